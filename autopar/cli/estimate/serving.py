"""`autopar estimate serving`: place many models on devices that need not exist.

In: a file of models, a trace or their traffic. Out: the results of `placement`, as tables, JSON and a picture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autopar.cli import options as shared
from autopar.cli.files import check_output
from autopar.cli.planning import refuse_several_kinds
from autopar.cli.terminal import output, progress, use_cpu_only
from autopar.errors import PlacementError

_EXAMPLES = """
estimate serving --models models.toml --trace trace.csv --hardware h100-sxm --devices 8
estimate serving --models models.toml --hardware h100-sxm --devices 8 --current placement.json -o placement.json --svg placement.svg
"""


def add_command(added: Any) -> None:
    """Add the command to the parser of `estimate`."""
    about = "place many models on one cluster: groups of devices, replicas, requests within their latency bounds"
    command = shared.add_command(added, "serving", about, _EXAMPLES)
    about = "TOML file with a table for each model: config, latency bounds, traffic"
    command.add_argument("--models", required=True, metavar="FILE", help=about)
    about = (
        "CSV file of requests: arrival_s, model, prompt_tokens, output_tokens (default: drawn from the models' traffic)"
    )
    command.add_argument("--trace", metavar="FILE", help=about)
    about = "seconds of the trace that is drawn without --trace (default: 120)"
    command.add_argument("--duration", type=shared.seconds, default=120.0, metavar="S", help=about)
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the trace that is drawn (default: 0)"
    )
    command.add_argument("--devices", type=shared.device_count, required=True, metavar="N", help="number of devices")
    about = "hardware profile (default: the visible devices)"
    command.add_argument("--hardware", metavar="NAME", help=about)
    about = "largest number of pipeline stages of a model (default: 1, as autopar's engine runs no pipelines)"
    command.add_argument("--max-pipeline", type=shared.count, default=1, metavar="N", help=about)
    about = (
        "placement that runs now, as -o writes it: of equally good ones, that which loads the fewest bytes is chosen"
    )
    command.add_argument("--current", metavar="FILE", help=about)
    about = "keep the groups of --current, and change only which models they run"
    command.add_argument("--keep-groups", action="store_true", help=about)
    about = "bytes of weights per second that a group can load, for the cost of a change (default: 2GB)"
    command.add_argument("--load-rate", type=shared.size, metavar="SIZE", help=about)
    about = "leave out the placements on one device more and less"
    command.add_argument("--no-neighbours", action="store_true", help=about)
    command.add_argument("-o", "--output", metavar="FILE", help="save the placement as JSON")
    command.add_argument("--svg", metavar="FILE", help="draw the placement")
    shared.add_solver_options(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Estimate, print the tables, save and draw the placement."""
    check_output(options)
    refuse_several_kinds(options, "estimate serving")
    if options.hardware:
        use_cpu_only()
    from autopar.placement.draw import placement_svg
    from autopar.placement.estimate_serving import (
        LOAD_BYTES_PER_S,
        estimate_serving,
        layouts_for,
        model_specs,
        trace_of,
    )
    from autopar.placement.models_file import read_models
    from autopar.placement.tables import placement_json, read_placement, render_serving, serving_json
    from autopar.placement.traces import Trace
    from autopar.planner.request import requested_profile

    entries = read_models(options.models)
    names = [entry.name for entry in entries]
    trace = Trace.read(options.trace, names) if options.trace else trace_of(entries, options.duration, options.seed)
    if options.current is None and (options.keep_groups or options.load_rate):
        raise PlacementError("`--keep-groups` and `--load-rate` are about what runs now: give `--current FILE` too")
    current = None if options.current is None else read_placement(options.current)
    profile = requested_profile(options.hardware)
    layouts = layouts_for(options.devices, profile, options.max_pipeline)
    planning = {"cache": options.cache or not options.no_cache}
    if options.time_limit is not None:
        planning["time_limit_s"] = options.time_limit
    with progress() as report:
        models = model_specs(entries, layouts, profile, report, **planning)
        found = estimate_serving(
            models,
            trace,
            profile,
            options.devices,
            memory_budget_bytes=options.memory_budget,
            current=current,
            keeps_groups=options.keep_groups,
            load_bytes_per_s=options.load_rate or LOAD_BYTES_PER_S,
            neighbours=not options.no_neighbours,
            progress=report,
        )
    if options.output is not None:
        saved = placement_json(found.found.placement, found.found.firsts)
        Path(options.output).write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if options.svg is not None:
        Path(options.svg).write_text(placement_svg(found), encoding="utf-8")
    output(options, lambda: serving_json(found), lambda console: render_serving(found, console))
