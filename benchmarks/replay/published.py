"""Training runs that others published, replayed. Nothing is fitted to them.

The programs are written anew in JAX (`llama.py`) as the configurations of the runs describe them, compiled by XLA for
absent GPUs, and replayed. Sources:

- torchtitan on the H100 with 96 GB: pytorch/torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md`; its policy of
  selective checkpointing, which computes every second matmul again, from `parallelize_llama.py` (float8 matmuls are not
  in its list, so they are all computed again).
- torchtitan on the H200: `benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md`.
- MaxText: NVIDIA/dgxc-benchmarking, `maxtext/configure.sh`: `save_qkv_proj`, cuDNN's attention, XLA's flags.

What differs from the runs:

- **Power.** The replay has no model of power: it takes the clock and the rates of a GPU that holds them, so it is expected
  to be faster than these runs, most of all in matmuls and attention. torchtitan's H100 is limited to 500 W of 700; its
  authors write that its peak is between those of the SXM and of the NVL, and that they do not know it. So these runs are
  replayed a second time with the NVL's peaks and clock (835 TFLOP/s in bfloat16 for 989).
- **Attention.** PyTorch ran FlashAttention-2, whose published rates are taken (`h100-96gb.toml`), MaxText cuDNN's.
- PyTorch's FSDP copies weights into and out of its buffers around each collective; here the results are used in place.
- PyTorch's context parallelism is written as it is: keys and values are gathered, each device's part has a kernel of its
  own, results are merged in float32, gradients go around a ring in float32. How its kernels wait for each other is XLA's.
- Without `torch.compile`, each operation of PyTorch's is a kernel of its own; the program has barriers between them. The
  host is assumed to launch them ahead of the GPU.
- Waits for slower devices and hosts are not modelled, so 8 and 128 GPUs differ by their optimizer alone.

No constant was fitted to these runs, but not every choice was made before the first comparison. Five were made after it,
each for a reason outside of it: FlashAttention-2's rates in place of cuDNN's, context parallelism as PyTorch computes it,
the second replay at the NVL's peaks, a cap of a GEMM's rate at that of the fastest measured one (large GEMMs had been
extrapolated beyond it), and cuDNN's published rates under a causal mask in place of those without one. Before these, with
torchtitan's H100, the error was 59 % for the compiled run on 8 GPUs and 100, 98, 176 and 192 % for context parallelism over
1, 2, 4 and 8; before the last two it was 45 %, and 23 % for MaxText. The comparison also showed that the replay counted
the whole buffer of an update in place.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autopar.hardware.profile import load as load_profile
from autopar.jax_interop.compilation import module_bytes
from autopar.xla_compiler.compiler import CompiledStep
from autopar.xla_replay.replay import Replay
from autopar.xla_replay.run import replay
from benchmarks.absent_gpus import absent_mesh
from benchmarks.compile_cache import CachingCompiler, default_folder
from benchmarks.replay.llama import Llama, attention_kernels, lowered
from benchmarks.replay.order import order

Record = dict[str, Any]

_HERE = Path(__file__).parent
#: XLA's flags that make it run a layer's collectives as FSDP does: one all-gather of a whole layer, ahead of its use. Of
#: MaxText's run they are its own.
_PIPELINED = (
    "--xla_gpu_enable_triton_gemm=false --xla_gpu_enable_pipelined_all_gather=true"
    " --xla_gpu_enable_pipelined_reduce_scatter=true --xla_gpu_enable_pipelined_all_reduce=true"
    " --xla_gpu_enable_while_loop_double_buffering=true --xla_disable_hlo_passes=rematerialization"
    " --xla_gpu_all_gather_combine_threshold_bytes=2147483648 --xla_gpu_all_reduce_combine_threshold_bytes=2147483648"
    " --xla_gpu_reduce_scatter_combine_threshold_bytes="
)
#: Names of activations that torchtitan's selective checkpointing saves: every other matmul, and attention.
_EVERY_SECOND = ("query", "value", "gate", "down", "attention")


_H100_96GB: Record = {"rates": str(_HERE / "h100-96gb.toml"), "slow_rates": str(_HERE / "h100-96gb-nvl-peak.toml")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run.

    Args:
        rates: device of the replay; `profile` is the one that XLA compiles for.
        slow_rates: the same device at the lowest peak that it may have; empty where its peak is known.
        fsdp, cp: devices of the two mesh axes.
        tokens_per_s: published tokens per second and GPU.
        reduce_bytes: XLA combines reduce-scatters up to this size.
    """

    name: str
    model: Llama
    rates: str
    slow_rates: str = ""
    tokens_per_s: float
    fsdp: int = 8
    cp: int = 1
    hosts: int = 1
    profile: str = "h100-sxm"
    reduce_bytes: int = 1 << 30

    @property
    def flags(self) -> str:
        return f"{_PIPELINED}{self.reduce_bytes}"

    @property
    def tokens(self) -> float:
        """Tokens of one step and GPU."""
        return self.model.batch * self.model.length / self.cp


