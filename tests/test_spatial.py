"""Spatial parallelism as an assignment: chosen where it is the optimum, exact, with the predicted halos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.hardware.profile import HardwareProfile, load
from autopar.jax_interop.compilation import module_bytes
from autopar.pipeline.plan_files import load_plan
from autopar.plans.plan import Plan
from autopar.rules.halo_window import LocalWindow, Window
from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for
from autopar.transforms.program import program_of
from autopar.xla_compiler import hlo_collectives as hlo
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.hlo_collectives import Collective

Params = list[jax.Array]
Layer = tuple[tuple[int, int, int, int], dict[str, Any]]  # a kernel's shape, and how it is applied


def image_net(layers: Sequence[Layer], pool: bool = False) -> Callable[..., Any]:
    """A train step of convolutions with a rectifier between each two, towards a given image."""

    def forward(params: Params, image: jax.Array) -> jax.Array:
        for i, (kernel, (_, options)) in enumerate(zip(params, layers, strict=True)):
            numbers = ("NHWC", "HWIO", "NHWC")
            how: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": numbers} | options
            image = lax.conv_general_dilated(image if i == 0 else jax.nn.relu(image), kernel, **how)
            if pool and i == 0:
                image = lax.reduce_window(image, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return image

    def step(params: Params, image: jax.Array) -> tuple[Params, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(jnp.square(forward(p, image))))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


def shapes(layers: Sequence[Layer], batch: int, *size: int) -> tuple[Any, ...]:
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in layers]
    channels = layers[0][0][2] * layers[0][1].get("feature_group_count", 1)
    return params, jax.ShapeDtypeStruct((batch, *size, channels), jnp.float32)


def values(args: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32) / s.shape[-2] ** 0.5, args)


WIDE: list[Layer] = [((3, 3, 8, 64), {}), ((3, 3, 64, 64), {}), ((3, 3, 64, 8), {})]
#: Strides, dilation, two groups, one input channel to each output channel, patches.
MIXED: list[Layer] = [
    ((7, 5, 4, 16), {"window_strides": (2, 2)}),
    ((3, 3, 8, 16), {"feature_group_count": 2}),
    ((3, 3, 1, 16), {"feature_group_count": 16, "rhs_dilation": (2, 2)}),
    ((3, 3, 16, 8), {"padding": ((1, 1), (0, 2))}),
    ((2, 2, 8, 8), {"window_strides": (2, 2), "padding": "VALID"}),
]
GROUPS: list[Layer] = [((3, 3, 1024, 2048), {"feature_group_count": 2})] * 3


def compiled_collectives(gpus: Compiler, plan: Plan, step: Callable[..., Any], args: Any) -> list[Collective]:
    """Of the planned step, compiled for GPUs that are not there."""
    traced = program_of(step, args, carry=None, donate=None).trace
    module = module_bytes(lower_for("cuda", jit_plan(plan, traced, abstract_mesh(plan.mesh)), args))
    return list(hlo.collectives(gpus.compile(module, load("h100-sxm"), plan.mesh.num_devices, 1).hlo_text))


def sent(plan: Plan, kind: str) -> Counter[float]:
    """How often a collective of so many bytes is predicted."""
    return Counter(use.num_bytes for use in plan.collectives if use.kind == kind)


def run_both(plan: Plan, step: Callable[..., Any], args: Any) -> None:
    """The planned step on CPU devices, and the step as it is."""
    expected = jax.jit(step)(*values(args))
    got = autopar.parallelize(step, plan=plan)(*values(args))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def wide() -> Plan:
    return autopar.plan(image_net(WIDE), *shapes(WIDE, 1, 1024, 1024), num_devices=8, hardware="h100-sxm")


def test_one_large_image_is_split_along_its_height(wide: Plan) -> None:
    assert "spatial parallel" in wide.strategy and "data parallel" not in wide.strategy
    layers = [d for d in wide.decisions if d.primitive == "conv_general_dilated" and d.phase == "forward"]
    assert len(layers) == 3 and all(d.sharding.dims[1] and not d.sharding.dims[3] for d in layers)
    assert {use.kind for use in wide.collectives} == {"collective-permute", "all-reduce"}
    causes = Counter(use.cause for use in wide.collectives if use.kind == "collective-permute")
    # Forward once for each layer, which the kernels' gradients use again; backward for all layers but the first.
    assert causes["exchange the halo of `image`"] == 2 and causes.total() == 2 * (3 + 2)
    assert wide.outcome.status == "proven optimal"


def test_compiled_for_absent_gpus_the_halos_are_those_predicted(wide: Plan, absent_gpus: Compiler) -> None:
    found = compiled_collectives(absent_gpus, wide, image_net(WIDE), shapes(WIDE, 1, 1024, 1024))
    permutes = Counter(float(sum(one.result_bytes)) for one in found if one.kind == "collective-permute")
    assert permutes == sent(wide, "collective-permute")
    summed = sum(sum(one.result_bytes) for one in found if one.kind == "all-reduce")
    assert summed == sum(use.num_bytes for use in wide.collectives if use.kind == "all-reduce")
    assert {one.kind for one in found} == {"collective-permute", "all-reduce"}


def test_two_groups_are_split_over_two_devices(absent_gpus: Compiler) -> None:
    step, args = image_net(GROUPS), shapes(GROUPS, 1, 13, 13)
    plan = autopar.plan(step, *args, num_devices=2, hardware="h100-sxm")
    layers = [d for d in plan.decisions if d.primitive == "conv_general_dilated" and len(d.shape) == 4]
    assert all("data" in d.sharding.dims[3] for d in layers if d.shape[:3] == (1, 13, 13))
    assert not sent(plan, "all-gather") and not sent(plan, "collective-permute")
    found = compiled_collectives(absent_gpus, plan, step, args)
    assert all(one.kind == "all-reduce" and one.num_elements == 1 for one in found), found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("pinned", [P(None, "data"), P(None, None, "data")], ids=["height", "width"])
def test_a_split_image_gives_the_same_gradients(mesh: str, pinned: P) -> None:
    step, args = image_net(MIXED, pool=True), shapes(MIXED, 2, 128, 128)
    plan = autopar.plan(step, *args, mesh=mesh, hardware=cheap_links(), pin={"image": pinned})
    assert sent(plan, "collective-permute"), plan.strategy
    run_both(plan, step, args)


def test_groups_split_by_an_axis_of_two_give_the_same_gradients() -> None:
    layers: list[Layer] = [((3, 3, 8, 16), {"feature_group_count": 2}), ((3, 3, 8, 16), {"feature_group_count": 2})]
    step, args = image_net(layers), shapes(layers, 3, 13, 13)
    plan = autopar.plan(step, *args, mesh="2x4", hardware=cheap_links(), pin={"image": P(None, None, None, "data")})
    assert plan.regions
    run_both(plan, step, args)


def scanned(kernels: jax.Array, image: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A train step whose convolutions are the trips of a loop."""

    def loss(kernels: jax.Array) -> jax.Array:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            numbers = ("NHWC", "HWIO", "NHWC")
            return jnp.tanh(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)), None

        return jnp.mean(jnp.square(lax.scan(layer, image, kernels)[0]))

    value, gradient = jax.value_and_grad(loss)(kernels)
    return kernels - 0.1 * gradient, value


