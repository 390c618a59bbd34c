"""Compute the logits of quantized checkpoints by the packages that define their formats, for `tests/logits/quantized`.

`python scripts/quantized_logits.py PYTHON [NAME ...]`, where PYTHON has torch, transformers and compressed-tensors, and finds the
sources of autoawq and gptqmodel, which need not be built (`pip download --no-deps --no-binary :all:`, unpacked, on PYTHONPATH).
By default all formats of `tests/quantized_checkpoints.py`.

The decompressors of compressed-tensors, gptqmodel's `convert_gptq_file` and autoawq's `dequantize_gemm` make float weights, and
`transformers` computes with them. Their kernels need a GPU, and `transformers` 5.24 cannot load packed zeros by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from family_checkpoints import tokens_of  # noqa: E402
from quantized_checkpoints import FORMATS, LENGTH, LOGITS, digest_of, file_of, write_quantized  # noqa: E402

_TORCH = r"""
from __future__ import annotations
import ast, collections, importlib, json, logging, sys, types, numpy as np, torch, transformers
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

def module(name):
    # Without the __init__ of its packages, which load kernels.
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            stub = types.ModuleType(package)
            stub.__path__ = [str(Path(each, *parts[:depth])) for each in sys.path if Path(each, *parts[:depth]).is_dir()]
            sys.modules[package] = stub
    return importlib.import_module(name)

def of_compressed_tensors(file, how):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    (scheme,) = QuantizationConfig.model_validate(how).config_groups.values()
    decompress, found = BaseCompressor.get_value_from_registry(how["format"]).decompress, load_file(file)
    for name in [each for each in found if each.endswith(".weight_scale")]:
        prefix = name.removesuffix("weight_scale")
        parts = {each.removeprefix(prefix): found.pop(each) for each in list(found) if each.startswith(prefix)}
        found[prefix + "weight"] = decompress(parts, scheme)["weight"]
    return found

def of_gptq(file, how):
    # The functions of the file without its imports, which need kernels.
    source = next(found for each in sys.path if (found := Path(each, "gptqmodel/utils/model_dequant.py")).is_file())
    tree = ast.parse(source.read_text())
    tree.body = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    bits = module("gptqmodel.utils.planar_packing").PLANAR_BITS
    names = {"torch": torch, "safe_open": safe_open, "defaultdict": collections.defaultdict, "PLANAR_BITS": bits}
    names["LOG"] = logging.getLogger()
    exec(compile(tree, str(source), "exec", flags=annotations.compiler_flag), names)
    return names["convert_gptq_file"](file, torch.float32, how, "cpu")

def of_awq(file, how):
    dequantize, found = module("awq.utils.packing_utils").dequantize_gemm, load_file(file)
    for name in [each for each in found if each.endswith(".qweight")]:
        prefix = name.removesuffix("qweight")
        parts = [found.pop(prefix + part) for part in ("qweight", "qzeros", "scales")]
        found[prefix + "weight"] = dequantize(*parts, how["bits"], how["group_size"]).T.contiguous()
    return found

tokens = torch.from_numpy(np.load(sys.argv[1])).long()
for folder in map(Path, sys.argv[2:]):
    config = json.loads((folder / "config.json").read_text())
    how = config.pop("quantization_config")
    read = {"compressed-tensors": of_compressed_tensors, "gptq": of_gptq, "awq": of_awq}[how["quant_method"]]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float()
    model.load_state_dict(read(folder / "model.safetensors", how), strict=True)
    with torch.no_grad():
        np.save(folder / "logits.npy", model.eval()(tokens).logits.float().numpy())
print("transformers", transformers.__version__, "torch", torch.__version__)
"""


def main() -> None:
    """Write the logits of all formats, or of those named."""
    python, *names = sys.argv[1:]
    clean = {key: value for key, value in os.environ.items() if key not in ("USE_TORCH", "PYTHONHOME")}
    LOGITS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch) / "tokens.npy"
        np.save(tokens, tokens_of(LENGTH))
        folders: dict[str, Path] = {}
        for name in names or FORMATS:
            place = Path(scratch) / str(len(folders))
            place.mkdir()
            folders[name], _ = write_quantized(place, "llama", name)
        subprocess.run(
            [python, "-c", _TORCH, str(tokens), *map(str, folders.values())],
            check=True,
            env={**clean, "HF_HUB_OFFLINE": "1", "USE_FLAX": "0"},
        )
        for name, folder in folders.items():
            logits = np.load(folder / "logits.npy").astype(np.float32)[:, -1]
            np.savez(file_of(name), logits=logits, digest=digest_of(folder))


if __name__ == "__main__":
    main()
