"""Define the options that `serve` and `route` share: the address, keys, connections.

In: option texts. Out: groups of options for `argparse`; keys; the host names that requests may be sent to.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from autopar.errors import InferenceError

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")


def add_address_options(command: argparse.ArgumentParser, host: str, port: str, admin: str) -> None:
    """Add the options for the address and the keys to a command.

    Args:
        host, port: the defaults, in words. admin: what the administration's keys are for.
    """
    group = command.add_argument_group("address")
    group.add_argument("--host", metavar="ADDRESS", help=f"address to listen on (default: {host})")
    group.add_argument("--port", type=int, metavar="N", help=f"port to listen on, 0 for any (default: {port})")
    about = "host name that requests may be sent to; may be repeated (default: on loopback its names, else any)"
    group.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=about)
    group = command.add_argument_group("keys")
    about = "file with keys, one per line, of which a request must have one (also: AUTOPAR_API_KEY)"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=about)
    group.add_argument("--admin-key-file", type=Path, metavar="FILE", help=f"file with keys for {admin}")


def add_connection_options(group: argparse._ArgumentGroup, most: int) -> None:
    """Add the limits of connections.

    Args:
        most: the default number of requests at once.
    """
    about = f"requests served at once; above it status 503 (default: {most})"
    group.add_argument("--max-connections", type=int, metavar="N", help=about)
    about = "how long running requests may go on after SIGTERM (default: 30)"
    group.add_argument("--shutdown", dest="shutdown_s", type=float, metavar="SECONDS", help=about)


def hosts_of(options: argparse.Namespace, host: str) -> frozenset[str]:
    """The host names that requests may be sent to; none for all."""
    return frozenset(options.allow_host or (_LOOPBACK if host in _LOOPBACK else ()))


def keys_of(file: Path | None, variable: str) -> frozenset[str]:
    """The keys of a file and of a variable.

    Raises:
        InferenceError: the file cannot be read, or has no key.
    """
    keys = {os.environ[variable]} if os.environ.get(variable) else set()
    if file is not None:
        try:
            found = {line.strip() for line in file.read_text(encoding="utf-8").splitlines()} - {""}
        except OSError as error:
            raise InferenceError(f"the keys in {file} cannot be read: {error.strerror}") from None
        if not found:
            raise InferenceError(f"{file} has no key: write one per line")
        keys |= found
    return frozenset(keys)
