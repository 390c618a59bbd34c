"""Run benchmarks: `python -m benchmarks.run [NAME ...] [--again] [--only TEXT]`.

Each benchmark runs in a process of its own. Its rows are appended to `results/NAME.jsonl`, and the newest rows of each
program are rendered as `results/NAME.md`. A program measured with the same sources and the same JAX is not measured
again, so the same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attention.long_context import CASES
from benchmarks.gpu.programs import path_of, stored
from benchmarks.held_out.draw import NUM_MODELS
from benchmarks.held_out.tuned import tuned
from benchmarks.machine import ROOT, fingerprint, machine, versions

RESULTS = Path(__file__).parent / "results"
#: Prefix of the rows in the output of a measuring process.
MARK = "BENCHMARK ROWS "

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of this package with `measure(program) -> rows`.

    Args:
        programs: names of the programs that it measures.
        xla_flags: XLA flags of its process.
        sources: files of this folder that it measures with, in addition to its own and the models.
        summary: a module with `summary(rows)` for the head of its page. It may have `page_table(rows)` for the tables,
            and `publish(rows, about)` to write its results elsewhere too. Without `page_table`, a page has all columns
            of all rows.
        module: the module's name in this package, if it is not the benchmark's.
        xla_flags_of: for single programs, flags in place of `xla_flags`.
        sources_of: for single programs, further files that they measure with: a change there affects no other program.
    """

    programs: tuple[str, ...]
    xla_flags: str
    sources: tuple[str, ...] = ("timing.py", "baselines/by_hand.py")
    summary: str = ""
    module: str = ""
    xla_flags_of: Mapping[str, str] = field(default_factory=dict)
    sources_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


