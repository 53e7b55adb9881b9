"""Facts of a run, flat and by name, from its arguments and its manifest, for comparisons."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from fp8launch.engines.base import OWN_ENTRY_TITLE
from fp8launch.hardware.quantization import QUANTIZATION, requested
from fp8launch.untyped import as_mapping

# Facts of these kinds are all known of a run that has a manifest.
SETTINGS = ("env ", "config ")
UNSET = "unset"
# Megatron's dump calls these otherwise than its command line.
_DUMP_NAMES = {"fp8_format": "fp8", "fp4_format": "fp4"}


def precision_of(arguments: Mapping[str, object]) -> str | None:
    """Name the precision as recipes do, with its departures from the plain recipe; None if unknown."""
    kind, fp4 = arguments.get("fp8"), arguments.get("fp4")
    if not kind and not fp4:
        return _high_precision(arguments)
    recipe = requested(arguments)
    parts = [recipe]
    quantization = QUANTIZATION.get(recipe)
    usually_e4m3 = quantization is not None and quantization.usual_format == "e4m3"
    if kind == "e4m3" and not usually_e4m3:
        parts.append("e4m3")
    history = arguments.get("fp8_amax_history_len", 1)
    if recipe == "delayed" and not fp4 and history != 1024:
        parts.append(f"history {history}")
    if arguments.get("fp8_param_gather") or arguments.get("fp4_param_gather"):
        parts.append("param gather")
    if arguments.get("first_last_layers_bf16"):
        start = arguments.get("num_layers_at_start_in_bf16", 1)
        end = arguments.get("num_layers_at_end_in_bf16", 1)
        parts.append(f"bf16 {start}+{end}")
    return " ".join(parts)


def _high_precision(arguments: Mapping[str, object]) -> str | None:
    for name in ("bf16", "fp16"):
        if arguments.get(name):
            return name
    if "fp8" in arguments:
        return "fp32"
    return None


def stated_arguments(manifest: Mapping[str, Any]) -> dict[str, object]:
    """Return the arguments that a run was started with by Megatron's names, as its manifest has them.

    Manifests of older versions have the argument list only.
    """
    stated = manifest.get("arguments")
    if isinstance(stated, Mapping):
        # A dump states the absence of both, too.
        return {"fp8": None, "fp4": None, **stated}
    return arguments_of(as_mapping(manifest.get("megatron")).get("argv") or [])


def arguments_of(argv: Sequence[object]) -> dict[str, object]:
    """Read Megatron's command line under the names of its dump: one value as number or text, several as a list."""
    found: dict[str, object] = {}
    name = ""
    for word in map(str, argv):
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = _DUMP_NAMES.get(name, name)
            found[name] = True
            if equals:
                found[name] = _value(value)
        elif name:
            found[name] = _with_word(found[name], word)
    return found


def _with_word(before: object, word: str) -> object:
    """The value of a flag after one more word; before its first word it is True."""
    value = _value(word)
    if before is True:
        return value
    if isinstance(before, list):
        return [*before, value]
    return [before, value]


def _value(word: str) -> object:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def manifest_facts(manifest: Mapping[str, Any], folder: Path) -> dict[str, object]:
    recipe, image, git = map(as_mapping, map(manifest.get, ("recipe", "image", "git")))
    facts: dict[str, object] = {
        "nodes": as_mapping(recipe.get("resources")).get("nodes"),
        "image": image.get("digest") or image.get("image"),
        "commit": git.get("commit"),
        "uncommitted changes": git.get("dirty"),
        "cluster": manifest.get("cluster"),
        "fp8launch": as_mapping(manifest.get("versions")).get("fp8launch"),
        "recipe": manifest.get("name"),
        "script": _entry_title(manifest),
    }
    environment = dict(as_mapping(manifest.get("environment")))
    with contextlib.suppress(ValueError):
        settings = as_mapping(json.loads(str(environment.get("FP8LAUNCH_CONFIG", ""))))
        for name, value in settings.items():
            facts[f"config {name}"] = value
        del environment["FP8LAUNCH_CONFIG"]
    # Paths into the run's own folder differ by nature.
    for name, value in environment.items():
        if str(folder) not in str(value):
            facts[f"env {name}"] = value
    known: dict[str, object] = {}
    for name, value in facts.items():
        if isinstance(value, str | int | float):
            known[name] = value
        elif value is not None:
            # A manifest that was edited by hand may hold any type here.
            known[name] = str(value)
    return known


def _entry_title(manifest: Mapping[str, Any]) -> str:
    """The settings that the run trained with. Manifests of older versions have them in their recipe only."""
    title = as_mapping(manifest.get("engine")).get("entry")
    if isinstance(title, str):
        return title
    script = as_mapping(as_mapping(manifest.get("recipe")).get("launch")).get("script")
    if isinstance(script, str):
        return PurePath(script).name
    return OWN_ENTRY_TITLE
