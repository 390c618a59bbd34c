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
from autopar.inference.model.quantized_sources import QuantizedSource
from autopar.inference.model.safetensors import DTYPES, StoredTensor, read_header, write_file
from autopar.inference.model.sharded_load import load_sharded

AnySource = names.Source | QuantizedSource
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LISTED = 5  # names in an error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder that holds every parameter in its shape, and nothing else.

    Args:
        sources: for each parameter path, the part of the stored tensors that is the parameter.
        stored: the tensors by name.
    """

    folder: Path
    config: DecoderConfig
    sources: Mapping[names.Path, AnySource]
    stored: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: str | os.PathLike[str], quantize: str | None = None) -> Checkpoint:
        """Read the configuration and the headers of the weight files, but no weights.

        Args:
            quantize: how to quantize float weights when they are read, such as "int8"; by default they stay as they are.

        Raises:
            ModelError: a tensor is missing, damaged, unexpected, of another shape, or the model is not supported.
        """
        folder = Path(folder)
        config = DecoderConfig.read(folder).quantized(quantize)
        stored = _stored(folder)
        sources = _sources(config)
        # Checkpoints of the bare model lack the prefix. Every checkpoint has the embedding, so its name shows which it is.
        prefix, head = names.prefix(config), names.head(config)
        (embedding,) = sources["embed", "weight"].names
        if embedding not in stored and embedding.removeprefix(prefix) in stored:
            stored = {name if name == head else prefix + name: tensor for name, tensor in stored.items()}
        _check(folder, config, sources, stored)
        return cls(folder, config, sources, stored)

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
                path: jax.ShapeDtypeStruct(
                    source.shape, jax.dtypes.canonicalize_dtype(source.dtype(self.stored, dtype))
                )
                for path, source in self.sources.items()
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
        loaded: dict[names.Path, Any] = {}
        dtypes: Any = traverse_util.flatten_dict(abstract["params"])
        for path, source in self.sources.items():
            report = partial(progress, "/".join(path)) if progress is not None else None
            loaded[path] = load_sharded(source.of(self.stored, dtype), dtypes[path].dtype, by_path[path], report)
        return _tree(loaded)


def write_checkpoint(
    folder: str | os.PathLike[str],
    fields: Mapping[str, Any],
    seed: int = 0,
    dtype: str = "F32",
    max_file_bytes: int = 5 * 1024**3,
    params: Any = None,
) -> None:
    """Write a model in Hugging Face's format: its trained weights, or random ones for tests and measurements.

    The scale of random weights keeps activations from vanishing or growing over the layers. Tensors are generated and written
    one by one.

    Args:
        folder: the folder to create. A failed write leaves no folder.
        fields: the fields of its `config.json`.
        dtype: "F32", "BF16", "F16" or "F64".
        max_file_bytes: the largest size of one file; larger models have several files.
        params: the weights, as `Decoder(config).init` returns them; by default random ones.

    Raises:
        ModelError: a field is not supported, the folder exists, or it cannot be written.
    """
    target, config = Path(folder), DecoderConfig.of(fields)
    if dtype not in DTYPES:
        raise ModelError(f"weights cannot be written as {dtype!r}; give one of {', '.join(DTYPES)}")
    if target.exists():
        raise ModelError(f"{target} already exists. Give the name of a new folder")
    sources = {path: source for path, source in _sources(config).items() if isinstance(source, names.Source)}
    paths = {name: path for path, source in sources.items() for name in source.names}
    shapes = {name: sources[path].stored_shape for name, path in paths.items()}
    center = 0 if config.norm == "rms_one" else 1
    values: Any = {} if params is None else traverse_util.flatten_dict(params["params"])

    def trained(name: str) -> NDArray[Any]:
        found = np.zeros(shapes[name], np.float32)
        for path, source in sources.items():
            if name in source.names:
                value = np.asarray(values[path], np.float32)
                source.put(found, value[source.names.index(name)] if source.is_stacked else value)
        return found

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
        _write_files(unfinished, shapes, dtype, max_file_bytes, make if params is None else trained)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _sources(config: DecoderConfig) -> dict[names.Path, AnySource]:
    """Map each parameter to its stored tensors. Layers of one kind have the same shapes, so one is traced for all."""
    of_kind: dict[Any, list[int]] = {}
    for layer, kind in enumerate(config.layers):
        of_kind.setdefault((kind.experts, kind.plain), []).append(layer)
    sources: dict[names.Path, AnySource] = {}
    for layers in of_kind.values():
        one = replace(config, num_layers=1, layers=(config.layers[layers[0]],))
        shapes: Any = jax.eval_shape(Decoder(one).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        flat: Any = traverse_util.flatten_dict(shapes["params"])
        for path, leaf in flat.items():
            in_layers = [(f"layers_{layer}", *path[1:]) for layer in layers]
            for each in in_layers if path[0] == "layers_0" else [path]:
                is_quantized = path[-1] != "bias" and (*path[:-1], "scale") in flat
                weight = flat[(*path[:-1], "weight")].shape if is_quantized else None
                sources[each] = _source(config, each, leaf.shape, weight)
    return sources


def _source(
    config: DecoderConfig, path: names.Path, shape: tuple[int, ...], weight: tuple[int, ...] | None
) -> AnySource:
    """The source of a parameter.

    Args:
        weight: the shape of the quantized weight of its module; None if the parameter is not part of one.
    """
    how = config.quantization_of(path[-2])
    if how is None or weight is None:
        return names.source(config, path, shape)
    base = names.source(config, (*path[:-1], "weight"), (*weight[:-1], weight[-1] * how.per_byte))
    return QuantizedSource(base, path[-1], shape, how)


def _tree(by_path: Mapping[names.Path, Any]) -> Any:
    return {"params": traverse_util.unflatten_dict(dict(by_path))}


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
    sources: Mapping[names.Path, AnySource],
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
