"""Fuse the instructions of one device into kernels, by XLA's fusion passes in XLA's order.

In: a `LocalProgram`. Out: `Fused` kernels in topological order; arguments are not among them. Source: openxla/xla,
xla/backends/gpu/transforms/priority_fusion.cc, with the cost model of
xla/service/gpu/model/gpu_performance_model_base.cc.
"""

from __future__ import annotations

from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.xla_model.gemm_fusion import fuse_into_gemms
from autopar.xla_model.kernels import Fused, Kernels
from autopar.xla_model.local_program import LocalProgram
from autopar.xla_model.multi_output_fusion import MultiOutputFusion
from autopar.xla_model.priority_fusion import PriorityFusion
from autopar.xla_model.softmax_rewriter import fuse_diamonds


def fuse(program: LocalProgram, profile: HardwareProfile, graph: Graph | None = None) -> list[Fused]:
    """Fuse a program into kernels.

    Args:
        program: the instructions of one device.
        profile: the hardware profile that prices kernels.
        graph: the program's graph; without it, no bias is added inside a matmul, and no column reduction is kept out of
            multi-output fusion.
    """
    kernels = Kernels(program)
    fuse_into_gemms(kernels, graph)
    fuse_diamonds(kernels)
    PriorityFusion(kernels, profile).run()
    kernels.drop_dead(even_late=True)
    fused = dict(sorted(kernels.kernels.items()))
    return MultiOutputFusion(program, fused, profile, graph).run()
