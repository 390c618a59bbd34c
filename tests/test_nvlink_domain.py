"""NVLink domains of several hosts: which link devices use, what plans cost, and what XLA's compiler knows of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P
from test_inference_on_paper import FIELDS

import autopar
from autopar.calibration.calibration import Calibration, Machine, profile_table
from autopar.comparison.least_devices import meshes_of
from autopar.cost.collective_entry import link_of
from autopar.cost.collectives import collective_time, groupings
from autopar.errors import HardwareError
from autopar.hardware.profile import HardwareProfile, known_names, load
from autopar.inference.estimate.estimate import PaperInference, inference_on_paper
from autopar.inference.model.config import DecoderConfig
from autopar.ir.mesh import parse_mesh
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.search.transfer_prices import sent_s
from autopar.plans.plan import Plan
from autopar.report.all_reduce_table import price_all_reduce
from autopar.runtime.distributed.plan_agreement import with_hosts
from autopar.vector_search.estimate.estimate import estimate_search
from autopar.vector_search.estimate.sizes import SearchSpec
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.gpu_target import topology_text
from autopar.xla_model.latency_estimator import collective_seconds
from autopar.xla_replay import rates

H100 = load("h100-sxm")
FOLDER = Path(__file__).resolve().parent.parent / "cost_models" / "hardware"


UNMEASURED = replace(H100, xla_estimator=None)


def rack(domain: int | None = 72, base: HardwareProfile = H100) -> HardwareProfile:
    """GPUs on hosts of 4, in NVLink domains of this size."""
    return replace(base, devices_per_host=4, nvlink_domain_devices=domain)


# -- the profile ---------------------------------------------------------------------------------


def with_domain(value: str, folder: Path) -> Path:
    path = folder / "mine.toml"
    block = f'[links.nvlink_domain]\nsource = "datasheet"\ndate = "2026-11-26"\ndevices = {value}\n\n'
    path.write_text((FOLDER / "h100-sxm.toml").read_text().replace("[links.network]", block + "[links.network]"))
    return path


@pytest.mark.contract
def test_a_domain_is_one_host_by_default(tmp_path: Path) -> None:
    assert (H100.nvlink_domain_devices, H100.devices_per_domain) == (None, 8)
    assert replace(H100, devices_per_host=4).devices_per_domain == 4
    found = load(with_domain("32", tmp_path))
    assert (found.devices_per_host, found.nvlink_domain_devices, found.devices_per_domain) == (8, 32, 32)
    assert found.sources["links.nvlink_domain"] == "datasheet (2026-11-26)"
    assert replace(found, devices_per_host=3).devices_per_domain == 30, "whole hosts"
    assert replace(found, devices_per_host=64).devices_per_domain == 64, "a host is never divided"


@pytest.mark.contract
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("0", "`links.nvlink_domain.devices` must be a whole number of at least 1; got 0"),
        ("7.5", "`links.nvlink_domain.devices` must be a whole number of at least 1; got 7.5"),
        ('"rack"', "`links.nvlink_domain.devices` must be a whole number of at least 1; got 'rack'"),
        (
            "70",
            "`links.nvlink_domain.devices` must be a multiple of `links.host.devices_per_host`, 8, because a domain holds"
            " whole hosts; got 70: give 72, or leave [links.nvlink_domain] out if NVLink ends at the host",
        ),
    ],
)
def test_a_domain_without_whole_hosts_is_refused(value: str, rule: str, tmp_path: Path) -> None:
    path = with_domain(value, tmp_path)
    with pytest.raises(HardwareError) as error:
        load(path)
    assert str(error.value) == f"hardware profile {path}: {rule}"


@pytest.mark.contract
def test_a_domain_needs_a_source(tmp_path: Path) -> None:
    path = with_domain("72", tmp_path)
    head, block, rest = path.read_text().partition("[links.nvlink_domain]\n")
    path.write_text(head + block + rest.partition("\n")[2])
    with pytest.raises(HardwareError, match=r"lacks `links\.nvlink_domain\.source`"):
        load(path)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("num_devices", "domain"),
    [(4, 72), (72, 72), (80, 40), (120, 60), (128, 64), (144, 72), (1024, 64), (6, 72), (146, 72)],
)
def test_a_mesh_takes_equally_many_devices_of_each_domain(num_devices: int, domain: int) -> None:
    assert rack().domain_in(num_devices) == domain


@pytest.mark.contract
@pytest.mark.parametrize("name", [name for name in known_names() if name != "cpu-host"])
def test_the_replay_has_the_same_domain(name: str) -> None:
    assert rates.load(name).domain_size == load(name).devices_per_domain


def test_a_calibrated_profile_keeps_the_domain_of_its_base() -> None:
    machine = Machine("NVIDIA GB200", "gpu", 4, "here", {"jax": "0.12"}, "2026-11-26", "autopar calibrate")
    links = profile_table(Calibration(machine, rack(), (), ()), "mine")["links"]
    assert list(links) == ["host", "nvlink_domain", "network"]
    assert links["nvlink_domain"]["devices"] == 72
    assert "NOT measured: devices, taken from `h100-sxm`" in links["nvlink_domain"]["source"]
    assert "nvlink_domain" not in profile_table(Calibration(machine, H100, (), ()), "mine")["links"]


def test_the_visible_devices_limit_host_and_domain() -> None:
    assert jax.device_count() == 8
    found = with_hosts(rack())
    assert (found.devices_per_host, found.devices_per_domain) == (4, 8)
    assert with_hosts(H100).nvlink_domain_devices is None


# -- links and prices ----------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("text", ["72", "9x8", "18x4", "2x72", "2x64", "4x36", "8x16", "2x8x8", "10x8", "3x40", "76"])
@pytest.mark.parametrize("domain", [None, 8, 36, 72])
def test_workers_agree_with_a_count_of_every_group(text: str, domain: int | None) -> None:
    mesh, profile = parse_mesh(text), rack(domain)
    devices = np.arange(mesh.num_devices).reshape(mesh.axis_sizes) // profile.domain_in(mesh.num_devices)
    for axes in [(a,) for a in mesh.axis_names] + [mesh.axis_names[:2], mesh.axis_names]:
        places = [mesh.axis_names.index(axis) for axis in axes]
        groups = np.moveaxis(devices, places, range(len(places))).reshape(mesh.sizes(axes), -1).T
        counts = {tuple(sorted(Counter(group.tolist()).values())) for group in groups}
        found, link = groupings(axes, mesh, profile)[0], link_of(axes, mesh, profile)
        in_domain = all(len(count) == 1 for count in counts)
        assert (link == profile.host_link) == in_domain
        assert found.slowest_link == link
        if not in_domain and (found.num_local,) * found.num_hosts != (1,) * mesh.sizes(axes):
            assert counts == {(found.num_local,) * found.num_hosts}


@pytest.mark.contract
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"])
@pytest.mark.parametrize("num_bytes", [1e3, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("text", ["data=72", "data=9,model=8", "data=18,model=4", "data=2,model=36"])
def test_a_collective_is_no_dearer_in_a_larger_domain(kind: str, num_bytes: float, text: str) -> None:
    mesh = parse_mesh(text)
    for axes in [(axis,) for axis in mesh.axis_names] + [mesh.axis_names]:
        seconds = [collective_time(kind, num_bytes, axes, mesh, rack(domain)) for domain in (4, 8, 72)]
        assert seconds == sorted(seconds, reverse=True)
        four, eight, all_72 = (collective_seconds(kind, num_bytes, axes, mesh, rack(domain)) for domain in (4, 8, 72))
        assert all_72 <= min(four, eight), "by XLA's estimator"


def data_parallel_plan(profile: HardwareProfile) -> Plan:
    """One and the same plan for every domain: data parallelism, pinned."""
    program = programs.mlp(batch=72 * 512, width=1024, num_layers=2)
    pins = {"batch/*": P("data"), "state/*": P()}
    return autopar.plan(
        program.step, *program.abstract_args(), mesh="72", hardware=profile, pin=pins, per_microbatch_statistics=False
    )


def test_a_plan_is_cheaper_in_a_larger_domain() -> None:
    plans = [data_parallel_plan(rack(domain, H100)) for domain in (None, 8, 72)]
    assert len({tuple(one.sharding for one in plan.inputs) for plan in plans}) == 1
    assert len({tuple((use.kind, use.axes, use.num_bytes) for use in plan.collectives) for plan in plans}) == 1
    host, eight, all_72 = (plan.prediction.step_time_s for plan in plans)
    assert host > eight > all_72
    assert host > 1.2 * all_72


def test_the_planner_searches_meshes_whose_axes_span_hosts() -> None:
    """Eight GPUs in one domain are planned as if they were in one host, though they are in two."""
    program = programs.mlp(batch=64, width=4096, num_layers=2)
    rates = H100
    options: dict[str, Any] = {"num_devices": 8}
    in_domain = autopar.plan(program.step, *program.abstract_args(), hardware=rack(72, rates), **options)
    in_host = autopar.plan(program.step, *program.abstract_args(), hardware=rates, **options)
    apart = autopar.plan(program.step, *program.abstract_args(), hardware=rack(None, rates), **options)
    assert in_domain.strategy == in_host.strategy
    assert 0.9 * in_host.prediction.step_time_s <= in_domain.prediction.step_time_s <= in_host.prediction.step_time_s
    assert apart.prediction.step_time_s > 1.05 * in_domain.prediction.step_time_s


@pytest.mark.contract
def test_stages_of_one_domain_send_over_nvlink() -> None:
    here = SubmeshShape("h100-sxm", 1, 4)
    small, large = (Cluster((DeviceGroup("h100-sxm", hosts, 4),)) for hosts in (18, 36))

    def seconds(cluster: Cluster, domain: int | None, *, same_host: bool = False) -> float:
        return sent_s(1e9, here, here, same_host, cluster, {"h100-sxm": rack(domain)})

    assert seconds(small, 72) == seconds(small, None, same_host=True)
    assert seconds(small, None) == seconds(large, 72) > 5 * seconds(small, 72)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "text", "domain", "xla_us"),
    [
        ("all-reduce", 16 << 20, "a=2,b=4", 4, 829.21),
        ("all-reduce", 4, "a=2,b=4", 4, 119.008),
        ("all-reduce", 4 << 20, "a=2,b=16", 16, 293.556),
    ],
)
def test_xlas_estimate_between_domains_of_other_sizes(
    kind: str, num_bytes: float, text: str, domain: int, xla_us: float
) -> None:
    """XLA's log (JAX 0.12.0.1, microseconds) with `partition_size` and `gpus_per_node` of the domain."""
    found = collective_seconds(kind, num_bytes, ("a",), parse_mesh(text), rack(domain))
    assert found * 1e6 == pytest.approx(xla_us, rel=1e-3)


