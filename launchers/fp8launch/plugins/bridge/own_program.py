"""Bridge's own program for a rehearsal, if the Python that runs fp8launch has Megatron-Bridge."""

from __future__ import annotations

import functools
import importlib.util
import json
import lzma
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8launch.engines.base import EngineArguments, OwnProgram
from fp8launch.plugins.bridge.index import BridgeRecipe
from fp8launch.plugins.bridge.injob import bridge_release

# Packages that Bridge imports but a rehearsal of Megatron-LM does not.
PACKAGES = ("transformers", "omegaconf", "hydra")
_HUB_MODELS = Path(__file__).with_name("hub_models.json.xz")


class NotHere(Exception):
    """Bridge's own program cannot run on this machine; the message says why."""


def own_program(args: EngineArguments, recipe: BridgeRecipe, folder: str | None) -> OwnProgram:
    """Return the in-job program with a run's arguments. Raises NotHere.

    The model is read from `folder` if this machine has it; otherwise its published configuration is used.
    """
    found = bridge_release.installed()
    if found is None:
        raise NotHere("not in this Python")
    release = found[1]
    if release.split(".")[:2] != recipe.release.split(".")[:2]:
        raise NotHere(f"this Python has {release or 'an unknown release'}, the recipe is of {recipe.release}")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHere(f"this Python lacks {', '.join(missing)}")
    words = list(args.argv)
    model: Mapping[str, Any] | None = None
    if folder is None or not Path(folder, "config.json").is_file():
        words = [word for word in words if not word.startswith("--model=")]
        known = [hub for hub in recipe.hub if hub in hub_models()]
        if known:
            model = hub_models()[known[0]]
        if model is None and recipe.hub:
            raise NotHere(f"the configuration of {recipe.hub[0]} is not here; name a folder as bridge.model")
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return OwnProgram(f"Megatron-Bridge {release}", tuple(words), model, tuple(filter(None, path)))


@functools.cache
def hub_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the published config.json of hub models, as far as Bridge reads them."""
    models: Mapping[str, Mapping[str, Any]] = json.loads(lzma.decompress(_HUB_MODELS.read_bytes()))
    return models
