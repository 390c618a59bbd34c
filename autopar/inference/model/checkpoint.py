"""A model's folder, as Hugging Face writes it, and its weights on devices.

In: `config.json`, and `model.safetensors` or several files with an index. Out: the decoder's parameters, each laid out as
somebody (a plan) says. They are read slice by slice: no tensor is whole on the host, unless a device wants it whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Sharding
from numpy.typing import NDArray

from autopar.errors import ModelError
from autopar.inference.model import parameter_names as names
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.decoder import Decoder
from autopar.inference.model.safetensors import DTYPES, StoredTensor, read_header, write_file
from autopar.inference.model.sharded_load import lay_out

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LISTED = 5  # of names in an error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, checked: every parameter is there, in its shape, and nothing else is.

    Args:
        tensors: by the path of the parameter, which is a part of the tensor.
    """

    folder: Path
    config: DecoderConfig
    tensors: Mapping[names.Path, tuple[names.Source, StoredTensor]]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Read what the folder holds; no weights are read.

        Raises:
            ModelError: what is missing, damaged, surplus, of another shape or not supported.
        """
        folder = Path(folder)
        config = DecoderConfig.read(folder)
        stored = _stored(folder)
        sources = _sources(config)
        # A checkpoint of the bare model has no prefix. The embedding, which every one has, tells.
        prefix = names.prefix(config)
        embedding = sources["embed", "weight"].name
        if embedding not in stored and embedding.removeprefix(prefix) in stored:
            stored = {name if name == names.HEAD else prefix + name: tensor for name, tensor in stored.items()}
        _check(folder, config, sources, stored)
        return cls(folder, config, {path: (source, stored[source.name]) for path, source in sources.items()})

    @property
    def model(self) -> Decoder:
        """The decoder whose parameters these are."""
        return Decoder(self.config)

    def abstract_params(self, dtype: Any = None) -> Any:
        """Shapes and dtypes of what `load` returns, to plan with.

        Args:
            dtype: of all parameters; by default as they are stored.
        """
        return _tree(
            {
                path: jax.ShapeDtypeStruct(source.shape, _dtype(tensor, dtype))
                for path, (source, tensor) in self.tensors.items()
            }
        )

    def load(self, shardings: Any = None, dtype: Any = None, progress: Callable[[str, int], None] | None = None) -> Any:
        """The parameters, which `model.apply` takes.

        Args:
            shardings: a sharding for each parameter, in a tree like `abstract_params()`, as a plan's `in_shardings` has
                it; or one for all. By default all lie on the first device.
            dtype: as of `abstract_params`. progress: called with a parameter's path and the bytes of a slice read.

        Raises:
            ModelError: `shardings` are not of these parameters; a tensor's dtype is not supported.
        """
        wanted = self.abstract_params(dtype)
        if shardings is None:
            shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if isinstance(shardings, Sharding):
            shardings = jax.tree.map(lambda _: shardings, wanted)
        if jax.tree.structure(shardings) != jax.tree.structure(wanted):
            raise ModelError(
                f"the shardings to load {self.folder} into are not a tree like its parameters. Take those of a plan whose"
                " step was given `abstract_params()`: `plan.in_shardings(mesh)[0]`"
            )
        by_path: Any = traverse_util.flatten_dict(shardings["params"])
        loaded = {}
        for path, (source, tensor) in self.tensors.items():
            report = partial(progress, "/".join(path)) if progress is not None else None
            view = source.view(tensor.mapped())
            loaded[path] = lay_out(view, _dtype(tensor, dtype), by_path[path], report)
        return _tree(loaded)


def write_checkpoint(
    folder: str | os.PathLike[str],
    fields: Mapping[str, Any],
    seed: int = 0,
    dtype: str = "F32",
    max_file_bytes: int = 5 * 1024**3,
) -> None:
    """Write a model with random weights in the real format, to test and to measure with.

    The weights are such that values neither vanish nor grow from layer to layer. Tensors are made and written one by one.

    Args:
        folder: is made, whole or not at all. fields: of its `config.json`.
        dtype: "F32", "BF16", "F16" or "F64". max_file_bytes: where there is more than this, there are several files.

    Raises:
        ModelError: fields are not supported, the folder is there already, or it cannot be written.
    """
    target, config = Path(folder), DecoderConfig.of(fields)
    if dtype not in DTYPES:
        raise ModelError(f"weights cannot be written as {dtype!r}; give one of {', '.join(DTYPES)}")
    if target.exists():
        raise ModelError(f"{target} is there already. Give the name of a folder that is not")
    sources = {source.name: (path, source) for path, source in _sources(config).items()}
    shapes = {name: source.stored_shape for name, (_, source) in sources.items()}

    def make(name: str) -> NDArray[Any]:
        path, source = sources[name]
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(
            source.stored_shape, dtype=np.float32
        )
        around = 1 if path[-2].endswith("norm") and path[-1] == "weight" else 0
        return around + noise / math.sqrt(config.hidden_size)

    unfinished: Path | None = None
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        text = json.dumps({**fields, "torch_dtype": DTYPES[dtype].name}, indent=2)
        (unfinished / "config.json").write_text(text, encoding="utf-8")
        _write_files(unfinished, shapes, dtype, max_file_bytes, make)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _sources(config: DecoderConfig) -> dict[names.Path, names.Source]:
    """Where each of a decoder's parameters lies. Layers are alike, so one is traced for all."""
    shapes: Any = jax.eval_shape(
        Decoder(replace(config, num_layers=1)).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    )
    sources: dict[names.Path, names.Source] = {}
    flat: Any = traverse_util.flatten_dict(shapes["params"])
    for path, leaf in flat.items():
        of_layers = [(f"layers_{layer}", *path[1:]) for layer in range(config.num_layers)]
        for each in of_layers if path[0] == "layers_0" else [path]:
            sources[each] = names.source(config, each, leaf.shape)
    return sources


