"""`autopar estimate search`: estimate a vector search on devices that need not exist.

In: the size of a corpus, index parameters. Out: the results of `vector_search.estimate`, as tables or JSON.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from autopar.cli import options as shared
from autopar.cli.files import check_output
from autopar.cli.planning import planning, refuse_several_kinds
from autopar.cli.terminal import output, progress
from autopar.errors import BudgetError, SearchError

#: Options that are fields of `SearchSpec`.
_FIELDS = (
    *("metric", "batch", "k", "recall", "degree", "beam", "code_bytes", "num_lists", "num_probes", "rerank"),
    "block_bytes",
)
_EXAMPLES = "estimate search --corpus 1.4e9x100:int8 --devices 8 --hardware h200"


def add_command(added: Any) -> None:
    """Add the command to the parser of `estimate`."""
    about = "estimate a vector search: time of a batch of queries and memory, by index kind"
    command = shared.add_command(added, "search", about, _EXAMPLES)
    about = "number of vectors, elements and dtype, e.g. 1.4e9x100:int8; float32, bfloat16, float16, int8 or uint8"
    command.add_argument("--corpus", required=True, metavar="NxD:DTYPE", help=about)
    command.add_argument("--batch", type=shared.count, metavar="N", help="queries in a batch (default: 1000)")
    command.add_argument("--k", type=shared.count, metavar="N", help="neighbours of each query (default: 10)")
    about = "recall@10, from which numbers of lists and nodes follow that are not given (default: 0.95)"
    command.add_argument("--recall", type=float, metavar="R", help=about)
    command.add_argument("--metric", help="l2, inner_product or cosine (default: l2)")
    about = "index kind: exact, ivf, graph or ivfpq; may be repeated (default: all)"
    command.add_argument("--index", action="append", metavar="KIND", help=about)
    about = "graph: neighbours of a node (default: 64)"
    command.add_argument("--degree", type=shared.count, metavar="N", help=about)
    command.add_argument("--beam", type=shared.count, metavar="N", help="graph: beam width (default: by --recall)")
    about = "ivfpq: bytes of a code, a divisor of D (default: the most, up to 32)"
    command.add_argument("--code-bytes", type=shared.count, metavar="N", help=about)
    about = "ivf, ivfpq: inverted lists (default: twice the square root of N)"
    command.add_argument("--num-lists", type=shared.count, metavar="N", help=about)
    command.add_argument(
        "--num-probes", type=shared.count, metavar="N", help="ivf, ivfpq: lists probed (default: by --recall)"
    )
    about = "ivfpq: candidates re-ranked by their vectors (default: 10 for each neighbour)"
    command.add_argument("--rerank", type=shared.count, metavar="N", help=about)
    about = "read bandwidth of the drives, per second; may be repeated (default: 5GB and 10GB)"
    command.add_argument("--ssd", type=shared.size, action="append", metavar="SIZE", help=about)
    command.add_argument(
        "--block", dest="block_bytes", type=shared.size, metavar="SIZE", help="block of a drive (default: 4KiB)"
    )
    about = "memory of a server for the index, for searches from drives, e.g. 64GB"
    command.add_argument("--server-memory", type=shared.size, metavar="SIZE", help=about)
    about = "memory bandwidth of a server, per second (default: 200GB)"
    command.add_argument("--server-bandwidth", type=shared.size, metavar="SIZE", help=about)
    about = "number of servers; may be repeated (default: 1 and 8)"
    command.add_argument("--servers", type=shared.count, action="append", metavar="N", help=about)
    about = "vectors that are inserted or deleted per second (default: 0)"
    command.add_argument("--updates", type=float, metavar="N", help=about)
    about = "queries per second that the servers have to answer (default: 0)"
    command.add_argument("--queries-per-s", type=float, metavar="N", help=about)
    about = "price of a GB of memory, and of a GB on a drive, for a month, e.g. 3,0.1"
    command.add_argument("--prices", metavar="USD,USD", help=about)
    command.add_argument("-o", "--output", metavar="FILE", help="save the plan of a batch of queries")
    shared.add_mesh_options(command)
    shared.add_pin(command)
    shared.add_solver_options(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Estimate, print the tables, and save the plan of a batch of queries."""
    check_output(options)
    refuse_several_kinds(options, "estimate search")
    case, more = _case(options), planning(options)
    from autopar.vector_search.estimate.estimate import estimate_search
    from autopar.vector_search.estimate.sizes import PARTS, SearchSpec
    from autopar.vector_search.estimate.tables import render_search_estimate, search_estimate_json

    with progress() as report:
        indexes, servers = options.index or tuple(PARTS), _servers(options)
        found = estimate_search(SearchSpec(**case), indexes=indexes, servers=servers, progress=report, **more)
    if options.output is not None:
        if found.requested.plan is None:
            raise BudgetError(found.requested.refused)
        found.requested.plan.save(options.output)
    output(options, lambda: search_estimate_json(found), lambda console: render_search_estimate(found, console))
    if options.output is not None and not options.json:
        print(f"\nThe plan of {found.case.batch:,} queries is saved to {options.output}; `autopar explain` says why.")


def _case(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `SearchSpec` that the user gave.

    Raises:
        SearchError: `--corpus` cannot be parsed.
    """
    num_vectors, dim, dtype = parse_corpus(options.corpus)
    more: dict[str, Any] = {name: getattr(options, name) for name in _FIELDS if getattr(options, name) is not None}
    if "block_bytes" in more:
        more["block_bytes"] = int(more["block_bytes"])
    if options.ssd:
        more["ssd_bytes_per_s"] = tuple(options.ssd)
    return {"num_vectors": num_vectors, "dim": dim, "dtype": dtype, **more}


def _servers(options: argparse.Namespace) -> Any:
    """The `Servers` that the user described; None without `--server-memory`.

    Raises:
        SearchError: an option of servers without their memory, or an invalid value.
    """
    from autopar.vector_search.estimate.servers import Servers

    given = {
        "memory_bytes_per_s": options.server_bandwidth,
        "numbers": None if options.servers is None else tuple(options.servers),
        "updates_per_s": options.updates,
        "queries_per_s": options.queries_per_s,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if options.prices is not None:
        given |= dict(zip(("memory_usd", "disk_usd"), _prices(options.prices), strict=True))
    if options.server_memory is None:
        if given:
            raise SearchError("the servers have no memory: give that of one server, as --server-memory 64GB")
        return None
    return Servers(**{"memory_bytes_per_s": 200e9, **given}, memory_bytes=options.server_memory)


def _prices(text: str) -> tuple[float, float]:
    try:
        memory, disk = map(float, text.split(","))
    except ValueError:
        raise SearchError(
            f"invalid --prices {text!r}: write USD,USD, of a GB of memory and of a GB on a drive for a month, e.g. 3,0.1"
        ) from None
    return memory, disk


def parse_corpus(text: str) -> tuple[int, int, str]:
    """Parse a corpus into the number of vectors, the elements of a vector, and their dtype.

    Raises:
        SearchError: the text cannot be parsed.

    >>> parse_corpus("1.4e9x100:int8")
    (1400000000, 100, 'int8')
    """
    match = re.fullmatch(r"([\d.]+(?:e\+?\d+)?)x(\d+):(\w+)", text.strip(), re.IGNORECASE)
    number = shared.whole_number(match[1]) if match else None
    if match is None or not number or int(match[2]) < 1:
        raise SearchError(
            f"invalid --corpus {text!r}: write NxD:DTYPE, N vectors of D elements each, e.g. 1.4e9x100:int8"
        )
    return number, int(match[2]), match[3]