VIRTUAL_DEVICES = "--xla_force_host_platform_device_count=8"
_UNOPTIMISED = "--xla_backend_optimization_level=0"
#: Models whose steps run in pipeline stages.
_EXECUTED = ("MLP", "GPT", "HF BERT", "HF GPT-2")
#: Models whose compiled pieces are replayed.
_PIECES = ("GPT", "GPT scanned", "BART", "ResNet-18", "U-Net")
#: Models that are trained in planned stages.
_TRAINED = (
    "ResNet-18",
    "ResNet-50",
    "U-Net",
    "U-Net in float64",
    "Inception",
    "BART",
    "GPT-2",
    "GPT-2 scanned",
    "MLP-Mixer",
)
#: Models that run under every schedule.
_SCHEDULED = ("GPT-2", "GPT-2 scanned", "BART")
_SMALL_ZOO = ("zoo/training.py", "zoo/patches_and_branches.py")
#: Models whose stages are compared with the best of all cuts.
_BALANCED = ("ResNet-18", "ResNet-50", "U-Net", "Inception", "BART", "GPT-2", "GPT-2 scanned", "MLP-Mixer")
#: Models whose stages, microbatches and schedule are searched together, and on how many devices.
_LANGUAGE = ("gpt2", "bert", "llama_1b", "llama_7b", "gptj", "llama3_8b", "experts", "bart")
_OTHERS = ("vit", "clip", "resnet", "whisper", "lstm", "graph_network", "unet", "lora")
_SEARCHED_TOGETHER = (
    *(f"{model}, {count}" for count in (8, 16) for model in (*_LANGUAGE, *_OTHERS)),
    *(f"{model}, 64" for model in _LANGUAGE),
)
#: Faults of a job under `autopar keep`, ten random moments each.
_SURVIVED = (
    *(f"survival: kills {n}" for n in range(1, 7)),
    *(f"survival: {k}" for k in ("frozen", "keeper", "connections")),
)
#: Data sets of the approximate searches, and the files that make them, in addition to the shared ones.
_SEARCHED = {"synthetic": (), "skewed": (), "text": ("../examples/documentation.py",)}
#: Parts of serving, and the files that they measure with, in addition to their own module.
_SERVED = {
    "scheduling": (),
    "host cost": ("inference/host_cost_program.py",),
    "paging": ("timing.py",),
    "chunked prefill": ("timing.py",),
    "speculation": (),
    "quantized weights": (),
    "start": (),
    "server": ("inference/server_program.py", "inference/server_clients.py", "inference/timed_device.py"),
    "restarts": ("inference/server_program.py", "inference/timed_device.py"),
    "eight devices": (),
    "transformers": ("inference/torch_generate.py",),
}
#: Hand-sharded models, and the settings they are planned for.
_SPLIT = (
    "gpt2",
    "bert",
    "llama_1b",
    "llama_7b",
    "gptj",
    "llama3_8b",
    "experts",
    "bart",
    "vit",
    "clip",
    "resnet",
    "whisper",
    "graph_network",
)
_GPUS = ("8 GPUs", "8 GPUs, batch of 8", "16 GPUs, batch of 8", "2 hosts", "8 hosts", "8 GPUs, 40 % of the memory")
_REPLAYED = ("absent_gpus.py", "compile_cache.py", "replay/llama.py", "replay/published.py")
_RATES = tuple(f"replay/{name}.toml" for name in ("h100-96gb", "h100-96gb-nvl-peak", "h200-pytorch"))
#: Runs of parameter servers: policy, seed, and how many processes are killed or frozen.
_DISTURBED = (
    *(f"stores: bsp, seed {seed}, 10 kills" for seed in (1, 2, 3, 4)),
    "stores: ssp(3), seed 5, 10 kills",
    "stores: async, seed 6, 10 kills",
    "stores: backup(1), seed 7, 5 kills",
    *(f"stores: bsp, seed {seed}, 5 freezes" for seed in (8, 9)),
)
#: Data sets and seeds of lists on disk.
_ON_DISK = (
    *(f"lists: {name}, {seed}" for seed in (21, 22, 23) for name in ("synthetic", "text")),
    "lists: million, 21",
)
#: Rounds of updates, and accidents meanwhile.
_CHANGED = (
    *(f"rounds: {k}" for k in ("same", "drift", "graph")),
    *(f"crashes: {k}{of}" for of in ("", " of a graph") for k in ("torn", "killed", "faults", "oracle")),
)
_ACCIDENTS = ("crashes", "faulty_files", "random_updates")
#: Parts of the placement of many models.
_PLACED = (
    "md1",
    *(f"goodput: CV {cv}" for cv in (1, 2, 4, 8)),
    "overhead",
    *(
        f"brute force: {case}"
        for case in (
            "2 models, 4 devices",
            "3 models, 4 devices",
            "4 models, 4 devices",
            "3 models, 8 devices",
            "4 models, 8 devices",
        )
    ),
    *(
        f"rates: {case}"
        for case in (
            "4 models, 4 devices",
            "8 models, 8 devices",
            "12 models, 8 devices",
            "12 models, 16 devices",
        )
    ),
    "scale",
    "real engine",
    "update weights",
    "lend",
    "kv pool",
)
_GRAPHS_ON_DISK = tuple(f"graph: {name}, {seed}" for seed in (21, 22, 23) for name in ("synthetic", "text"))
_ON_CURVES = ("vector_search/contenders.py", "vector_search/data.py", "synthetic_vectors.py")
BENCHMARKS = {
    "attention": Benchmark(
        ("cudnn", "pallas", *CASES),
        VIRTUAL_DEVICES,
        sources=(),
        module="attention.parts",
        sources_of={
            **dict.fromkeys(("cudnn", "pallas"), ("attention/kernels.py",)),
            **dict.fromkeys(CASES, ("attention/long_context.py", "zoo/llama3.py", "zoo/training.py")),
        },
    ),
    "dispatch_overhead": Benchmark(("gpt2_small_one_device", "gpt2_small"), VIRTUAL_DEVICES),
    "faults": Benchmark(
        ("templates", *_SURVIVED, "copies", "stragglers", *_DISTURBED),
        VIRTUAL_DEVICES,
        sources=(),
        sources_of={
            "templates": ("faults/templates.py",),
            **dict.fromkeys(_DISTURBED, ("faults/stores.py", "faults/store_process.py")),
            **dict.fromkeys(
                _SURVIVED, ("faults/survival.py", "faults/fsdp.py", "faults/kept_job.py", "faults/proxy.py")
            ),
            "copies": ("faults/copies.py", "faults/fsdp.py", "faults/kept_job.py"),
            "stragglers": ("faults/stragglers.py", "faults/survival.py", "faults/fsdp.py", "faults/kept_job.py"),
        },
        summary="benchmarks.faults.page",
        module="faults.parts",
    ),
    "first_start": Benchmark(("unet",), VIRTUAL_DEVICES, sources=("zoo/diffusion.py", "zoo/training.py")),
    "held_out": Benchmark(
        (
            *(f"model {number}" for number in range(1, NUM_MODELS + 1)),
            *(f"tuned {one.seed}/{one.number}" for one in tuned()),
        ),
        "",
        sources=(
            "compile_cache.py",
            "held_out/sizes.py",
            "held_out/draw.py",
            "held_out/build.py",
            "held_out/seed.py",
            "zoo/training.py",
            "zoo/language.py",
            "zoo/vision.py",
            "zoo/experts.py",
            "zoo/expert_layer.py",
        ),
        summary="benchmarks.held_out.page",
        module="held_out.parts",
    ),
    "inference": Benchmark(
        tuple(_SERVED),
        "",
        sources=("inference/models.py", "inference/rows.py"),
        summary="benchmarks.inference.page",
        module="inference.parts",
        xla_flags_of={"eight devices": VIRTUAL_DEVICES},
        sources_of={part: (f"inference/{part.replace(' ', '_')}.py", *more) for part, more in _SERVED.items()},
    ),
    "inference_attention": Benchmark(("few tokens", "half", "nearly all"), "", sources=("timing.py",)),
    "kernels": Benchmark(
        tuple(stored()),
        "",
        sources=("gpu/programs.py", "gpu/aligned.py"),
        summary="benchmarks.gpu.replayed",
        module="gpu.replayed",
        sources_of={name: (path_of(name).relative_to(Path(__file__).parent).as_posix(),) for name in stored()},
    ),
    "large_steps": Benchmark(
        (
            "scanned, 8x8",
            "scanned, 4x4x4",
            "unrolled, half the tokens, 8x8",
            "unrolled, 8x8",
            "unrolled, half the tokens, 4x4x4",
        ),
        "--xla_gpu_autotune_level=0",
        sources=("absent_gpus.py", "zoo/language.py", "zoo/training.py"),
    ),
    "memory_sweep": Benchmark(
        ("gpt2_six_layers", "gpt2_medium", "llama_1b"),
        "",
        sources=(
            "compile_cache.py",
            "baselines/pinned.py",
            "baselines/checkpointed.py",
            "zoo/language.py",
            "zoo/training.py",
        ),
    ),
    "memory_wall": Benchmark(
        ("bert_large", "gpt2_xl", "turing_nlg", "gpt3"),
        "",
        sources=("zoo/stacked.py", "zoo/mixed_precision.py", "zoo/training.py"),
    ),
    "parameter_server": Benchmark(
        ("overhead", "stragglers", "digits", "text"),
        VIRTUAL_DEVICES,
        sources=("timing.py",),
        sources_of={
            "overhead": ("parameter_server/calls.py",),
            "stragglers": ("parameter_server/stragglers.py",),
            **{task: ("parameter_server/convergence.py", f"parameter_server/{task}.py") for task in ("digits", "text")},
        },
        summary="benchmarks.parameter_server.page",
        module="parameter_server.parts",
    ),
    "pipeline": Benchmark(
        (
            "theory",
            "partition",
            "clusters",
            "token_slices",
            *(f"execution: {m}" for m in _EXECUTED),
            *(f"pieces: {m}" for m in _PIECES),
            *(f"balance: {m}" for m in _BALANCED),
            *(f"models: {m}" for m in _TRAINED),
            *(f"schedules: {m}" for m in _SCHEDULED),
            *(f"auto: {case}" for case in _SEARCHED_TOGETHER),
        ),
        VIRTUAL_DEVICES,
        sources=(),
        summary="benchmarks.pipeline.page",
        module="pipeline.parts",
        sources_of={
            "theory": ("pipeline/theory.py",),
            "partition": ("pipeline/partition.py",),
            "clusters": ("pipeline/clusters.py", "zoo/gpt.py", "zoo/mixed_precision.py", "zoo/training.py"),
            "token_slices": ("pipeline/token_slices.py", "zoo/gpt.py", "zoo/mixed_precision.py", "zoo/training.py"),
            **{f"execution: {model}": ("pipeline/execution.py",) for model in _EXECUTED},
            **{f"pieces: {model}": ("pipeline/pieces.py", "zoo/training.py") for model in _PIECES},
            **{f"balance: {model}": ("pipeline/balance.py", *_SMALL_ZOO) for model in _BALANCED},
            **{f"models: {model}": ("pipeline/models.py", *_SMALL_ZOO) for model in _TRAINED},
            **{
                f"schedules: {model}": ("pipeline/schedules.py", "pipeline/models.py", *_SMALL_ZOO)
                for model in _SCHEDULED
            },
            **dict.fromkeys(
                (f"auto: {case}" for case in _SEARCHED_TOGETHER),
                ("pipeline/auto.py", "plans/models.py", "zoo/real.py", "zoo/training.py"),
            ),
        },
        xla_flags_of=dict.fromkeys(
            (*(f"models: {model}" for model in _TRAINED), *(f"schedules: {model}" for model in _SCHEDULED)),
            f"{VIRTUAL_DEVICES} {_UNOPTIMISED}",
        ),
    ),
    "pipeline_partition": Benchmark(
        ("GPT 39B, 8x8 V100", "ResNet-152, 2x8 V100", "GPT 6.7B, 8 A100 and 2x8 V100"),
        "",
        sources=(
            "baselines/stages_equal.py",
            "baselines/stages_min_cut.py",
            "baselines/stages_random.py",
            "baselines/stages_reinforce.py",
        ),
    ),
    "placement": Benchmark(
        _PLACED,
        "",
        sources=("inference/rows.py",),
        summary="benchmarks.placement.page",
        module="placement.parts",
        xla_flags_of=dict.fromkeys(("real engine", "update weights"), "--xla_force_host_platform_device_count=2"),
        sources_of={
            part: (
                f"placement/{part.partition(':')[0].replace(' ', '_')}.py",
                *(("placement/settings.py",) if part.startswith(("goodput", "overhead", "brute", "rates")) else ()),
                *(("placement/every_placement.py",) if part.startswith("brute") else ()),
                *(("placement/small_decoder.py",) if part.startswith(("real engine", "lend")) else ()),
                *(("inference/models.py",) if part == "real engine" else ()),
            )
            for part in _PLACED
        },
    ),
    "plans": Benchmark(
        tuple(f"{model}: {setting}" for setting in _GPUS for model in _SPLIT),
        "",
        sources=(
            "compile_cache.py",
            "baselines/pinned.py",
            "baselines/roles.py",
            "baselines/maxtext_rules.py",
            "baselines/jitted.py",
            "plans/models.py",
            "gpu/transformer.py",
            "plans/recipes.py",
            "plans/activations.py",
            "plans/tuned.py",
            "plans/case.py",
            "plans/judge.py",
            "zoo/training.py",
        ),
        summary="benchmarks.plans.page",
        module="plans.parts",
    ),
    "planning_time": Benchmark(("gpt2_small",), "--xla_gpu_autotune_level=0"),
    "proof": Benchmark(
        ("gpt2_small", "llama_1b", "bert_base", "resnet50", "demo_gpt", "vit_base", "bart_base"),
        "",
        sources=("compile_cache.py", "baselines/pinned.py", "baselines/megatron_only.py"),
        summary="benchmarks.proof_summary",
    ),
    "replay": Benchmark(
        ("tables", "published", "agreement", "faults"),
        "",
        sources=(),
        summary="benchmarks.replay.page",
        module="replay.parts",
        sources_of={
            "tables": ("replay/tables.py", "replay/fit.py", "replay/xla_tables.py"),
            "published": (*_REPLAYED, *_RATES),
            "agreement": (
                "compile_cache.py",
                "replay/agreement.py",
                "plans/models.py",
                "gpu/transformer.py",
                "plans/recipes.py",
                "plans/activations.py",
                "baselines/pinned.py",
                "baselines/roles.py",
                "baselines/jitted.py",
                "zoo/training.py",
            ),
            "faults": (*_REPLAYED, *_RATES, "replay/faults.py"),
        },
    ),
    "second_start": Benchmark(("gpt2_small",), "", sources=("zoo/language.py", "zoo/training.py")),
    "solvers": Benchmark(
        ("G", "A", "M", "S", "example", "gpt2_small", "gpt2_small_tight"),
        "",
        sources=("iopddl.py", "baselines/mcmc.py"),
    ),
    "step_time": Benchmark(("demo_gpt",), VIRTUAL_DEVICES),
    "vector_search": Benchmark(
        (
            "exact: batch 1000",
            "exact: batch 1",
            *(f"{kind}: {data}" for data in _SEARCHED for kind in ("ivf", "pq", "graph")),
        ),
        "",
        sources=("timing.py", "vector_search/faiss_at_its_best.py"),
        summary="benchmarks.vector_search.page",
        module="vector_search.parts",
        sources_of={
            **{f"exact: batch {batch}": ("vector_search/exact.py",) for batch in (1000, 1)},
            **{
                f"{kind}: {data}": (f"vector_search/{kind}.py", *_ON_CURVES, *more)
                for data, more in _SEARCHED.items()
                for kind in ("ivf", "pq", "graph")
            },
        },
    ),
    "vector_disk": Benchmark(
        (
            *_ON_DISK,
            *_GRAPHS_ON_DISK,
            *("memory", "memory: graph"),
            *_CHANGED,
            *("cache", "servers", "efforts", "graph_build"),
        ),
        "",
        sources=(),
        summary="benchmarks.vector_disk.page",
        module="vector_disk.parts",
        sources_of={
            **dict.fromkeys(_ON_DISK, ("vector_disk/lists.py", "synthetic_vectors.py", "../examples/documentation.py")),
            **dict.fromkeys(
                _GRAPHS_ON_DISK,
                (
                    "vector_disk/graph.py",
                    "vector_disk/diskann_rival.py",
                    "vector_disk/lists.py",
                    "vector_search/contenders.py",
                    "synthetic_vectors.py",
                    "../examples/documentation.py",
                ),
            ),
            **dict.fromkeys(("memory", "memory: graph"), ("vector_disk/memory.py",)),
            **dict.fromkeys(_CHANGED[:3], ("vector_disk/rounds.py", "synthetic_vectors.py")),
            **dict.fromkeys(_CHANGED[3:], tuple(f"vector_disk/{name}.py" for name in _ACCIDENTS)),
            "cache": ("vector_disk/cache.py",),
            "servers": ("vector_disk/servers.py", "vector_disk/lists.py", "synthetic_vectors.py"),
            "graph_build": ("vector_disk/graph_build.py", "vector_disk/hnswlib_rival.py", "synthetic_vectors.py"),
            "efforts": ("vector_disk/efforts.py", "vector_disk/lists.py", "synthetic_vectors.py"),
        },
    ),
    "versions": Benchmark(
        ("rules", "sleeps", "convergence", "speed"),
        VIRTUAL_DEVICES,
        sources=(),
        summary="benchmarks.asynchronous.page",
        module="asynchronous.parts",
        xla_flags_of=dict.fromkeys(  # a device for each stage
            ("sleeps", "convergence"), "--xla_force_host_platform_device_count=4"
        ),
        sources_of={
            "rules": ("asynchronous/rules.py",),
            "sleeps": ("asynchronous/sleeps.py",),
            "convergence": ("asynchronous/convergence.py", "../examples/async_pipeline.py"),
            "speed": ("asynchronous/speed.py", "pipeline/clusters.py", "zoo/gpt.py"),
        },
    ),
    "zoo": Benchmark(
        (
            "gpt2",
            "bert",
            "llama",
            "gptj",
            "bart",
            "vit",
            "clip",
            "resnet",
            "whisper",
            "lstm",
            "graph_network",
        ),
        "",
        sources=(
            "compile_cache.py",
            "zoo/real.py",
            "zoo/training.py",
            "zoo/language.py",
            "zoo/vision.py",
            "zoo/speech.py",
            "zoo/recurrent.py",
            "zoo/graph_network.py",
        ),
        summary="benchmarks.zoo.summary",
        module="zoo.proof",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measure what is not measured yet.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all without any")
    parser.add_argument("--again", action="store_true", help="measure even what is measured")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only the program of this name, or those whose name has this in it"
    )
    parser.add_argument("--child", metavar="PROGRAM", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if arguments.child:
        name = arguments.names[0]
        module = importlib.import_module(f"benchmarks.{BENCHMARKS[name].module or name}")
        print(MARK + json.dumps(module.measure(arguments.child)))
        return
    failed = [name for name in arguments.names or BENCHMARKS if not _run(name, arguments.again, arguments.only)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(name: str, again: bool, only: str = "") -> bool:
    """Measure a benchmark's programs without a result whose name is, or else contains, `only`; False if one failed."""
    done = set() if again else {_key(record) for record in records(name)}
    succeeded = True
    programs = BENCHMARKS[name].programs
    for program in [only] if only in programs else [one for one in programs if only in one]:
        record = _blank_record(name, program)
        if _key(record) in done:
            print(f"{name} {program}: measured already (--again to repeat)")
            continue
        print(f"{name} {program}: measuring", flush=True)
        rows = _measure(name, program)
        if rows is None:
            succeeded = False
            continue
        with _path(name, "jsonl").open("a") as file:
            file.write(json.dumps(record | {"rows": rows}) + "\n")
    if records(name):
        _path(name, "md").write_text(_page(name))
        print(f"{name}: {_path(name, 'md').relative_to(ROOT)}")
        summary = importlib.import_module(BENCHMARKS[name].summary) if BENCHMARKS[name].summary else None
        if summary is not None and hasattr(summary, "publish"):
            summary.publish(newest_rows(name), _about(name))
    return succeeded


def _measure(name: str, program: str) -> list[Record] | None:
    """Rows from a process of its own: fresh memory, its own XLA flags, no GPU plugin."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": BENCHMARKS[name].xla_flags_of.get(program, BENCHMARKS[name].xla_flags),
        "USE_TORCH": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.run", name, "--child", program]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    rows = [line.removeprefix(MARK) for line in child.stdout.splitlines() if line.startswith(MARK)]
    if child.returncode or not rows:
        print(f"{name} {program}: failed\n{child.stderr[-4000:]}", file=sys.stderr)
        return None
    return json.loads(rows[-1])


def _blank_record(name: str, program: str) -> Record:
    here = Path(__file__).parent
    sources = (*BENCHMARKS[name].sources, *BENCHMARKS[name].sources_of.get(program, ()))
    measured = [_module_file(name), here / "models.py", *((here / source).resolve() for source in sources)]
    return {
        "benchmark": name,
        "program": program,
        "sources": fingerprint(*measured, ROOT / "examples" / "train_gpt.py"),
        "versions": versions(),
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.run {name}",
    }


def _module_file(name: str) -> Path:
    """The file of the benchmark; its module docstring heads the page."""
    return Path(__file__).parent / f"{(BENCHMARKS[name].module or name).replace('.', '/')}.py"


def _key(record: Record) -> tuple[str, str, str]:
    return record["program"], record["sources"], record["versions"]["jax"]


def records(name: str) -> list[Record]:
    """All that was measured of a benchmark, the newest last."""
    path = _path(name, "jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _path(name: str, suffix: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{name}.{suffix}"


def _page(name: str) -> str:
    """The page: the newest result of each program and JAX version, and how to repeat it."""
    about = ast.get_docstring(ast.parse(_module_file(name).read_text())) or ""
    parts, table = [f"# {name}", about], _table
    if BENCHMARKS[name].summary:
        module = importlib.import_module(BENCHMARKS[name].summary)
        parts.append(module.summary(newest_rows(name)))
        table = getattr(module, "page_table", _table)
    return "\n\n".join([*parts, *(_section(record, table) for record in _newest(name))]) + "\n"


def _newest(name: str) -> list[Record]:
    found = {(record["program"], record["versions"]["jax"]): record for record in records(name)}
    order = BENCHMARKS[name].programs
    known = [record for record in found.values() if record["program"] in order]
    return sorted(known, key=lambda record: order.index(record["program"]))


def newest_rows(name: str) -> list[Record]:
    newest = {record["program"]: record for record in _newest(name)}
    return [row for record in newest.values() for row in record["rows"]]


def _about(name: str) -> str:
    """What the newest results were measured with, for a page that shows no single records."""
    newest = _newest(name)[-1]
    return (
        f"{newest['date']}, jax {newest['versions']['jax']}; `{newest['command']}`,"
        f" every case in `benchmarks/results/{name}.md`."
    )


def _section(record: Record, table: Callable[[list[Record]], str]) -> str:
    used, host = record["versions"], record["machine"]
    title = f"## {record['program']}, jax {used['jax']}"
    made = f"{record['date']}, {host['cpu']}, {host['cores']} cores, {host['memory_gb']} GB, load {host['load']} before"
    packages = ", ".join(f"{package} {number}" for package, number in used.items())
    footer = f"{made}. {packages}; sources {record['sources']}. `{record['command']}`"
    return "\n\n".join([title, table(record["rows"]), footer])


def _table(rows: list[Record]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([_text(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
