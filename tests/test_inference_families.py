"""Test every family of decoders: logits equal those of `transformers`, over whole sequences and over pages.

The logits are in `tests/logits`; `family_checkpoints` writes the same checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_checkpoints import CHECKPOINTS, LENGTH, POSITIONS, logits_of, tokens_of, write_family
from jax.sharding import PartitionSpec

import autopar
from autopar.inference import Checkpoint, DecoderConfig, Engine, Options
from autopar.inference.kernels.paged_attention import attend_paged
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.model.families import FAMILIES

TOLERANCE = 1e-4
SIZE = 4  # tokens per page
#: One of each kind of layer.
KINDS = ["falcon-alibi", "gemma2", "mistral", "qwen2_moe"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_family(tmp_path / name, name))
    expected = logits_of(name, tmp_path / name)
    assert expected.std() > 0.5
    logits: Any = jax.jit(checkpoint.model.apply)(checkpoint.load(), tokens_of())
    np.testing.assert_allclose(logits[0][:, POSITIONS], expected, atol=TOLERANCE)


def test_every_family_has_logits() -> None:
    assert {fields["model_type"] for fields in CHECKPOINTS.values()} == FAMILIES.keys()


class Pages:
    """The pages of two sequences with the first tokens in common, whose pages they share.

    Args:
        backend: a backend of paged attention.
        num_shared: the number of shared pages.
    """

    def __init__(self, config: DecoderConfig, backend: str, num_shared: int) -> None:
        num, self.config, self.backend = LENGTH // SIZE, config, backend
        order = np.random.default_rng(3).permutation(2 * num).astype(np.int32).reshape(2, num)
        order[1, :num_shared] = order[0, :num_shared]
        self.tables = order
        one = kv_pages.empty_pages(2 * num, SIZE, config.num_kv_heads, config.head_dim, jnp.dtype("float32"))
        self.pages = (one,) * config.num_layers

    def behind(self, start: int) -> np.ndarray:
        """The page tables without the pages that no token from `start` on may see."""
        tables = self.tables.copy()
        if self.config.window is not None:
            tables[:, : max(0, start - self.config.window + 1) // SIZE] = self.pages[0].scratch_page
        return tables


def stepped(pages: Pages, model: Any, params: Any, tokens: np.ndarray, first_row: int) -> np.ndarray:
    """The logits of all tokens, [2, tokens, vocabulary], by prefill in chunks and then token by token.

    Args:
        first_row: the number of tokens that the second sequence finds in the pages of the first.
    """

    @jax.jit
    def step(params: Any, cache: Any, tables: Any, tokens: Any, positions: Any) -> Any:
        def attend(cache: Any, layer: int, queries: Any, keys: Any, values: Any, scores: Any) -> Any:
            written = kv_pages.write(cache[layer], keys, values, tables, positions)
            attended = attend_paged(pages.backend, queries, written, tables, positions, scores)
            return attended, (*cache[:layer], written, *cache[layer + 1 :])

        return model.apply(params, tokens, jnp.maximum(positions, 0), attend, cache)

    found = np.zeros((*tokens.shape, model.config.vocab_size), np.float32)
    bounds = [(0, 16), (16, 32), *((at, at + 1) for at in range(32, tokens.shape[1]))]
    for start, end in bounds:
        positions = np.broadcast_to(np.arange(start, end, dtype=np.int32), (2, end - start)).copy()
        if end <= first_row:
            positions[1] = -1  # the second sequence computes nothing that the first has
        logits, pages.pages = step(params, pages.pages, pages.behind(start), tokens[:, start:end], positions)
        found[:, start:end] = logits
    return found


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_chunks_decode_and_shared_pages_give_the_same_logits(name: str, tmp_path: Path) -> None:
    """The first sequence is that of `transformers`. The second begins with its first 16 tokens and shares their pages."""
    checkpoint = Checkpoint.open(write_family(tmp_path / name, name))
    model: Any = checkpoint.model
    tokens, params = tokens_of(), checkpoint.load()
    tokens[1, :16] = tokens[0, :16]
    expected = np.asarray(model.apply(params, tokens)[0])
    np.testing.assert_allclose(expected[0, POSITIONS], logits_of(name, tmp_path / name)[0], atol=TOLERANCE)
    found = stepped(Pages(checkpoint.config, "blocks", 16 // SIZE), model, params, tokens, 16)
    np.testing.assert_allclose(found[0], expected[0], atol=TOLERANCE)
    np.testing.assert_allclose(found[1, 16:], expected[1, 16:], atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gather", "pallas"])
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_every_backend_gives_the_same_logits(name: str, backend: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_family(tmp_path / name, name))
    model: Any = checkpoint.model
    found = stepped(Pages(checkpoint.config, backend, 0), model, checkpoint.load(), tokens_of(), 0)
    np.testing.assert_allclose(found[:, POSITIONS], logits_of(name, tmp_path / name), atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_an_engine_on_eight_devices_generates_what_the_model_does(name: str, tmp_path: Path) -> None:
    """Greedy tokens, whose logprobs equal those of the model over the whole sequence. Prompts are longer than windows."""
    checkpoint = Checkpoint.open(write_family(tmp_path / name, name))
    model: Any = checkpoint.model
    tokens, params = tokens_of(), checkpoint.load()
    prompts = [tokens[0, :30].tolist(), tokens[0, :20].tolist(), tokens[1, :11].tolist()]
    options = Options(num_slots=2, max_length=48, chunks=((1, 16),), steps=4)
    for devices in (1, 8):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("model",))
        engine = Engine.open(tmp_path / name, options=options, mesh=mesh, page_size=4, attention="blocks", cache=False)
        for prompt, made in zip(prompts, engine.generate(prompts, max_tokens=10), strict=True):
            whole = np.array([[*prompt, *made.tokens]])
            logprobs = jax.nn.log_softmax(model.apply(params, whole)[0], axis=-1)[0, len(prompt) - 1 : -1]
            assert logprobs.argmax(-1).tolist() == list(made.tokens)
            np.testing.assert_allclose(made.logprobs, logprobs.max(-1), atol=TOLERANCE)
        engine.pool.check()
        assert engine.stats.held_pages == 0


@pytest.mark.slow
def test_a_plan_splits_experts_over_devices(tmp_path: Path) -> None:
    """With an axis for experts, each device has some of them; logits are those of `transformers`."""
    name = "mixtral"
    folder = write_family(tmp_path / name, name)
    checkpoint = Checkpoint.open(folder)
    model: Any = checkpoint.model

    def forward(params: Any, tokens: Any) -> jax.Array:
        return model.apply(params, tokens)[0]

    mesh = jax.make_mesh((4, 2), ("expert", "x"), axis_types=2 * (jax.sharding.AxisType.Auto,))
    kinds = ("gate", "up", "down")
    pin = {
        f"params/params/layers_{layer}/experts/{kind}/weight": PartitionSpec("expert")
        for layer in (0, 1)
        for kind in kinds
    }
    plan = autopar.plan(forward, checkpoint.abstract_params(), tokens_of(), mesh=mesh, hardware="h100-sxm", pin=pin)
    assert isinstance(plan, autopar.Plan)
    shardings: Any = plan.in_shardings(mesh)
    assert shardings[0]["params"]["layers_0"]["experts"]["gate"]["weight"].spec[0] == "expert"
    params = checkpoint.load(shardings[0])
    run = jax.jit(forward, in_shardings=shardings, out_shardings=plan.out_shardings(mesh))
    np.testing.assert_allclose(run(params, tokens_of())[:, POSITIONS], logits_of(name, folder), atol=TOLERANCE)


def test_windows_and_rotary_embeddings_by_layer() -> None:
    """Fields of published checkpoints."""

    def layers(name: str, **fields: Any) -> Any:
        return DecoderConfig.of({**CHECKPOINTS[name], "max_position_embeddings": 4096, **fields}).layers

    assert [layer.window for layer in layers("gemma2", num_hidden_layers=4)] == [8, None, 8, None]
    local, whole = (layers("gemma3_text")[layer].rotary for layer in (0, 1))
    assert (local.base, local.factor, whole.base, whole.factor) == (1e4, 1.0, 1e6, 8.0)
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    again = layers("gemma3_text", rope_scaling=None, rope_parameters=nested)
    assert [layer.rotary for layer in again] == [local, whole]
    assert [layer.window for layer in layers("qwen2-window")] == [None, 8]
    assert [layer.window for layer in layers("mistral-no-window")] == [None, None]
    config = {name: value for name, value in CHECKPOINTS["mistral"].items() if name != "sliding_window"}
    assert DecoderConfig.of({**config, "max_position_embeddings": 32768}).window == 4096
    assert DecoderConfig.of({**config, "max_position_embeddings": 4096}).window is None, "no sequence is longer"
    assert [layer.rotary is None for layer in layers("smollm3")] == [False, True, False, True]
    assert [layer.experts is None for layer in layers("qwen2_moe")] == [False, True, False]


@pytest.mark.contract
def test_longrope_chooses_its_divisors_by_the_longest_sequence() -> None:
    config = DecoderConfig.of(CHECKPOINTS["phi3-longrope"])
    long, short = (config.for_length(length).layers[0].rotary for length in (64, 32))
    assert long is not None and short is not None
    plain = long.changed(long=None).frequencies(8)
    np.testing.assert_allclose(plain / long.frequencies(8), [1.5, 2.0, 3.0, 4.5], rtol=1e-6)
    np.testing.assert_allclose(plain / short.frequencies(8), [1.0, 1.1, 1.2, 1.3], rtol=1e-6)
    assert long.magnitude == short.magnitude == pytest.approx(np.sqrt(1 + np.log(2) / np.log(32)))
