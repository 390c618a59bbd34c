"""Find what makes the step-time estimate of XLA's scheduler wrong for a program.

In: an optimized HLO module. Out: the known errors that it has, in words; empty where the estimate is sound. Each error was
seen with JAX 0.12.0.1 and has a test in tests/test_replay_run.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.xla_compiler.hlo_text import Computation, Instruction, Module, itemsize, parse_module

_CONVOLUTION, _GEMM = "__cudnn$conv", "__cublas$"
#: XLA's name of a Triton fusion that is neither a matmul nor a collective.
_TRITON = '"kind":"__triton"'
#: The one error that the planner's simulation of the estimate does not share.
LOOP = "a loop"
#: Opcodes that count as a launch.
_LAUNCHES = {"while": LOOP, "conditional": "a conditional", "sort": "a sort", "fft": "an FFT"}


def estimate_errors(hlo: Module | str) -> tuple[str, ...]:
    """The known errors of XLA's estimate for a program, each once.

    - A loop counts as one short operation, whatever its trip count.
    - A convolution counts as a launch, whatever its FLOPs.
    - A matmul of 16- or 8-bit operands with a float32 result counts up to 64 times its time.
    - A custom call counts as a launch: fused attention, Pallas kernels, factorizations.
    - A Triton fusion (softmax, normalization), a conditional, a sort and an FFT count as a launch.
    """
    module = parse_module(hlo) if isinstance(hlo, str) else hlo
    return tuple(dict.fromkeys(_errors(module)))


def _errors(module: Module) -> Iterator[str]:
    for computation in module.computations.values():
        for one in computation.instructions:
            if one.opcode in _LAUNCHES:
                yield _LAUNCHES[one.opcode]
            elif one.opcode == "fusion" and _TRITON in one.attributes:
                yield "a Triton fusion"
            elif one.opcode == "convolution" or one.custom_call_target.startswith(_CONVOLUTION):
                yield "a convolution"
            elif one.opcode == "dot" and _widens(computation, one):
                yield f"a {computation.shape_of(one.operands[0]).dtype} matmul with float32 result"
            elif one.opcode == "custom-call" and not one.custom_call_target.startswith(_GEMM):
                yield f"custom call {one.custom_call_target}"


def _widens(computation: Computation, dot: Instruction) -> bool:
    operand = computation.shape_of(dot.operands[0])
    return dot.shape.dtype == "f32" and itemsize(operand.dtype) < itemsize("f32")