def _tree(by_path: Mapping[names.Path, Any]) -> Any:
    return {"params": traverse_util.unflatten_dict(dict(by_path))}


def _dtype(tensor: StoredTensor, dtype: Any) -> Any:
    """What a tensor is on devices; where JAX has no float64, float32 of that."""
    return jax.dtypes.canonicalize_dtype(dtype or DTYPES.get(tensor.dtype, np.float32))


def _stored(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, by name; of several files each that the index says."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists() or not index.exists():
        if not single.exists():
            raise ModelError(
                f"{folder} has neither {_SINGLE} nor {_INDEX}. Weights in another format (pytorch_model.bin) can be"
                " converted: `save_pretrained(folder, safe_serialization=True)` of `transformers`"
            )
        return read_header(single)
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        outside = [file for file in files.values() if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} cannot be read ({error!r}). Copy it again from where it came from") from None
    if outside:
        raise ModelError(f"{index} names {outside[0]!r}, which is no file of its folder. Files are given by name alone")
    by_file = {file: read_header(folder / file) for file in sorted(set(files.values()))}
    lost = [(name, file) for name, file in files.items() if name not in by_file[file]]
    if lost:
        name, file = lost[0]
        raise ModelError(
            f"{folder / file} has no `{name}`, which {_INDEX} says it holds. The files are not of one checkpoint: copy"
            " all of them again"
        )
    return {name: tensor for tensors in by_file.values() for name, tensor in tensors.items()}


def _check(
    folder: Path,
    config: DecoderConfig,
    sources: Mapping[names.Path, names.Source],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Refuse what is missing, surplus, or of another shape than the configuration says."""
    shapes = {source.name: source.stored_shape for source in sources.values()}
    missing = [f"`{name}` of the shape {list(shape)}" for name, shape in shapes.items() if name not in stored]
    if missing:
        raise ModelError(
            f"{folder} lacks {_some(missing)}, which a {config.family} model by its config.json has. Copy all files of"
            " the checkpoint again, or mend config.json"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ModelError(
                f"{stored[name].file}: `{name}` has the shape {list(stored[name].shape)}, and by config.json it has"
                f" {list(shape)}. The two are not of one model: copy both again"
            )
    surplus = [name for name in stored if name not in shapes and not names.is_no_weight(config, name)]
    if surplus:
        listed = _some([f"`{name}` of the shape {list(stored[name].shape)}" for name in surplus])
        raise ModelError(
            f"{stored[surplus[0]].file} holds {listed}, which a {config.family} model by its config.json does not have:"
            " it would compute something else than what was trained. Copy config.json and the weights of one model"
        )


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more


def _write_files(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    max_file_bytes: int,
    make: Callable[[str], NDArray[Any]],
) -> None:
    """One file, or several with their index; a tensor is in one of them."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = total = 0
    for name, shape in shapes.items():
        size = DTYPES[dtype].itemsize * math.prod(shape)
        if groups[-1] and filled + size > max_file_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled, total = filled + size, total + size
    if len(groups) == 1:
        write_file(folder / _SINGLE, shapes, dtype, make)
        return
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / file, group, dtype, make)
        weight_map |= dict.fromkeys(group, file)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / _INDEX).write_text(index, encoding="utf-8")
