"""Measure one piece in a process of its own: `python -m benchmarks.gpu.child PIECE PLANS RESULTS SCALE SECONDS LIMIT`.

In: the command line; the piece `host` describes the host. Out: lines of JSON on standard output, behind a prefix: the
record so far, each time that the piece has more, and the whole record last. GPU memory is free again when the process
ends.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

#: Prefix of the record in the process's output.
MARK = "GPU RECORD "
HOST = "host"
#: Packages that a dry run hides, because a GPU host may lack them: solvers, and libraries of models.
ABSENT = ("ortools", "numba", "transformers", "torch", "tokenizers", "jraph", "diffusers")


def main(piece: str, plans: str, results: str, scale: str, seconds: str, limit: str) -> None:
    ends_at = time.monotonic() + float(limit)
    if scale == "tiny":
        modules: dict[str, Any] = sys.modules
        modules.update(dict.fromkeys(ABSENT))  # makes `import` fail
    from benchmarks.gpu.host import host

    here = host()

    def keep(found: dict[str, Any]) -> None:
        print(MARK + json.dumps(finite({"host": here, "found": found}), allow_nan=False), flush=True)

    if piece == HOST:
        print(MARK + json.dumps({"host": here}), flush=True)
    else:
        from benchmarks.gpu.pieces import PIECES
        from benchmarks.gpu.setting import Setting

        folders: Any = {"plans": Path(plans), "results": Path(results), "scale": scale}
        setting = Setting(host=here, seconds=float(seconds), ends_at=ends_at, keep=keep, **folders)
        keep(PIECES[piece].measure(setting))


def finite(value: Any) -> Any:
    """The value with text in place of numbers that JSON cannot express.

    >>> finite({"loss": [1.0, float("nan")]})
    {'loss': [1.0, 'nan']}
    """
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
