"""The index of Megatron-Bridge's recipes, by release and name: performance recipes and, since 0.6, the library.

`tools/bridge_recipes.py` makes the data from Bridge's source: it calls each recipe function and records what it sets.
Recipes of 0.4 and 0.5 are functions with arguments; their names here have the form that Bridge uses since 0.6.
"""

from __future__ import annotations

import functools
import json
import lzma
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError, error, nearest

SECTIONS = ("mixed_precision", "ddp", "optimizer", "comm_overlap", "dataset")
_DATA = Path(__file__).with_name("recipes.json.xz")
_LIBRARY = "megatron.bridge.recipes."


@dataclass(frozen=True)
class BridgeRecipe:
    """A recipe function of one release and what it sets.

    `hub` lists the Hugging Face models whose configuration it reads. `layout` has the keys tp, pp, cp, vp, ep and etp,
    as far as the recipe sets them. `settings` are the fields that it sets on the model, by Megatron's names;
    `sections` are the fields of SECTIONS that differ from Bridge's defaults. `tokenizer` is the hub model whose
    tokenizer a job reads; None if it reads none, and for every recipe before 0.6. `missing_files` are files of Bridge
    that the recipe reads and the release's wheel lacks, `missing_sizes` sizes of the model that it leaves to the user.
    `null_vocabulary` is the size of a NullTokenizer. `takes_vocabulary` says when the model takes the size of the
    tokenizer's vocabulary: `always`, or `if unset` because the model states none.

    `data` has the class of the data, the data set on the hub and the length of packed sequences; `peft` has the class
    of the adapters and the settings that differ from its defaults. Library and fine-tuning recipes have both.
    """

    release: str
    name: str
    module: str
    function: str
    arguments: Mapping[str, str]
    model: str
    task: str
    gpu: str
    gpus: int
    precision: str
    variant: str
    hub: tuple[str, ...]
    layout: Mapping[str, int]
    fsdp: bool
    micro_batch: int
    global_batch: int
    sequence: int | None
    iterations: int | None
    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    sections: Mapping[str, Any]
    tokenizer: str | None = None
    missing_files: tuple[str, ...] = ()
    missing_sizes: tuple[str, ...] = ()
    null_vocabulary: int | None = None
    takes_vocabulary: Literal["always", "if unset"] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    peft: Mapping[str, Any] = field(default_factory=dict)

    @property
    def library(self) -> bool:
        """Whether the recipe is for training. Performance recipes are for measuring the speed of a few steps."""
        return self.module.startswith(_LIBRARY)

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON shows it."""
        return {
            **vars(self),
            "hub": list(self.hub),
            "missing_files": list(self.missing_files),
            "missing_sizes": list(self.missing_sizes),
        }


@functools.cache
def releases() -> tuple[str, ...]:
    """Return the releases of Megatron-Bridge in the index, the oldest first."""
    return tuple(sorted(_read(), key=_numbers))


@functools.cache
def recipes_of(release: str) -> Mapping[str, BridgeRecipe]:
    """Return the recipes of a release by name. Raises UserError for a release that the index lacks."""
    data = _read()
    if release not in data:
        fix = f"use one of {', '.join(releases())}"
        raise error("unknown-bridge-release", f"the index has no Megatron-Bridge {release}", None, fix)
    return {name: _recipe(release, name, entry) for name, entry in data[release]["recipes"].items()}


def find(name: str, release: str | None = None, where: str | None = None) -> BridgeRecipe:
    """Return the recipe with this name, by default from the newest release that has it.

    The name may be one of Bridge's aliases, such as `llama32_1b_sft_config`. Raises UserError at `where` for an unknown
    name, with the nearest known name in the message, and for a recipe that Bridge refuses to build.
    """
    asked = tuple(reversed(releases()))
    if release:
        asked = (release,)
    for each in asked:
        known = recipes_of(each)
        own_name = _read()[each].get("aliases", {}).get(name, name)
        if own_name in known:
            return known[own_name]
        reason = _read()[each].get("refused", {}).get(own_name)
        if reason is not None:
            message = f"Megatron-Bridge {each} refuses to build {own_name}: {reason}"
            raise UserError([Problem("error", "bridge-task", message, where)], ANSWER_IS_NO)
    near = nearest(name, chain.from_iterable(map(recipes_of, asked)))
    fix = "`fp8launch recipes --engine bridge` lists them"
    if near:
        fix = f"did you mean '{near}'? {fix}"
    message = f"there is no recipe '{name}' in Megatron-Bridge {', '.join(reversed(asked))}"
    raise error("unknown-bridge-recipe", message, where, fix)


def select(
    release: str | None = None, gpu: str | None = None, model: str | None = None, precision: str | None = None
) -> list[BridgeRecipe]:
    """Return the recipes of a release (the newest by default) that fit the filters, sorted by name.

    `model` is any part of the model's name, such as `qwen3`. `gpu` and `precision` are exact: `gb200`, `fp8mx`.
    """
    found = []
    for recipe in recipes_of(release or releases()[-1]).values():
        if gpu is not None and recipe.gpu != gpu.lower():
            continue
        if model is not None and plain(model) not in plain(recipe.model):
            continue
        if precision is None or recipe.precision == plain(precision):
            found.append(recipe)
    return sorted(found, key=lambda one: (one.model, one.gpu, one.gpus, one.name))


def values_of(field: str, release: str | None = None) -> list[str]:
    """Return the distinct values of `gpu`, `model` or `precision` in a release, sorted."""
    return sorted({getattr(one, field) for one in recipes_of(release or releases()[-1]).values()})


def plain(text: str) -> str:
    """Return a name in lower case without its punctuation: `LLAMA3.1_405B` and `llama31_405b` are one model."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@functools.cache
def _read() -> dict[str, Any]:
    data = json.loads(lzma.decompress(_DATA.read_bytes()))
    assert isinstance(data, dict)
    return data


def _recipe(release: str, name: str, entry: Mapping[str, Any]) -> BridgeRecipe:
    sections = {key: entry[key] for key in SECTIONS if entry.get(key)}
    return BridgeRecipe(
        release=release,
        name=name,
        module=entry["module"],
        function=entry["function"],
        arguments=entry.get("arguments", {}),
        model=entry["model"],
        task=entry["task"],
        gpu=entry["gpu"],
        gpus=entry["gpus"],
        precision=entry["precision"],
        variant=entry.get("variant", ""),
        hub=tuple(entry["hub"]),
        layout=entry["layout"],
        fsdp=entry["fsdp"],
        micro_batch=entry["micro_batch"],
        global_batch=entry["global_batch"],
        sequence=entry["sequence"],
        iterations=entry["iterations"],
        environment=entry["environment"],
        settings=entry["settings"],
        sections=sections,
        tokenizer=entry.get("tokenizer"),
        missing_files=tuple(entry.get("missing_files", ())),
        missing_sizes=tuple(entry.get("missing_sizes", ())),
        null_vocabulary=entry.get("null_vocabulary"),
        takes_vocabulary=entry.get("takes_vocabulary"),
        data=entry.get("data", {}),
        peft=entry.get("peft", {}),
    )
