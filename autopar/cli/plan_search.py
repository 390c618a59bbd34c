"""`autopar plan --for search`: its options, and what they mean; and which options go with which `--for`.

In: texts. Out: what `vector_search.on_paper` takes; or a refusal of options that say nothing of what is planned.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from autopar.cli import plan_inference as cli_inference
from autopar.errors import SearchError, TargetError

#: By option: the field of `PaperSearch` that it is.
_FIELDS = ("metric", "batch", "k", "degree", "beam", "code_bytes", "num_lists", "num_probes", "rerank", "block_bytes")
#: Options of planning that a search has no use for.
_NO_USE = (
    "compare",
    "no_rematerialize",
    "dims_as_written",
    "num_microbatches",
    "per_microbatch_statistics",
    "stages",
    "schedule",
)


def add_search_options(parser: argparse.ArgumentParser, size: Any) -> None:
    """The options, each None where it is not given.

    Args:
        size: what reads a size. See `cli_inference` for those of `--for inference`.
    """
    group = parser.add_argument_group("search, on paper (with --for search)")
    about = (
        "instead of a TARGET: a search of so many vectors, or the serving of a MODEL, on devices that need not be there"
    )
    group.add_argument("--for", dest="plan_for", choices=("search", "inference"), help=about)
    about = "how many vectors of what: NxD:DTYPE, e.g. 1.4e9x100:int8; float32, bfloat16 or int8"
    group.add_argument("--corpus", metavar="NxD:DTYPE", help=about)
    about = "queries at once (default: 1000); of inference, sequences at once in a replica (default: 16)"
    group.add_argument("--batch", type=count, metavar="N", help=about)
    group.add_argument("--k", type=count, metavar="N", help="neighbours of each (default: 10)")
    group.add_argument("--metric", help="l2, inner_product or cosine (default: l2)")
    about = "tell of this kind alone: exact, graph or ivfpq; may be repeated (default: of all)"
    group.add_argument("--index", action="append", metavar="KIND", help=about)
    about = "of a graph: neighbours of a node (default: 64)"
    group.add_argument("--degree", type=count, metavar="N", help=about)
    group.add_argument("--beam", type=count, metavar="N", help="of a graph: nodes that a walk looks at (default: 64)")
    about = "of ivfpq: bytes of a code, which divide D (default: the most, up to 32)"
    group.add_argument("--code-bytes", type=count, metavar="N", help=about)
    about = "of ivfpq: lists (default: twice the square root of N)"
    group.add_argument("--num-lists", type=count, metavar="N", help=about)
    group.add_argument("--num-probes", type=count, metavar="N", help="of ivfpq: lists looked into (default: 32)")
    about = "of ivfpq: candidates scored again by their vectors (default: 10 for each neighbour)"
    group.add_argument("--rerank", type=count, metavar="N", help=about)
    about = "what drives read in a second; may be repeated (default: 5GB and 10GB)"
    group.add_argument("--ssd", type=size, action="append", metavar="SIZE", help=about)
    group.add_argument("--block", dest="block_bytes", type=size, metavar="SIZE", help="of a drive (default: 4KiB)")


def check_target(options: argparse.Namespace) -> None:
    """Refuse a plan of nothing, and options of the one kind with the other.

    Raises:
        TargetError: naming them.
    """
    of_search, of_inference = (
        [name for name in names if getattr(options, name) is not None]
        for names in (("corpus", "index", "ssd", *_FIELDS), cli_inference.OWN)
    )
    if options.plan_for is None:
        if of_search:
            raise TargetError(f"{_flags(of_search)} say what to search: add --for search, or drop them")
        if of_inference:
            raise TargetError(f"{_flags(of_inference)} say what to serve: add --for inference, or drop them")
        if not options.target:
            raise TargetError("`autopar plan` needs a TARGET, or --for search with --corpus NxD:DTYPE")
        return
    if options.plan_for == "inference":
        cli_inference.check_inference(options, _flags, [name for name in of_search if name != "batch"])
        return
    if of_inference:
        raise TargetError(f"{_flags(of_inference)} say what to serve, and --for search plans a search: drop them")
    useless = [name for name in ("target", *_NO_USE) if getattr(options, name) not in (None, [], False)]
    if useless:
        raise TargetError(f"--for search plans a search, and no step of yours: drop {_flags(useless)}")
    if "=" in (options.hardware or ""):
        raise TargetError(
            f"--for search plans devices of one kind, and --hardware is {options.hardware!r}: give one name"
        )
    if options.corpus is None:
        raise TargetError("--for search needs --corpus NxD:DTYPE, e.g. --corpus 1.4e9x100:int8")


def search_asked(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `PaperSearch`, as far as they were given.

    Raises:
        SearchError: a corpus or a block that cannot be read.
    """
    num_vectors, dim, dtype = parse_corpus(options.corpus)
    asked = {name: getattr(options, name) for name in _FIELDS if getattr(options, name) is not None}
    if "block_bytes" in asked:
        asked["block_bytes"] = int(asked["block_bytes"])
    if options.ssd:
        asked["ssd_bytes_per_s"] = tuple(options.ssd)
    return {"num_vectors": num_vectors, "dim": dim, "dtype": dtype, **asked}


def parse_corpus(text: str) -> tuple[int, int, str]:
    """How many vectors, their elements, and the dtype of these.

    Raises:
        SearchError: where it cannot be read.

    >>> parse_corpus("1.4e9x100:int8")
    (1400000000, 100, 'int8')
    """
    match = re.fullmatch(r"([\d.]+(?:e\+?\d+)?)x(\d+):(\w+)", text.strip(), re.IGNORECASE)
    number = _whole(match[1]) if match else None
    if match is None or not number or int(match[2]) < 1:
        raise SearchError(
            f"--corpus {text!r} is no corpus: write NxD:DTYPE, N vectors of D elements each, e.g. 1.4e9x100:int8"
        )
    return number, int(match[2]), match[3]


def _whole(text: str) -> int | None:
    """`1.4e9` as a whole number; None where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def count(text: str) -> int:
    number = _whole(text)
    if not number or number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of these: write 1 or more")
    return number


def _flags(names: list[str]) -> str:
    spelled = {"target": "TARGET", "block_bytes": "--block"}
    return ", ".join(spelled.get(name, f"--{name.replace('_', '-')}") for name in names)
