"""Write the best variant as a recipe, with the measurements as comments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.plugins.tune.rows import Row, percent
from fp8launch.plugins.tune.state import speed_in_words
from fp8launch.recipe.load import RecipeSource
from fp8launch.recipe.write_yaml import write_yaml
from fp8launch.recipe.yaml_source import parse_yaml
from fp8launch.resources import pack_folder


def recipe_text(
    name: str,
    source: RecipeSource,
    user: Sequence[str],
    values: Mapping[str, Any],
    rows: Sequence[Row],
    setting: str,
    notes: Sequence[str],
    file: Path,
) -> str:
    """Return a recipe that extends the tuned recipe by the user's overrides and the changes `values`.

    `setting` describes how and where the trials ran; `notes` are remarks on the kept changes.
    """
    recipe: dict[str, Any] = {}
    notes = list(notes)
    if ":" in name:
        engine, _, own = name.partition(":")
        recipe |= {"engine": engine, engine: {"recipe": own}}
    else:
        parent = _parent(source, file)
        recipe["extends"] = [parent]
        if parent.startswith("."):
            notes.append(f"It extends {parent}, relative to this file: move both together.")
    entries = []
    for word in user:
        key, _, text = word.partition("=")
        entries.append((key, parse_yaml(text, word).plain()))
    for key, value in (*entries, *values.items()):
        if key == "precision.recipe":
            # The pack's part for this recipe also sets the format and the matching options.
            recipe.setdefault("extends", []).append(f"precision/{value}")
        else:
            _put(recipe, key.strip().split("."), value)
    return write_yaml(recipe, {"": _comment(rows, setting, notes)})


def _put(into: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for step in path[:-1]:
        into = into.setdefault(step, {})
        if not isinstance(into, dict):
            raise error("tune-write", f"cannot write a key below {step}, which has a value", ".".join(path))
    into[path[-1]] = value


def _parent(source: RecipeSource, file: Path) -> str:
    """Return how the written recipe refers to the tuned one: by its name in the pack, or by a relative path."""
    pack, tuned = pack_folder("recipes").resolve(), source.path.resolve()
    if tuned.is_relative_to(pack):
        return str(tuned.relative_to(pack).with_suffix(""))
    relative = os.path.relpath(tuned, file.resolve().parent)
    if relative.startswith(".."):
        return relative
    return f"./{relative}"


def _comment(rows: Sequence[Row], setting: str, notes: Sequence[str]) -> list[str]:
    found = [f"Written by fp8launch tune: {setting}."]
    left = []
    for row in rows:
        if row.kept:
            found.append(f"{_measured(row)} ({', '.join(row.runs)}).")
        elif row.measured is not None:
            left.append(f"{row.change} {percent(row.measured)}")
    if left:
        found.append(f"Not kept: {', '.join(left)}.")
    return [*found, *notes]


def _measured(row: Row) -> str:
    """Describe a kept variant by its gain, speed and memory."""
    facts = [speed_in_words(row.tflops_per_gpu, row.step_time_ms)]
    if row.peak_memory_gib:
        facts.append(f"{row.peak_memory_gib:.1f} GiB")
    if row.measured is None or row.low is None or row.high is None:
        return f"{row.change}: {', '.join(facts)}"
    facts.insert(0, f"{percent(row.measured)} [{percent(row.low)}, {percent(row.high)}]")
    if "numerics" in row.touches:
        facts.append("changes numerics")
    return f"+ {row.change}: {', '.join(facts)}"
