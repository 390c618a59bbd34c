"""Hand-written recipes: their shardings, constraints and collectives, and that none changes the result."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.ir.mesh import MeshShape
from autopar.runtime.jit import lower_for, make_mesh
from benchmarks.baselines import maxtext_rules, pinned, roles
from benchmarks.plans.recipes import Recipe, gpu_counts, recipes
from benchmarks.plans.tuned import Priced, combiner_options, price
from benchmarks.zoo import experts, language, small
from benchmarks.zoo.training import Training

# isort: split
from transformers import GPT2Config, LlamaConfig

#: No other dim of the small models has this size, nor a local part of one.
VOCABULARY = 1048
#: One grid of each kind, for 8 devices.
CHOSEN = (
    "data parallel",
    "ZeRO-1",
    "FSDP",
    "MaxText rules",
    "MaxText rules 2x4",
    "data x tensor 2x4",
    "TP + SP 2x4",
    "FSDP x TP + SP 2x4",
    "vocabulary split 2x4",
    "context parallel 2x4",
    "expert parallel 2x4",
    "EP x TP + SP 1x4x2",
    "EP x CP 1x4x2",
)


def llama() -> Training:
    return language.llama(_llama(), batch=8, seq=32)


def gpt2() -> Training:
    """A fused QKV kernel, tied embeddings, and a vocabulary that nothing divides."""
    return language.gpt2(GPT2Config(vocab_size=251, n_positions=32, n_embd=64, n_layer=1, n_head=4), batch=8, seq=32)


def wide_gpt2() -> Training:
    """Wide enough that a column reduction with few thread blocks is slow."""
    return language.gpt2(
        GPT2Config(vocab_size=251, n_positions=128, n_embd=256, n_layer=1, n_head=4), batch=64, seq=128
    )


def mixture() -> Training:
    return experts.mixture(_llama(), 4, batch=8, seq=32)


MODELS = {"llama": llama, "gpt2": gpt2, "wide gpt2": wide_gpt2, "mixture": mixture}


def _llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )


@cache
def model(name: str) -> Training:
    return MODELS[name]()


def recipe(name: str, of: str = "llama", num_gpus: int = 8) -> Recipe:
    return next(one for one in recipes(num_gpus, model(of).target[1]) if one.name == name)


def pins(name: str, of: str = "llama", num_gpus: int = 8) -> dict[str, P]:
    one = recipe(name, of, num_gpus)
    return one.pins(model(of).target[1], one.mesh)


LAYER, MOMENTS = "model/layers/0", "opt_state/0/mu"
EXPECTED = {
    "data parallel": {"q_proj": P(), "mu": P(), "lm_head": P(), "tokens": P("data")},
    "ZeRO-1": {"q_proj": P(), "mu": P("data"), "lm_head": P(), "tokens": P("data")},
    "FSDP": {"q_proj": P("data"), "mu": P("data"), "lm_head": P(None, "data"), "tokens": P("data")},
    "MaxText rules": {"q_proj": P("fsdp"), "mu": P("fsdp"), "lm_head": P("fsdp"), "tokens": P("fsdp")},
    "MaxText rules 2x4": {
        "q_proj": P("fsdp", "tensor"),
        "mu": P("fsdp", "tensor"),
        "lm_head": P("fsdp", "tensor"),
        "tokens": P("fsdp"),
    },
    "TP + SP 2x4": {"q_proj": P(None, "model"), "mu": P(None, "model"), "tokens": P("data")},
    "FSDP x TP + SP 2x4": {"q_proj": P("data", "model"), "mu": P("data", "model"), "lm_head": P("data", "model")},
    "vocabulary split 2x4": {
        "q_proj": P(("data", "model")),
        "lm_head": P("data", "model"),
        "tokens": P(("data", "model")),
    },
    "context parallel 2x4": {"q_proj": P(("data", "context")), "tokens": P("data", "context")},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_state_and_batch_are_sharded_as_the_recipe_says(name: str) -> None:
    found = pins(name)
    paths = {
        "q_proj": f"state/params/{LAYER}/self_attn/q_proj/kernel",
        "mu": f"state/{MOMENTS}/{LAYER}/self_attn/q_proj/kernel",
        "lm_head": "state/params/lm_head/kernel",
        "tokens": "batch/tokens",
    }
    assert {key: found[paths[key]] for key in EXPECTED[name]} == EXPECTED[name]


def test_hsdp_shards_within_a_host_and_the_batch_over_all() -> None:
    args = language.llama(_llama(), batch=16, seq=32).target[1]
    one = next(one for one in recipes(16, args) if one.name == "HSDP")
    found = one.pins(args, one.mesh)
    assert one.mesh == MeshShape(("data", "fsdp"), (2, 8))
    assert found["state/params/lm_head/kernel"] == P(None, "fsdp")
    assert found["batch/tokens"] == P(("data", "fsdp"))


def test_experts_go_to_their_own_axis() -> None:
    found = pins("expert parallel 2x4", "mixture")
    assert found["state/params/layer_0/experts/up_experts"] == P("expert", None, "data")
    assert found["state/params/layer_0/self_attn/q_proj/kernel"] == P(("data", "expert"))


def test_experts_with_tensor_or_context_parallelism_split_an_example() -> None:
    """16 GPUs share 8 examples."""
    args = model("mixture").target[1]
    found = {one.name: one.pins(args, one.mesh) for one in recipes(16, args) if one.kind.startswith("EP")}
    up, query = "state/params/layer_0/experts/up_experts", "state/params/layer_0/self_attn/q_proj/kernel"
    tensor, context = found["EP x TP + SP 2x4x2"], found["EP x CP 2x4x2"]
    assert tensor[up] == P("expert", None, ("data", "model"))
    assert tensor[query] == P(("data", "expert"), "model")
    assert tensor["batch/tokens"] == P(("data", "expert"))
    assert context[up] == P("expert", None, ("data", "context"))
    assert context[query] == P(("data", "expert", "context"))
    assert context["batch/tokens"] == P(("data", "expert"), "context")
    assert "EP x CP 1x4x4" in found and "EP x CP 4x2x2" not in found


def test_a_fused_kernel_is_sharded_by_its_input_under_sequence_parallelism() -> None:
    path = "state/params/transformer/h/0/attn/c_attn/kernel"
    assert pins("data x tensor 2x4", "gpt2")[path] == P("model")
    assert pins("TP + SP 2x4", "gpt2")[path] == P(None, "model")


def test_gpt_j_s_feed_forward_is_sharded() -> None:
    assert roles.tensor_dim("transformer/h/0/mlp/fc_in/kernel", (64, 256)) == 1
    assert roles.tensor_dim("transformer/h/0/mlp/fc_out/kernel", (256, 64)) == 0


def test_every_recipe_runs_on_every_number_of_gpus_that_divides() -> None:
    assert gpu_counts(16) == [16, 8, 4, 2, 1]
    args = model("llama").target[1]
    names = {count: [one.name for one in recipes(count, args)] for count in gpu_counts(16)}
    assert names[1] == ["one GPU"]
    assert not {"data parallel", "FSDP", "HSDP", "vocabulary split 4x4"} & set(names[16])  # a batch of 8
    assert {"TP + SP 8x2", "context parallel 2x8"} <= set(names[16])
    assert {"data parallel", "ZeRO-1", "FSDP", "MaxText rules"} <= set(names[4])
    for count, found in names.items():
        assert len(found) == len(set(found)), count


def test_a_recipe_that_shards_nothing_of_a_model_is_left_out() -> None:
    graph = {one.kind for one in recipes(8, small.graph_network_().target[1])}
    assert graph <= {"data parallel", "ZeRO-1", "FSDP", "MaxText rules"}
    images = {one.kind for one in recipes(8, small.vit().target[1])}
    assert not {"context parallel", "vocabulary split", "expert parallel", "EP x CP", "EP x TP + SP"} & images


def test_maxtext_names_an_axis_once_and_keeps_a_dim_that_does_not_divide() -> None:
    mesh = MeshShape(("data", "fsdp", "tensor"), (1, 4, 2))
    assert maxtext_rules.mesh_axes(("embed", "mlp"), (64, 128), mesh) == ("fsdp", "tensor")
    assert maxtext_rules.mesh_axes(("embed", "embed"), (64, 64), mesh) == ("fsdp",)
    assert maxtext_rules.mesh_axes(("vocab", "embed_vocab"), (251, 64), mesh) == (None, "fsdp")
    assert maxtext_rules.mesh_axes(("norm",), (63,), mesh) == ()


@pytest.mark.parametrize(
    ("name", "of", "specs"),
    [
        ("TP + SP 2x4", "llama", ['[{"data"}, {"model"}, {}]', '[{"data"}, {}, {"model"}]']),
        ("context parallel 2x4", "llama", ['[{"data"}, {"context"}, {}]', '[{"data"}, {}, {}, {}]']),
        ("vocabulary split 2x4", "llama", ['[{"data", "model"}, {}, {}]', '[{"data"}, {}, {"model"}]']),
        ("vocabulary split 2x4", "gpt2", ['[{"data"}, {}, {"model"}]']),
        ("expert parallel 2x4", "mixture", ['[{"expert"}, {"data"}, {}, {}]']),
        ("EP x TP + SP 1x4x2", "mixture", ['[{"expert"}, {}, {"model"}, {}]', '[{"expert"}, {"model"}, {}]']),
        ("EP x CP 1x4x2", "mixture", ['[{"expert"}, {}, {"context"}, {}]', '[{"expert"}, {"context"}, {}]']),
        ("MaxText rules 2x4", "llama", ['[{"fsdp"}, {}, {"tensor"}]']),
    ],
)
def test_a_user_s_step_has_the_constraints_that_the_recipe_needs(name: str, of: str, specs: list[str]) -> None:
    step, args = model(of).target
    text = lower_for("cuda", recipe(name, of).by_user(step, args), args).as_text()
    constraints = [line for line in text.splitlines() if "sharding_constraint" in line]
    for spec in specs:
        assert any(spec in line for line in constraints), spec


@pytest.mark.parametrize("name", ["data parallel", "ZeRO-1", "FSDP", "data x tensor 2x4"])
def test_a_user_s_step_of_the_others_has_none(name: str) -> None:
    step, args = model("llama").target
    one = recipe(name)
    assert "sharding_constraint" not in lower_for("cuda", one.by_user(step, args), args).as_text()
    is_constrained = "sharding_constraint" in lower_for("cuda", one.by_expert(step, args), args).as_text()
    assert is_constrained == one.has_more_constraints


def test_no_device_holds_the_logits_of_a_split_vocabulary() -> None:
    """XLA's program for 8 devices has no dim of the whole vocabulary: neither logits nor embedding are gathered."""
    step, args = model("llama").target
    one = recipe("vocabulary split 2x4")
    text = one.by_user(step, args, make_mesh(one.mesh)).lower(*args).compile().as_text()
    shapes = set(re.findall(r"\w\d+\[([\d,]+)\]", text))
    assert not [shape for shape in shapes if str(VOCABULARY) in shape.split(",")]
    assert [shape for shape in shapes if str(VOCABULARY // 4) in shape.split(",")]


def test_sequence_parallelism_leaves_no_whole_activation_between_blocks() -> None:
    step, args = model("llama").target
    one = recipe("TP + SP 2x4")
    text = one.by_user(step, args, make_mesh(one.mesh)).lower(*args).compile().as_text()
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    assert "4,8,64" in shapes  # between blocks: 32 tokens over 4 devices
    assert not {"4,32,1"} & shapes  # no norm of all tokens on one device


CASES = [
    (of, name)
    for of in ("llama", "gpt2", "mixture")
    for name in CHOSEN
    if not (name.startswith(("expert", "EP")) and of != "mixture")
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("of", "name"), CASES)
def test_user_expert_and_kernels_give_the_result_of_plain_jit(of: str, name: str) -> None:
    step, args = model(of).target
    one, batch = recipe(name, of), model(of).make_batch(0)
    want_state, want_loss = reference(of)
    programs = {
        "user": one.by_user(step, args, make_mesh(one.mesh)),
        "expert": one.by_expert(step, args, make_mesh(one.mesh)),
        "kernels": priced(of, name).with_kernels(make_mesh(one.mesh)),
    }
    for way, jitted in programs.items():
        state, loss = jitted(jax.jit(model(of).create_state)(jax.random.key(0)), batch)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5, err_msg=way)
        for (path, got), want in zip(
            pinned.leaves(state.opt_state), jax.tree.leaves(want_state.opt_state), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-6, err_msg=f"{way} {path}")


@cache
def reference(of: str) -> tuple[Any, Any]:
    step = model(of).step
    return jax.jit(step)(jax.jit(model(of).create_state)(jax.random.key(0)), model(of).make_batch(0))


@cache
def priced(of: str, name: str) -> Priced:
    step, args = model(of).target
    return price(recipe(name, of), step, args, "h100-sxm")


def test_the_tuned_program_has_the_hand_s_shardings_and_no_scatter_in_the_loss() -> None:
    """The one-hot gradient, the recipe's own constraints, and nothing of the planner's."""
    step, args = model("llama").target
    one = priced("llama", "FSDP")
    user = lower_for("cuda", one.recipe.by_user(step, args), args).as_text()
    kernels = lower_for("cuda", one.with_kernels(), args).as_text()
    expert = lower_for("cuda", one.recipe.by_expert(step, args), args).as_text()
    assert user.count("stablehlo.scatter") == expert.count("stablehlo.scatter") > kernels.count("stablehlo.scatter")
    assert kernels.count("sharding_constraint") == expert.count("sharding_constraint") > 0
    tensors = {tensor.path: tensor.sharding for tensor in one.plan.inputs}
    assert str(tensors["state/params/lm_head/kernel"]) == "P(None, 'data')"


def test_column_reductions_of_a_plan_run_in_the_hand_s_program() -> None:
    one = priced("wide gpt2", "data x tensor 2x4")
    assert one.plan.unfused_reductions
    text = lower_for("cuda", one.with_kernels(), model("wide gpt2").target[1]).as_text()
    assert text.count("optimization_barrier") >= len(one.plan.unfused_reductions)


def test_combiner_limits_are_those_that_plans_set() -> None:
    plan = priced("llama", "FSDP").plan
    assert combiner_options(None, plan) == {}
    assert combiner_options(8, plan) == {
        f"xla_gpu_{kind}_combine_threshold_bytes": 8 << 20 for kind in ("all_gather", "all_reduce", "reduce_scatter")
    }


def test_a_price_needs_no_memory() -> None:
    assert priced("llama", "FSDP").price_s > 0 < priced("llama", "FSDP").peak_bytes
