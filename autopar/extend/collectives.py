"""User-defined collectives: priced, chosen where they are cheaper than XLA's, reported and run."""

from autopar.cost.user_collectives import register_collective as register_collective
from autopar.hardware.profile import LinkProfile as LinkProfile
