"""Compile a planned step for absent H100s, and count its all-reduces."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from autopar.hardware.profile import load
from autopar.jax_interop.compilation import module_bytes
from autopar.plans.plan import Plan
from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for
from autopar.runtime.xla_options import compiler_options
from autopar.transforms.program import Program
from autopar.xla_compiler.compiler import Compiler

_ALL_REDUCE = re.compile(r" = (.*) all-reduce(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def compiled(compiler: Compiler, plan: Plan, program: Program, *args: Any) -> Any:
    """The compiled step on hosts of eight GPUs."""
    jitted = jit_plan(plan, program.of(plan).trace, abstract_mesh(plan.mesh, load("h100-sxm")))
    module = module_bytes(lower_for("cuda", jitted, args))
    num_hosts = -(-plan.num_devices // 8)
    return compiler.compile(module, load("h100-sxm"), plan.num_devices, num_hosts, options=compiler_options(plan))


def all_reduced(hlo_text: str) -> dict[str, int]:
    """Number of all-reduced elements by dtype, however combined."""
    found: Counter[str] = Counter()
    for line in hlo_text.splitlines():
        made = _ALL_REDUCE.search(line)
        for dtype, dims in _ARRAY.findall(made[1]) if made else ():
            found[dtype] += math.prod(int(d) for d in dims.split(",") if d)
    return dict(found)
