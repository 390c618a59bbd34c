"""Test decoders and their checkpoints: logits equal those of `transformers`' models on the same files."""

from __future__ import annotations

import json
import os
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.errors import ModelError
from autopar.inference import Checkpoint, DecoderConfig, load_tokenizer, write_checkpoint
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.model.attention import AttendContiguous, ContiguousCache
from autopar.inference.model.parameter_names import Source
from autopar.inference.model.rotary import Llama3Scaling, Rotary
from autopar.system.install_command import install_command

GPT2 = {
    "model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    **LLAMA, "rope_theta": 500000.0, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 16},
}  # fmt: skip
LINEAR = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}, "head_dim": 16}
QWEN2 = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "rope_theta": 1e6}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 64}
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "llama3": LLAMA3, "linear": LINEAR, "qwen2": QWEN2, "qwen3": QWEN3}
FAMILIES["mistral"] = MISTRAL


def tokens_of(fields: dict[str, Any], batch: int = 2, length: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(0, fields["vocab_size"], (batch, length), dtype=np.int32)


def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    checkpoint = Checkpoint.open(folder)
    logits, _ = jax.jit(checkpoint.model.apply)(checkpoint.load(), tokens)  # pyright: ignore[reportGeneralTypeIssues]
    return np.asarray(logits)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family. The one of qwen2 has several files."""
    root = tmp_path_factory.mktemp("models")
    for name, fields in FAMILIES.items():
        write_checkpoint(root / name, fields, max_file_bytes=20_000 if name == "qwen2" else 1 << 30)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.mark.sampled(6)
@pytest.mark.contract
@pytest.mark.parametrize("name", FAMILIES)
def test_chunked_prefill_and_decode_with_a_cache_give_the_same_logits(name: str, folders: dict[str, Path]) -> None:
    """Two chunks, then token by token. The sequences are at different positions, and one slot has no sequence."""
    checkpoint = Checkpoint.open(folders[name])
    model, params = checkpoint.model, checkpoint.load()
    tokens = tokens_of(LLAMA, batch=3, length=14)
    whole = np.asarray(model.apply(params, tokens)[0])  # pyright: ignore[reportIndexIssue]
    offsets = np.array([0, 3, 0])  # the second sequence is three tokens ahead from the second call on

    @jax.jit
    def step(params: Any, cache: Any, tokens: Any, positions: Any) -> Any:
        return model.apply(params, tokens, positions, AttendContiguous(positions), cache)

    cache = ContiguousCache.empty(checkpoint.config, batch=3, length=16)
    positions = np.broadcast_to(np.arange(8), (3, 8))
    logits, cache = step(params, cache, tokens[:, :8], positions)
    np.testing.assert_allclose(logits, whole[:, :8], atol=1e-5)
    for start, length in ((5, 3), (8, 1), (9, 1), (10, 1)):
        positions = start + offsets[:, None] + np.arange(length)
        new = np.take_along_axis(tokens, positions, axis=1)
        padded = np.where(np.arange(3)[:, None] == 2, -1, positions)  # padding is not written
        logits, cache = step(params, cache, new, padded)
        for row in (0, 1):
            np.testing.assert_allclose(logits[row], whole[row, positions[row]], atol=1e-5)
    for stored in (*cache.keys, *cache.values):
        np.testing.assert_array_equal(stored[2, 8:], 0)


def test_a_paged_cache_gives_the_same_bits_as_a_contiguous_one(folders: dict[str, Path]) -> None:
    """The decoder's logits are equal, with prefill and decode steps."""
    checkpoint = Checkpoint.open(folders["llama"])
    model: Any = checkpoint.model
    params, tokens = checkpoint.load(), tokens_of(LLAMA, batch=2, length=10)
    tables = jnp.array([[4, 0, 6, 2], [1, 5, 3, 7]], jnp.int32)

    @jax.jit
    def over_pages(params: Any, cache: Any, tokens: Any, positions: Any) -> Any:
        def attend(cache: Any, layer: int, queries: Any, keys: Any, values: Any, scores: Any) -> Any:
            pages = kv_pages.write(cache[layer], keys, values, tables, positions)
            attended = kv_pages.attend(queries, *kv_pages.gather(pages, tables), positions, scores)
            return attended, (*cache[:layer], pages, *cache[layer + 1 :])

        return model.apply(params, tokens, positions, attend, cache)

    @jax.jit
    def over_arrays(params: Any, cache: Any, tokens: Any, positions: Any) -> Any:
        return model.apply(params, tokens, positions, AttendContiguous(positions), cache)

    config = checkpoint.config
    pages: Any = (kv_pages.empty_pages(8, 4, config.num_kv_heads, config.head_dim, jnp.dtype(jnp.float32)),)
    pages, arrays = pages * config.num_layers, ContiguousCache.empty(config, batch=2, length=16)
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 10)):
        given = tokens[:, start:end], np.broadcast_to(np.arange(start, end), (2, end - start))
        logits, pages = over_pages(params, pages, *given)
        expected, arrays = over_arrays(params, arrays, *given)
        np.testing.assert_array_equal(logits, expected)