def test_halos_in_a_loop_are_sent_in_every_trip(absent_gpus: Compiler) -> None:
    args = jax.ShapeDtypeStruct((5, 3, 3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((1, 64, 64, 8), jnp.float32)
    plan = autopar.plan(scanned, *args, mesh="2x4", hardware=cheap_links(), pin={"image": P(None, ("data", "model"))})
    halos = [use for use in plan.collectives if use.kind == "collective-permute"]
    assert halos and {use.num_times for use in halos} == {5}
    run_both(plan, scanned, args)
    found = [one for one in compiled_collectives(absent_gpus, plan, scanned, args) if one.kind == "collective-permute"]
    num_bytes = sum(sum(one.result_bytes) * one.num_times for one in found)  # XLA sends some of them together
    assert num_bytes == sum(use.bytes_per_step for use in halos)


def cheap_links() -> HardwareProfile:
    """Devices that talk for nothing, so that even a small image is worth splitting."""
    h100 = load("h100-sxm")
    link = replace(h100.host_link, bytes_per_s=1e15, latency_s=1e-12)
    return replace(h100, host_link=link, collective_launch_s=1e-12, kernel_launch_s=1e-12)


def test_a_plan_with_regions_is_read_back(wide: Plan, tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    wide.save(path)
    loaded = load_plan(path)
    assert isinstance(loaded, Plan) and loaded.regions == wide.regions != ()


WINDOWS = {
    "same": (Window(32, 32, 1, 3, 1), 8, LocalWindow(1, 1, (0, 0), 0, 0, 6, (0, 0))),
    "strided": (Window(32, 16, 2, 3, 0, slack=1), 8, LocalWindow(0, 1, (0, 0), 0, 0, 5, (0, 0))),
    "gradient of strided": (Window(16, 32, 1, 3, 1, 2), 8, LocalWindow(0, 1, (0, 0), 0, 0, 3, (1, 0))),
    "patches": (Window(32, 8, 4, 4, 0, slack=3), 8, LocalWindow(0, 0, (0, 0), 0, 0, 4, (0, 0))),
    "parts that move": (Window(32, 30, 1, 3, 0), 2, LocalWindow(1, 1, (0, 0), 1, -1, 17, (0, 0))),
    "odd": (Window(31, 31, 1, 3, 1), 8, None),
    "beyond the neighbours": (Window(16, 16, 1, 7, 3), 8, None),
    "parts that differ": (Window(6, 9, 1, 3, 1, 2), 3, None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_what_one_device_reads(name: str) -> None:
    window, parts, expected = WINDOWS[name]
    assert window.local(parts) == expected
