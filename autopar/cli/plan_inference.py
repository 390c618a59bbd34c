"""`autopar plan --for inference MODEL`: its options, and what they mean.

In: texts. Out: what `inference.on_paper` takes; or a refusal of options that say nothing of inference.
"""

from __future__ import annotations

import argparse

from autopar.cli.files import check_output
from autopar.cli.options import count, seconds
from autopar.cli.planning import planning
from autopar.cli.terminal import given, progress, refuse, tell
from autopar.errors import TargetError

#: By option: the field of `PaperInference` that it is. Those that a search has too are in `plan_search`.
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
#: Options of inference alone.
OWN = tuple(name for name in _FIELDS if name != "batch")
#: Options of planning that inference has no use for.
_NO_USE = ("compare", "no_rematerialize", "pin", "num_microbatches", "per_microbatch_statistics", "stages", "schedule")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options, each None where it is not given; `--batch` is the search's."""
    group = parser.add_argument_group("inference, on paper (with --for inference MODEL)")
    about = "tokens of a prompt (default: 1000); MODEL is a folder with a config.json, or such a file"
    group.add_argument("--prompt-tokens", type=count, metavar="N", help=about)
    about = "tokens generated for each (default: 1000)"
    group.add_argument("--output-tokens", type=count, metavar="N", help=about)
    about = "tokens of the longest sequence (default: prompt and output, in whole pages)"
    group.add_argument("--max-length", type=count, metavar="N", help=about)
    about = "of weights and cache: bfloat16, float16 or float32 (default: the model's)"
    group.add_argument("--dtype", metavar="DTYPE", help=about)
    group.add_argument("--page-size", type=count, metavar="N", help="tokens of a page of the cache (default: 16)")
    about = "latency: the shortest time for a token (default); throughput: most tokens of all devices"
    group.add_argument("--objective", metavar="NAME", help=about)
    about = "seconds until a prompt's first token, at most"
    group.add_argument("--ttft", type=seconds, metavar="S", help=about)
    about = "seconds for each further token, at most; for throughput, where requests always wait"
    group.add_argument("--tpot", type=seconds, metavar="S", help=about)


def check(options: argparse.Namespace, of_search: list[str]) -> None:
    """Refuse what says nothing of inference.

    Args:
        of_search: those of a search alone that were given.

    Raises:
        TargetError: naming them.
    """
    refuse([*of_search, *given(options, _NO_USE)], "--for inference plans the serving of a model")
    if len(options.target) != 1:
        named = ", ".join(options.target) or "none"
        raise TargetError(
            f"--for inference takes one MODEL, a folder with a config.json or such a file, and was given {named}"
        )
    if "=" in (options.hardware or ""):
        raise TargetError(
            f"--for inference plans devices of one kind, and --hardware is {options.hardware!r}: give one name"
        )


def run(options: argparse.Namespace) -> None:
    """Plan, print, and save the plan of a decode iteration where that was asked for."""
    check_output(options)
    more = planning(options)
    from autopar.inference.estimate.estimate import PaperInference, inference_on_paper
    from autopar.inference.estimate.tables import inference_json, render_inference
    from autopar.inference.model.config import DecoderConfig
    from autopar.inference.schedule.requests import Shape

    (model,) = options.target
    asked = {field: getattr(options, name) for name, field in _FIELDS.items() if getattr(options, name) is not None}
    case = PaperInference(config=DecoderConfig.read(model), **asked)
    more.pop("pin")
    with progress() as report:
        told = inference_on_paper(case, progress=report, **more)
    if options.output is not None:
        assert told.chosen.layout is not None
        told.chosen.layout.programs[Shape()].plan.save(options.output)
    tell(options, lambda: inference_json(told), lambda console: render_inference(told, console))
    if options.output is not None and not options.json:
        print(f"\nThe plan of a decode iteration is saved to {options.output}; `autopar explain` says why.")
