"""Measure one piece in a process of its own: `python -m benchmarks.gpu.child PIECE PLANS SCALE SECONDS`.

In: the command line; the piece `host` describes the host. Out: a line of JSON on standard output, behind a prefix. GPU
memory is free again when the process ends.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

#: Prefix of the record in the process's output.
MARK = "GPU RECORD "
HOST = "host"
#: Packages that a dry run hides, because a GPU host may lack them: solvers, and libraries of models.
ABSENT = ("ortools", "numba", "transformers", "torch", "tokenizers", "jraph", "diffusers")


def main(piece: str, plans: str, scale: str, seconds: str) -> None:
    if scale == "tiny":
        modules: dict[str, Any] = sys.modules
        modules.update(dict.fromkeys(ABSENT))  # makes `import` fail
    from benchmarks.gpu.host import host

    here = host()
    record: dict[str, Any] = {"host": here}
    if piece != HOST:
        from benchmarks.gpu.pieces import PIECES
        from benchmarks.gpu.setting import Setting

        given: Any = {"plans": Path(plans), "scale": scale, "seconds": float(seconds)}
        setting = Setting(profile=here["profile"], num_devices=here["num_devices"], **given)
        record["found"] = PIECES[piece].measure(setting)
    print(MARK + json.dumps(finite(record), allow_nan=False), flush=True)


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
