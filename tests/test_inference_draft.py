"""A draft model: its guesses are what it would say itself, whatever its cache went through; and they are held for what
they are worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autopar.api.planned_function import Planned
from autopar.errors import InferenceError
from autopar.inference import Checkpoint, write_checkpoint
from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.schedule.requests import Options, Request, Result, Run, Shape
from autopar.inference.schedule.scheduler import Scheduler
from autopar.inference.schedule.speculation_policy import DraftRequest
from autopar.inference.serve.draft_model import DraftModel, Jitted
from autopar.inference.step.sampling import params_of
from autopar.inference.step.verify_draft import verify
from autopar.jax_interop.partition_spec import partition_spec

LENGTH, SLOTS, PROPOSALS, CHUNK = 40, 3, 3, (2, 8)
FIELDS = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "intermediate_size": 24, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


class Small:
    """A model, its programs, each compiled once for all tests, and what it says without a cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model, self.params = checkpoint.model, checkpoint.load()
        self.programs: dict[str, Any] = {}
        self._whole = jax.jit(lambda tokens: self.model.apply(self.params, tokens)[0])  # pyright: ignore[reportIndexIssue]

    def draft(self, *, max_length: int = 2 * LENGTH, vocab_size: int = 24) -> DraftModel:
        sizes = (SLOTS, max_length, PROPOSALS)
        return DraftModel(self.model, self.params, *sizes, vocab_size=vocab_size, chunk=CHUNK, prepare=self._prepare)

    def _prepare(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return self.programs.setdefault(function.__name__, Jitted.of(function, arguments))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Of what follows each token."""
        padded = np.zeros((1, LENGTH + PROPOSALS), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._whole(padded))[0, : len(tokens)]

    def said(self, text: list[int], run: Run, shape: Shape) -> Result:
        """What comes out of a run, whose tokens are the last of a text, by the model alone."""
        if not run.samples:
            return Result()
        if shape.width == 1:
            new: list[int] = []
            for _ in range(shape.steps):
                new.append(int(self.logits([*text, *new])[-1].argmax()))
            return Result(tuple(new))
        logits = np.zeros((1, 1 + PROPOSALS, 24), np.float32)
        proposed = np.zeros((1, PROPOSALS), np.int32)
        num = len(run.tokens) - 1
        logits[0, : num + 1], proposed[0, :num] = self.logits(text)[-num - 1 :], run.tokens[1:]
        found = VERIFY(logits, proposed, np.array([num]), params_of([None]), np.array([run.start + 1]))
        return Result(tuple(np.asarray(found.tokens)[0, : int(found.num_accepted[0]) + 1].tolist()))

    def check(self, tokens: list[int], guess: list[int]) -> None:
        """Each guess is the most probable token, or as probable but for rounding."""
        for place, row in enumerate(self.logits([*tokens, *guess])[len(tokens) - 1 : -1]):
            assert row[guess[place]] >= row.max() - 1e-4, (place, guess)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("draft")
    write_checkpoint(folder / "model", FIELDS)
    small = Small(Checkpoint.open(folder / "model"))
    yield small
    compiled = {name: program.run._cache_size() for name, program in small.programs.items()}
    assert compiled == {"guess": 1, "catch_up": 1}, "whatever was asked, there are two programs"


VERIFY = jax.jit(verify)
TOKENS = st.lists(st.integers(0, 23), min_size=1, max_size=LENGTH + 4)
#: What happens to a sequence between two calls: so many guesses are accepted and a token follows; another request comes into
#: its slot; it loses its last tokens, as if it were a fork of its past; it is not asked for.
EVENTS = st.one_of(
    st.tuples(st.just("goes on"), st.integers(0, PROPOSALS), st.integers(0, 23)),
    st.tuples(st.just("another"), TOKENS),
    st.tuples(st.just("shorter"), st.integers(1, 30)),
    st.just(("rests",)),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(st.tuples(*[EVENTS] * SLOTS), min_size=1, max_size=8), most=st.integers(1, PROPOSALS))
def test_guesses_are_what_the_model_says_without_a_cache(
    rounds: list[tuple[Any, ...]], most: int, small: Small
) -> None:
    draft = small.draft()
    tokens: list[list[int]] = [[slot] for slot in range(SLOTS)]
    guesses: list[list[int]] = [[] for _ in range(SLOTS)]
    for events in rounds:
        for slot, (what, *more) in enumerate(events):
            if what == "goes on":
                tokens[slot] = [*tokens[slot], *guesses[slot][: more[0]], more[1]]
            elif what == "another":
                tokens[slot] = list(more[0])
            elif what == "shorter":
                tokens[slot] = tokens[slot][: max(1, len(tokens[slot]) - more[0])]
        asked = [DraftRequest(slot, tokens[slot], most) for slot, event in enumerate(events) if event[0] != "rests"]
        guesses = [[] for _ in range(SLOTS)]
        for each, guess in zip(asked, draft.propose(asked), strict=True):
            guesses[each.slot] = list(guess)
            small.check(each.tokens, guesses[each.slot])
            assert len(guess) in (0, min(most, max(0, LENGTH + 1 - len(each.tokens))))
    asked = [DraftRequest(slot, tokens[slot][-LENGTH:], 1) for slot in range(SLOTS)]
    found = [draft.propose(asked) for _ in range(SLOTS * LENGTH // CHUNK[1])]  # as if a chunk were of one only
    assert all(len(guess) == 1 for guess in found[-1]), "in the end all have caught up"


def test_a_draft_that_is_the_model_is_always_right(small: Small) -> None:
    """Verified by its own greedy logits, all is accepted: also after preemption, and in slots that others had."""
    prompts = [(1, 2, 3), (1, 2, 3), (4,), tuple(range(14)), (7, 7, 7), tuple(range(14)), (9, 8)]
    requests = [Request(str(i), prompt, 17) for i, prompt in enumerate(prompts)]
    scheduler = Scheduler(
        PagedCache(PagePool(8), 4), Options(SLOTS, LENGTH, (CHUNK,), num_proposals=PROPOSALS), small.draft()
    )
    for request in requests:
        scheduler.submit(request)
    texts = {request.name: list(request.prompt) for request in requests}
    widths: list[int] = []
    attempts: set[int] = set()
    while iteration := scheduler.next():
        results: dict[str, Result] = {}
        for run in iteration.runs:
            text = [*texts[run.name][: run.start], *run.tokens]
            results[run.name] = small.said(text, run, iteration.shape)
            attempts.add(run.attempt)
            if run in iteration.decodes and iteration.shape.width > 1:
                widths.append(run.num_tokens)
                assert len(results[run.name].tokens) == run.num_tokens, "a guess was rejected"
        for each in scheduler.update(iteration, results):
            texts[each.name] += each.tokens
    assert scheduler.num_running == scheduler.num_waiting == 0 and len(attempts) > len(requests), "some are preempted"
    for request in requests:
        small.check(list(request.prompt), texts[request.name][len(request.prompt) :])
        assert len(texts[request.name]) == len(request.prompt) + 17
    assert sum(widths) / len(widths) > 3, "tokens of a verified step; the last of a sequence is shorter"


def test_a_draft_of_another_vocabulary_is_refused(small: Small) -> None:
    with pytest.raises(InferenceError, match=r"vocabulary of 24 tokens, .* one of 32000: take a draft with the same"):
        small.draft(vocab_size=32000)


@pytest.mark.slow
def test_a_planned_draft_guesses_the_same(tmp_path: Path) -> None:
    """The second program is planned around what the first says of weights and cache, which are split."""
    fields = {**FIELDS, "vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    write_checkpoint(tmp_path / "model", {**fields, "num_hidden_layers": 1, "intermediate_size": 512})
    checkpoint = Checkpoint.open(tmp_path / "model")
    lying: dict[str, Any] = {}

    def planned(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Planned:
        program = Planned.of(function, arguments, {"mesh": "model=8", "pin": dict(lying)})
        inputs = [tensor for tensor in program.plan.inputs if tensor.path.startswith(("params", "cache"))]
        lying.update({tensor.path: partition_spec(tensor.sharding) for tensor in inputs})
        return program

    asked = [DraftRequest(slot, list(range(slot, 7 * slot + 1)), PROPOSALS) for slot in range(SLOTS)]
    guesses = [
        DraftModel(
            checkpoint.model, checkpoint.load(), SLOTS, LENGTH, PROPOSALS, vocab_size=1024, chunk=CHUNK, prepare=prepare
        ).propose(asked)
        for prepare in (planned, Jitted.of)
    ]
    assert guesses[0] == guesses[1] and all(len(guess) == PROPOSALS for guess in guesses[0][:2])
    assert lying["cache/keys/0"] == lying["cache/values/0"] == P(None, None, "model")
