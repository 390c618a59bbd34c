"""Measure which part of a fused attention kernel each of 8 devices runs.

A step computes the gradients of one attention layer (8 examples of 1,024 tokens, 16 query heads, 8 heads of keys and values, or 16 where
a kernel takes no groups; causal) and is planned for 8 H100s, with the batch on one mesh axis and the heads on the other. `share` is the FLOPs of
the kernels in one device's program over those of the step's program (0.125 is an eighth). `calls` counts the kernels in the
program that XLA compiles for absent H100s, and `collectives` its collectives. `error` is the largest difference between the gradients of the sharded
and of the unsharded step on 8 virtual CPU devices, relative to the largest gradient, where the kernel runs on CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, str | float]

MESHES = ("data=8", "data=2,model=4", "model=8")
#: By kernel, what its calls are named in a compiled program.
KERNELS = {"cudnn": "__cudnn$fmhaSoftmax", "pallas": "__gpu$xla.gpu.triton"}


def measure(program: str) -> list[Row]:
    """A row for each mesh. `program` is a kernel."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from autopar.xla_compiler.compiler import Compiler

    with Compiler(platform=None) as compiler:
        return [_row(program, mesh, compiler) for mesh in MESHES]


def _row(kernel: str, mesh: str, compiler: Any) -> Row:
    import jax

    import autopar
    from autopar.hardware.profile import load
    from autopar.jax_interop import compat as jax_compat
    from autopar.jax_interop.compilation import module_bytes
    from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for
    from autopar.transforms.program import program_of
    from autopar.xla_compiler import hlo_collectives

    profile, step, args = load("h100-sxm"), step_of(kernel), shapes_of(kernel)
    axes = [axis if f"{axis}=" in mesh else None for axis in ("data", "model")]
    pin = {"q": jax.P(axes[0], None, axes[1])}
    plan = autopar.plan(step, *args, mesh=mesh, hardware=profile, pin=pin, cache=False)
    assert isinstance(plan, autopar.Plan)
    program = program_of(step, args, carry=None, donate=None)
    jitted = jit_plan(plan, program.of(plan).trace, abstract_mesh(plan.mesh, profile))
    compiled = compiler.compile(module_bytes(lower_for("cuda", jitted, args)), profile, plan.num_devices, 1)
    calls = [line for line in compiled.hlo_text.splitlines() if f'custom_call_target="{KERNELS[kernel]}' in line]
    row: Row = {
        "mesh": mesh,
        "share": sum(flops_in(jitted.trace(*args).jaxpr)) / sum(flops_in(jax_compat.trace(step, args).jaxpr)),
        "calls": len(calls),
        "collectives": sum(1 for _ in hlo_collectives.collectives(compiled.hlo_text)),
        "step_us": 1e6 * plan.prediction.step_time_s,
    }
    return row | ({"error": _error(mesh, pin)} if kernel == "pallas" else {})


def flops_in(jaxpr: Any) -> Iterator[float]:
    """The FLOPs of each kernel in a program; inside `shard_map`, those of one device."""
    from autopar.frontend.kernel_flops import counted_work
    from autopar.jax_interop import compat as jax_compat

    for equation in jax_compat.open_jaxpr(jaxpr)[0].eqns:
        work = counted_work(equation)
        if work is not None:
            yield sum(flops for _, flops in work[1])
            continue
        for inner in jax_compat.programs_in(equation):
            yield from flops_in(inner)


def shapes_of(kernel: str, tokens: int = 1024, dtype: str = "bfloat16") -> tuple[Any, ...]:
    """Queries, keys and values; Pallas's kernel for GPUs takes no grouped heads."""
    import jax

    heads = 16 if kernel == "pallas" else 8
    return tuple(jax.ShapeDtypeStruct((8, tokens, n, 64), dtype) for n in (16, heads, heads))


def step_of(kernel: str, **options: Any) -> Callable[..., Any]:
    """The gradients of an attention layer."""
    import jax
    import jax.numpy as jnp

    def attention(q: Any, k: Any, v: Any) -> Any:
        if kernel == "cudnn":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        from jax.experimental.pallas.ops.gpu.attention import mha

        return mha(q, k, v, None, causal=True, **options)

    def step(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda *args: jnp.sum(attention(*args).astype(jnp.float32) ** 2), argnums=(0, 1, 2))(q, k, v)

    return step


def _error(mesh: str, pin: dict[str, Any]) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autopar

    step = step_of("pallas", interpret=True)
    args = [
        jax.random.normal(jax.random.key(i), one.shape) for i, one in enumerate(shapes_of("pallas", 256, "float32"))
    ]
    plan = autopar.plan(step, *args, mesh=mesh, hardware="h100-sxm", pin=pin)
    got, expected = autopar.parallelize(step, plan=plan)(*args), jax.jit(step)(*args)
    pairs = zip(got, expected, strict=True)
    return max(float(np.max(np.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
