"""`autopar serve`: serve models over HTTP, with the endpoints of OpenAI's API; or an index for vector search.

In: models' folders or an index, an address, limits. Out: a server, until a signal ends it. The address is printed once it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.listening import add_address_options, add_connection_options, hosts_of, keys_of
from autopar.cli.options import add_command as add_with_examples
from autopar.cli.options import size
from autopar.cli.serving_options import add_serving_options, serving_of
from autopar.cli.terminal import progress
from autopar.errors import InferenceError
from autopar.system.install_command import install_command

if TYPE_CHECKING:
    from autopar.inference import KVPool

_EXAMPLES = """
serve Qwen3-0.6B
serve chat=Qwen3-0.6B judge=Qwen3-1.7B --slots 32 --port 9000
serve chat=Qwen3-0.6B judge=Qwen3-1.7B --kv-pool 20GB --weights-memory 4GB
serve Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt
serve --index corpus.index
"""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "serve models over HTTP, with the endpoints of OpenAI's API; or an index for vector search"
    serve = add_with_examples(added, "serve", about, _EXAMPLES)
    about = "a model as Hugging Face writes it, served under its folder's name or under NAME"
    serve.add_argument("models", nargs="*", metavar="[NAME=]MODEL_DIR", help=about)
    group = serve.add_argument_group("vector search")
    about = "serve an index on disk, or a part of one that `divide` made, instead of models"
    group.add_argument("--index", type=Path, metavar="FILE", help=about)
    about = "addresses of the servers of all parts, in their order: answer searches by requests to them"
    group.add_argument("--servers", nargs="+", metavar="URL", help=about)
    about = "memory for the index, searches and a cache of its pages (default: no cache)"
    group.add_argument("--index-memory", type=size, metavar="SIZE", help=about)
    admin = "loading, unloading and sleeping, which are off without it (also: AUTOPAR_ADMIN_KEY)"
    host = "127.0.0.1, this machine only; under Vertex AI: 0.0.0.0"
    add_address_options(serve, host, "8000, or AIP_HTTP_PORT", admin)
    group = serve.add_argument_group("limits")
    about = "tokens of requests that wait, per model; above it a request gets status 429 (default: 1000000)"
    group.add_argument("--max-queued-tokens", type=int, metavar="N", help=about)
    group.add_argument(
        "--max-body", dest="max_body_bytes", type=size, metavar="SIZE", help="body of a request (default: 10MB)"
    )
    about = "longest time of a reply (default: 600)"
    group.add_argument("--timeout", dest="timeout_s", type=float, metavar="SECONDS", help=about)
    add_connection_options(group, 1000)
    group = serve.add_argument_group("prompts")
    about = "file with a chat template in Jinja that replaces the models' own"
    group.add_argument("--chat-template", type=Path, metavar="FILE", help=about)
    group = serve.add_argument_group("several models")
    about = "one pool of this size on each device for the caches of all models (default: a cache for each)"
    group.add_argument("--kv-pool", type=size, metavar="SIZE", help=about)
    about = "with --kv-pool, the weights that a device has at once; those of other models wait in the host's memory (default: all)"
    group.add_argument("--weights-memory", type=size, metavar="SIZE", help=about)
    add_serving_options(serve)
    serve.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Serve until a signal.

    Raises:
        InferenceError: neither models nor an index, or both, or a package that is missing.
        SearchError, IndexFileError: the index cannot be served.
    """
    if (options.index is None) == (not options.models):
        raise InferenceError("give the folders of models, or `--index FILE` for vector search: one of the two")
    if options.index is None and (options.servers or options.index_memory):
        raise InferenceError("`--servers` and `--index-memory` are for vector search: give `--index FILE` too")
    if options.index is not None:
        _serve_index(options)
        return
    try:
        from autopar.serving.limits import Limits
        from autopar.serving.server import serve
    except ModuleNotFoundError as error:
        raise InferenceError(
            f"the package {error.name!r} of the server is not installed: {install_command('serve')}"
        ) from None
    from autopar.inference import Engine
    from autopar.planner.request import requested_profile

    folders = [_named(each) for each in options.models]
    budget, has_pool = options.memory_budget, options.kv_pool is not None
    if options.weights_memory is not None and not has_pool:
        raise InferenceError("`--weights-memory` is for models on one pool: give `--kv-pool SIZE` too")
    if budget is None and len(folders) > 1 and not has_pool:
        budget = requested_profile(None).usable_bytes / len(folders)
    options.memory_budget = budget
    for _, folder in folders:
        serving_of(str(folder), options)  # what is wrong is said before the first model is read

    pool = pool_of(folders, options) if has_pool else None

    def open_engine(folder: Path) -> Engine:
        serving = serving_of(str(folder), options)
        if pool is not None:
            is_named = any(folder == each for _, each in folders)
            serving |= {"pool": pool, "mesh": None, "quota": 1 / len(folders) if is_named else 0.0}
        serving["options"] = replace(serving["options"], samples_apart=True)  # requests may have grammars
        with progress() as report:
            return Engine.open(folder, **serving, progress=report)

    host = options.host or ("0.0.0.0" if "AIP_HTTP_PORT" in os.environ else "127.0.0.1")
    port = int(os.environ.get("AIP_HTTP_PORT", "8000")) if options.port is None else options.port
    given = {each.name: value for each in fields(Limits) if (value := getattr(options, each.name, None)) is not None}
    limits = Limits(
        **given,
        api_keys=keys_of(options.api_key_file, "AUTOPAR_API_KEY"),
        admin_keys=keys_of(options.admin_key_file, "AUTOPAR_ADMIN_KEY"),
        hosts=hosts_of(options, host),
    )

    def on_ready(address: str) -> None:
        names = ", ".join(name or folder.resolve().name for name, folder in folders)
        print(f"{names}: {address}/v1 (page: {address}/)", file=sys.stderr, flush=True)

    asyncio.run(
        serve(
            folders, open_engine, limits, host=host, port=port, chat_template=options.chat_template, on_ready=on_ready
        )
    )


def pool_of(folders: list[tuple[str | None, Path]], options: argparse.Namespace) -> KVPool:
    """One pool for the caches of all models, of which each can count on an equal share."""
    from autopar.inference import KVPool

    mesh, dtype = options.mesh, serving_of(str(folders[0][1]), options)["dtype"]
    most = math.inf if options.weights_memory is None else options.weights_memory
    return KVPool.of([folder for _, folder in folders], options.kv_pool, mesh=mesh, dtype=dtype, weights_bytes=most)


def _serve_index(options: argparse.Namespace) -> None:
    from autopar.vector_search.servers.serve_index import server_of

    host = options.host or "127.0.0.1"
    port = 8000 if options.port is None else options.port
    with server_of(options.index, (host, port), options.servers, options.index_memory) as server:
        print(f"{options.index.name}: {server.url}/search", file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _named(text: str) -> tuple[str | None, Path]:
    name, separator, folder = text.partition("=")
    return (name, Path(folder)) if separator and not Path(text).exists() else (None, Path(text))
