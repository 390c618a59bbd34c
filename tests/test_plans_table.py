"""The table of plans beside sharding by hand: which programs are compiled, the tuned version, the split, kept figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autopar.hardware.profile import load as load_profile
from autopar.ir.mesh import MeshShape
from autopar.planner import overlap_search
from autopar.xla_compiler.compiler import CompiledStep
from benchmarks.baselines import pinned
from benchmarks.compile_cache import save
from benchmarks.plans import audit, case, judge, page, parts, tuned
from benchmarks.plans.audit import draw
from benchmarks.plans.case import ByHand, Candidate, chosen
from benchmarks.plans.judge import Judge
from benchmarks.plans.models import Model
from benchmarks.plans.recipes import Recipe, recipes
from benchmarks.plans.split import Split, mean, split, variant_text
from benchmarks.plans.tuned import Extras
from benchmarks.zoo import language
from benchmarks.zoo.training import Training

# isort: split
from transformers import LlamaConfig

Row = dict[str, Any]
#: What progress shows of a row besides its time and bytes.
SHOWN = ("exposed_s", "counts", "mesh", "words")
H100 = load_profile("h100-sxm")


def row(step_s: float | None, way: str = "user", **more: Any) -> Row:
    about: Row = {"model": "gpt2", "setting": "8 GPUs", "gpus": 8, "gpus_used": 8, "batch": 8, "failed": ""}
    about |= {"recipe": "FSDP", "kind": "FSDP", "mesh": "8", "words": "", "price_s": 1.0, "peak_bytes": 1e9}
    about |= {"constraints": False, "limit_mib": None, "kernels": False, "early_reductions": False, "counts": {}}
    about |= {"exposed_s": 0.0, "sent_bytes": 1e9, "xla_s": step_s, "xla_errors": []}
    return about | {"way": way, "step_s": step_s} | more


OWN = row(1.0, "autopar", recipe="autopar", kind="autopar", budget_bytes=None)
HAND = [
    row(4.0),
    row(9.0, recipe="ZeRO-1"),
    row(3.6, gpus_used=4),
    row(3.0, "variant", gpus_used=4, constraints=True),
    row(2.4, "variant", gpus_used=4, constraints=True, limit_mib=8),
    row(1.2, "variant", gpus_used=4, constraints=True, limit_mib=8, kernels=True),
    row(1.2, "tuned", gpus_used=4, constraints=True, limit_mib=8, kernels=True, variant="constraints, kernels"),
]


def test_the_factors_of_a_gain_multiply_to_it() -> None:
    found = split([*HAND, OWN])
    assert found is not None
    assert found.devices == pytest.approx(4.0 / 3.6)
    assert found.combiner == pytest.approx(3.0 / 2.4)
    assert found.kernels == pytest.approx(2.4 / 1.2)
    assert found.sharding == pytest.approx(3.6 / 3.0 * 1.2 / 1.0)
    assert found.gain == pytest.approx(4.0)
    assert found.over_tuned == pytest.approx(1.2)


def test_a_case_without_a_time_has_no_split() -> None:
    assert split(HAND) is None
    assert split([row(None), OWN]) is None
    assert split([row(1.0, peak_bytes=90e9), OWN]) is None


def test_a_recipe_that_runs_on_no_all_gpus_gains_nothing_by_devices() -> None:
    found = split([row(2.0, gpus_used=4), OWN])
    assert found == Split(sharding=2.0, kernels=1.0, combiner=1.0, devices=1.0, over_tuned=2.0)


def test_means_are_geometric() -> None:
    found = mean([Split(1, 1, 4, 1, 1), Split(1, 1, 1, 9, 1)])
    assert (found.combiner, found.devices, found.gain) == pytest.approx((2.0, 3.0, 6.0))


def test_the_page_has_the_gates_the_split_and_what_an_earlier_version_measured() -> None:
    earlier: Row = {"model": "bert", "setting": "8 GPUs", "gpus": 8, "recipe": "FSDP", "way": "expert", "failed": ""}
    earlier |= {"step_s": 2.0, "peak_bytes": 1e9, "sent_bytes": 1e9, "exposed_s": 0.0, "counts": {}, "mesh": "8"}
    text = page.summary([*HAND, OWN, earlier, earlier | {"way": "autopar", "recipe": "autopar", "step_s": 1.0}])
    assert "1 of 2 cases" in text and "In 1 of them, combine thresholds by hand end at XLA's default." in text
    larger = page.summary([*HAND, row(2.5, "variant", limit_mib=60), OWN])
    assert "1 of 1 cases" in larger and "end at XLA's default" not in larger
    assert "| tuned over the user's version of the same recipe, worst of 1 | 0.333 (FSDP of gpt2, 8 GPUs)" in text
    assert "| autopar over the best tuned expert on any number of GPUs, worst | 0.833 (gpt2 (8 GPUs)); 1 of 1" in text
    assert "| 8 GPUs | 1 | 1.200 | 4.000 | 1.440 | 2.000 | 1.250 | 1.111 |" in text
    assert "(FSDP, on 4 of 8 GPUs; constraints, kernels)" in text
    assert "measured by an earlier version" in text and "| bert | 2000.00 ms (FSDP, expert)" in text
    table = page.page_table([*HAND, OWN, row(None, failed="VerifyError: no")])
    assert "| FSDP | 4 | 8 | constraints, combine 8 MiB |" in table and "VerifyError: no" in table


def test_xla_s_estimate_is_shown_only_where_it_is_sound() -> None:
    assert "not sound" in page.page_table([row(1.0, xla_errors=["a loop"])])
    assert "not sound" not in page.page_table([row(1.0)])


def test_one_flag_away_is_every_other_limit_and_every_other_flag() -> None:
    away = list(Extras(constraints=True, limit_mib=8, kernels=True).one_flag_away())
    assert away == [
        *(Extras(constraints=True, limit_mib=limit, kernels=True) for limit in (None, 60, 120, 15, 7.5, 1)),
        Extras(limit_mib=8, kernels=True),
        Extras(constraints=True, limit_mib=8, kernels=True, early_reductions=True),
        Extras(constraints=True, limit_mib=8),
    ]


def test_hands_have_every_threshold_that_autopar_chooses_from() -> None:
    """One that autopar makes from XLA's default, to the byte, is the same number of MiB here."""
    default = H100.combine_threshold_bytes
    own = {round(share * default / 2**20, 1) for share in overlap_search._THRESHOLDS}
    assert own == {7.5, 15, 60, 120} and own < set(tuned.LIMITS_MIB)
    assert {None, 8, 1} < set(tuned.LIMITS_MIB)


