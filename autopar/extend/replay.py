"""What a custom kernel computes, for `autopar.replay`."""

from autopar.xla_replay.library_calls import Attention as Attention
from autopar.xla_replay.library_calls import LibraryKernel as LibraryKernel
from autopar.xla_replay.rates import known_names as known_names
from autopar.xla_replay.rates import load as load
