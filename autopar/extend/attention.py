"""Back ends of paged attention: `BACKENDS` has an entry for each."""

from autopar.inference.kernels.paged_attention import BACKENDS as BACKENDS
from autopar.inference.kernels.paged_attention import Backend as Backend
