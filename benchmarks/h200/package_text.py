"""Make a dataset of the Python packages that are installed: `package_text.py PREFIX [MB]` (default: 130 MB of text).

Sources, docstrings and documentation (*.py, *.pyi, *.rst, *.md, *.txt) of the packages in PACKAGES that this Python
has, and of its standard library: real text that a host without a network has. Tests and repeated files are left out.
Documents are shuffled with a fixed seed, so that the last ones, which `data.split` holds out, are a fair sample. Writes
PREFIX.bin and PREFIX.idx by `fp8launch data tokenizer` (a BPE of 16384 tokens, of a sixth of the documents) and `data
build`, and PREFIX.json: versions of the packages, documents, bytes, and the sha256 of the text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    "accelerate", "aiohttp", "botorch", "cupy", "diffrax", "einops", "equinox", "flax", "fontTools", "gpytorch",
    "h5py", "huggingface_hub", "hypothesis", "jax", "linear_operator", "matplotlib", "mpmath", "networkx", "numba",
    "numpy", "numpyro", "onnx", "onnxscript", "optax", "orbax", "pandas", "patsy", "peft", "pip", "plotly", "pygments",
    "pytest", "pytorch_lightning", "lightning", "rich", "sacrebleu", "scipy", "seaborn", "sentence_transformers",
    "setuptools", "skimage", "sklearn", "statsmodels", "sympy", "tensorboard", "timm", "torch", "torch_geometric",
    "torchaudio", "torchvision", "torchmetrics", "triton", "xarray",
)  # fmt: skip
SUFFIXES = frozenset({".py", ".pyi", ".rst", ".md", ".txt"})
LEFT_OUT = frozenset({"test", "tests", "testing", "idle_test", "__pycache__", "site-packages", "dist-packages"})
VOCABULARY = 16384
SAMPLE = 6  # the tokenizer sees every sixth document
SMALLEST, LARGEST = 400, 400_000


def places() -> dict[str, Path]:
    found = {"stdlib": Path(sysconfig.get_path("stdlib"))}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or []:
            found[name] = Path(folder)
    return found


def texts() -> Iterator[str]:
    seen = set()
    for folder in places().values():
        for path in sorted(folder.rglob("*")):
            below = path.relative_to(folder)
            if path.suffix not in SUFFIXES or LEFT_OUT & set(below.parts) or not path.is_file():
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            digest = hashlib.sha256(text.encode()).digest()
            if SMALLEST <= len(text) <= LARGEST and digest not in seen:
                seen.add(digest)
                yield text


def versions() -> dict[str, str]:
    distributions = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(distributions[name][0]) for name in places() if name in distributions} | {
        "python": platform.python_version()
    }


def main() -> None:
    prefix, limit = Path(sys.argv[1]).resolve(), int((sys.argv[2:] or ["130"])[0]) * 10**6
    prefix.parent.mkdir(parents=True, exist_ok=True)
    documents = list(texts())
    random.Random(1).shuffle(documents)
    size, kept = 0, []
    for text in documents:
        if size >= limit:
            break
        kept.append(text)
        size += len(text.encode())
    files = {Path(f"{prefix}.jsonl"): kept, Path(f"{prefix}.sample.jsonl"): kept[::SAMPLE]}
    for file, chosen in files.items():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen), encoding="utf-8")
    whole, sample = files
    command = [sys.executable, "-m", "fp8launch", "data"]
    tokenizer = f"{prefix}.tokenizer"
    subprocess.run(
        [*command, "tokenizer", str(sample), "--vocab-size", str(VOCABULARY), "--out", tokenizer], check=True
    )
    subprocess.run([*command, "build", str(whole), "--tokenizer", tokenizer, "--out", str(prefix)], check=True)
    made = {
        "documents": len(kept),
        "bytes": size,
        "sha256": hashlib.sha256("".join(kept).encode()).hexdigest(),
        "versions": versions(),
    }
    Path(f"{prefix}.json").write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made))


if __name__ == "__main__":
    main()
