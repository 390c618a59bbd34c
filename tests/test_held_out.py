"""The held-out models: the same for a seed, valid, of every family; the seed is the planner's commit; the page's groups.

Nothing is planned or compiled.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.held_out import page, parts
from benchmarks.held_out.build import training
from benchmarks.held_out.draw import FAMILIES, NUM_MODELS, Drawn, model, models
from benchmarks.held_out.seed import PATHS, SeedError, seed
from benchmarks.held_out.sizes import Convolutions, Patches, Text
from benchmarks.held_out.tuned import FILE, Tuned, tuned
from benchmarks.machine import ROOT
from benchmarks.run import BENCHMARKS

SEEDS = [f"{number * 0x0147AE15 % 2**32:08x}" for number in range(200)]


# -- the generator -------------------------------------------------------------------------------


def test_a_seed_draws_the_same_models_again() -> None:
    assert models("0123abcd") == models("0123abcd")
    assert models("0123abcd") != models("0123abce")
    assert model("0123abcd", 7) == models("0123abcd")[6]


def test_a_seed_draws_the_models_that_it_always_drew() -> None:
    """A change here changes the models of every seed, also of measured ones."""
    first, *_, last = models("0123abcd")
    assert (first.num_gpus, str(first.sizes)) == FIRST
    assert (last.num_gpus, str(last.sizes)) == LAST


FIRST = (
    64,
    "vit: 6 layers, width 2,048, 16 heads of 128, gelu of 8,192, dropout 0.1, patches of 32, 21,843 labels, 8192 images of 384",
)
LAST = (
    8,
    "llama with experts: 2 layers, width 1,024, 16 heads of 64 (8 of keys and values), gated silu of 3,584, dropout 0.0, 32 experts, untied vocabulary of 32,000, 96 x 512 tokens",
)


@pytest.mark.parametrize("chunk", range(4))
def test_two_hundred_seeds_draw_valid_models(chunk: int) -> None:
    for text in SEEDS[chunk::4]:
        drawn = models(text)
        assert [one.number for one in drawn] == list(range(1, NUM_MODELS + 1))
        for one in drawn:
            check_sizes(one)


def check_sizes(one: Drawn) -> None:
    """Heads divide the width, those of keys and values the heads; the batch divides; the state fits when sharded."""
    sizes = one.sizes
    assert sizes.batch % one.num_gpus == 0 or (isinstance(sizes, Text) and 2 * sizes.batch == one.num_gpus)
    assert 16 * sizes.num_parameters / one.num_gpus < sizes.memory_bytes(one.num_gpus) <= 45e9
    assert 1e12 < sizes.flops / one.num_gpus < 1e14
    if isinstance(sizes, Convolutions):
        assert len(sizes.depths) == len(sizes.channels) == 4 and sizes.size % 32 == 0
        return
    body = sizes.body
    assert body.width == body.heads * body.head_dim and body.heads % body.kv_heads == 0
    assert 2 <= body.layers <= 8 and body.head_dim % 2 == 0
    if isinstance(sizes, Patches):
        assert sizes.size % sizes.patch == 0
    else:
        assert not sizes.experts or 2 * sizes.seq // sizes.experts > 0


def test_every_seed_draws_every_family_twice_and_every_number_of_hosts() -> None:
    for text in SEEDS:
        drawn = models(text)
        families = [one.family for one in drawn]
        assert all(families.count(family) >= 2 for family in FAMILIES)
        assert {one.num_gpus for one in drawn} == {8, 16, 64}
        assert {one.num_hosts for one in drawn} == {1, 2, 8}


def test_seeds_draw_every_architecture_and_grouped_heads() -> None:
    drawn = [one.sizes for text in SEEDS for one in models(text)]
    assert {one.architecture for one in drawn} == {
        *("gpt2", "gpt_neo", "llama", "mistral", "gemma", "llama with experts"),
        *("bart", "mbart", "t5", "t5_v1_1", "vit", "resnet"),
    }
    assert any(isinstance(one, Text) and one.body.kv_heads < one.body.heads for one in drawn)
    assert any(isinstance(one, Text) and one.tied for one in drawn)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("architecture", ["gpt_neo", "gemma", "mbart", "t5_v1_1", "vit"])
def test_a_drawn_model_is_a_train_step(architecture: str) -> None:
    check_step(next(one for one in every_model() if one.sizes.architecture == architecture))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("number", range(24))
def test_drawn_models_are_train_steps(number: int) -> None:
    check_step(models(SEEDS[number // 12])[number % 12])


def every_model() -> list[Drawn]:
    return [one for text in SEEDS for one in models(text)]


def check_step(one: Drawn) -> None:
    """The step returns its state, and has as many parameters as its sizes say, but for biases and norms."""
    step, args = training(one.sizes).target
    after, loss = jax.eval_shape(step, *args)
    assert loss.shape == ()
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), args[0]
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(args[0].params))
    assert count == pytest.approx(one.sizes.num_parameters, rel=0.1)
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(args[0].params))


# -- the seed ------------------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    ran = subprocess.run(["git", *identity, *arguments], cwd=root, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def commit(root: Path, file: str, text: str) -> str:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", file)
    return git(root, "rev-parse", "HEAD")


def test_the_seed_is_that_of_the_planners_newest_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    first = commit(tmp_path, "autopar/cost/a.py", "1")
    commit(tmp_path, "README.md", "1")
    commit(tmp_path, "autopar/cli/a.py", "1")
    assert seed(tmp_path) == first[:8]
    second = commit(tmp_path, "autopar/planner/a.py", "2")
    assert seed(tmp_path) == second[:8]
    (tmp_path / "autopar/cost/a.py").write_text("3")
    with pytest.raises(SeedError, match=r"commit these changes first(.|\n)*autopar/cost/a\.py"):
        seed(tmp_path)


def test_no_seed_without_a_commit_of_the_planner(tmp_path: Path) -> None:
    with pytest.raises(SeedError, match="git status failed"):
        seed(tmp_path)
    git(tmp_path, "init", "-q")
    commit(tmp_path, "README.md", "1")
    with pytest.raises(SeedError, match="no commit in"):
        seed(tmp_path)


def test_the_seeds_paths_are_packages() -> None:
    assert all((ROOT / path).is_dir() for path in PATHS)


# -- models that were looked into ----------------------------------------------------------------


def test_the_list_of_models_that_were_looked_into(tmp_path: Path) -> None:
    assert all(one.reason for one in tuned())
    assert set(BENCHMARKS["held_out"].programs) >= {f"tuned {one.seed}/{one.number}" for one in tuned()}
    file = tmp_path / FILE.name
    file.write_text('[[model]]\nseed = "0123abcd"\nnumber = 7\nreason = "its profile"\n')
    assert tuned(file) == (Tuned("0123abcd", 7, "its profile"),)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ('seed = 123\nnumber = 7\nreason = "a"', "seed 123 is not 8 hex digits in quotes"),
        ('seed = "0123abcd"\nnumber = 13\nreason = "a"', "number 13 is not one of 1 to 12"),
        ('seed = "0123abcd"\nnumber = 1', "model 1 of seed 0123abcd has no reason"),
    ],
)
def test_an_entry_that_names_no_model_is_an_error(tmp_path: Path, entry: str, error: str) -> None:
    file = tmp_path / FILE.name
    file.write_text(f"[[model]]\n{entry}\n")
    with pytest.raises(ValueError, match=error):
        tuned(file)


def test_a_program_names_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "seed", lambda: "0123abcd")
    assert parts.drawn_of("model 3") == model("0123abcd", 3)
    assert parts.drawn_of("tuned 89abcdef/12") == model("89abcdef", 12)


def test_a_model_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no plan")

    monkeypatch.setattr(parts, "seed", lambda: "0123abcd")
    monkeypatch.setattr(parts, "_planned_and_compiled", fail)
    (row,) = parts.measure("model 3")
    assert row["failed"] == "ValueError: no plan" and row["number"] == 3 and row["gpus"] in (8, 16, 64)


# -- the page ------------------------------------------------------------------------------------


def row(number: int, **more: Any) -> dict[str, Any]:
    return {
        "seed": "0123abcd",
        "number": number,
        "family": "decoder",
        "sizes": "llama: 2 layers",
        "gpus": 8 if number < 10 else 16,
        "hosts": 1 if number < 10 else 2,
        "failed": "",
        "plan_s": 8.0,
        "plan_cpu_s": 6.0,
        "compile_s": 10.0,
        "compile_cpu_s": 12.0,
        "mesh": "2x4",
        "words": "data parallel",
        "status": "proven optimal",
        "gap": 0.0,
        "step_predicted_s": 0.0102,
        "step_replayed_s": 0.0100,
        "no_replay": "",
        "peak_predicted": 10.1e9,
        "peak_compiled": 10e9,
        "budget_bytes": 64e9,
        "sent_predicted": 1e9,
        "sent_compiled": 1e9,
        "sent_exact": True,
    } | more


ROWS = [row(number) for number in range(1, 13)]


def met(rows: list[dict[str, Any]], listed: tuple[Tuned, ...] = ()) -> list[str]:
    """Whether each gate of the page is met."""
    table = page.summary(rows, listed).split("| gate |")[1].split("\n\n")[0]
    return [line.split("|")[-2].strip().strip("*") for line in table.splitlines()[2:]]


def test_good_predictions_meet_every_gate() -> None:
    assert met(ROWS) == ["yes"] * 6
    text = page.summary(ROWS, ())
    assert "12 of 12 models are held out, 0 of them failed; seed 0123abcd." in text
    assert (
        "| step time, predicted against replayed | median 2.0%, worst +2.0% (of 12) | median 5%, worst 20% | yes |"
        in text
    )
    assert "| 1: llama | 8 | data parallel; 2x4 | 10.20 ms | 10.00 ms | +2.0% | 10.10 GB | 10.00 GB | +1.0% |" in text
    assert "1.00 GB | 1.00 GB | yes | 0.50 |" in text


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ({"step_replayed_s": 0.02}, 0),
        ({"step_replayed_s": None, "no_replay": "no rates"}, 0),
        ({"peak_predicted": 11e9}, 1),
        ({"budget_bytes": 9e9}, 2),
        ({"sent_exact": False}, 3),
        ({"plan_cpu_s": 13.0}, 4),
    ],
)
def test_one_bad_model_misses_its_gate(change: dict[str, Any], gate: int) -> None:
    assert met([row(1, **change), *ROWS[1:]]) == ["no" if n == gate else "yes" for n in range(6)]


def test_planning_between_hosts_may_take_longer() -> None:
    assert met([*ROWS[:-1], row(12, plan_cpu_s=17.0)])[5] == "yes"
    assert met([*ROWS[:-1], row(12, plan_cpu_s=19.0)])[5] == "no"


def test_a_failed_model_is_shown_and_meets_no_gate_of_its_group() -> None:
    planned = row(12, failed="not compiled: VerifyError: XLA\n could | not")
    for name in ("step_replayed_s", "peak_compiled", "compile_cpu_s", "sent_exact", "sent_predicted"):
        del planned[name]
    assert met([*ROWS[:-1], planned]) == ["no"] * 4 + ["yes", "no"]
    text = page.summary([*ROWS[:-1], planned], ())
    assert "| data parallel; 2x4; not compiled: VerifyError: XLA could / not | 10.20 ms | - | - | 10.10 GB |" in text
    bare = {name: value for name, value in row(1).items() if name in ("seed", "number", "sizes", "gpus", "hosts")}
    unplanned = bare | {"failed": "BudgetError: too small"}
    assert "| 1: llama | 8 | BudgetError: too small | - |" in page.summary([unplanned, *ROWS[1:]], ())
    assert met([unplanned, *ROWS[1:]])[4:] == ["no", "yes"]
    assert "BudgetError: too small" in page.page_table([unplanned]) and "XLA could | not" in page.page_table([planned])


def test_an_unfinished_group_meets_no_gate() -> None:
    assert met(ROWS[:-1]) == ["no"] * 6
    assert met([*ROWS[:-1], row(12, seed="89abcdef")]) == ["no"] * 6
    assert "Unfinished" in page.summary([*ROWS[:-1], row(12, seed="89abcdef")], ())


def test_a_model_that_was_looked_into_counts_in_no_gate() -> None:
    bad = row(1, step_replayed_s=0.1, sent_exact=False)
    listed = (Tuned("0123abcd", 1, "its profile"), Tuned("89abcdef", 3, "its prices"))
    rows = [bad, *ROWS[1:], row(3, seed="89abcdef", step_replayed_s=1.0)]
    assert met(rows, listed) == ["yes"] * 6
    text = page.summary(rows, listed)
    assert "11 of 12 models are held out" in text
    tuning = text.split("**The tuning group**")[1]
    assert "| 1: llama |" in tuning and "| its profile |" in tuning and "| its prices |" in tuning
    held_out, looked_into = page.groups(rows, listed)
    assert len(held_out) == 11 and [reason for _, reason in looked_into] == ["its profile", "its prices"]
