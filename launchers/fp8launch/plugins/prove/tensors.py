"""Read the tensors of torch_dist checkpoints, whole and by name, and compare two of them."""
# mypy: disable-error-code="import-not-found, no-any-return"

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Adam's first moment after one step is a tenth of the gradient (beta1 = 0.9).
_MOMENT = re.compile(r"^.*\bexp_avg\.")
_OF_OPTIMIZER = re.compile(r"(^|\.)optimizer\.")
FROM_MOMENT = 10.0
# Arguments, and the format of the file: a resumed run has other folders. The last one names groups in the log.
_ON_PURPOSE = ("args", "content_metadata", "default_config")


def read(folder: str) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint unsharded, for any layout that saved it."""
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    found = {}
    for name, entry in stored.items():
        if isinstance(entry, TensorStorageMetadata):
            found[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    dcp.load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    return found


def gradients(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradient of every weight from a checkpoint of the first step, by the name of the weight."""
    return {_MOMENT.sub("", name): FROM_MOMENT * tensor for name, tensor in tensors.items() if _MOMENT.match(name)}


def weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, without the optimizer's copies."""
    return {name: tensor for name, tensor in tensors.items() if not _OF_OPTIMIZER.search(name)}


def compare(task: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the checkpoint `candidate` with `reference`.

    `what` is "step": gradients and weights after the first step; or "state": every tensor and object.
    """
    first, second = read(task["reference"]), read(task["candidate"])
    if task["what"] == "step":
        return {
            "gradients": _compare(gradients(first), gradients(second)),
            "weights": _compare(weights(first), weights(second)),
        }
    return {"tensors": _compare(first, second), "objects": _different_objects(task["reference"], task["candidate"])}


def _compare(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return for each tensor its norm in the first, its norm in the second, the norm of the difference, and the scale.

    The scale is the projection of the second on the first: 2 for a gradient that is counted twice. The value
    is None for a tensor that is missing or has another shape in one of them.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({*first, *second}):
        one, other = first.get(name), second.get(name)
        entry: dict[str, Any] = {"first": _norm(one), "second": _norm(other), "difference": None, "scale": None}
        if one is not None and other is not None and one.shape == other.shape:
            one, other = one.double(), other.double()
            entry["difference"] = float((one - other).norm())
            square = float((one * one).sum())
            if square:
                entry["scale"] = float((one * other).sum()) / square
        found[name] = entry
    return found


def _norm(tensor: torch.Tensor | None) -> float | None:
    if tensor is None:
        return None
    return float(tensor.double().norm())


def _different_objects(first: str, second: str) -> list[str]:
    one, other = _objects(first), _objects(second)
    found = []
    for name in sorted({*one, *other}.difference(_ON_PURPOSE)):
        found += differences(name, _loaded(name, one.get(name)), _loaded(name, other.get(name)))
    return found


def _objects(folder: str) -> dict[str, Any]:
    """Return the contents of a checkpoint other than tensors: random state by rank, scheduler, iteration."""
    reader = FileSystemReader(folder)
    found: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            found[name] = io.BytesIO()
    dcp.load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    file = Path(folder, "common.pt")
    if file.exists():  # until 0.18
        found |= torch.load(file, weights_only=False)
    return found


def differences(name: str, one: Any, other: Any) -> list[str]:
    """Return the names of all values in which two objects differ, tensors and arrays compared to the last bit.

    `name` is the name of the objects. Numbers and text are shown: `scheduler.num_steps (4 instead of 8)`.
    """
    found = []
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            if key not in _ON_PURPOSE:
                found += differences(f"{name}.{key}", one.get(key), other.get(key))
        return found
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            found += differences(f"{name}.{place}", *pair)
        return found
    if _equal(one, other):
        return []
    if all(isinstance(value, (str, int, float, type(None))) for value in (one, other)):
        return [f"{name} ({other} instead of {one})"]
    return [name]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return one.tobytes() == other.tobytes()
    return type(one) is type(other) and (bool(one == other) or pickle.dumps(one) == pickle.dumps(other))


def _loaded(name: str, value: Any) -> Any:
    """Return the object that a checkpoint stores by this name."""
    if isinstance(value, io.BytesIO):
        value.seek(0)
        value = torch.load(value, weights_only=False)
    return _state_of_fp8(value) if "_extra_state" in name else value


def _state_of_fp8(stored: Any) -> Any:
    """Return the state that Transformer Engine stores pickled, as a tensor of bytes or a stream.

    The bytes of equal states can differ, because pickle refers to an object that it has written before.
    """
    if isinstance(stored, list):
        return [_state_of_fp8(one) for one in stored]
    if isinstance(stored, torch.Tensor):
        content = stored.numpy().tobytes()
    elif isinstance(stored, io.BytesIO):
        content = stored.getvalue()
    else:
        return stored
    return pickle.loads(content) if content else None
