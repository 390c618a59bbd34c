"""Choose which hand-written programs of one model and setting are compiled, and tune the best.

In: a model's step, the GPUs. Out: rows. Every recipe is first priced by autopar's planner with everything pinned; then
XLA compiles, as users write them, the best grid of each kind of recipe on all GPUs, and the best four on any number of
GPUs (one grid of a kind on each number). Tuned versions follow: of the two best by price, the fastest as compiled, and all
within 3 % of it. Each variant differs from the best one so far in one thing, and the best stays:

1. `constraints`: the shardings of activations and gradients that an expert adds, if the recipe has any;
2. `combiner`: combine thresholds above XLA's default, then below it; each direction ends once one made the step slower
   by more than 2 %;
3. `kernels`: the one-hot gradient of the loss and separate column reductions; then early reductions.

The tuned version is the fastest of these and the user's program, so it is never slower.

A case that was measured before may be tuned again (`ByHand.tuned_again`): its rows stay, and only variants that it lacks
are compiled, e.g. those of a new combine threshold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.plans.judge import Judge
from benchmarks.plans.recipes import Recipe, gpu_counts, recipes
from benchmarks.plans.split import MEMORY_BYTES, fits, variant_text
from benchmarks.plans.tuned import LARGER_MIB, SMALLER_MIB, Extras, Programs, price
from benchmarks.zoo.training import Target

Row = dict[str, Any]

#: A program that is predicted to need more than this share of the memory is not compiled.
HOPELESS = 1.25
#: Kinds of recipe priced on half the GPUs: the best on all of them, and those that did not divide there.
_KINDS_KEPT = 4
#: Fewer GPUs are not priced once the best price on some is this much above the best so far.
_STOP = 1.5
_NUM_COMPILED, _NUM_TUNED = 4, 2
#: Recipes this near to the fastest as compiled are tuned, too.
_NEAR = 1.03
#: Combine thresholds still farther from the default are not tried once one made the step this much slower.
_HOPELESS_THRESHOLD = 1.02


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe and its price.

    Args:
        failed: why it has no price.
    """

    recipe: Recipe
    price_s: float = math.inf
    peak_bytes: float = 0.0
    failed: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit the memory."""
        return not self.failed and self.peak_bytes <= MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class ByHand:
    """All hand-written programs of one model on at most `num_gpus` GPUs.

    Args:
        row_of: makes a row, or a row with the error, from what names it and a function for its figures.
    """

    target: Callable[[], Target]
    num_gpus: int
    hardware: str
    judge: Judge
    row_of: Callable[[Row, Callable[[], Row]], Row]

    def rows(self) -> list[Row]:
        """Rows of users' programs, then of tuned variants and of the tuned version of each tuned recipe."""
        candidates = self.priced()
        rows = [self._user(one) for one in chosen(candidates, self.num_gpus)]
        by_name = {(one.recipe.name, one.recipe.num_gpus): one for one in candidates}
        best = [by_name[_recipe_of(row)] for row in _near(rows)] + best_by_price(candidates)[:_NUM_TUNED]
        users = {_recipe_of(row): row for row in rows}
        for one in dict.fromkeys(best):
            user = users.get((one.recipe.name, one.recipe.num_gpus))
            if user is not None:
                rows += self.tuned(one, user)
        return rows

    def tuned_again(self, known: Sequence[Row], changed: Collection[str] = ()) -> list[Row]:
        """The known rows by hand of this case, with the variants that they lack and new tuned versions.

        Args:
            changed: kinds of recipe that are written otherwise now: their rows are made again.
        """
        users = [row for row in known if row["way"] == "user"]
        users = [self._user(self._candidate(row)) if row["kind"] in changed else row for row in users]
        variants = [row for row in known if row["way"] == "variant" and row["kind"] not in changed]
        before = {_recipe_of(row) for row in known if row["way"] == "tuned"}
        near, rows = {_recipe_of(row) for row in _near(users)}, list(users)
        for user in users:
            if (name := _recipe_of(user)) in before | near:
                rows += self.tuned(self._candidate(user), user, [row for row in variants if _recipe_of(row) == name])
        return rows

    def _candidate(self, user: Row) -> Candidate:
        """The recipe of a row and its price there."""
        name, num_gpus = _recipe_of(user)
        recipe = next(one for one in recipes(num_gpus, self.target()[1]) if one.name == name)
        return Candidate(recipe, user["price_s"], user["price_bytes"])

    def priced(self) -> list[Candidate]:
        """Recipes on all GPUs, then on fewer as long as these may be faster, and on one GPU."""
        step, args = self.target()
        found, kept = list[Candidate](), set[tuple[str, int]]()
        seen, counts = set[str](), gpu_counts(self.num_gpus)
        is_slower = False
        for count in counts:
            if is_slower and count != counts[-1]:
                continue
            here = []
            for recipe in recipes(count, args):
                if count == self.num_gpus or recipe.kind not in seen or (recipe.kind, recipe.inner) in kept:
                    here.append(self._price(recipe, step, args))
            ranked = sorted(here, key=lambda one: one.price_s)
            seen |= {one.recipe.kind for one in here}
            kept = {(one.recipe.kind, one.recipe.inner) for one in _best_of_kinds(ranked)[:_KINDS_KEPT]}
            best = min((one.price_s for one in found if one.fits), default=math.inf)
            found += here
            is_slower |= min((one.price_s for one in here if one.fits), default=math.inf) > _STOP * best
        return found

    def _price(self, recipe: Recipe, step: Any, args: Any) -> Candidate:
        start = time.perf_counter()
        try:
            made = price(recipe, step, args, self.hardware)
            candidate = Candidate(recipe, made.price_s, made.peak_bytes)
        except Exception as error:  # continue with the other recipes
            candidate = Candidate(recipe, failed=f"{type(error).__name__}: {str(error)[:300]}")
        seconds = time.perf_counter() - start
        price_text = candidate.failed or f"{1e3 * candidate.price_s:.2f} ms, {candidate.peak_bytes / 1e9:.2f} GB"
        print(f"priced in {seconds:.0f} s: {recipe.name} on {recipe.num_gpus}: {price_text}", flush=True)
        return candidate

    def _user(self, one: Candidate) -> Row:
        def figures() -> Row:
            if one.failed or one.peak_bytes > HOPELESS * MEMORY_BYTES:
                raise RuntimeError(one.failed or f"predicted to need {one.peak_bytes / 1e9:.0f} GB: not compiled")
            return self._figures(self._programs(one.recipe), Extras())

        return self._row(one, "user", Extras(), figures)

    def tuned(self, one: Candidate, user: Row, known: Sequence[Row] = ()) -> list[Row]:
        """Rows of the variants, then the fastest of them and the user's program once more, as the tuned version.

        Args:
            known: variants that were measured before.
        """
        found, programs = [user, *known], self._programs(one.recipe)

        def best(*, by_default: bool = False) -> Row:
            """The fastest so far without kernels, which come last; with XLA's combine threshold if asked."""
            plain = [row for row in found if fits(row) and not row["kernels"]]
            plain = [row for row in plain if row["limit_mib"] is None] if by_default else plain
            return min(plain, key=lambda row: row["step_s"], default=user)

        def compile_if_new(extras: Extras) -> Row | None:
            """The program's row; None if there is no such program."""
            measured = [row for row in found if Extras.of(row) == extras]
            if measured:
                return measured[0]
            try:
                exists = programs.has(extras)
            except Exception as error:  # without a plan, there is nothing to take from it
                print(f"no plan: {error}", flush=True)
                return None
            if exists:
                found.append(self._row(one, "variant", extras, lambda: self._figures(programs, extras)))
            return found[-1] if exists else None

        compile_if_new(Extras(constraints=True))
        walked = [best(by_default=True)]
        constraints = walked[0]["constraints"]
        for limits in (LARGER_MIB, SMALLER_MIB):
            for limit in limits:
                if (made := compile_if_new(Extras(constraints, limit))) is None:
                    continue
                before = min((row["step_s"] for row in walked if fits(row)), default=math.inf)
                walked.append(made)
                if fits(made) and made["step_s"] > _HOPELESS_THRESHOLD * before:
                    break
        plain = Extras.of(best())
        compile_if_new(replace(plain, kernels=True))
        compile_if_new(replace(plain, kernels=True, early_reductions=True))
        fastest = min(filter(fits, found), key=lambda row: row["step_s"], default=user)
        return [*found[1:], fastest | {"way": "tuned", "variant": variant_text(fastest)}]

    def _programs(self, recipe: Recipe) -> Programs:
        return Programs(recipe, *self.target(), self.hardware)

    def _figures(self, programs: Programs, extras: Extras) -> Row:
        module, options = programs.lowered(extras)
        return self.judge.figures(module, programs.recipe.mesh, programs.recipe.num_hosts, options)

    def _row(self, one: Candidate, way: str, extras: Extras, figures: Callable[[], Row]) -> Row:
        about = {
            "recipe": one.recipe.name,
            "kind": one.recipe.kind,
            "way": way,
            "gpus_used": one.recipe.num_gpus,
            "mesh": str(one.recipe.mesh),
            "words": "",
            "price_s": one.price_s,
            "price_bytes": one.peak_bytes,
        }
        return self.row_of(about | asdict(extras), figures)