def test_estimates_of_a_search_follow_the_domain() -> None:
    spec = SearchSpec(num_vectors=10_000_000, dim=128, dtype="float32")
    options: dict[str, Any] = {"mesh": "16", "indexes": ("exact",)}
    inside, apart = (estimate_search(spec, hardware=rack(domain), **options).requested.plan for domain in (72, None))
    assert inside is not None and apart is not None
    assert inside.prediction.step_time_s < apart.prediction.step_time_s


@pytest.mark.slow
def test_estimates_of_inference_follow_the_domain() -> None:
    case = PaperInference(config=DecoderConfig.of(FIELDS))
    inside, apart = (
        inference_on_paper(case, mesh="model=8", hardware=rack(domain)).chosen.figures for domain in (72, None)
    )
    assert inside is not None and apart is not None
    assert inside.tpot_s < apart.tpot_s


@pytest.mark.contract
def test_candidate_meshes_have_an_axis_for_domains() -> None:
    assert [str(mesh) for mesh in meshes_of(72, rack())] == ["72"]
    assert [str(mesh) for mesh in meshes_of(128, rack())] == ["2x64", "128"]
    assert [str(mesh) for mesh in meshes_of(16, rack(None))] == ["4x4", "16"]


@pytest.mark.contract
def test_the_table_of_all_reduces_counts_domains() -> None:
    across, inside = price_all_reduce(parse_mesh("2x72"), rack())
    assert (across.group, across.workers.num_hosts, across.workers.num_local) == ("NVLink domain", 2, 1)
    assert (inside.group, inside.workers.num_hosts, inside.workers.num_local) == ("host", 18, 4)
    assert inside.workers.slowest_link == H100.host_link
    for axis in (across, inside):  # the price of the table is that of plans
        for k, size in enumerate(axis.sizes_bytes):
            cheapest = min(row.seconds[k] for row in axis.rows if row.in_backend)
            seconds = collective_time("all-reduce", size, (axis.axis,), parse_mesh("2x72"), rack())
            assert axis.planned_s[k] == pytest.approx(seconds)
            modelled = collective_time("all-reduce", size, (axis.axis,), parse_mesh("2x72"), rack(base=UNMEASURED))
            assert cheapest == pytest.approx(modelled)
    assert price_all_reduce(parse_mesh("2x8"), H100)[0].group == "host"


