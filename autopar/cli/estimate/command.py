"""`autopar estimate`: estimate inference, many models on one cluster, vector search, collectives, pipelines over nodes that fail.

In: a model, a corpus, a mesh, or a step. Out: times and memory on devices that need not exist.
"""

from __future__ import annotations

from typing import Any

from autopar.cli.estimate import collectives, inference, pipelines, search, serving


def add_command(added: Any) -> None:
    """Add the command and its subcommands to a parser's commands."""
    about = "estimate inference, many models on one cluster, a vector search, collectives, or pipelines over nodes that fail, on devices that need not exist"
    estimate = added.add_parser("estimate", help=about, description=about)
    under = estimate.add_subparsers(title="what to estimate", metavar="WHAT", required=True)
    for command in (inference, serving, search, collectives, pipelines):
        command.add_command(under)