def test_logits_of_chosen_tokens_alone(folders: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(folders["llama"])
    params, tokens, only = checkpoint.load(), tokens_of(LLAMA, length=6), np.array([[5], [2]])
    model: Any = checkpoint.model
    whole, some = model.apply(params, tokens)[0], model.apply(params, tokens, only=only)[0]
    assert some.shape == (2, 1, 96)
    np.testing.assert_allclose(some[:, 0], whole[np.arange(2), only[:, 0]], atol=1e-6)


def test_frequencies_of_llama_3() -> None:
    """Short wavelengths stay, long ones are stretched by the factor, and the others are interpolated."""
    plain = Rotary(500000.0).frequencies(128)
    scaled = Rotary(500000.0, 8.0, Llama3Scaling(1.0, 4.0, 8192)).frequencies(128)
    wavelengths = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8, rtol=1e-6)
    between = scaled[(wavelengths > 2048) & (wavelengths < 8192)] / plain[(wavelengths > 2048) & (wavelengths < 8192)]
    assert len(between) and ((between > 1 / 8) & (between < 1)).all()


@pytest.mark.slow
def test_weights_load_in_the_shardings_of_a_plan(tmp_path: Path) -> None:
    """The budget of each of 8 devices is 60 % of the weights, so the planner splits them. Logits equal those of one device."""
    write_checkpoint(tmp_path / "model", {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 8})
    checkpoint = Checkpoint.open(tmp_path / "model")
    model: Any = checkpoint.model
    tokens = tokens_of(LLAMA, batch=1, length=8)

    def forward(params: Any, tokens: Any) -> jax.Array:
        return model.apply(params, tokens)[0]

    abstract = checkpoint.abstract_params()
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = autopar.plan(
        forward, abstract, tokens, mesh=mesh, hardware="h100-sxm", memory_budget_bytes=int(0.6 * weights)
    )
    assert isinstance(plan, autopar.Plan)
    shardings = plan.in_shardings(mesh)
    params = checkpoint.load(shardings[0])
    for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings[0]), strict=True):
        assert leaf.sharding == sharding
    local_bytes = sum(leaf.addressable_shards[3].data.nbytes for leaf in jax.tree.leaves(params))
    assert local_bytes < 0.5 * weights
    run = jax.jit(forward, in_shardings=shardings, out_shardings=plan.out_shardings(mesh))
    np.testing.assert_allclose(run(params, tokens), forward(checkpoint.load(), tokens), atol=1e-5)


@pytest.mark.slow
@pytest.mark.contract
def test_a_plan_splits_a_step_with_a_cache(tmp_path: Path) -> None:
    """The planner splits the cache by its heads, and the step gives on 8 devices what it gives on one."""
    write_checkpoint(tmp_path / "model", {**LLAMA, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8})
    checkpoint = Checkpoint.open(tmp_path / "model")
    model: Any = checkpoint.model
    tokens = tokens_of(LLAMA, batch=2, length=4)
    positions = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])

    def step(params: Any, cache: Any, tokens: Any, positions: Any) -> Any:
        return model.apply(params, tokens, positions, AttendContiguous(positions), cache)

    cache = ContiguousCache.empty(checkpoint.config, batch=2, length=512)
    abstract = jax.tree.map(jnp.asarray, (tokens, positions))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    plan = autopar.plan(
        step, checkpoint.abstract_params(), cache, *abstract, mesh=mesh, hardware="h100-sxm", memory_budget_bytes=held
    )
    assert isinstance(plan, autopar.Plan)
    shardings: Any = plan.in_shardings(mesh)
    assert {leaf.spec for leaf in jax.tree.leaves(shardings[1])} == {PartitionSpec(None, None, "x")}
    run = jax.jit(step, in_shardings=shardings, out_shardings=plan.out_shardings(mesh))
    planned = run(checkpoint.load(shardings[0]), jax.device_put(cache, shardings[1]), *abstract)
    one = jax.jit(step)(checkpoint.load(), cache, *abstract)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), planned, one)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_weights_are_never_whole_on_the_host(dtype: Any, tmp_path: Path) -> None:
    """Each slice is read once, one at a time, and the host's memory grows by no more than a slice."""
    write_checkpoint(tmp_path / "model", {**LLAMA, "hidden_size": 256, "vocab_size": 8192, "intermediate_size": 1024})
    checkpoint = Checkpoint.open(tmp_path / "model")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    split = jax.tree.map(
        lambda leaf: NamedSharding(mesh, PartitionSpec(*("x" if size % 4 == 0 else None for size in leaf.shape[:1]))),
        checkpoint.abstract_params(),
    )
    read: list[int] = []
    taken: list[int] = []  # peak bytes beyond those in use after the previous slice
    held = [0]

    def on_slice(path: str, size: int) -> None:
        now, peak = tracemalloc.get_traced_memory()
        taken.append(peak - held[0])
        read.append(size)
        held[0] = now
        tracemalloc.reset_peak()

    checkpoint.load(split, dtype)  # warm up imports and compiles
    tracemalloc.start()
    params = checkpoint.load(split, dtype, progress=on_slice)
    tracemalloc.stop()
    assert sum(read) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert max(read) == params["params"]["embed"]["weight"].nbytes // 4
    assert max(taken) < 1.5 * max(read)


