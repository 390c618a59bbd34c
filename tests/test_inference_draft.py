"""Test the draft model: its draft tokens are its own greedy continuation, whatever its cache went through."""

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
from simulated_results import results_of

from autopar.api.planned_function import Planned
from autopar.errors import InferenceError
from autopar.inference import Checkpoint, write_checkpoint
from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.schedule.requests import Options, Request, Run, Shape
from autopar.inference.schedule.scheduler import Scheduler
from autopar.inference.schedule.speculation_policy import DraftRequest
from autopar.inference.serve.draft_model import DraftModel, Jitted
from autopar.inference.step.sampling_params import params_of
from autopar.inference.step.verify_draft import verify
from autopar.jax_interop.partition_spec import partition_spec

LENGTH, SLOTS, PROPOSALS, CHUNK = 40, 3, 3, (2, 8)
FIELDS = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "intermediate_size": 24, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


class Small:
    """A model, its programs, each compiled once for all tests, and its logits without a cache."""

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
        """The logits after each token, without a cache."""
        padded = np.zeros((1, LENGTH + PROPOSALS), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._whole(padded))[0, : len(tokens)]

    def result(self, text: list[int], run: Run, shape: Shape) -> list[int]:
        """The tokens of a run by the model alone. The run's tokens are the last of the text."""
        if not run.samples:
            return []
        if shape.width == 1:
            new: list[int] = []
            for _ in range(run.num_tokens if shape.steps > 1 else 1):
                new.append(int(self.logits([*text, *new])[-1].argmax()))
            return new
        logits = np.zeros((1, 1 + PROPOSALS, 24), np.float32)
        proposed = np.zeros((1, PROPOSALS), np.int32)
        num = len(run.tokens) - 1
        logits[0, : num + 1], proposed[0, :num] = self.logits(text)[-num - 1 :], run.tokens[1:]
        found = VERIFY(logits, proposed, np.array([num]), params_of([None]), np.array([run.start + 1]))
        return np.asarray(found.tokens)[0, : int(found.num_accepted[0]) + 1].tolist()

    def check(self, tokens: list[int], draft: list[int]) -> None:
        """Assert that each draft token is the most probable one, up to rounding."""
        for i, row in enumerate(self.logits([*tokens, *draft])[len(tokens) - 1 : -1]):
            assert row[draft[i]] >= row.max() - 1e-4, (i, draft)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("draft")
    write_checkpoint(folder / "model", FIELDS)
    small = Small(Checkpoint.open(folder / "model"))
    yield small
    compiled = {name: program.run._cache_size() for name, program in small.programs.items()}
    assert compiled == {"draft": 1, "prefill": 1}, "no request compiles another program"


VERIFY = jax.jit(verify)
TOKENS = st.lists(st.integers(0, 23), min_size=1, max_size=LENGTH + 4)
#: What happens to a sequence between two calls: some draft tokens are accepted and a token follows; another request gets the
#: slot; the sequence loses its last tokens, like a fork; or it has no draft request.
EVENTS = st.one_of(
    st.tuples(st.just("continues"), st.integers(0, PROPOSALS), st.integers(0, 23)),
    st.tuples(st.just("another"), TOKENS),
    st.tuples(st.just("shorter"), st.integers(1, 30)),
    st.just(("no request",)),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(st.tuples(*[EVENTS] * SLOTS), min_size=1, max_size=8), most=st.integers(1, PROPOSALS))
