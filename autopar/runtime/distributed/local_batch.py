"""Make global arrays from local data: a process's share of the examples, or equal whole values on every process.

In: host arrays (anything that `numpy.asarray` takes), the plan's tensors, and their shardings.
Out: global arrays with the planned shardings. A process gives the whole of a tensor or its share: one equal part of the
first dim per process, in process order, independent of the plan. If the plan keeps a share on its process's devices,
nothing moves; else devices exchange it. Whole values must be equal on all processes, which is checked for the first
batch.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import BatchError
from autopar.plans.records import TensorPlan
from autopar.runtime.distributed.exchange import Exchange, Given, named

_LOG = logging.getLogger("autopar")

#: A function from this process's share and the whole's shape to the whole array.
Gather = Callable[[np.ndarray, tuple[int, ...]], jax.Array]


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of one tensor of the plan.

    Args:
        num_shares: the number of processes that give shares.
        stays: whether the plan keeps each process's share on its own devices.
        gather: a function that gathers the shares, for a pipelined step in which some processes have no part of the
            array.
    """

    tensor: TensorPlan
    sharding: NamedSharding
    num_shares: int
    stays: bool
    gather: Gather | None = None

    @classmethod
    def of(cls, tensor: TensorPlan, sharding: NamedSharding, gather: Gather | None = None) -> Place:
        if gather is not None:
            return cls(tensor, sharding, jax.process_count(), stays=False, gather=gather)
        processes = sorted({device.process_index for device in sharding.device_set})
        return cls(tensor, sharding, len(processes), _stays(sharding, tensor.shape, processes))

    @property
    def share_shape(self) -> tuple[int, ...] | None:
        """The shape of a process's share; None if the tensor has no shares."""
        shape, count = self.tensor.shape, self.num_shares
        if count == 1 or not shape or shape[0] % count:
            return None
        return (shape[0] // count, *shape[1:])

    def problem(self, array: Any, *, shares: bool) -> str | None:
        """Why an array does not fit this tensor, as text; None if it fits."""
        tensor, shape, dtype = self.tensor, tuple(array.shape), _canonical(array.dtype)
        if dtype != tensor.dtype:
            return f"`{tensor.path}` is {dtype}, and the plan was made for {tensor.dtype}: convert it first"
        if shape == tensor.shape or (shares and shape == self.share_shape):
            return None
        text = f"`{tensor.path}` has shape {shape}, and the plan takes"
        if not shares or self.num_shares == 1:
            return f"{text} {tensor.shape}"
        if self.share_shape is None:
            return f"{text} the whole, {tensor.shape}: its first dim has no equal parts for {self.num_shares} processes"
        return (
            f"{text} {self.share_shape}, the share of each of {self.num_shares} processes, or the whole, {tensor.shape}"
        )

    def is_share(self, array: Any) -> bool:
        return tuple(array.shape) != self.tensor.shape

    def global_array(self, array: Any) -> jax.Array:
        """The global array from this process's share or the whole; the host array if each stage takes its own part."""
        if self.gather is not None and not self.is_share(array):
            return array
        if _is_key(array):
            words = np.asarray(jax.random.key_data(array))
            shape = (*self.tensor.shape, *words.shape[len(array.shape) :])
            return jax.random.wrap_key_data(self._laid_out(words, shape), impl=jax.random.key_impl(array))
        return self._laid_out(np.asarray(array, dtype=self.tensor.dtype), self.tensor.shape)

    def _laid_out(self, array: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
        if self.gather is not None:
            return self.gather(array, shape)
        if self.stays or array.shape == shape:
            return jax.make_array_from_process_local_data(self.sharding, array, shape)
        assert isinstance(self.sharding.mesh, Mesh)
        devices = sorted(self.sharding.mesh.devices.flat, key=lambda d: (d.process_index, d.id))
        by_process = Mesh(np.array(devices, dtype=object).reshape(self.num_shares, -1), ("process", "local"))
        given = NamedSharding(by_process, PartitionSpec("process"))
        return jax.device_put(jax.make_array_from_process_local_data(given, array, shape), self.sharding)


def _stays(sharding: NamedSharding, shape: tuple[int, ...], processes: Sequence[int]) -> bool:
    """Whether each process's devices hold parts of its own share only."""
    if not shape or shape[0] % len(processes):
        return False
    share = shape[0] // len(processes)
    order = {process: n for n, process in enumerate(processes)}
    for device, index in sharding.devices_indices_map(shape).items():
        start, stop, _ = index[0].indices(shape[0])
        n = order[device.process_index]
        if start < n * share or stop > (n + 1) * share:
            return False
    return True


def _canonical(dtype: Any) -> str:
    """A dtype as JAX converts it: `float64` is `float32` unless 64 bits are enabled."""
    extended = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    return str(dtype if extended else jax.dtypes.canonicalize_dtype(dtype))


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and bool(jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key))


def is_global(leaf: Any) -> bool:
    """Whether an array spans several processes already."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def on_host(leaf: Any, path: str) -> Any:
    """A leaf as a NumPy array: from NumPy, a torch or TensorFlow tensor, or a local JAX array.

    Raises:
        BatchError: NumPy cannot convert it.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        array = np.asarray(leaf)
    except Exception as error:
        raise BatchError(f"`{path}` is of type {type(leaf).__name__}, which NumPy cannot convert: {error}") from None
    if array.dtype == object:
        raise BatchError(f"`{path}` is of type {type(leaf).__name__}, which NumPy cannot convert to numbers")
    return array


def lay_out(
    places: Sequence[Place], leaves: Sequence[Any], exchange: Exchange | None, what: str, *, shares: bool, check: bool
) -> list[jax.Array]:
    """Make global arrays from local ones.

    Args:
        leaves: one array per place.
        what: the purpose, for error messages; the same on every process.
        shares: whether shares are allowed, or only whole arrays.
        check: whether to compare the arrays of all processes; then every process must call this.

    Raises:
        BatchError: a shape or dtype differs from the plan's, or values that must be equal differ. With `check`, on
            every process, with the names of the differing ones.
    """
    arrays: list[Any] = []
    problems: list[str] = []
    for place, leaf in zip(places, leaves, strict=True):
        try:
            arrays.append(on_host(leaf, place.tensor.path))
            problem = None if is_global(leaf) else place.problem(arrays[-1], shares=shares)
        except BatchError as error:
            problem = str(error)
        problems += [] if problem is None else [problem]
    if check and exchange is not None:
        exchange.judged(what, _description(places, arrays, problems), _fit_together)
    if problems:
        raise BatchError(f"{what}: {'; '.join(problems)}")
    pairs = zip(places, arrays, strict=True)
    return [array if is_global(array) else place.global_array(array) for place, array in pairs]


def check_equal(exchange: Exchange, what: str, leaves: Mapping[str, Any]) -> None:
    """Refuse host values, given by path, that differ between processes.

    Raises:
        BatchError: on every process, with the differing paths and processes.
    """
    digests = {path: [False, digest(on_host(leaf, path))] for path, leaf in leaves.items() if not is_global(leaf)}
    exchange.judged(what, {"problems": [], "leaves": digests}, _fit_together)


def _description(places: Sequence[Place], arrays: Sequence[Any], problems: Sequence[str]) -> dict[str, Any]:
    if problems:
        return {"problems": list(problems), "leaves": {}}
    pairs = [(place, array) for place, array in zip(places, arrays, strict=True) if not is_global(array)]
    leaves = {place.tensor.path: [place.is_share(array), digest(array)] for place, array in pairs}
    return {"problems": [], "leaves": leaves}


def digest(leaf: Any) -> str:
    """A digest of an array's type and content."""
    array = np.ascontiguousarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    content = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    content.update(array.reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def _fit_together(given: Sequence[Given]) -> None:
    """Refuse shares that do not form a whole."""
    wrong = [one for one in given if one.value["problems"]]
    if wrong:
        raise BatchError("; ".join(f"{one.by}: {'; '.join(one.value['problems'])}" for one in wrong[:4]))
    first, *others = given
    all_shares = [name for name, (is_share, _) in first.value["leaves"].items() if is_share]
    for path, (is_share, content) in first.value["leaves"].items():
        differing_kind = [one.by for one in others if one.value["leaves"].get(path, [None])[0] != is_share]
        if differing_kind:
            kinds = ("the whole", "a share")
            raise BatchError(
                f"`{path}`: {first.by} gave {kinds[is_share]}, but {named(differing_kind)} {kinds[not is_share]}: all must"
                " give the same"
            )
        differing = [one.by for one in others if one.value["leaves"][path][1] != content]
        if differing and not is_share:
            raise BatchError(
                f"`{path}` must be equal on every process, as each gives the whole of it, but {named(differing)} gave"
                f" other values than {first.by}: use the same seed and data on every process; or, for examples, give each"
                " process's share of the first dim to `shard_batch`"
            )
    if all_shares and all(
        one.value["leaves"][path][1] == first.value["leaves"][path][1] for one in others for path in all_shares
    ):
        _LOG.warning(
            "every process gave the same %s: is the data split by process? Its shares should be different examples",
            ", ".join(f"`{path}`" for path in all_shares[:3]),
        )