def test_weights_do_not_change_with_their_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", LLAMA)
    params = Checkpoint.open(tmp_path / "model").load()
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), params)
    file = tmp_path / "model" / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.write(bytes(size))
    jax.tree.map(np.testing.assert_array_equal, params, before)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_equal_the_tensors_of_the_safetensors_library(name: str, folders: dict[str, Path]) -> None:
    """Each parameter is a view of the file, and equals its tensor as `safetensors` reads it."""
    from safetensors.numpy import load_file

    stored = {key: array for file in folders[name].glob("*.safetensors") for key, array in load_file(file).items()}
    checkpoint = Checkpoint.open(folders[name])
    loaded = traverse_util.flatten_dict(checkpoint.load()["params"])
    assert {name for source in checkpoint.sources.values() for name in source.names} == set(stored)
    for path, source in checkpoint.sources.items():
        assert isinstance(source, Source)
        mapped = [checkpoint.stored[name].mapped() for name in source.names]
        every = tuple(slice(size) for size in source.shape)
        assert np.shares_memory(source.view(mapped)[every], mapped[0])
        expected = source.view([stored[name] for name in source.names])[every]
        np.testing.assert_array_equal(np.asarray(loaded[path]), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_trained_weights_are_written(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """What is written is what is read, also from fused and transposed tensors."""
    params = Checkpoint.open(folders[name]).load()
    write_checkpoint(tmp_path / name, FAMILIES[name], params=params)
    jax.tree.map(np.testing.assert_array_equal, Checkpoint.open(tmp_path / name).load(), params)


@pytest.mark.slow
def test_other_dtypes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", LLAMA, dtype="BF16")
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert checkpoint.config.dtype == "bfloat16"
    model: Any = checkpoint.model
    narrow, wide = checkpoint.load(), checkpoint.load(dtype=jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow)} == {"bfloat16"}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(jnp.float32), b), narrow, wide)
    tokens = tokens_of(LLAMA, length=8)
    logits = model.apply(narrow, tokens)[0]
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, model.apply(wide, tokens)[0], atol=0.2)


