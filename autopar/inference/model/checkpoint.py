"""Read and write model folders in Hugging Face's format, and load their weights with given shardings.

In: `config.json`, and `model.safetensors` or several files with an index. Out: the decoder's parameters, in the shardings
of a plan. They are read slice by slice: the host never holds a whole tensor, unless a device needs the whole tensor.
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
from autopar.inference.model.sharded_load import load_sharded

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LISTED = 5  # names in an error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder that holds every parameter in its shape, and nothing else.

    Args:
        tensors: for each parameter path, the stored tensors and the part of them that is the parameter.
    """

    folder: Path
    config: DecoderConfig
    tensors: Mapping[names.Path, tuple[names.Source, tuple[StoredTensor, ...]]]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Read the configuration and the headers of the weight files, but no weights.

        Raises:
            ModelError: a tensor is missing, damaged, unexpected, of another shape, or the model is not supported.
        """
        folder = Path(folder)
        config = DecoderConfig.read(folder)
        stored = _stored(folder)
        sources = _sources(config)
        # Checkpoints of the bare model lack the prefix. Every checkpoint has the embedding, so its name shows which it is.
        prefix, head = names.prefix(config), names.head(config)
        (embedding,) = sources["embed", "weight"].names
        if embedding not in stored and embedding.removeprefix(prefix) in stored:
            stored = {name if name == head else prefix + name: tensor for name, tensor in stored.items()}
        _check(folder, config, sources, stored)
        return cls(
            folder,
            config,
            {path: (source, tuple(stored[name] for name in source.names)) for path, source in sources.items()},
        )

    @property
    def model(self) -> Decoder:
        """The decoder of these parameters."""
        return Decoder(self.config)

    def abstract_params(self, dtype: Any = None) -> Any:
        """The shapes and dtypes of the result of `load`, for planning.

        Args:
            dtype: the dtype of all parameters; by default the stored one.
        """
        return _tree(
            {
                path: jax.ShapeDtypeStruct(source.shape, _dtype(tensors[0], dtype))
                for path, (source, tensors) in self.tensors.items()
            }
        )

    def load(self, shardings: Any = None, dtype: Any = None, progress: Callable[[str, int], None] | None = None) -> Any:
        """Load the parameters, for `model.apply`.

        Args:
            shardings: one sharding for all parameters; or one for each, in a tree like `abstract_params()`, such as a
                plan's `in_shardings`. By default all parameters are on the first device.
            dtype: the dtype of all parameters; by default the stored one.
            progress: called with a parameter's path and the bytes of a slice that has been read.

        Raises:
            ModelError: the tree of `shardings` differs from that of the parameters, or a tensor's dtype is not supported.
        """
        abstract = self.abstract_params(dtype)
        if shardings is None:
            shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if isinstance(shardings, Sharding):
            shardings = jax.tree.map(lambda _: shardings, abstract)
        if jax.tree.structure(shardings) != jax.tree.structure(abstract):
            raise ModelError(
                f"the shardings to load {self.folder} into are not a tree like its parameters. Plan a step with"
                " `abstract_params()` as its first argument, and use `plan.in_shardings(mesh)[0]`"
            )
        by_path: Any = traverse_util.flatten_dict(shardings["params"])
        loaded = {}
        for path, (source, tensors) in self.tensors.items():
            report = partial(progress, "/".join(path)) if progress is not None else None
            view = source.view([tensor.mapped() for tensor in tensors])
            loaded[path] = load_sharded(view, _dtype(tensors[0], dtype), by_path[path], report)
        return _tree(loaded)


def write_checkpoint(
    folder: str | os.PathLike[str],
    fields: Mapping[str, Any],
    seed: int = 0,
    dtype: str = "F32",
    max_file_bytes: int = 5 * 1024**3,
) -> None:
    """Write a model with random weights in Hugging Face's format, for tests and measurements.

    The scale of the weights keeps activations from vanishing or growing over the layers. Tensors are generated and written
    one by one.

    Args:
        folder: the folder to create. A failed write leaves no folder.
        fields: the fields of its `config.json`.
        dtype: "F32", "BF16", "F16" or "F64".
        max_file_bytes: the largest size of one file; larger models have several files.

    Raises:
        ModelError: a field is not supported, the folder exists, or it cannot be written.
    """
    target, config = Path(folder), DecoderConfig.of(fields)
    if dtype not in DTYPES:
        raise ModelError(f"weights cannot be written as {dtype!r}; give one of {', '.join(DTYPES)}")
    if target.exists():
        raise ModelError(f"{target} already exists. Give the name of a new folder")
    sources = _sources(config)
    paths = {name: path for path, source in sources.items() for name in source.names}
    shapes = {name: sources[path].stored_shape for name, path in paths.items()}
    center = 0 if config.norm == "rms_one" else 1

    def make(name: str) -> NDArray[Any]:
        path = paths[name]
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shapes[name], dtype=np.float32)
        mean = center if path[-2].endswith("norm") and path[-1] == "weight" else 0
        return mean + noise / math.sqrt(config.hidden_size)

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
    """Map each parameter to its stored tensors. Layers of one kind have the same shapes, so one is traced for all."""
    of_kind: dict[Any, list[int]] = {}
    for layer, kind in enumerate(config.layers):
        of_kind.setdefault(kind.experts, []).append(layer)
    sources: dict[names.Path, names.Source] = {}
    for layers in of_kind.values():
        one = replace(config, num_layers=1, layers=(config.layers[layers[0]],))
        shapes: Any = jax.eval_shape(Decoder(one).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        flat: Any = traverse_util.flatten_dict(shapes["params"])
        for path, leaf in flat.items():
            in_layers = [(f"layers_{layer}", *path[1:]) for layer in layers]
            for each in in_layers if path[0] == "layers_0" else [path]:
                sources[each] = names.source(config, each, leaf.shape)
    return sources


def _tree(by_path: Mapping[names.Path, Any]) -> Any:
    return {"params": traverse_util.unflatten_dict(dict(by_path))}


def _dtype(tensor: StoredTensor, dtype: Any) -> Any:
    """The dtype of a tensor on the devices: float64 becomes float32 unless JAX has x64 enabled."""
    return jax.dtypes.canonicalize_dtype(dtype or DTYPES.get(tensor.dtype, np.float32))


def _stored(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, by name. With several files, the index names the file of each tensor."""
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
        raise ModelError(
            f"{index} names {outside[0]!r}, which is not a file in its folder. It must name files without a path"
        )
    by_file = {file: read_header(folder / file) for file in sorted(set(files.values()))}
    lacking = [(name, file) for name, file in files.items() if name not in by_file[file]]
    if lacking:
        name, file = lacking[0]
        raise ModelError(
            f"{folder / file} has no `{name}`, but {_INDEX} lists it there. The files are not from one checkpoint: copy"
            " all of them again"
        )
    return {name: tensor for tensors in by_file.values() for name, tensor in tensors.items()}


def _check(
    folder: Path,
    config: DecoderConfig,
    sources: Mapping[names.Path, names.Source],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Refuse tensors that are missing, unexpected, or of another shape than the configuration requires."""
    shapes = {name: shape for source in sources.values() for name, shape in source.stored.items()}
    missing = [f"`{name}` of the shape {list(shape)}" for name, shape in shapes.items() if name not in stored]
    if missing:
        raise ModelError(
            f"{folder} lacks {_some(missing)}, which its config.json requires of a {config.family} model. Copy all files"
            " of the checkpoint again, or correct config.json"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ModelError(
                f"{stored[name].file}: `{name}` has the shape {list(stored[name].shape)}, but config.json requires"
                f" {list(shape)}. The two files are from different models: copy both again"
            )
    unexpected = [name for name in stored if name not in shapes and not names.is_ignored(config, name)]
    if unexpected:
        listed = _some([f"`{name}` of the shape {list(stored[name].shape)}" for name in unexpected])
        raise ModelError(
            f"{stored[unexpected[0]].file} holds {listed}, which its config.json does not allow in a {config.family}"
            " model: without it the model would not compute what was trained. Copy config.json and the weights of one"
            " model"
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
    """Write one file, or several with an index. A tensor is never split over files."""
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
