"""Run `transformers`' generate in torch, in static batches, as a process for a Python that has torch.

In: on standard input, a line of JSON per round, with `prompts`, `max_tokens` of each, and `slots` of a batch. Out: on
standard output, a line of JSON per round, with seconds, steps of the model, and the tokens of each prompt. It waits
between rounds. Greedy, float32, torch's default number of threads.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from transformers import AutoModelForCausalLM

PAD = 0


def main(folder: str) -> None:
    """Serve rounds until the input ends."""
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    for field in ("eos_token_id", "bos_token_id"):  # random weights: no token ends a text
        setattr(model.generation_config, field, None)
    model.generation_config.pad_token_id = PAD
    about = f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads"
    print(json.dumps({"about": about}), flush=True)
    for line in sys.stdin:
        print(json.dumps(served(model, **json.loads(line))), flush=True)


def served(model: Any, prompts: list[list[int]], max_tokens: list[int], slots: int) -> dict[str, Any]:
    """Serve all prompts in batches of `slots`, each as long as its longest request."""
    begin, steps = time.perf_counter(), 0
    tokens: list[list[int]] = []
    for start in range(0, len(prompts), slots):
        batch, wanted = prompts[start : start + slots], max_tokens[start : start + slots]
        made = generated(model, batch, max(wanted))
        steps += max(wanted)
        tokens += [row[:num] for row, num in zip(made, wanted, strict=True)]
    return {"seconds": time.perf_counter() - begin, "steps": steps, "tokens": tokens}


def generated(model: Any, batch: list[list[int]], num_tokens: int) -> list[list[int]]:
    """New tokens of one batch, padded on the left."""
    width = max(map(len, batch))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in batch])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, use_cache=True)
    return out[:, width:].tolist()


if __name__ == "__main__":
    main(sys.argv[1])