def test_a_bare_model_with_buffers_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """The first GPT-2 checkpoints have no prefix, and hold each layer's mask."""
    from safetensors.numpy import load_file, save_file

    bare = {
        key.removeprefix("transformer."): value
        for key, value in load_file(next(folders["gpt2"].glob("*.safet*"))).items()
    }
    save_file({**bare, "h.0.attn.bias": np.ones((1, 1, 64, 64), bool)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    tokens = tokens_of(GPT2)
    np.testing.assert_array_equal(logits_of(tmp_path, tokens), logits_of(folders["gpt2"], tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**LLAMA, "model_type": "mamba"}, "'mamba'.*falcon, gemma, gemma2, .*qwen3_moe, smollm3"),
        ({**LLAMA, "hidden_act": "relu2"}, "`hidden_act` is 'relu2'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "type 'ntk'.*supported are default, linear"),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}}, "must have 4"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "no `low_freq_factor`"),
        ({**LLAMA, "partial_rotary_factor": 1.5}, "`partial_rotary_factor` is 1.5"),
        ({**LLAMA, "partial_rotary_factor": 0.4}, "rotates 3 of 8 elements"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config has no `quant_method`"),
        ({**LLAMA, "hidden_size": "32"}, "`hidden_size` is '32', and must be a positive int"),
        ({**LLAMA, "num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({**LLAMA, "num_key_value_heads": 3}, "3 heads of keys"),
        ({**QWEN3, "layer_types": ["full_attention", "chunked_attention"]}, "`layer_types`.*one of full_attention, sl"),
        ({**QWEN3, "layer_types": ["full_attention"]}, "`layer_types`.*for each of 2 layers"),
        (
            {**LLAMA, "model_type": "gemma", "use_bidirectional_attention": True},
            "`use_bidirectional_attention` is true",
        ),
        (
            {**LLAMA, "model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False},
            "`parallel_attn`",
        ),
        ({**LLAMA, "model_type": "falcon", "num_ln_in_parallel_attn": 2}, "`num_ln_in_parallel_attn` is 2"),
        ({**LLAMA, "model_type": "smollm3", "no_rope_layers": [1]}, "`no_rope_layers`.*each of 2 layers"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx`"),
        ({**GPT2, "n_head": 5}, "`n_embd` is 32"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "no `vocab_size`"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DecoderConfig.of(fields)


def test_damaged_folders_name_the_tensor_and_the_file(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file, tensors = tmp_path / "model.safetensors", load_file(folders["llama"] / "model.safetensors")
    key = "model.layers.1.self_attn.k_proj.weight"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def refused(message: str) -> None:
        with pytest.raises(ModelError, match=message):
            Checkpoint.open(tmp_path)

    refused("neither model.safetensors nor")
    save_file({**tensors, key: tensors[key][:8]}, file)
    refused(rf"{file}: `{key}` has the shape \[8, 32\], but config.json requires \[16, 32\]")
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, file)
    refused(rf"lacks `{key}` of the shape \[16, 32\]")
    save_file({**tensors, "model.layers.1.self_attn.k_proj.bias": tensors["model.norm.weight"]}, file)
    refused(rf"{file} holds `model.layers.1.self_attn.k_proj.bias` of the shape \[32\]")
    save_file(tensors, file)
    whole = file.read_bytes()
    for size, message in (
        (len(whole) - 1, "truncated within `.*weight`"),
        (100, "within its header"),
        (0, "not a safetensors"),
    ):
        file.write_bytes(whole[:size])
        refused(message)
    file.write_bytes(whole + b"0")
    refused("its header and tensors take")
    file.write_bytes(whole.replace(b'"dtype":"F32"', b'"dtype":"F16"', 1))
    refused("is damaged: its header gives `")
    file.write_bytes(len(whole[8:]).to_bytes(8, "little") + whole[8:])
    refused("header cannot be read")
    save_file({**tensors, key: tensors[key].astype(np.int8)}, file)
    with pytest.raises(ModelError, match=rf"dtype of `{key}` is I8, but it must be one of F64"):
        Checkpoint.open(tmp_path).load()
    (tmp_path / "config.json").write_text("{")
    refused("is not JSON")


def test_files_that_contradict_their_index_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["qwen2"].glob("model*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    index = tmp_path / "model.safetensors.index.json"
    about = json.loads(index.read_text())
    name, file = next(iter(about["weight_map"].items()))
    other = next(one for one in about["weight_map"].values() if one != file)
    index.write_text(json.dumps({"weight_map": {**about["weight_map"], name: other}}))
    with pytest.raises(ModelError, match=f"{other} has no `{name}`"):
        Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {name: "../model.safetensors"}}))
    with pytest.raises(ModelError, match="not a file in its folder"):
        Checkpoint.open(tmp_path)
    index.write_text(json.dumps(about))
    (tmp_path / other).unlink()
    with pytest.raises(ModelError, match=f"{other} cannot be read"):
        Checkpoint.open(tmp_path)


def test_wrong_shardings_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="not a tree like its parameters"):
        Checkpoint.open(folders["llama"]).load({"params": {}})


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model", GPT2)
    with pytest.raises(ModelError, match="already exists"):
        write_checkpoint(tmp_path / "model", GPT2)
    with pytest.raises(ModelError, match="'int8'"):
        write_checkpoint(tmp_path / "other", GPT2, dtype="int8")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="No space left"):
        write_checkpoint(tmp_path / "other", GPT2)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({"where": 0, "weights": 1, "are": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("where weights are").ids == [0, 1, 2]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ModelError, match=re.escape(install_command("inference"))):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
