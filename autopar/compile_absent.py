"""The process in which `absent` has a step compiled: `python -m autopar.compile_absent FOLDER`.

In: files `module`, `target`, `topology` of the folder. Out: files `program` and `memory` beside them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from jax.experimental import topologies

from autopar.jax_compat import compile_module


def main(folder: Path) -> None:
    """Compile, and write what came out."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=(folder / "target").read_text(encoding="utf-8"),
        topology=(folder / "topology").read_text(encoding="utf-8"),
    )
    start = time.perf_counter()
    executable = compile_module((folder / "module").read_bytes(), topology.devices)
    compile_s = time.perf_counter() - start
    sizes = executable.get_compiled_memory_stats()
    memory = {
        "argument_bytes": sizes.argument_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
        "output_bytes": sizes.output_size_in_bytes,
        "alias_bytes": sizes.alias_size_in_bytes,
        "compile_s": compile_s,
    }
    (folder / "program").write_text(executable.hlo_modules()[0].to_string(), encoding="utf-8")
    (folder / "memory").write_text(json.dumps(memory), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
