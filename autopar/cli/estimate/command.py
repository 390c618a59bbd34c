"""`autopar estimate`: estimate inference, vector search and collectives, without a program of the user's.

In: a model, a corpus or a mesh. Out: times and memory on devices that need not exist.
"""

from __future__ import annotations

from typing import Any

from autopar.cli.estimate import collectives, inference, search


def add_command(added: Any) -> None:
    """Add the command and its subcommands to a parser's commands."""
    about = "estimate inference, a vector search or collectives on devices that need not exist"
    estimate = added.add_parser("estimate", help=about, description=about)
    under = estimate.add_subparsers(title="what to estimate", metavar="WHAT", required=True)
    for command in (inference, search, collectives):
        command.add_command(under)
