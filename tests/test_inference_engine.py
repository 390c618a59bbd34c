"""Test the engine: its output equals that of the same model recomputed for every token, without a cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_inference_sampling import penalized
from tiny_models import BAD, CONFIG, LENGTH, OPTIONS, is_idle, opened, write_model

from autopar.errors import InferenceError, ModelError
from autopar.inference import Checkpoint, Engine, Options, SamplingOptions, write_checkpoint
from autopar.inference.schedule.speculation_policy import NGram
from autopar.inference.serve.setup import planned_for, stop_tokens_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", has_nan=True)


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Engine:
    return opened(folder)


@pytest.fixture
def engine(compiled: Engine) -> Engine:
    """An engine with an empty cache, and the programs of `compiled`."""
    return Engine(compiled.runner, compiled.tokenizer)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    """A function to the logits after a sequence, which computes the whole sequence."""
    checkpoint = Checkpoint.open(folder)
    model: Any = checkpoint.model
    params = checkpoint.load()
    run = jax.jit(lambda tokens: model.apply(params, tokens)[0])

    def logits(tokens: Sequence[int]) -> Any:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return run(padded)[0, len(tokens) - 1]

    return logits


def prompts(num: int, seed: int = 0, longest: int = 100) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(BAD) for _ in range(chance.randrange(1, longest))] for _ in range(num)]


# -- tokens ------------------------------------------------------------------------------------


def test_tokens_and_logprobs_equal_those_without_a_cache(engine: Engine, oracle: Any) -> None:
    """Prompts have all lengths, are prefilled in chunks in a batch, and reuse slots."""
    given = prompts(9)
    for prompt, generation in zip(given, engine.generate(given, max_tokens=11, num_best=3), strict=True):
        tokens = list(prompt)
        for token, logprob, best in zip(generation.tokens, generation.logprobs, generation.best, strict=True):
            expected = jax.nn.log_softmax(oracle(tokens))
            assert token == int(jnp.argmax(expected))
            np.testing.assert_allclose(logprob, expected[token], atol=1e-4)
            assert [t for t, _ in best] == np.argsort(-np.asarray(expected))[:3].tolist()
            assert best[0] == (token, logprob)
            tokens.append(token)
        assert (len(generation.tokens), generation.ended) == (11, "length")
    assert is_idle(engine)


@pytest.mark.slow
def test_a_request_does_not_depend_on_its_batch_or_its_slot(folder: Path) -> None:
    """Tokens are equal, and logprobs to the bit, alone and as the fifth of a batch; also with sampling."""
    engine = opened(folder, options=Options(num_slots=4, max_length=LENGTH, chunks=((2, 16),), steps=1))
    prompt = prompts(1, seed=5, longest=40)[0]
    for sampling in (SamplingOptions(), SamplingOptions(0.9, top_k=30, top_p=0.9, seed=7)):
        alone = engine.submit(prompt, max_tokens=12, sampling=sampling).result()
        others = [engine.submit(other, max_tokens=20) for other in prompts(6, seed=6)]
        again = engine.submit(prompt, max_tokens=12, sampling=sampling)
        more = [engine.submit(other, max_tokens=5) for other in prompts(3, seed=7)]
        assert again.result().tokens == alone.tokens
        assert again.logprobs == alone.logprobs
        for other in others + more:
            other.result()


@pytest.mark.slow
@pytest.mark.contract
def test_eight_devices_give_the_same_tokens_as_one(folder: Path, engine: Engine) -> None:
    given = prompts(6, seed=1)
    options: list[dict[str, Any]] = [
        {"sampling": SamplingOptions()},
        {"sampling": SamplingOptions(0.7, top_p=0.8, seed=1)},
    ]
    several = opened(folder, num_devices=8, options=Options(num_slots=4, max_length=LENGTH, chunks=((1, 48),), steps=1))
    for each in options:
        one = engine.generate(given, max_tokens=9, **each)
        assert [g.tokens for g in several.generate(given, max_tokens=9, **each)] == [g.tokens for g in one]
    assert is_idle(several)


def test_cached_prefixes_are_found_and_change_no_token(engine: Engine) -> None:
    """Pages have 16 tokens. A repeated prompt of 40 tokens finds two pages; a prompt with the generated tokens finds more."""
    first = prompts(1, seed=2)[0][:3] + list(range(37))
    longer = [*first, *engine.submit(first, max_tokens=30).result().tokens, 1, 2]
    assert engine.submit(first, max_tokens=3).result().num_cached == 32
    again = engine.submit(longer, max_tokens=8).result()
    assert again.num_cached == 64
    without = Engine(engine.runner, shares_prefixes=False)
    plain = without.submit(longer, max_tokens=8).result()
    assert (plain.num_cached, plain.tokens) == (0, again.tokens)


@pytest.mark.slow
def test_every_backend_of_attention_serves(folder: Path, engine: Engine) -> None:
    """The selected backend and a requested one give the same tokens."""
    given = prompts(4, seed=14)
    expected = [generation.tokens for generation in engine.generate(given, max_tokens=9)]
    options = Options(num_slots=4, max_length=LENGTH, chunks=((4, 32),), steps=1)
    for name in (None, "blocks"):
        other = opened(folder, options=options, attention=name)
        assert [generation.tokens for generation in other.generate(given, max_tokens=9)] == expected
    assert other.runner.served.attention == "blocks"
    with pytest.raises(InferenceError, match="gather"):
        opened(folder, attention="fastest")


def test_preempted_requests_are_recomputed(engine: Engine) -> None:
    """There are pages for one and a half long sequences."""
    given = prompts(8, seed=3, longest=60)
    expected = [generation.tokens for generation in engine.generate(given, max_tokens=60)]
    small = Engine(engine.runner, num_pages=12)
    assert [generation.tokens for generation in small.generate(given, max_tokens=60)] == expected
    assert is_idle(small)


def test_penalties_and_biases_depend_on_the_requests_own_tokens(engine: Engine, oracle: Any) -> None:
    """Greedy tokens, logprobs and seeded ones, with preemption, slots used before, and several steps a call."""
    options = [
        SamplingOptions(repetition_penalty=1.3, frequency_penalty=0.2),
        SamplingOptions(presence_penalty=1.5, logit_bias={7: 3.0, 11: -100.0}),
        SamplingOptions(),
        SamplingOptions(frequency_penalty=-0.4, logit_bias={5: 1.0}),
    ]
    given = prompts(8, seed=31, longest=50)
    small = Engine(engine.runner, num_pages=10)
    generations = [small.submit(prompt, max_tokens=40, sampling=options[at % 4]) for at, prompt in enumerate(given)]
    small.run()
    assert small.stats.num_preempted, "so that counts are made anew"
    for at in (0, 1, 3, 5, 6):
        generation, each = generations[at], options[at % 4]
        for number in range(0, 40, 3):
            tokens = generation.tokens[:number]
            logits = penalized(np.asarray(oracle([*given[at], *tokens])), each, given[at], tokens)
            assert generation.tokens[number] == int(logits.argmax())
            expected = jax.nn.log_softmax(logits.astype(np.float32))[generation.tokens[number]]
            np.testing.assert_allclose(generation.logprobs[number], expected, atol=1e-4)
    seeded = SamplingOptions(1.0, top_k=200, seed=3, repetition_penalty=1.2, min_p=0.01)
    alone = engine.submit(given[0], max_tokens=20, sampling=seeded).result().tokens
    beside = [engine.submit(prompt, max_tokens=20, sampling=seeded) for prompt in (given[1], given[0], given[2])]
    assert beside[1].result().tokens == alone
    with pytest.raises(InferenceError, match="logit_bias has token 300, but the model's tokens are 0 to 299"):
        engine.submit([1], sampling=SamplingOptions(logit_bias={300: 1.0}))


def test_prompts_are_scored_and_their_last_states_are_those_of_the_model(
    folder: Path, engine: Engine, oracle: Any
) -> None:
    """Whatever is in the cache, however long the chunks, beside other requests, and after a preemption."""
    given = prompts(5, seed=41, longest=100)
    given[0] = given[0][:1] * 2
    model: Any = Checkpoint.open(folder).model
    params = Checkpoint.open(folder).load()
    small = Engine(engine.runner, num_pages=12)
    for _ in range(2):
        starts = [1, 3, len(given[2]) - 1, 1, len(given[4]) // 2]
        scored = [
            small.submit(prompt, max_tokens=3, scored_from=start, wants_state=True)
            for prompt, start in zip(given, starts, strict=True)
        ]
        small.generate(prompts(3, seed=42), max_tokens=20)
        for prompt, start, generation in zip(given, starts, scored, strict=True):
            generation.result()
            logprobs = jax.nn.log_softmax(model.apply(params, jnp.array([prompt]))[0][0])
            assert sorted(generation.prompt_scores) == list(range(start, len(prompt)))
            for at, (logprob, best, best_logprob) in generation.prompt_scores.items():
                np.testing.assert_allclose(logprob, logprobs[at - 1, prompt[at]], atol=1e-4)
                assert best == int(jnp.argmax(logprobs[at - 1]))
                np.testing.assert_allclose(best_logprob, logprobs[at - 1, best], atol=1e-4)
            states = model.apply(params, jnp.array([prompt]), method="states")[0][0]
            assert generation.state is not None
            np.testing.assert_allclose(generation.state, states[-1], atol=1e-4)
    assert is_idle(small)
    with pytest.raises(InferenceError, match="scored_from is 2, but the prompt has 2 tokens"):
        engine.submit([1, 2], scored_from=2)


# -- compilation -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_mixed_requests_compile_nothing(engine: Engine) -> None:
    chance = random.Random(4)
    assert engine.stats.num_compiled == len(OPTIONS.shapes) + 2 <= 7
    compiled: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for number in range(1000):
            engine.submit(
                [chance.randrange(BAD) for _ in range(chance.randrange(1, 60))],
                max_tokens=chance.randrange(1, 9),
                sampling=SamplingOptions(
                    chance.choice([0, 0.5, 1]),
                    chance.choice([0, 5, 100]),
                    chance.choice([1, 0.9]),
                    number,
                    presence_penalty=chance.choice([0, 0, 1]),
                    logit_bias=chance.choice([{}, {}, {3: 1.0}]),
                ),
                stop_tokens=[chance.randrange(BAD)],
            )
        engine.run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert is_idle(engine)


# -- text --------------------------------------------------------------------------------------


def test_text_comes_in_pieces_and_ends_before_a_stop_string(engine: Engine) -> None:
    whole = engine.submit("a prompt", max_tokens=30).result()
    pieces = list(engine.submit("a prompt", max_tokens=30))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    stop = whole.text[10:13]
    stopped = engine.submit("a prompt", max_tokens=30, stop=stop).result()
    assert (stopped.text, stopped.ended) == (whole.text[: whole.text.index(stop)], "stop")
    token = whole.tokens[4]
    ended = engine.submit("a prompt", max_tokens=30, stop_tokens=[token]).result()
    assert ended.tokens == whole.tokens[: whole.tokens.index(token) + 1]
    assert ended.ended == "stop"
    assert is_idle(engine)


def test_text_is_decoded_by_the_reader(engine: Engine) -> None:
    """An unread generation of more tokens than a window has the same tokens, logprobs and text as one that is streamed."""
    pieces = list(engine.submit("a", max_tokens=100, num_best=2))
    generation = engine.submit("a", max_tokens=100, num_best=2)
    decoded: list[int] = []
    decode = generation.decode
    assert decode is not None
    generation.decode = lambda token: decoded.append(token) or decode(token)
    engine.run()
    assert (generation.ended, decoded) == ("length", [])
    assert generation.text == "".join(piece.text for piece in pieces)
    assert decoded == generation.tokens == [token for piece in pieces for token in piece.tokens]
    assert generation.logprobs == [logprob for piece in pieces for logprob in piece.logprobs]
    assert generation.best == [best for piece in pieces for best in piece.best]


def test_the_models_stop_tokens_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_tokens_of(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert stop_tokens_of(tmp_path) == {5, 6}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "five"}')
    with pytest.raises(ModelError, match="generation_config"):
        stop_tokens_of(tmp_path)


# -- failures ----------------------------------------------------------------------------------


def test_non_finite_logits_end_their_own_request(engine: Engine) -> None:
    given = prompts(5, seed=8, longest=30)
    expected = [generation.tokens for generation in engine.generate(given, max_tokens=6)]
    others = [engine.submit(prompt, max_tokens=6) for prompt in given]
    bad = engine.submit([1, 2, BAD], max_tokens=6, name="bad one")
    assert [other.result().tokens for other in others] == expected
    with pytest.raises(InferenceError, match=r"'bad one'.*NaN or infinite"):
        bad.result()
    with pytest.raises(InferenceError, match="NaN or infinite"):
        list(bad)
    assert is_idle(engine)
    assert engine.submit([1, 2, 3] * 6, max_tokens=2).result().ended == "length", "its pages are not cached"


def test_closing_an_iterator_aborts_its_request_and_others_continue(engine: Engine) -> None:
    given = prompts(3, seed=9)
    expected = [generation.tokens for generation in engine.generate(given, max_tokens=10)]
    unread = engine.submit(given[0], max_tokens=25)
    left = engine.submit(given[1], max_tokens=25)
    reading = iter(left)
    next(reading)
    others = [engine.submit(prompt, max_tokens=10) for prompt in given]
    reading.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert left.ended == "aborted"
    assert [generation.result().tokens for generation in others] == expected
    engine.run()
    assert len(unread.tokens) == 25
    assert is_idle(engine)


def test_ten_times_as_many_requests_as_slots_wait_and_are_served(engine: Engine) -> None:
    generations = [engine.submit(prompt, max_tokens=4) for prompt in prompts(40, seed=10, longest=30)]
    assert engine.stats.num_waiting == 40
    assert all(generation.result().ended == "length" for generation in generations)
    assert is_idle(engine)


def test_several_threads_read_at_once(engine: Engine) -> None:
    given = prompts(6, seed=11)
    expected = [generation.tokens for generation in engine.generate(given, max_tokens=10)]
    found: dict[int, list[int]] = {}

    def read(number: int) -> None:
        pieces = engine.submit(given[number], max_tokens=10)
        found[number] = [token for piece in pieces for token in piece.tokens]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(given))] == expected


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"prompt": [1] * 120, "max_tokens": 20}, "at most 128"),
        ({"prompt": []}, "both must be positive"),
        ({"prompt": [1, 300]}, r"token 300.*0 to 299"),
        ({"prompt": [1], "stop": [""]}, "stop string is empty"),
        ({"prompt": [1], "num_best": 99}, "num_best is 99"),
    ],
)
def test_invalid_requests_are_refused(engine: Engine, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InferenceError, match=why):
        engine.submit(options.pop("prompt"), **options)
    assert is_idle(engine)


def test_text_without_a_tokenizer_is_refused(folder: Path, engine: Engine) -> None:
    bare = Engine(engine.runner)
    with pytest.raises(InferenceError, match="no tokenizer"):
        bare.submit("text")
    with pytest.raises(InferenceError, match="stop_tokens"):
        bare.submit([1], stop="x")


@pytest.mark.slow
def test_invalid_sizes_are_refused(folder: Path) -> None:
    with pytest.raises(InferenceError, match="has 128 positions"):
        opened(folder, options=Options(max_length=256))
    with pytest.raises(InferenceError, match="does not fit in memory with the model"):
        opened(folder, num_pages=None, memory_budget_bytes=1e5)


@pytest.mark.slow
def test_the_cache_gets_the_memory_that_weights_leave(engine: Engine) -> None:
    """With a small budget it gets all that the programs do not need; with a large one, four times what all slots need."""

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))

    def layout(budget: float) -> Any:
        return planned_for(engine.runner.served, {"mesh": mesh, "memory_budget_bytes": budget})

    small = layout(1.6e6)
    assert 8 < small.num_pages < 4 * 4 * 8
    assert 0.8 * 1.6e6 < small.peak_bytes < 0.95 * 1.6e6
    assert layout(1e9).num_pages == 4 * 4 * 8


@pytest.mark.slow
def test_speculative_decoding_changes_no_token_and_saves_steps(folder: Path, engine: Engine) -> None:
    """If the model is its own draft model, all draft tokens are accepted. N-grams work on a text that repeats itself."""
    given = [*prompts(3, seed=12, longest=40), [1, 2, 3, 4, 5] * 5]
    expected = [generation.tokens for generation in engine.generate(given, max_tokens=40)]
    options = Options(num_slots=4, max_length=LENGTH, chunks=((4, 32),), steps=1, num_proposals=3)
    proposing = opened(folder, options=options, propose=folder)
    assert proposing.stats.num_compiled == len(options.shapes) + 2
    always = Engine(proposing.runner, proposer=proposing.proposer)
    assert [generation.tokens for generation in always.generate(given, max_tokens=40)] == expected
    assert always.stats.num_steps < 16, "four tokens per step, after the first token"
    repeated = expected[3][:4] * 6
    plain = Engine(proposing.runner).submit(repeated, max_tokens=40).result().tokens
    by_n_grams = Engine(proposing.runner, proposer=NGram())
    assert by_n_grams.submit(repeated, max_tokens=40).result().tokens == plain
    assert is_idle(by_n_grams)
    changed = SamplingOptions(frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={2: 1.0})
    plain = Engine(proposing.runner).submit(repeated, max_tokens=40, sampling=changed).result().tokens
    assert by_n_grams.submit(repeated, max_tokens=40, sampling=changed).result().tokens == plain
    assert always.submit(repeated, max_tokens=40, sampling=changed).result().tokens == plain
    with pytest.raises(InferenceError, match="n-gram"):
        opened(folder, propose="nobody")


@pytest.mark.slow
def test_two_models_share_one_pool(folder: Path, tmp_path: Path) -> None:
    """The second model has fewer layers. Each waits for pages that the other holds, and both give their own tokens."""
    write_checkpoint(tmp_path / "small", CONFIG | {"num_hidden_layers": 1, "intermediate_size": 64}, seed=1)
    options = Options(num_slots=4, max_length=LENGTH, chunks=((4, 32),), steps=1)
    large = opened(folder, options=options, num_pages=14)
    alone = opened(tmp_path / "small", options=options, num_pages=14)
    small = opened(tmp_path / "small", options=options, pages_of=large)
    assert small.pool is large.pool
    given = prompts(6, seed=13, longest=60)
    expected = [[g.tokens for g in Engine(each.runner).generate(given, max_tokens=40)] for each in (large, alone)]
    running = [[engine.submit(prompt, max_tokens=40) for prompt in given] for engine in (large, small)]
    assert [[g.result().tokens for g in generations] for generations in running] == expected
    assert is_idle(large)
    assert is_idle(small)
    with pytest.raises(InferenceError, match="cannot share pages: in layer 1"):
        opened(folder, options=options, pages_of=alone)
