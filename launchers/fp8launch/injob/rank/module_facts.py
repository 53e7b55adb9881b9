"""Describe what each module with a matrix did in its last forward pass: FP8 or not, with which recipe, and why not.

Transformer Engine keeps this state on the module (see `probe`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

_LAYER = re.compile(r"\b(layers|local_experts)\.(\d+)\b")
_LOCAL = ("ColumnParallelLinear", "RowParallelLinear")
_RAW = (
    "fp8", "fp8_initialized", "fp8_calibration", "fp8_parameters", "primary_weights_in_fp8", "fp4",
    "disable_parameter_transpose_cache", "save_original_input", "te_quant_params",
)  # fmt: skip

# --- The state of a module -------------------------------------------------------------------------------------------


def facts(module: Any) -> dict[str, Any]:
    """Return the state of a module after its last forward pass: raw values, recipe, quantizers, kinds of weights."""
    metas = [getattr(module, "fp8_meta", None), *_values(getattr(module, "_fp8_metas", None))]
    recipe = None
    for meta in metas:
        if recipe is None and isinstance(meta, Mapping):
            recipe = meta.get("recipe") or None
    raw = {}
    for name in _RAW:
        value = plain(getattr(module, name, None))
        if value or name == "fp8":
            raw[name] = value
    return {
        "class": type(module).__name__,
        "base": _base(module),
        "ran_fp8": _ran_fp8(module),
        "recipe": None if recipe is None else type(recipe).__name__,
        "recipe_values": _recipe_values(recipe),
        "quantizers": _quantizers(module),
        "weights": dict(Counter(type(parameter).__name__ for parameter in matrices(module))),
        "raw": raw,
    }


def _quantizers(module: Any) -> dict[str, list[str]] | None:
    """Return the classes of a module's quantizers for each side, forward and backward."""
    found = getattr(module, "quantizers", None) or getattr(module, "_quantizers", None)
    if not isinstance(found, Mapping):
        return None
    classes = {}
    for side, listed in found.items():
        classes[str(side)] = sorted({type(each).__name__ for each in listed if each is not None})
    return classes


def matrices(module: Any) -> list[Any]:
    """Return the module's own parameters that a GEMM or a look-up can use, which have at least two dimensions."""
    if not hasattr(module, "parameters"):
        return []
    return [parameter for parameter in module.parameters(recurse=False) if getattr(parameter, "ndim", 0) >= 2]


def _ran_fp8(module: Any) -> bool:
    """Return whether the last forward pass was in FP8, or in FP4, for which Transformer Engine uses the same names."""
    if getattr(module, "fp8", None) is True:
        return True
    return bool(_values(getattr(module, "_fp8_metas", None))) and getattr(module, "_quantizers", None) is not None


def _values(mapping: Any) -> list[Any]:
    """Return the values of a mapping that are not None; none for any other object."""
    if not isinstance(mapping, Mapping):
        return []
    return [value for value in mapping.values() if value is not None]


def _base(module: Any) -> str | None:
    """Return the class of Transformer Engine, Megatron's tensor parallel layers or torch that a module derives from."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith(("transformer_engine", "megatron.core.tensor_parallel", "torch.nn")):
            return f"{kind.__module__.split('.', 1)[0]}.{kind.__name__}"
    return None


def _recipe_values(recipe: Any) -> dict[str, Any] | None:
    if recipe is None:
        return None
    names = ("fp8_format", "fp4_format", "fp8_dpa", "fp8_mha", "backward_override", "amax_history_len",
             "amax_compute_algo", "reduce_amax", "margin")  # fmt: skip
    return {name: plain(getattr(recipe, name)) for name in names if getattr(recipe, name, None) is not None}


def plain(value: Any) -> Any:
    """Return a value for JSON: a name or a short text for types that JSON lacks."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "name", None) or str(value)[:60]


# --- Why a module did not run in FP8 ---------------------------------------------------------------------------------


def role(name: str, found: Mapping[str, Any]) -> str:
    """Return the role of a module with a matrix: `linear`, `embedding`, `lm head`, `router` or `other`."""
    kind, base = found["class"], str(found["base"] or "")
    last = name.rpartition(".")[2]
    if last == "output_layer" or "LMHead" in kind:
        return "lm head"
    if "Embedding" in kind or "Embedding" in base:
        return "embedding"
    if "Router" in kind or last == "router":
        return "router"
    for word in ("Linear", "LayerNormMLP", "Experts", "GroupedMLP"):
        if word in kind or word in base:
            return "linear"
    return "other"


