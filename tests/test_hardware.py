"""The committed hardware profiles are complete and plausible, and every error in a profile is explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import HardwareError
from autopar.hardware import profile as hardware
from autopar.rules.elementwise import FLOPS_PER_ELEMENT

FOLDER = Path(__file__).resolve().parent.parent / "cost_models" / "hardware"
NAMES = (
    "a100-pcie-80",
    "a100-sxm-40",
    "a100-sxm-80",
    "b200",
    "b300",
    "cpu-host",
    "gb200-nvl72",
    "gb300-nvl72",
    "h100-nvl",
    "h100-sxm",
    "h200",
    "l40s",
    "v100-sxm-16",
    "v100-sxm-32",
)
GPUS = tuple(name for name in NAMES if name != "cpu-host")
pytestmark = pytest.mark.contract


def test_the_profiles_there_are():
    assert hardware.known_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_loads_by_name_and_by_path(name: str):
    profile = hardware.load(name)
    assert profile.name == name
    assert profile == hardware.load(FOLDER / f"{name}.toml") == hardware.load(str(FOLDER / f"{name}.toml"))
    assert hash(profile) == hash(hardware.load(name)), "cost functions may memoise by profile"


@pytest.mark.parametrize("name", NAMES)
def test_units_are_sane(name: str):
    p = hardware.load(name)
    assert set(p.peak_flops_per_s) == set(hardware.MATRIX_DTYPES)
    assert all(1e9 <= rate <= 1e16 for rate in p.peak_flops_per_s.values())
    assert p.peak_flops_per_s["float64"] <= p.peak_flops_per_s["float32"]
    assert (
        p.peak_flops_per_s["float32"] <= p.peak_flops_per_s["int8"] or "b300" in name
    )  # Blackwell Ultra has few units
    assert 1e9 <= p.vector_flops_per_s <= 1e15
    assert 0.5 <= p.compute_efficiency <= 1
    assert 1e-6 <= p.kernel_launch_s <= 1e-4
    assert 4e9 <= p.hbm_bytes <= 1e12
    assert p.usable_bytes == p.hbm_bytes * p.usable_fraction
    assert 1e9 <= p.hbm_bytes_per_s <= 1e14
    assert 1e5 <= p.near_cache_bytes < p.cache_bytes < p.hbm_bytes / 100
    assert set(p.operations) == set(hardware.OPERATIONS)
    assert all(1 <= count <= 3000 for count in p.operations.values())
    assert p.flops_per_element("sub", "float32") == p.flops_per_element("add", "float32") == p.operations["add"]
    assert p.flops_per_element("never_heard_of", "float32") == p.operations["default"]
    assert p.flops_per_element("exp", "bfloat16") == p.operations["exp_bfloat16"]
    for link in (p.host_link, p.network_link):
        assert 1e8 <= link.bytes_per_s <= p.hbm_bytes_per_s
        assert 1e-7 <= link.latency_s <= 1e-3
    assert p.network_link.bytes_per_s < p.host_link.bytes_per_s
    assert p.devices_per_domain >= 8 or name == "h100-nvl", "a bridge joins two GPUs"
    assert p.host_link_kind in hardware.LINK_KINDS
    assert (p.host_link_kind == "memory") == (p.platform == "cpu")
    assert 1e8 <= p.storage_write_bytes_per_s <= p.storage_read_bytes_per_s <= 1e12
    assert 1e-6 <= p.collective_launch_s <= 1e-3
    assert p.combine_threshold_bytes >= 1e6


@pytest.mark.parametrize("name", NAMES)
def test_every_block_has_a_source_and_a_date(name: str):
    sources = hardware.load(name).sources
    blocks = {"compute", "operations", "memory", "links.host", "links.network", "storage", "collectives"}
    assert set(sources) == blocks | ({"links.nvlink_domain"} if name.endswith("nvl72") else set())
    assert all(re.search(r"\w{4}.* \(\d{4}-\d\d-\d\d\)$", source) for source in sources.values())


@pytest.mark.parametrize("name", GPUS)
def test_the_xla_target_agrees_with_the_profile(name: str):
    p = hardware.load(name)
    assert p.xla_target is not None
    assert p.xla_target["device_memory_size"] == p.hbm_bytes
    assert p.xla_target["memory_bandwidth"] == pytest.approx(p.hbm_bytes_per_s)


@pytest.mark.parametrize("name", ["a100-sxm-80", "b200", "h100-sxm", "h200", "v100-sxm-16"])
def test_the_xla_target_is_the_one_that_compiles(name: str, shared_dir: Path):
    target = hardware.load(name).xla_target
    assert target is not None
    text = (shared_dir / "xla_gpu_targets" / f"{name.replace('-', '_')}.txtpb").read_text()
    info = text.split("matrix_unit_description")[0].split("scalar_unit_description")[0]
    scalars = dict(re.findall(r"(\w+): (\d+(?:\.\d+)?)\n", info))
    assert len(scalars) > 15
    assert {key: float(value) for key, value in scalars.items()} == {key: float(target[key]) for key in scalars}
    rates = re.findall(r"key: (\d+) value { clock_rate_ghz: (\S+) units_per_core: (\d+) ops_per_clock: (\d+)", text)
    rows = [*target.get("scalar_unit_description", ()), *target.get("matrix_unit_description", ())]
    assert [[float(x) for x in row] for row in rates] == [[float(x) for x in row] for row in rows]


def test_a_cpu_has_no_xla_target():
    assert hardware.load("cpu-host").xla_target is None


def test_matrix_rates_by_dtype():
    p = hardware.load("h100-sxm")
    peak = {dtype: rate * p.compute_efficiency for dtype, rate in p.peak_flops_per_s.items()}
    assert p.matrix_rate("bfloat16") == peak["bfloat16"] == 2 * peak["float32"]
    assert p.matrix_rate("float8_e4m3fn") == p.matrix_rate("float8_e5m2") == peak["float8"]
    assert p.matrix_rate("uint8") == peak["int8"]
    assert p.matrix_rate("complex64") == peak["float32"]
    assert p.matrix_rate("int32") == p.matrix_rate("never_heard_of") == p.vector_flops_per_s


@pytest.mark.parametrize(
    ("device_kind", "platform", "name"),
    [
        ("cpu", "cpu", "cpu-host"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100-sxm"),
        ("nvidia h100 80gb hbm3", "cuda", "h100-sxm"),
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA B200", "gpu", "b200"),
        ("NVIDIA B300 SXM6 AC", "gpu", "b300"),
        ("NVIDIA GB200", "gpu", "gb200-nvl72"),
        ("NVIDIA GB300", "gpu", "gb300-nvl72"),
        ("NVIDIA H100 NVL", "gpu", "h100-nvl"),
        ("NVIDIA L40S", "gpu", "l40s"),
        ("NVIDIA A100 80GB PCIe", "gpu", "a100-pcie-80"),
        ("NVIDIA A100-SXM4-40GB", "gpu", "a100-sxm-40"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "a100-sxm-80"),
        ("Tesla V100-SXM2-16GB", "gpu", "v100-sxm-16"),
        ("Tesla V100-SXM2-32GB", "gpu", "v100-sxm-32"),
    ],
)
def test_detection(device_kind: str, platform: str, name: str):
    assert hardware.detect(device_kind, platform) == name


def test_no_device_kind_means_two_profiles():
    kinds = [kind.lower() for name in NAMES for kind in hardware.load(name).device_kinds]
    assert len(kinds) == len(set(kinds))


def test_an_undetected_device_is_named_with_the_way_out():
    with pytest.raises(HardwareError) as error:
        hardware.detect("TPU v5p", "tpu")
    assert str(error.value) == (
        "no hardware profile for a tpu device of kind 'TPU v5p'; pass hardware= one of "
        + ", ".join(NAMES)
        + ", or describe yours in a TOML file (cost_models/README.md) and pass its path"
    )


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("h100", " Did you mean 'h100-nvl' or 'h100-sxm'?"),  # by likeness alone it would be h200
        ("gb200", " Did you mean 'gb200-nvl72'?"),
        ("H100-SXM", " Did you mean 'h100-sxm'?"),
        ("h100-smx", " Did you mean 'h100-sxm'?"),
        ("a100", " Did you mean 'a100-pcie-80' or 'a100-sxm-40' or 'a100-sxm-80'?"),
        ("quantum", ""),
        ("", ""),
    ],
)
def test_an_unknown_name_lists_the_known_ones_and_the_closest(asked: str, hint: str):
    with pytest.raises(HardwareError) as error:
        hardware.load(asked)
    assert str(error.value) == (
        f"unknown hardware {asked!r}.{hint} Known: {', '.join(NAMES)};"
        " or describe yours in a TOML file (cost_models/README.md) and pass its path"
    )


def test_a_missing_file_is_named(tmp_path: Path):
    path = tmp_path / "mine.toml"
    with pytest.raises(HardwareError, match=re.escape(f"cannot read hardware profile {path}: No such file")):
        hardware.load(path)


def test_damaged_toml_names_file_and_line(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[compute\n')
    with pytest.raises(HardwareError, match=rf"hardware profile {re.escape(str(path))} is not valid TOML: .*line 2"):
        hardware.load(path)


def _keys(table: dict[str, Any], prefix: str = "") -> list[str]:
    own = [f"{prefix}{key}" for key, value in table.items() if not isinstance(value, dict)]
    nested = [_keys(value, f"{prefix}{key}.") for key, value in table.items() if isinstance(value, dict)]
    return own + [key for keys in nested for key in keys]


#: What a user's file may go without, and no committed one.
DERIVED = ("memory.cache_bytes", "memory.near_cache_bytes")
REQUIRED = [k for k in _keys(tomllib.loads((FOLDER / "cpu-host.toml").read_text())) if k not in DERIVED]


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_profile_states_what_another_may_derive(name: str):
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    assert set(table["operations"]) == {"source", "date", *hardware.OPERATIONS}
    assert {"cache_bytes", "near_cache_bytes"} <= set(table["memory"])


@pytest.mark.parametrize("name", ["v100-sxm-16", "cpu-host"])
def test_a_profile_of_before_has_what_is_derived(name: str, tmp_path: Path):
    whole, text = hardware.load(name), (FOLDER / f"{name}.toml").read_text()
    for key in DERIVED:
        text = _without(text, key)
    head, _, rest = text.partition("[operations]\n")
    (tmp_path / "mine.toml").write_text(head + rest[rest.index("[memory]") :])
    found = hardware.load(tmp_path / "mine.toml")
    caches = (whole.cache_bytes, whole.near_cache_bytes) if whole.xla_target else (0, 0)
    assert (found.cache_bytes, found.near_cache_bytes) == caches
    assert [found.operations[one] for one in ("default", "add", "div", "tanh", "exp_bfloat16")] == [1, 1, 4, 10, 10]
    assert set(found.operations) == set(hardware.OPERATIONS)
    assert "default counts of the rules" in found.sources["operations"]


def test_the_default_counts_are_those_of_the_rules():
    counts = FLOPS_PER_ELEMENT | {"default": 1.0, "integer_pow": 1.0, "random_bits": FLOPS_PER_ELEMENT["threefry2x32"]}
    assert {name: counts[name.removesuffix("_bfloat16")] for name in hardware.OPERATIONS} == hardware.OPERATIONS


def _without(text: str, key: str) -> str:
    """The file without the line of one dotted key."""
    block, _, leaf = key.rpartition(".")
    head, bracket, rest = text.partition(f"[{block}]\n") if block else ("", "", text)
    assert re.search(rf"^{leaf} = ", rest, re.MULTILINE)
    return head + bracket + re.sub(rf"^{leaf} = .*\n", "", rest, count=1, flags=re.MULTILINE)


@pytest.mark.parametrize("key", REQUIRED)
def test_every_key_is_required_and_named_where_missing(key: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(_without((FOLDER / "cpu-host.toml").read_text(), key))
    with pytest.raises(HardwareError) as error:
        hardware.load(path)
    assert str(error.value) == (
        f"hardware profile {path} lacks `{key}`; cost_models/README.md lists every key and its unit"
    )


def test_a_missing_block_is_named_by_its_first_key(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "cpu-host.toml").read_text().replace("[links.network]", "[links.wires]"))
    with pytest.raises(HardwareError, match=r"lacks `links\.network\.bytes_per_s`"):
        hardware.load(path)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("hbm_bytes_per_s", "0", "`memory.hbm_bytes_per_s` must be a number above 0; got 0"),
        ("hbm_bytes_per_s", '"fast"', "`memory.hbm_bytes_per_s` must be a number above 0; got 'fast'"),
        ("hbm_bytes_per_s", "inf", "`memory.hbm_bytes_per_s` must be a number above 0; got inf"),
        ("hbm_bytes_per_s", "true", "`memory.hbm_bytes_per_s` must be a number above 0; got True"),
        ("hbm_bytes", "0.5", "`memory.hbm_bytes` must be a whole number of at least 1; got 0.5"),
        ("launch_s", "-1e-6", "`collectives.launch_s` must be a number of at least 0; got -1e-06"),
        ("usable_fraction", "75", "`memory.usable_fraction` must be a number above 0 and at most 1; got 75"),
        ("device_kinds", '"cpu"', "`device_kinds` must be a list of texts; got 'cpu'"),
        ("description", '""', "`description` must be text; got ''"),
        ("kind", '"rope"', "`links.host.kind` must be one of nvswitch, nvlink, pcie, memory; got 'rope'"),
        ("read_bytes_per_s", "0", "`storage.read_bytes_per_s` must be a number above 0; got 0"),
    ],
)
def test_a_senseless_value_is_named_with_its_rule(key: str, value: str, rule: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    text = re.sub(rf"^{key} = .*$", f"{key} = {value}", (FOLDER / "cpu-host.toml").read_text(), flags=re.MULTILINE)
    path.write_text(text)
    with pytest.raises(HardwareError) as error:
        hardware.load(path)
    assert str(error.value) == f"hardware profile {path}: {rule}"


def test_missing_data_folder_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "PACKAGE", tmp_path / "autopar")
    with pytest.raises(HardwareError, match=r"the hardware profiles are missing: looked in .* reinstall autopar"):
        hardware.known_names()


def test_data_inside_the_wheel_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inside = tmp_path / "autopar" / "cost_models" / "hardware"
    beside = tmp_path / "cost_models" / "hardware"
    for folder, name in ((inside, "inside"), (beside, "beside")):
        folder.mkdir(parents=True)
        (folder / f"{name}.toml").touch()
    monkeypatch.setattr(hardware, "PACKAGE", tmp_path / "autopar")
    assert hardware.known_names() == ("inside",)
