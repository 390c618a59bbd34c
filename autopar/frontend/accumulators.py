"""Find loop carries that are accumulators: sums that start at zero, such as accumulated gradients.

In: a trace and one of its loops.
Out: the carries that are accumulators. One that is unreduced over devices may stay so across iterations, with a single
reduction after the loop.
"""

from __future__ import annotations

import numpy as np

from autopar.frontend.equations import Atom, LiteralOperand, Region
from autopar.frontend.trace import Trace
from autopar.rules.table import traits_of


def sums_of(trace: Trace, region: Region) -> tuple[tuple[int, int], ...]:
    """The carries of a loop that are accumulators, as pairs of entering and leaving pieces."""
    return tuple(pair for pair in region.carries(trace.equations) if _is_sum(trace, *pair))


def _is_sum(trace: Trace, enter: int, leave: int) -> bool:
    (start,), (last,) = trace.equations[enter].operands, trace.equations[leave].operands
    (carried,) = trace.equations[enter].results
    n = trace.producers.get(last) if isinstance(last, int) else None
    if n is None or not isinstance(last, int) or not _is_zero(trace, start):
        return False
    added = trace.equations[n]
    reads_once = trace.users.get(carried) == [n] and trace.users[last] == [leave]
    return traits_of(added.primitive).adds and reads_once and carried in added.operands


def _is_zero(trace: Trace, atom: Atom) -> bool:
    if isinstance(atom, LiteralOperand):
        value = np.asarray(atom.value)
        return value.size == 1 and not np.any(value)
    producer = trace.equations[trace.producers[atom]] if atom in trace.producers else None
    return (
        producer is not None and traits_of(producer.primitive).linear == "one" and _is_zero(trace, producer.operands[0])
    )
