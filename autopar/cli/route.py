"""`autopar route`: one address in front of several `autopar serve` processes, which run the groups of a placement.

In: a placement's file, addresses, limits. Out: a router, until a signal ends it. The address is printed once it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from autopar.cli.listening import add_address_options, add_connection_options, hosts_of, keys_of
from autopar.cli.options import add_command as add_with_examples
from autopar.cli.options import seconds, size
from autopar.errors import InferenceError, PlacementError
from autopar.system.install_command import install_command

_EXAMPLES = """
route --servers http://127.0.0.1:8001 http://127.0.0.1:8002
route placement.json --servers http://gpu-1:8000 http://gpu-2:8000 --host 0.0.0.0 --api-key-file keys.txt
route placement.json --servers http://gpu-1:8000 http://gpu-2:8000 --models models.toml --hardware h100-sxm --apply
"""
_MOST_CONNECTIONS = 10_000


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "route requests to several `autopar serve`: by queues and cached prefixes, around servers that fail"
    route = add_with_examples(added, "route", about, _EXAMPLES)
    about = "a placement that `autopar estimate serving -o` wrote; without it, all servers count as one device"
    route.add_argument("placement", nargs="?", type=Path, metavar="PLACEMENT", help=about)
    about = "address of the server of each group, in the placement's order"
    route.add_argument("--servers", nargs="+", required=True, metavar="URL", help=about)
    about = "how long a request waits if no server has its model (default: 10)"
    route.add_argument("--hold", type=seconds, default=10.0, metavar="S", help=about)
    admin = "draining and changes of models, which the servers must have too (also: AUTOPAR_ADMIN_KEY)"
    add_address_options(route, "127.0.0.1, this machine only", "8000", admin)
    add_connection_options(route.add_argument_group("limits"), _MOST_CONNECTIONS)
    group = route.add_argument_group("new placements when rates drift")
    about = "the models' file of `autopar estimate serving`; without it, no new placement is looked for"
    group.add_argument("--models", type=Path, metavar="FILE", help=about)
    group.add_argument("--hardware", metavar="NAME", help="hardware profile (default: the visible devices)")
    about = "seconds of requests that are looked at, again and again (default: 600)"
    group.add_argument("--window", type=seconds, default=600.0, metavar="S", help=about)
    about = "load and unload models as a new placement says, if it pays within a window (default: it is shown only)"
    group.add_argument("--apply", action="store_true", help=about)
    about = "memory per device (default: all that a program may use)"
    group.add_argument("--memory-budget", type=size, metavar="SIZE", help=about)
    about = "bytes of weights per second that a group can load (default: 2GB)"
    group.add_argument("--load-rate", type=size, metavar="SIZE", help=about)
    route.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Route until a signal.

    Raises:
        InferenceError: a package is missing, or nothing can listen. PlacementError: the placement and the servers do not fit.
    """
    try:
        from autopar.serving.limits import Limits
        from autopar.serving.router.placed import Replacing
        from autopar.serving.router.run import route
    except ModuleNotFoundError as error:
        raise InferenceError(
            f"the package {error.name!r} of the router is not installed: {install_command('serve')}"
        ) from None
    given = (options.hardware, options.apply, options.memory_budget, options.load_rate)
    if options.models is None and any(given):
        raise PlacementError(
            "`--hardware`, `--apply`, `--memory-budget` and `--load-rate` are for new placements: give `--models FILE`"
        )
    if options.models is not None and options.placement is None:
        raise PlacementError("`--models` is for new placements, which start from one: give PLACEMENT too")
    replacing = None
    if options.models is not None:
        sizes = {"--memory-budget": options.memory_budget, "--load-rate": options.load_rate}
        more = tuple(text for name, value in sizes.items() if value is not None for text in (name, str(int(value))))
        replacing = Replacing(
            models=options.models,
            hardware=options.hardware,
            window_s=options.window,
            applies=options.apply,
            options=more,
        )
    host = options.host or "127.0.0.1"
    limits = Limits(
        max_connections=options.max_connections or _MOST_CONNECTIONS,
        shutdown_s=30.0 if options.shutdown_s is None else options.shutdown_s,
        api_keys=keys_of(options.api_key_file, "AUTOPAR_API_KEY"),
        admin_keys=keys_of(options.admin_key_file, "AUTOPAR_ADMIN_KEY"),
        hosts=hosts_of(options, host),
    )

    def on_ready(address: str) -> None:
        print(f"{len(options.servers)} servers: {address}/v1", file=sys.stderr, flush=True)

    asyncio.run(
        route(
            options.placement,
            options.servers,
            limits,
            host=host,
            port=8000 if options.port is None else options.port,
            replacing=replacing,
            hold_s=options.hold,
            on_ready=on_ready,
        )
    )