def _fsdp(num_devices: int, eager: float, compiled: float, float8: float) -> list[Run]:
    name = f"torchtitan 8B, {num_devices} H100 of 96 GB"
    shared: dict[str, Any] = {"batch": 2, "length": 8192}
    models = {
        "eager": (Llama(**shared, saved=_EVERY_SECOND, eager=True), eager),
        "compiled": (Llama(**shared, saved=_EVERY_SECOND), compiled),
        "compiled, float8": (Llama(**shared, saved=("attention",), float8=True), float8),
    }
    return [
        Run(
            name=f"{name}: {how}",
            model=model,
            **_H100_96GB,
            tokens_per_s=published,
            fsdp=num_devices,
            hosts=num_devices // 8,
        )
        for how, (model, published) in models.items()
    ]


def _context(cp: int, published: float) -> Run:
    length = 32768 * cp
    return Run(
        name=f"torchtitan 8B, FSDP {8 // cp} x CP {cp}, {length:,} tokens, float8",
        model=Llama(batch=1, length=length, saved=(), float8=True),
        **_H100_96GB,
        tokens_per_s=published,
        fsdp=8 // cp,
        cp=cp,
    )


def _h200(num_devices: int, published: float) -> Run:
    return Run(
        name=f"torchtitan 8B, {num_devices} H200: compiled, float8",
        model=Llama(batch=2, length=8192, saved=("attention",), float8=True),
        rates=str(_HERE / "h200-pytorch.toml"),
        profile="h200",
        tokens_per_s=published,
        fsdp=num_devices,
        hosts=num_devices // 8,
    )


RUNS = (
    *_fsdp(8, 5762, 6667, 8532),
    *_fsdp(128, 5605, 6514, 8380),
    *(_context(cp, published) for cp, published in ((1, 3890), (2, 2540), (4, 1071), (8, 548))),
    _h200(32, 10938),
    _h200(64, 10753),
    Run(
        name="MaxText 70B, 128 H100 SXM",
        model=Llama(
            batch=2,
            length=8192,
            saved=("query", "key", "value"),
            layers=80,
            width=8192,
            hidden=28672,
            heads=64,
            repeats_keys=False,
            reduces_f32=False,
            one_hot=True,
        ),
        rates="h100-sxm",
        tokens_per_s=256 * 8192 / 15.57 / 128,
        fsdp=128,
        hosts=16,
        reduce_bytes=1 << 25,
    ),
)


def rows(runs: Sequence[Run] = RUNS) -> list[Record]:
    """One row for each run."""
    found = []
    for run in runs:
        start = time.perf_counter()
        step = compiled(run)
        kernels = attention_kernels(run.model, run.cp)
        both = [
            replay(step.hlo_text, hardware=rates, custom_kernels=kernels)
            for rates in (run.rates, run.slow_rates or run.rates)
        ]
        found.append(_row(run, both[0], both[1], step.peak_bytes, time.perf_counter() - start))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def compiled(run: Run) -> CompiledStep:
    """XLA's program of a run."""
    profile = load_profile(run.profile)
    mesh = absent_mesh({"fsdp": run.fsdp, "cp": run.cp}, profile)
    target = profile.xla_target
    assert target is not None
    step = lowered(run.model, mesh, profile.device_kinds[0], int(target["core_count"]))
    with (
        mock.patch.dict(os.environ, {"XLA_FLAGS": run.flags}),
        CachingCompiler(default_folder()) as compiler,
    ):
        return compiler.compile(module_bytes(step), profile, run.fsdp * run.cp, run.hosts)


def _row(run: Run, replayed: Replay, slow: Replay, peak_bytes: float, seconds: float) -> Record:
    tokens, slow_tokens = (run.tokens / one.step_time_s for one in (replayed, slow))
    return {
        "run": run.name,
        "published": round(run.tokens_per_s),
        "replayed": round(tokens),
        "error": round(tokens / run.tokens_per_s - 1, 3),
        "at_nvl_peak": round(slow_tokens) if run.slow_rates else "",
        "error_then": round(slow_tokens / run.tokens_per_s - 1, 3) if run.slow_rates else "",
        "step_s": round(replayed.step_time_s, 3),
        "exposed_ms": {kind: round(1e3 * exposed, 1) for kind, exposed in replayed.exposed_s.items() if exposed > 1e-4},
        "kinds_ms": {kind: round(1e3 * time) for kind, time in replayed.by_kind().items() if time > 1e-3},
        "tflops_per_s": round(replayed.flops / replayed.step_time_s / 1e12),
        "peak_gib": round(peak_bytes / 2**30, 1),
        "took_s": round(seconds, 1),
    }


if __name__ == "__main__":
    print(order(rows()))
