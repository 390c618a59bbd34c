"""Build a mesh of NVIDIA GPUs that this machine does not have, for XLA's compiler to compile for.

In: mesh axes and a hardware profile. Out: `jax.sharding.Mesh`. Needs the wheels `jax-cuda12-pjrt` and
`jax-cuda12-plugin`, and `JAX_PLATFORMS=cpu` before JAX is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from autopar.hardware.profile import HardwareProfile
from autopar.xla_compiler.gpu_target import target_text, topology_text


def absent_mesh(axes: Mapping[str, int], profile: HardwareProfile) -> Mesh:
    """A mesh of GPUs in a single host, in the compiler's order."""
    sizes = tuple(axes.values())
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_text(profile), topology=topology_text(profile, math.prod(sizes), 1)
    )
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(np.array(topology.devices).reshape(sizes), tuple(axes), axis_types=types)
