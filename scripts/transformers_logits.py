"""Compute the logits of small checkpoints of every family by `transformers` in torch, for `tests/logits`.

`python scripts/transformers_logits.py PYTHON [NAME ...]`, where PYTHON has torch and transformers (any environment:
`python -m venv DIR && DIR/bin/pip install torch transformers`). By default all checkpoints of `tests/family_checkpoints.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from family_checkpoints import CHECKPOINTS, FOLDER, POSITIONS, digest_of, tokens_of, write_family  # noqa: E402

_TORCH = """
import sys, numpy as np, torch, transformers
from transformers import AutoModelForCausalLM
tokens = torch.from_numpy(np.load(sys.argv[1])).long()
for folder in sys.argv[2:]:
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not loading["missing_keys"] and not loading["unexpected_keys"], (folder, loading)
    with torch.no_grad():
        np.save(folder + "/logits.npy", model.eval()(tokens).logits.float().numpy())
print("transformers", transformers.__version__, "torch", torch.__version__)
"""


def main() -> None:
    """Write the logits of all checkpoints, or of those named."""
    python, *names = sys.argv[1:]
    clean = {key: value for key, value in os.environ.items() if key not in ("USE_TORCH", "PYTHONPATH", "PYTHONHOME")}
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch) / "tokens.npy"
        np.save(tokens, tokens_of())
        folders = [write_family(Path(scratch) / name, name) for name in names or CHECKPOINTS]
        subprocess.run(
            [python, "-c", _TORCH, str(tokens), *map(str, folders)],
            check=True,
            env={**clean, "HF_HUB_OFFLINE": "1", "USE_FLAX": "0"},
        )
        for folder in folders:
            logits = np.load(folder / "logits.npy")[:, POSITIONS].astype(np.float32)
            np.savez(FOLDER / f"{folder.name}.npz", logits=logits, digest=digest_of(folder))


if __name__ == "__main__":
    main()