def test_rows_are_drawn_by_the_seed_alone() -> None:
    rows = [row(1.0, "tuned", recipe=str(n)) for n in range(30)] + [row(None, "tuned"), row(1.0)]
    first, again = (draw(rows, 0xABCD, 10) for _ in range(2))
    assert first == again != draw(rows, 0xABCE, 10)
    assert len({one["recipe"] for one in first}) == 10 and all(one["way"] == "tuned" for one in first)


def test_one_more_flag_s_gain_is_that_of_the_fastest_program() -> None:
    tuned_row = row(10.0, "tuned", model="small", gpus_used=8, constraints=True)
    times = Times(10.5, 9.0, 11.0, 9.5, 9.9, 9.9, 9.9, 9.9)
    with mock.patch.dict(audit.MODELS, {"small": Model("", 1, lambda _: language_model())}):
        most, extras = audit.gain(tuned_row, times)  # pyright: ignore[reportArgumentType]
    assert most == pytest.approx(0.1) and extras == Extras(constraints=True, limit_mib=120)


def priced(name: str, seconds: float, num_gpus: int = 8, kind: str = "", **more: Any) -> Candidate:
    recipe = Recipe(kind or name, name, MeshShape(("data",), (num_gpus,)), pinned.fsdp)
    return Candidate(recipe, seconds, **more)