def test_draft_tokens_equal_greedy_decoding_without_a_cache(
    rounds: list[tuple[Any, ...]], most: int, small: Small
) -> None:
    model = small.draft()
    tokens: list[list[int]] = [[slot] for slot in range(SLOTS)]
    drafts: list[list[int]] = [[] for _ in range(SLOTS)]
    for events in rounds:
        for slot, (what, *more) in enumerate(events):
            if what == "continues":
                tokens[slot] = [*tokens[slot], *drafts[slot][: more[0]], more[1]]
            elif what == "another":
                tokens[slot] = list(more[0])
            elif what == "shorter":
                tokens[slot] = tokens[slot][: max(1, len(tokens[slot]) - more[0])]
        requests = [
            DraftRequest(slot, tokens[slot], most) for slot, event in enumerate(events) if event[0] != "no request"
        ]
        drafts = [[] for _ in range(SLOTS)]
        for each, draft in zip(requests, model.propose(requests), strict=True):
            drafts[each.slot] = list(draft)
            small.check(tokens[each.slot], drafts[each.slot])
            assert len(draft) in (0, min(most, max(0, LENGTH + 1 - len(tokens[each.slot]))))
    requests = [DraftRequest(slot, tokens[slot][-LENGTH:], 1) for slot in range(SLOTS)]
    found = [model.propose(requests) for _ in range(SLOTS * LENGTH // CHUNK[1])]  # enough even for one chunk per call
    assert all(len(draft) == 1 for draft in found[-1]), "in the end all sequences are prefilled"


def test_a_draft_model_equal_to_the_target_is_always_accepted(small: Small) -> None:
    """This holds also after preemption, and in reused slots."""
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
        results: dict[tuple[int, int], list[int]] = {}
        for run in iteration.runs:
            text = [*texts[run.name][: run.start], *run.tokens]
            new = results[run.slot, run.start] = small.result(text, run, iteration.shape)
            attempts.add(run.attempt)
            if run not in iteration.chunks and iteration.shape.width > 1:
                widths.append(run.num_tokens)
                assert len(new) == run.num_tokens, "a draft token was rejected"
        for each in scheduler.update(iteration, results_of(iteration, SLOTS, results)).progress():
            texts[each.name] += each.tokens
    assert scheduler.num_running == scheduler.num_waiting == 0 and len(attempts) > len(requests), "some are preempted"
    for request in requests:
        small.check(list(request.prompt), texts[request.name][len(request.prompt) :])
        assert len(texts[request.name]) == len(request.prompt) + 17
    assert sum(widths) / len(widths) > 3, "tokens per verified step; the last step of a sequence has fewer"


def test_a_draft_model_with_another_vocabulary_is_refused(small: Small) -> None:
    with pytest.raises(
        InferenceError, match=r"vocabulary of 24 tokens, .* one of 32000: use a draft model with the same"
    ):
        small.draft(vocab_size=32000)


@pytest.mark.slow
def test_a_planned_draft_model_gives_the_same_tokens(tmp_path: Path) -> None:
    """The second program is planned with the shardings of weights and cache of the first, which are split."""
    fields = {**FIELDS, "vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    write_checkpoint(tmp_path / "model", {**fields, "num_hidden_layers": 1, "intermediate_size": 512})
    checkpoint = Checkpoint.open(tmp_path / "model")
    pins: dict[str, Any] = {}

    def planned(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Planned:
        program = Planned.of(function, arguments, {"mesh": "model=8", "pin": dict(pins)})
        inputs = [tensor for tensor in program.plan.inputs if tensor.path.startswith(("params", "cache"))]
        pins.update({tensor.path: partition_spec(tensor.sharding) for tensor in inputs})
        return program

    requests = [DraftRequest(slot, list(range(slot, 7 * slot + 1)), PROPOSALS) for slot in range(SLOTS)]
    drafts = [
        DraftModel(
            checkpoint.model, checkpoint.load(), SLOTS, LENGTH, PROPOSALS, vocab_size=1024, chunk=CHUNK, prepare=prepare
        ).propose(requests)
        for prepare in (planned, Jitted.of)
    ]
    assert drafts[0] == drafts[1] and all(len(draft) == PROPOSALS for draft in drafts[0][:2])
    assert pins["cache/keys/0"] == pins["cache/values/0"] == P(None, None, "model")