# -- XLA's compiler ------------------------------------------------------------------------------


@pytest.mark.contract
def test_a_slice_of_xlas_topology_is_a_domain() -> None:
    assert topology_text(H100, 16, 2) == "2x1x8"
    assert topology_text(rack(), 8, 2) == "1x2x4"
    assert topology_text(rack(), 128, 32) == "2x16x4"
    assert topology_text(rack(), 8, 1) == "1x1x8", "more GPUs in a host than the profile has"


class Unstarted(Compiler):
    """A compiler whose worker does nothing."""

    def _start(self) -> Any:
        return None

    def _end(self) -> None:
        self.ended = getattr(self, "ended", 0) + 1

    def _done(self, job: str) -> str:
        raise InterruptedError


@pytest.mark.usefixtures("gpu_compiler")
def test_xla_knows_the_devices_of_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    options = "--xla_gpu_analytical_latency_estimator_options"

    def flag(profile: HardwareProfile, num_devices: int, num_hosts: int) -> str:
        with pytest.raises(InterruptedError):
            compiler.compile(b"", profile, num_devices, num_hosts)
        return next(flag for flag in compiler.flags if flag.startswith(options)).partition("=")[2]

    compiler = Unstarted(platform=None)
    assert flag(rack(), 8, 2) == flag(H100, 4, 1) == flag(H100, 16, 2) == "partition_size=8"
    assert getattr(compiler, "ended", 0) == 0, "no worker is started again"
    assert flag(rack(), 16, 4) == "partition_size=16,gpus_per_node=16"
    assert flag(rack(), 8, 2) == "partition_size=16,gpus_per_node=16", "one domain anyway"
    assert flag(rack(), 128, 32) == "partition_size=64,gpus_per_node=64"
    assert flag(H100, 16, 2) == "partition_size=8"
    assert flag(H100, 8, 2) == "partition_size=4,gpus_per_node=4"
    compiler.close()