def test_the_best_of_each_kind_and_the_best_four_are_compiled() -> None:
    on_all = [priced("TP 4x2", 9, kind="TP"), priced("TP 2x4", 8, kind="TP"), priced("FSDP", 4), priced("DP", 10)]
    fewer = [priced("FSDP", 5, 4), priced("DP", 6, 4), priced("ZeRO-1", 1, 4, peak_bytes=90e9)]
    names = [(one.recipe.name, one.recipe.num_gpus) for one in chosen([*on_all, *fewer], 8)]
    assert names == [("FSDP", 8), ("FSDP", 4), ("DP", 4), ("TP 2x4", 8), ("DP", 8)]


class Times:
    """A judge that gives known seconds, in order."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.options = list(seconds), list[Any]()

    def figures(self, module: bytes, mesh: MeshShape, num_hosts: int, options: Any = None) -> Row:
        self.options.append(options)
        return {"step_s": self.seconds.pop(0), "exposed_s": 0.0, "peak_bytes": 1e9, "sent_bytes": 0.0, "counts": {}}


def small_llama() -> Any:
    return language_model().target


def language_model() -> Training:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    return language.llama(config, batch=8, seq=16)


def by_hand(times: Times) -> ByHand:
    def row_of(about: Row, make: Callable[[], Row]) -> Row:
        return {"failed": "", "gpus": 8} | about | make()

    return ByHand(small_llama, 8, "h100-sxm", times, row_of)  # pyright: ignore[reportArgumentType]


def fsdp() -> Candidate:
    return Candidate(next(one for one in recipes(8, small_llama()[1]) if one.name == "FSDP"), 1.0)


def test_each_variant_adds_one_thing_to_the_best_so_far() -> None:
    """Constraints help, 60 MiB helps more, 120 MiB is a little slower, 15 MiB so much that 8 is not tried, kernels help."""
    times = Times(8.0, 7.0, 7.1, 7.5, 6.0)
    rows = by_hand(times).tuned(fsdp(), row(10.0))
    assert [one["step_s"] for one in rows] == [8.0, 7.0, 7.1, 7.5, 6.0, 6.0]
    assert [variant_text(one) for one in rows[:-1]] == [
        "constraints",
        "constraints, combine 60 MiB",
        "constraints, combine 120 MiB",
        "constraints, combine 15 MiB",
        "constraints, kernels, combine 60 MiB",
    ]
    assert rows[-1]["way"] == "tuned" and rows[-1]["variant"] == "constraints, kernels, combine 60 MiB"
    limits = [one and set(one.values()) for one in times.options]
    assert limits == [None, {60 << 20}, {120 << 20}, {15 << 20}, {60 << 20}]


def test_thresholds_on_one_side_of_the_default_end_where_they_get_slow() -> None:
    times = Times(8.0, 9.0, 7.9, 7.7, 7.7, 7.6, 9.0)
    rows = by_hand(times).tuned(fsdp(), row(10.0))
    assert [one["limit_mib"] for one in rows] == [None, 60, 15, 8, 7.5, 1, 1, 1]
    assert times.options[4] == dict.fromkeys(times.options[4], 7.5 * 2**20)


def test_a_case_is_tuned_again_with_what_it_lacks_only() -> None:
    """The known rows stay; a recipe near to the fastest is tuned, one that is far is not."""
    known = [
        row(10.0, price_bytes=1.0),
        row(8.0, "variant", constraints=True),
        row(7.0, "variant", constraints=True, limit_mib=8),
        row(6.0, "variant", constraints=True, limit_mib=8, kernels=True),
        row(6.0, "tuned", constraints=True, limit_mib=8, kernels=True, variant="constraints, kernels, combine 8 MiB"),
        row(10.2, recipe="data parallel", price_bytes=1.0),
        row(11.0, recipe="ZeRO-1", price_bytes=1.0),
    ]
    # FSDP with 60, 15 and 7.5 MiB, as far as it gets faster from the default; data parallel with constraints, 60, 15 MiB, kernels.
    times = Times(7.9, 8.1, 7.5, 7.2, 10.1, 12.0, 12.0, 10.0)
    rows = by_hand(times).tuned_again(known)
    assert [one["step_s"] for one in rows if one["way"] == "user"] == [10.0, 10.2, 11.0]
    made = [(one["recipe"], one["way"], variant_text(one), one["step_s"]) for one in rows if one["way"] != "user"]
    assert made == [
        ("FSDP", "variant", "constraints", 8.0),
        ("FSDP", "variant", "constraints, combine 8 MiB", 7.0),
        ("FSDP", "variant", "constraints, kernels, combine 8 MiB", 6.0),
        ("FSDP", "variant", "constraints, combine 60 MiB", 7.9),
        ("FSDP", "variant", "constraints, combine 120 MiB", 8.1),
        ("FSDP", "variant", "constraints, combine 15 MiB", 7.5),
        ("FSDP", "variant", "constraints, combine 7.5 MiB", 7.2),
        ("FSDP", "tuned", "constraints, kernels, combine 8 MiB", 6.0),
        ("data parallel", "variant", "constraints", 10.1),
        ("data parallel", "variant", "constraints, combine 60 MiB", 12.0),
        ("data parallel", "variant", "constraints, combine 15 MiB", 12.0),
        ("data parallel", "variant", "constraints, kernels", 10.0),
        ("data parallel", "tuned", "constraints, kernels", 10.0),
    ]
    assert not times.seconds


def test_a_tuned_version_is_never_slower_than_the_user_s() -> None:
    rows = by_hand(Times(11.0, 12.0, 13.0, 14.0)).tuned(fsdp(), row(10.0))
    assert rows[-1]["way"] == "tuned" and rows[-1]["step_s"] == 10.0
    assert rows[-1]["variant"] == "as the user's"


def test_a_changed_recipe_is_compiled_again() -> None:
    known = [
        row(10.0, price_bytes=1.0),
        row(8.0, "variant", constraints=True),
        row(8.0, "tuned", constraints=True, variant="constraints"),
    ]
    rows = by_hand(Times(9.0, 7.0, 8.0, 8.0, 8.0)).tuned_again(known, changed=["FSDP"])
    assert [(one["way"], variant_text(one), one["step_s"]) for one in rows] == [
        ("user", "as the user's", 9.0),
        ("variant", "constraints", 7.0),
        ("variant", "constraints, combine 60 MiB", 8.0),
        ("variant", "constraints, combine 15 MiB", 8.0),
        ("variant", "constraints, kernels", 8.0),
        ("tuned", "constraints", 7.0),
    ]


@pytest.mark.parametrize(("peak_bytes", "step_s"), [(1e9, 1.0), (2e9, 3.0)])
def test_autopar_plans_again_if_its_memory_is_another(peak_bytes: float, step_s: float) -> None:
    known, by_hand = [row(5.0), OWN], [row(5.0), row(4.0, "tuned", peak_bytes=peak_bytes)]
    planned = mock.Mock(return_value={"step_s": 3.0, "peak_bytes": 1.0, "sent_bytes": 0.0} | dict.fromkeys(SHOWN))
    with (
        mock.patch.object(ByHand, "tuned_again", lambda *_: by_hand),
        mock.patch.object(parts._Case, "_planned", lambda _, budget: planned(budget)),
    ):
        rows = parts.tuned_again("gpt2: 8 GPUs, 40 % of the memory", known)
    assert [one["step_s"] for one in rows] == [5.0, 4.0, step_s]
    assert planned.call_args_list == ([] if step_s == 1.0 else [mock.call(0.4 * peak_bytes)])


@dataclass(frozen=True)
class Price:
    price_s: float
    peak_bytes: float = 1e9


def prices_asked(monkeypatch: pytest.MonkeyPatch, price_of: Callable[[Recipe], float]) -> list[tuple[str, int]]:
    """The recipes that are priced, by name and number of GPUs."""
    found = list[tuple[str, int]]()

    def price(recipe: Recipe, *_: Any) -> Price:
        found.append((recipe.name, recipe.num_gpus))
        return Price(price_of(recipe))

    monkeypatch.setattr(case, "price", price)
    by_hand(Times()).priced()
    return found


def test_fewer_gpus_are_priced_while_they_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = prices_asked(monkeypatch, lambda recipe: 8 / recipe.num_gpus)
    assert {count for _, count in slower} == {
        8,
        4,
        1,
    }  # half the GPUs take twice as long: a quarter is not tried, but one GPU is
    faster = prices_asked(monkeypatch, lambda recipe: recipe.num_gpus / 8)
    assert {count for _, count in faster} == {8, 4, 2, 1}


def test_on_fewer_gpus_only_the_best_kinds_are_priced_in_their_best_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    order = ["FSDP", "TP + SP 2x4", "ZeRO-1", "context parallel 4x2"]
    found = prices_asked(monkeypatch, lambda one: 1 + (order.index(one.name) if one.name in order else 9))
    assert {name for name, count in found if count == 4} == {"FSDP", "TP + SP 1x4", "ZeRO-1", "context parallel 2x2"}


HLO = """\
HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  ROOT %end = f32[1024,1024]{1,0} negate(%a)
}
"""


class Cache:
    """A compiler that must not compile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compile(self, *args: Any, **options: Any) -> CompiledStep:
        raise AssertionError("compiled")


