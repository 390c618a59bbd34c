"""`autopar plan --for search`: its options, and what they mean.

In: texts. Out: the times of a search on paper, in words or JSON; or a refusal of options that say nothing of it.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from autopar.cli.files import check_output
from autopar.cli.options import count, size, whole_number
from autopar.cli.planning import planning
from autopar.cli.terminal import flags, given, progress, refuse, tell
from autopar.errors import BudgetError, SearchError, TargetError

#: By option: the field of `PaperSearch` that it is.
_FIELDS = ("metric", "batch", "k", "degree", "beam", "code_bytes", "num_lists", "num_probes", "rerank", "block_bytes")
#: Options that say what to search.
OWN = ("corpus", "index", "ssd", *_FIELDS)
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options, each None where it is not given; `plan_inference` has those of `--for inference`."""
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


def check(options: argparse.Namespace, of_inference: list[str]) -> None:
    """Refuse what says nothing of a search.

    Args:
        of_inference: options of inference alone that were given.

    Raises:
        TargetError: naming them.
    """
    if of_inference:
        raise TargetError(f"{flags(of_inference)} say what to serve, and --for search plans a search: drop them")
    useless = given(options, ("target", *_NO_USE), empty=True)
    refuse(useless, "--for search plans a search, and no step of yours")
    if "=" in (options.hardware or ""):
        raise TargetError(
            f"--for search plans devices of one kind, and --hardware is {options.hardware!r}: give one name"
        )
    if options.corpus is None:
        raise TargetError("--for search needs --corpus NxD:DTYPE, e.g. --corpus 1.4e9x100:int8")


def run(options: argparse.Namespace) -> None:
    """Plan, print, and save the plan of a batch of queries where that was asked for."""
    check_output(options)
    case, more = _asked(options), planning(options)
    from autopar.vector_search.estimate.estimate import search_on_paper
    from autopar.vector_search.estimate.sizes import PARTS, PaperSearch
    from autopar.vector_search.estimate.tables import on_paper_json, render_on_paper

    with progress() as report:
        told = search_on_paper(PaperSearch(**case), indexes=options.index or tuple(PARTS), progress=report, **more)
    if options.output is not None:
        if told.asked.plan is None:
            raise BudgetError(told.asked.refused)
        told.asked.plan.save(options.output)
    tell(options, lambda: on_paper_json(told), lambda console: render_on_paper(told, console))
    if options.output is not None and not options.json:
        print(f"\nThe plan of {told.case.batch:,} queries is saved to {options.output}; `autopar explain` says why.")


def _asked(options: argparse.Namespace) -> dict[str, Any]:
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
    number = whole_number(match[1]) if match else None
    if match is None or not number or int(match[2]) < 1:
        raise SearchError(
            f"--corpus {text!r} is no corpus: write NxD:DTYPE, N vectors of D elements each, e.g. 1.4e9x100:int8"
        )
    return number, int(match[2]), match[3]
