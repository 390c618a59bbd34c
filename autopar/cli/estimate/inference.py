"""`autopar estimate inference`: estimate the serving of a model on devices that need not exist.

In: a model's config, a workload. Out: the results of `inference.estimate`, as tables or JSON.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli import options as shared
from autopar.cli.files import check_output
from autopar.cli.planning import planning, refuse_several_kinds
from autopar.cli.terminal import output, progress

#: The field of `PaperInference` by option.
_FIELDS = {
    "batch": "batch",
    "prompt_tokens": "prompt",
    "output_tokens": "output",
    "max_length": "max_length",
    "dtype": "dtype",
    "page_size": "page_size",
    "objective": "objective",
    "ttft": "ttft_s",
    "tpot": "tpot_s",
}
_EXAMPLES = "estimate inference Llama-3.1-8B --devices 8 --hardware h100-sxm --batch 64"


def add_command(added: Any) -> None:
    """Add the command to the parser of `estimate`."""
    about = "estimate the serving of a model: TTFT, TPOT, throughput and KV cache, by layout of the devices"
    command = shared.add_command(added, "inference", about, _EXAMPLES)
    command.add_argument("model", metavar="MODEL", help="a folder with a config.json, or such a file")
    about = "sequences in a batch of one replica (default: 16)"
    command.add_argument("--batch", type=shared.count, metavar="N", help=about)
    about = "tokens of a prompt (default: 1000)"
    command.add_argument("--prompt-tokens", type=shared.count, metavar="N", help=about)
    about = "tokens generated for each prompt (default: 1000)"
    command.add_argument("--output-tokens", type=shared.count, metavar="N", help=about)
    about = "tokens of the longest sequence (default: prompt and output, in whole pages)"
    command.add_argument("--max-length", type=shared.count, metavar="N", help=about)
    about = "dtype of weights and KV cache: bfloat16, float16 or float32 (default: the model's)"
    command.add_argument("--dtype", metavar="DTYPE", help=about)
    about = "quantize float weights: int8 or int4, with a group of inputs as int8-g128 (default: as in the config.json)"
    command.add_argument("--quantize", metavar="NAME", help=about)
    command.add_argument("--page-size", type=shared.count, metavar="N", help="tokens in a KV cache page (default: 16)")
    about = "latency: the lowest TPOT (default); throughput: the most tokens per second of all devices"
    command.add_argument("--objective", metavar="NAME", help=about)
    about = "limit on the time to the first token (TTFT)"
    command.add_argument("--ttft", type=shared.seconds, metavar="S", help=about)
    about = "limit on the time per further token (TPOT); for throughput, with requests always queued"
    command.add_argument("--tpot", type=shared.seconds, metavar="S", help=about)
    about = "never split one dim into two"
    command.add_argument("--dims-as-written", action="store_true", help=about)
    command.add_argument("-o", "--output", metavar="FILE", help="save the plan of a decode iteration")
    shared.add_mesh_options(command)
    shared.add_solver_options(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Estimate, print the tables, and save the plan of a decode iteration."""
    check_output(options)
    refuse_several_kinds(options, "estimate inference")
    more = planning(options)
    from autopar.inference.estimate.estimate import PaperInference, inference_on_paper
    from autopar.inference.estimate.tables import inference_json, render_inference
    from autopar.inference.model.config import DecoderConfig
    from autopar.inference.schedule.requests import Shape

    workload = {field: getattr(options, name) for name, field in _FIELDS.items() if getattr(options, name) is not None}
    case = PaperInference(config=DecoderConfig.read(options.model).quantized(options.quantize), **workload)
    more.pop("pin")
    with progress() as report:
        found = inference_on_paper(case, progress=report, **more)
    if options.output is not None:
        assert found.chosen.layout is not None
        found.chosen.layout.programs[Shape()].plan.save(options.output)
    output(options, lambda: inference_json(found), lambda console: render_inference(found, console))
    if options.output is not None and not options.json:
        print(f"\nThe plan of a decode iteration is saved to {options.output}; `autopar explain` says why.")
