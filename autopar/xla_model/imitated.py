"""List the XLA passes that this package models, by module, and the JAX releases against whose XLA it is tested.

In: nothing. Out: `PASSES`, `CHECKED`. `tests/test_xla_conformance.py` compares each pass with XLA's own on each
release, and fails on a release that has no patch in `CHECKED`. The constants of XLA's
latency estimator are part of a hardware profile (`hardware/xla_estimator`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: JAX release -> the commit of jax-ml/jax it is built from; third_party/xla of that commit pins its XLA.
CHECKED: Mapping[str, str] = {
    "0.10.2": "990e6a0b84138346e6a38785412f36356e0e5dc3",
    "0.11.2": "32544801e26115ac1794926d027148abf3baf009",
    "0.12.0.1": "dc4af684446e65ee98eee8090e1ff6f8211473fb",
}


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of XLA.

    Args:
        name: the name XLA's users know.
        modules: modules of this package that model it.
        sources: files of openxla/xla that implement it, in the version of JAX 0.12.
    """

    name: str
    modules: tuple[str, ...]
    sources: tuple[str, ...]


_GPU = "xla/backends/gpu/transforms"
#: In XLA's order.
PASSES: tuple[Pass, ...] = (
    Pass(
        "SPMD partitioner",
        (
            "spmd_partition",
            "local_program",
            "partition_builder",
            "partition_communication",
            "instruction_kinds",
            "dot_operands",
            "loop_borders",
        ),
        ("xla/service/spmd/spmd_partitioner.cc",),
    ),
    Pass(
        "reassociation of reductions",
        ("reduce_reassociate",),
        ("xla/service/all_reduce_reassociate.cc", "xla/service/reduce_scatter_reassociate.cc"),
    ),
    Pass("ragged dot rewriter", ("ragged_dot",), ("ragged_dot_rewriter.cc",)),
    Pass("dot merger", ("dot_merger",), ("xla/hlo/transforms/simplifiers/dot_merger.cc",)),
    Pass(
        "layout assignment",
        ("operand_copies",),
        ("xla/backends/gpu/transforms/layout_assignment.cc",),
    ),
    Pass("GEMM fusion", ("gemm_fusion",), (f"{_GPU}/gemm_fusion.cc", f"{_GPU}/gemm_rewriter.cc")),
    Pass("softmax rewriter", ("softmax_rewriter",), (f"{_GPU}/softmax_rewriter_triton.cc",)),
    Pass(
        "priority fusion",
        ("fusion_pipeline", "priority_fusion", "kernels", "kernel_work"),
        (f"{_GPU}/priority_fusion.cc", "xla/service/gpu/model/gpu_performance_model_base.cc"),
    ),
    Pass(
        "multi-output fusion",
        ("multi_output_fusion",),
        (f"{_GPU}/multi_output_fusion.cc", "xla/service/gpu/gpu_fusible.cc"),
    ),
    Pass("buffer assignment", ("buffer_assignment",), ("xla/service/buffer_assignment.cc",)),
    Pass(
        "collective pipeliner",
        ("collective_pipeliner",),
        ("xla/service/collective_pipeliner.cc", "xla/service/copy_insertion.cc"),
    ),
    Pass("collective combiners", ("collective_combiner",), (f"{_GPU}/collectives/all_reduce_combiner.cc",)),
    Pass(
        "latency hiding scheduler",
        ("latency_hiding_scheduler", "latency_estimator", "simulation", "timeline", "step_summary"),
        ("xla/service/latency_hiding_scheduler.cc", "xla/service/gpu/gpu_latency_hiding_scheduler.cc"),
    ),
)
