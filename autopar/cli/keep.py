"""`autopar keep`: keep a training job alive when processes or hosts fail.

In: a command that calls `autopar.join()`. Out: its output, what happens to its members on standard error, and its exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from autopar.errors import ProcessError

_EPILOG = """\
examples:
  autopar keep -n 4 -- python train.py                      everything on this host
  autopar keep -n 4 --at host0:7077                         the keeper alone, which computes nothing
  autopar keep --join host0:7077 -- python train.py         on each host that trains
docs/fault-tolerance.md has Slurm, Kubernetes and Ray.
"""
_TOKEN = "AUTOPAR_KEEP_TOKEN"


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "keep a training job alive: go on without hosts that fail, and take them back"
    keep = added.add_parser(
        "keep", help=about, description=about, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keep.add_argument("-n", "--members", type=_count, help="hosts, or processes of this host, that train together")
    keep.add_argument("--at", default="127.0.0.1:0", metavar="HOST:PORT", help="address of the keeper")
    keep.add_argument("--join", metavar="HOST:PORT", help="be a member of the job whose keeper is there")
    keep.add_argument("--name", help="name of this member; by default the host's")
    keep.add_argument("--state", default=".autopar-keep", metavar="FOLDER", help="the keeper's state, for a new keeper")
    keep.add_argument("--least", type=_count, default=1, help="fewest members with which the job goes on")
    keep.add_argument("--timeout", type=_seconds, default=10.0, metavar="S", help="without a sign of life: dead")
    keep.add_argument("--step-timeout", type=_seconds, default=1800.0, metavar="S", help="without a step done: hanging")
    keep.add_argument(
        "--copies", type=_count_or_0, default=1, help="members that have a copy of each shard, besides its own"
    )
    keep.add_argument("--every", type=_count, default=10, help="steps between two copies")
    keep.add_argument("--ahead", type=_count_or_0, default=2, help="compile ahead for so many fewer members")
    keep.add_argument(
        "--microbatches",
        type=_count,
        default=0,
        metavar="M",
        help="divide each batch into M, dealt to members by their speed",
    )
    keep.add_argument(
        "--slow", type=float, default=2.0, metavar="FACTOR", help="a spare replaces a slower member; 0: never"
    )
    keep.add_argument(
        "--return-after",
        type=float,
        default=5.0,
        metavar="S",
        help="start a killed member again, with -n and a command",
    )
    keep.add_argument("--notice", type=Path, metavar="FILE", help="leave at a step border when this file appears")
    keep.add_argument(
        "--keeper-wait", type=_seconds, default=600.0, metavar="S", help="a member ends without a keeper for so long"
    )
    keep.add_argument("command", nargs="*", metavar="-- COMMAND", help="what trains")
    keep.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Be the keeper, an agent, or the keeper with agents on this host.

    Raises:
        ProcessError: options that do not go together.
    """
    if options.join is not None:
        return asyncio.run(_agent(options))
    if options.members is None:
        raise ProcessError(
            "give the number of members, as in `autopar keep -n 4 -- python train.py`, or --join HOST:PORT"
        )
    return asyncio.run(_keeper(options))


async def _agent(options: argparse.Namespace) -> int:
    import socket

    from autopar.membership.agent import Agent
    from autopar.membership.state_file import StateFolder

    if not options.command:
        raise ProcessError("give the command that trains: autopar keep --join HOST:PORT -- python train.py")
    token = os.environ.get(_TOKEN) or StateFolder(options.state).token()
    name = options.name or socket.gethostname()
    agent = Agent(
        name, options.command, options.join, token, _printer(f"member {name}"), options.notice, options.keeper_wait
    )
    return await agent.run()


async def _keeper(options: argparse.Namespace) -> int:
    from autopar.membership.job_keeper import JobKeeper
    from autopar.membership.local_agents import LocalAgents
    from autopar.membership.records import Terms
    from autopar.membership.state_file import StateFolder

    terms = Terms(
        *(options.members, options.least, options.timeout, options.step_timeout, options.copies, options.every),
        ahead=options.ahead,
        spares_after=options.slow,
        microbatches=options.microbatches,
    )
    if terms.least > terms.wanted:
        raise ProcessError(
            f"the job goes on with at least {terms.least} members (--least), and has {terms.wanted} (-n): it would never start"
        )
    if terms.microbatches and terms.microbatches < terms.wanted:
        raise ProcessError(
            f"{terms.wanted} members need a microbatch each, and --microbatches is {terms.microbatches}: give at least {terms.wanted}"
        )
    show = _printer("keeper")
    folder = StateFolder(options.state)
    keeper = JobKeeper(terms, options.at, folder, show, os.environ.get(_TOKEN, ""))
    listening = asyncio.Event()
    keeping = asyncio.create_task(keeper.run(listening.set))
    tasks: set[asyncio.Task[int]] = {keeping}
    await asyncio.wait({keeping, asyncio.create_task(listening.wait())}, return_when=asyncio.FIRST_COMPLETED)
    show(f"listening at {keeper.address}; state in {folder.folder}")
    agents = LocalAgents(options.members, options.command, keeper.token, options.return_after, show)
    if options.command and not keeping.done():
        if keeper.is_successor:  # its members have to connect again first
            await asyncio.wait({keeping}, timeout=options.timeout)
        tasks.add(asyncio.create_task(agents.keep(keeper.address, keeper.local_agents)))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if keeping not in done:  # an agent ended by itself: the job is over, or cannot run
        (ended,) = done
        if keeper.job.code is None and ended.result():
            keeper.job.code = ended.result()
    code = await keeping
    agents.end()
    return code


def _printer(who: str) -> Any:
    start_s = time.monotonic()

    def show(text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(f"autopar {who} [{time.monotonic() - start_s:7.2f} s]: {text}", file=sys.stderr, flush=True)

    return show


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def _count_or_0(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0; got {number}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0; got {number}")
    return number
