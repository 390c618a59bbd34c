"""Name the cause of a failure among its effects: when one worker is gone, collectives fail in the others too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.membership.records import Place, Report, shown

#: In what a worker reports when another one is gone: JAX's errors, collective libraries, and the end that JAX's client brings about.
_EFFECTS = ("JaxRuntimeError", "XlaRuntimeError", "Gloo", "NCCL", "RCCL", "SIGABRT", "was ended with its generation")


def cause(lost: Sequence[str], closed: Sequence[Report], failed: Sequence[Report], places: Mapping[str, Place]) -> str:
    """What ended a generation.

    Args:
        lost: members that are gone.
        closed: members without a connection.
        failed: members whose workers failed.
    """
    if lost:
        return f"{', '.join(map(shown, lost))} {'is' if len(lost) == 1 else 'are'} gone"
    own = [one for one in failed if not is_effect(one.why)]
    if not own and closed:
        return f"{', '.join(map(str, closed))} closed the connection"
    first = (own or list(failed))[0]
    return f"worker {places[first.agent].rank}, of {first}, {shown(first.why, 2000)}"


def is_effect(why: str) -> bool:
    """Whether an error may be the effect of another worker's end."""
    return any(effect in why for effect in _EFFECTS)