def compiled_step(hlo: str) -> CompiledStep:
    return CompiledStep(
        argument_bytes=4.0,
        temp_bytes=2.0,
        output_bytes=4.0,
        alias_bytes=0.0,
        hosts=(0,) * 8,
        step_time_s=1e-3,
        exposed_s={},
        compile_s=30.0,
        flags=(),
        hlo_text=hlo,
    )


def test_a_changed_replay_needs_no_new_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, mesh = tmp_path / "kept.jsonl", MeshShape(("data",), (8,))
    monkeypatch.setattr(judge, "key", lambda *_: "program")
    save(tmp_path, "program", compiled_step(HLO))

    def figures() -> Row:
        return Judge(Cache(tmp_path), H100, kept=kept).figures(b"", mesh, 1)  # pyright: ignore[reportArgumentType]

    first = figures()
    assert 0 < first["step_s"] < 1e-3 and first["xla_s"] == 1e-3 and first["peak_bytes"] == 10.0
    assert first["replay"] == judge.replay_version(H100) and not first["compiled_now"]
    (tmp_path / "program.json").rename(tmp_path / "away.json")
    assert figures() == first  # from the repository, without the program
    monkeypatch.setattr(judge, "replay_version", lambda _: "another")
    with pytest.raises(AssertionError, match="compiled"):
        figures()
    (tmp_path / "away.json").rename(tmp_path / "program.json")
    assert figures()["replay"] == "another"
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    assert [one["replay"] for one in lines] == [first["replay"], "another"]


def test_figures_name_the_errors_of_xla_s_estimate() -> None:
    text = HLO.replace("negate(%a)", 'custom-call(%a), custom_call_target="flash"')
    found = judge.figures(compiled_step(text), MeshShape(("data",), (8,)), 1, H100)
    assert found["xla_errors"] == ["custom call flash"]
    assert found["step_s"] is None or math.isfinite(found["step_s"])


def test_a_program_that_is_not_scheduled_has_no_time() -> None:
    found = judge.figures(compiled_step(HLO.replace(", is_scheduled=true", "")), MeshShape(("data",), (8,)), 1, H100)
    assert found["step_s"] is None and "not scheduled" in found["no_replay"]