@pytest.mark.slow
def test_two_hosts_of_one_domain_are_one_slice_to_xla(absent_gpus: Compiler) -> None:
    """8 GPUs on 2 hosts of a GB200 NVL72: XLA compiles the step for one slice."""
    program = programs.mlp(batch=4096, width=1024, num_layers=2)
    result = autopar.verify(
        program.step,
        *program.abstract_args(),
        mesh="host=2,gpu=4",
        hardware="gb200-nvl72",
        pin={"batch/*": P(("host", "gpu"))},
        compiler=absent_gpus,
    )
    assert result.topology == "1x2x4"
    assert result.compiled.hosts == (0,) * 4 + (1,) * 4
    assert any(flag.endswith("partition_size=8") for flag in result.compiled.flags)
    assert result.collectives and [match.name for match in result.collectives if not match.figure.holds] == []
    assert result.times.estimate_errors == ("a GPU without measured tables",)
    assert result.times.replay is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gb300-nvl72", "b300", "l40s", "a100-pcie-80", "h100-nvl"])
def test_xla_compiles_a_sharded_step(name: str, absent_gpus: Compiler) -> None:
    program = programs.mlp(batch=4096, width=512, num_layers=2)
    result = autopar.verify(
        program.step,
        *program.abstract_args(),
        mesh="2x4",
        hardware=name,
        pin={"batch/*": P(("data", "model"))},
        compiler=absent_gpus,
    )
    assert result.collectives and [match.name for match in result.collectives if not match.figure.holds] == []
