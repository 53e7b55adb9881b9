"""One process of a conversion by Megatron-Bridge: `python convert.py -- DIRECTION OPTIONS...`

DIRECTION is `hf-to-megatron` (a Hugging Face model becomes a torch_dist checkpoint without optimizer state, iteration
0) or `megatron-to-hf`. Bridge's AutoBridge creates the model and moves the weights. The output is next to --out
under another name until it is complete. Started like worker.py, after the same preparation, with the same exit codes.

A conversion that would lose something silently is refused: parameters that Bridge does not map, tensors that one
side lacks, and settings without a shape (RoPE's base, the norm's epsilon) that differ.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import shutil
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by path: use the package's full names in imports, never bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from fp8launch.injob.ownership import foreign_owner, leads_elsewhere
from fp8launch.injob.rank import worker
from fp8launch.injob.supervisor import checkpoints
from fp8launch.plugins.bridge.injob import bridge
from fp8launch.plugins.convert.injob.checks import (
    LOAD,
    differences,
    recorded_settings,
    refuse_other_tensors,
    refuse_unmapped,
    settings_of,
    unused_tensors,
)
from fp8launch.plugins.convert.injob.model import (
    DTYPES,
    HUB,
    build,
    dtype_of,
    has_weights,
    open_model,
    provider_of,
    without_gpu,
)
from fp8launch.plugins.convert.injob.output import begin_output, finish_output, rank, wait_for_all

TO_MEGATRON, TO_HF = DIRECTIONS = ("hf-to-megatron", "megatron-to-hf")
_SAVE = "megatron.bridge.training.model_load_save"
# Files of a Hugging Face model other than its weights and configuration.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.tiktoken", "chat_template*")
_COPIED = (*_TOKENIZER, "config.json", "generation_config.json", "*.py")


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the direction and its options."""
    parser = argparse.ArgumentParser(prog="convert.py", allow_abbrev=False)
    parser.add_argument("direction", choices=DIRECTIONS)
    parser.add_argument("--model", required=True, help="folder or name on the hub")
    parser.add_argument("--checkpoint", type=Path, help="folder of one iteration, for megatron-to-hf")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--fingerprint", default="", help="kept in the record")
    for name in ("tp", "pp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    # torchrun's own parser removes the separator.
    return parser.parse_args([word for word in words if word != "--"])


def to_megatron(source: Any, model: list[Any], folder: Path, model_name: str) -> dict[str, Any]:
    """Write a checkpoint of iteration 0 with Bridge's configuration. Return additions to the record."""
    unused = unused_tensors(source, refuse_unmapped(source, model))
    if unused and rank() == 0:
        print(
            f"fp8launch: warning: {len(unused)} tensors of {model_name} are not a part of Megatron's model: "
            f"{', '.join(unused[:3])}",
            file=sys.stderr,
        )
    place = Path(model_name)
    tokenizer = None
    if not place.is_dir() or _files(place, _TOKENIZER):
        tokenizer = model_name
    save: Any = importlib.import_module(_SAVE)
    save.save_megatron_model(model, str(folder), hf_tokenizer_path=tokenizer, low_memory_save=True)
    return {"unused": unused}


def to_hf(source: Any, model: list[Any], checkpoint: Path, folder: Path, model_name: str, provider: Any) -> None:
    """Load a checkpoint into the model, and write it in Hugging Face's format."""
    different = differences(settings_of(provider), recorded_settings(checkpoint))
    if different:
        worker.stop(worker.WRONG_REQUEST, f"{checkpoint} is not of this model: {'; '.join(different)}")
    refuse_other_tensors(checkpoint, model, provider)
    load: Any = importlib.import_module(LOAD)
    load._load_model_weights_from_checkpoint(str(checkpoint), model)
    place = Path(model_name)
    if not place.is_dir():
        source.save_hf_pretrained(model, str(folder), show_progress=False)
        return
    # Bridge would load and save the tokenizer, which fails without one and may change its files.
    if rank() == 0:
        for file in files_to_copy(place):
            shutil.copyfile(str(file), str(folder / file.name))
    wait_for_all()
    source.save_hf_weights(model, str(folder), show_progress=False)


def files_to_copy(model: Path) -> list[Path]:
    """Return a model's files other than its weights. Another user's programs are left out, with a warning.

    Exits at another user's link to a file that is not theirs: it may be private, and the output may be published.
    """
    copied = []
    for file in sorted(filter(Path.is_file, _files(model, _COPIED))):
        reason = leads_elsewhere(file)
        if reason is not None:
            worker.stop(worker.WRONG_REQUEST, f"{reason}, which is not copied: name a --model without it")
        owner = foreign_owner(file)
        if file.suffix == ".py" and owner is not None:
            print(
                f"fp8launch: warning: {file.name} is left out: transformers may run it, and it belongs to {owner}; "
                f"read {file}, then copy it",
                file=sys.stderr,
            )
            continue
        copied.append(file)
    return copied


def _files(folder: Path, patterns: Sequence[str]) -> set[Path]:
    """Return the files in a folder that match one of the patterns."""
    return set(chain.from_iterable(map(folder.glob, patterns)))


def state_dtype(config: Path, dtype: Any) -> None:
    """Write the data type of the weights into a model's config.json, where transformers reads it."""
    stated = json.loads(config.read_text())
    key = "dtype"
    if "torch_dtype" in stated:
        key = "torch_dtype"
    stated[key] = str(dtype).rpartition(".")[2]
    config.write_text(json.dumps(stated, indent=2) + "\n")


def convert(ours: argparse.Namespace, device: str) -> None:
    """Convert, and write the output."""
    importing = ours.direction == TO_MEGATRON
    source = open_model(ours.model, importing or has_weights(ours.model))
    dtype = dtype_of(source, ours.dtype)
    provider = provider_of(source, ours, dtype, importing)
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(without_gpu(provider))
        model = build(provider, device)
    folder = begin_output(ours.out)
    record: dict[str, Any] = {
        "format": 1,
        "direction": ours.direction,
        "model": ours.model,
        "dtype": str(dtype).rpartition(".")[2],
        "fingerprint": ours.fingerprint,
        "settings": settings_of(provider),
    }
    if importing:
        record |= to_megatron(source, model, folder, ours.model)
        if rank() == 0:
            _refuse_torn(folder)
    else:
        record["checkpoint"] = str(ours.checkpoint)
        to_hf(source, model, ours.checkpoint, folder, ours.model, provider)
        if rank() == 0:
            state_dtype(folder / "config.json", dtype)
    finish_output(folder, ours.out, record)


def _refuse_torn(folder: Path) -> None:
    problem = checkpoints.torn(checkpoints.place(folder, 0))
    if problem is not None:
        worker.stop(1, f"the checkpoint that Megatron-Bridge wrote is not whole: it {problem}")


def main() -> None:
    ours = arguments(sys.argv[1:])
    device = worker.begin()
    bridge.check_bridge("")
    if device == "cuda":
        worker.check_gpu()
    worker.announce()
    worker.prepare(device)
    bridge.import_modules((HUB, _SAVE, LOAD))
    worker.run_to_the_end(lambda: convert(ours, device))


if __name__ == "__main__":
    main()
