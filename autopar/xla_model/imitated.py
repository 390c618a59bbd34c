"""Which XLA this package imitates: its passes by module, and the JAX releases whose XLA it was held against.

In: nothing. Out: `PASSES`, `CHECKED`. `tests/test_xla_conformance.py` holds each pass against XLA's own on each release, and
fails on a release of which no patch is in `CHECKED`. What XLA charges for a kernel or a collective is no pass, and so is priced in
`cost/kernel_time` and `cost/xla_latency_estimator`, below the solver, which needs it before there is a program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: JAX release, and the commit of jax-ml/jax that it is built from; the commit's third_party/xla pins its XLA.
CHECKED: Mapping[str, str] = {
    "0.10.2": "990e6a0b84138346e6a38785412f36356e0e5dc3",
    "0.11.2": "32544801e26115ac1794926d027148abf3baf009",
    "0.12.0.1": "dc4af684446e65ee98eee8090e1ff6f8211473fb",
}


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of XLA's.

    Args:
        name: as XLA's users know it.
        modules: of this package, that imitate it.
        sources: files of openxla/xla, as JAX 0.12 has them.
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
    Pass("all-reduce reassociation", ("all_reduce_reassociate",), ("xla/service/all_reduce_reassociate.cc",)),
    Pass("ragged dot rewriter", ("ragged_dot",), ("ragged_dot_rewriter.cc",)),
    Pass("GEMM fusion", ("gemm_fusion",), (f"{_GPU}/gemm_fusion.cc", f"{_GPU}/gemm_rewriter.cc")),
    Pass("softmax rewriter", ("softmax_rewriter",), (f"{_GPU}/softmax_rewriter_triton.cc",)),
    Pass(
        "priority fusion",
        ("fusion_pipeline", "priority_fusion", "kernels"),
        (f"{_GPU}/priority_fusion.cc", "xla/service/gpu/model/gpu_performance_model_base.cc"),
    ),
    Pass(
        "multi-output fusion",
        ("multi_output_fusion",),
        (f"{_GPU}/multi_output_fusion.cc", "xla/service/gpu/gpu_fusible.cc"),
    ),
    Pass("buffer assignment", ("buffer_assignment",), ("xla/service/buffer_assignment.cc",)),
    Pass("collective combiners", ("collective_combiner",), (f"{_GPU}/collectives/all_reduce_combiner.cc",)),
    Pass(
        "latency hiding scheduler",
        ("latency_hiding_scheduler", "simulation", "timeline", "step_summary"),
        ("xla/service/latency_hiding_scheduler.cc", "xla/service/gpu/gpu_latency_hiding_scheduler.cc"),
    ),
)
