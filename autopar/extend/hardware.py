"""Hardware profiles: the constants of a device and of its links, by name or from a file."""

from autopar.hardware.profile import HardwareProfile as HardwareProfile
from autopar.hardware.profile import LinkProfile as LinkProfile
from autopar.hardware.profile import known_names as known_names
from autopar.hardware.profile import load as load
from autopar.ir.mesh import MeshShape as MeshShape