def reason(what: str, found: Mapping[str, Any], asked: Mapping[str, Any], layer: int | None) -> str | None:
    """Return why a module did not run in FP8; None if it did, or if there is no reason. `layer` counts from 1."""
    if found["ran_fp8"]:
        return None
    if what == "embedding":
        return "a look-up, not a GEMM"
    if not (asked.get("fp8") or asked.get("fp4")):
        return "FP8 was not requested"
    if what == "router":
        return "Megatron computes routing in higher precision"
    if what == "lm head" and not asked.get("fp8_output_proj"):
        return "Megatron keeps the LM head in bf16"
    if what == "other":
        return "not a linear layer"
    if found["raw"].get("te_quant_params"):
        return "--te-precision-config-file gives it a precision of its own"
    if layer is not None and asked.get("first_last_layers_bf16"):
        start, end = (int(asked.get(f"num_layers_at_{side}_in_bf16") or 0) for side in ("start", "end"))
        if layer <= start or layer > int(asked.get("num_layers") or 0) - end:
            return "one of the first or last layers, which the arguments keep in bf16"
    return None


def chunks_of(model: Any) -> list[Any]:
    """Return the chunks of a rank's model, which Megatron passes as a list or as one module."""
    if isinstance(model, list | tuple):
        return list(model)
    return [model]


def walk(chunk: Any) -> Iterator[tuple[str, Any, int | None, bool]]:
    """Yield (name, module, layer number, replaced) for every module with a matrix.

    Megatron hides the operations of `--use-transformer-engine-op-fuser` in a tuple, `_fused_impl`. They run in place of
    the modules below, whose weights they share: these modules are `replaced`.
    """
    numbers: dict[str, int | None] = {"": None}
    replaced: list[str] = []
    for name, module in chunk.named_modules():
        parent = name.rpartition(".")[0]
        number = getattr(module, "layer_number", None)
        # Only transformer layers have the number in the whole model; modules below them may count differently.
        transformer = type(module).__name__.endswith("Layer") and "mtp" not in name
        numbers[name] = numbers.get(parent)  # of the outermost layer
        if not numbers[name] and isinstance(number, int) and transformer:
            numbers[name] = number
        hidden = getattr(module, "_fused_impl", None)
        if isinstance(hidden, tuple | list):
            replaced.append(name + ".")
            for position, pipeline in enumerate(hidden):
                for below, operation in pipeline.named_modules():
                    if matrices(operation):
                        yield f"{name}._fused_impl.{position}.{below}", operation, numbers[name], False
        if matrices(module) or type(module).__name__ in _LOCAL:
            yield name, module, numbers[name], any(map(name.startswith, replaced))


def probe(chunks: list[Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modules of this rank in groups that only differ in their layer, and the totals."""
    groups: dict[str, dict[str, Any]] = {}
    totals = {"linears": 0, "fp8": 0, "explained": 0, "unexplained": 0, "weights": 0, "fp8_weights": 0}
    for chunk in chunks:
        for name, module, layer, replaced in walk(chunk):
            found = facts(module)
            what = role(name, found)
            why = reason(what, found, asked, layer)
            if replaced and not found["ran_fp8"]:
                why = "replaced by fused operations"
            entry = {"role": what, **found, "why": why}
            pattern = _LAYER.sub(r"\1.*", re.sub(r"^(?:module\.)+", "", name))
            key = json.dumps([pattern, entry], sort_keys=True, default=str)
            group = groups.setdefault(key, {"modules": pattern, "n": 0, "layers": [], **entry})
            group["n"] += 1
            if layer is not None and layer not in group["layers"]:
                group["layers"].append(layer)
            _count(totals, what, found, why, replaced, shared="._fused_impl." in name)
    for group in groups.values():
        group["layers"] = _ranges(sorted(group["layers"]))
    # Without empty entries the line is short enough for one write.
    return {"totals": totals, "groups": list(map(_without_empty, groups.values()))}


def _without_empty(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if value not in (None, "", {})}


def _count(
    totals: dict[str, int], what: str, found: Mapping[str, Any], why: str | None, replaced: bool, shared: bool
) -> None:
    if not shared:  # Fused operations share the weights of the modules that they replace.
        totals["fp8_weights"] += sum(n for kind, n in found["weights"].items() if is_quantized(kind))
        if what != "embedding":
            totals["weights"] += sum(found["weights"].values())
    if replaced or not (what == "linear" or found["ran_fp8"]):
        return
    totals["linears"] += 1
    if found["ran_fp8"]:
        totals["fp8"] += 1
    elif why:
        totals["explained"] += 1
    else:
        totals["unexplained"] += 1


def is_quantized(kind: str) -> bool:
    """Return whether a tensor class has FP8 or FP4 values, by its name in Transformer Engine 2.0 to 2.20."""
    return kind.startswith(("Float8", "MXFP8", "NVFP4", "HybridQuantized"))


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