def chosen(candidates: Sequence[Candidate], num_gpus: int) -> list[Candidate]:
    """The candidates to compile: the best grid of each kind on all GPUs, the best four on any number, and one GPU unless it is priced
    far above the best. A price is a plan's, and XLA may run a recipe otherwise; one GPU it runs as it is."""
    by_price = best_by_price(candidates)
    alone = [one for one in by_price if one.recipe.num_gpus == 1 and one.price_s <= _STOP * by_price[0].price_s]
    on_all = sorted((one for one in candidates if one.recipe.num_gpus == num_gpus), key=lambda one: one.price_s)
    return list(dict.fromkeys([*by_price[:_NUM_COMPILED], *alone, *_best_of_kinds(on_all)]))


def best_by_price(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that fit, best first, with one grid of each kind on each number of GPUs."""
    found: dict[tuple[str, int], Candidate] = {}
    for one in sorted((one for one in candidates if one.fits), key=lambda one: one.price_s):
        found.setdefault((one.recipe.kind, one.recipe.num_gpus), one)
    return list(found.values())


def _near(users: Sequence[Row]) -> list[Row]:
    """The fastest of these programs, and those almost as fast."""
    running = sorted(filter(fits, users), key=lambda row: row["step_s"])
    return [row for row in running if row["step_s"] <= _NEAR * running[0]["step_s"]]


def _recipe_of(row: Row) -> tuple[str, int]:
    return row["recipe"], row["gpus_used"]


def _best_of_kinds(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The first of each kind."""
    found: dict[str, Candidate] = {}
    for one in ranked:
        found.setdefault(one.recipe.kind, one)
    return list(found.values())
