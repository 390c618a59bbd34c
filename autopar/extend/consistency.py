"""Consistency policies of versioned stores: functions of the workers' clocks, and a simulator of what they cost; mixing matrices of
decentralized training."""

from autopar.versions.consistency.clocks import Clocks as Clocks
from autopar.versions.consistency.mixing import Mixing as Mixing
from autopar.versions.consistency.mixing import find_mixing as find_mixing
from autopar.versions.consistency.policy import Decision as Decision
from autopar.versions.consistency.policy import Part as Part
from autopar.versions.consistency.policy import Pending as Pending
from autopar.versions.consistency.policy import Policy as Policy
from autopar.versions.consistency.simulate import SimulatedRun as SimulatedRun
from autopar.versions.consistency.simulate import simulate as simulate
from autopar.versions.consistency.table import find as find
