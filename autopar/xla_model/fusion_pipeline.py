"""Instructions to kernels, by XLA's fusion passes in their order.

In: a `LocalProgram`. Out: `Fused` kernels, each after those whose results it reads; arguments are not among them. Source:
openxla/xla, xla/backends/gpu/transforms/priority_fusion.cc; xla/service/gpu/model/gpu_performance_model_base.cc prices it.
"""

from __future__ import annotations

from autopar.cost.hardware_profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.xla_model.gemm_fusion import fuse_into_gemms
from autopar.xla_model.kernels import Fused, Kernels
from autopar.xla_model.local_program import LocalProgram
from autopar.xla_model.multi_output_fusion import MultiOutputFusion
from autopar.xla_model.priority_fusion import PriorityFusion
from autopar.xla_model.softmax_rewriter import fuse_diamonds


def fuse(program: LocalProgram, profile: HardwareProfile, graph: Graph | None = None) -> list[Fused]:
    """Fuse a program.

    Args:
        graph: what the program is of; without it no sum is kept from the others.
    """
    kernels = Kernels(program)
    fuse_into_gemms(kernels)
    fuse_diamonds(kernels)
    fused = PriorityFusion(kernels, profile).run()
    program.outputs = [at if at is None else kernels.renamed.get(at, at) for at in program.outputs]
    return MultiOutputFusion(program, fused, profile, graph).run()
