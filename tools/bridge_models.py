"""Write the shapes of models that Megatron-Bridge reads from the Hugging Face hub and that the pack lacks.

    python tools/bridge_models.py CHECKOUT HUB_ID=FOLDER...

A CHECKOUT is a folder with Bridge's source (`src/`) or its unpacked wheel, a FOLDER has the model's published
config.json. Bridge's own code creates the model's configuration from it. Fields that differ from the defaults are kept,
by Megatron-LM's names. Needs torch, megatron-core, transformers, omegaconf and hydra-core. No network is used.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from bridge_source import source_folder

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "launchers" / "fp8launch" / "plugins" / "bridge" / "models.json"
# Fields about how a model is read, built or computed rather than its shape. Recipes set the sequence length.
LEFT_OUT = frozenset(("autocast_dtype", "hf_model_id", "hetereogenous_dist_checkpoint", "seq_length"))


def shape(folder: Path) -> dict[str, Any]:
    """Return the configuration that Bridge creates from a published one."""
    from fp8launch.plugins.bridge.fields import attribute_of

    stubs = importlib.import_module("bridge_stubs")
    auto = stubs.settled(lambda: stubs.load("megatron.bridge.models.conversion.auto_bridge")).AutoBridge
    model = auto.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    found: dict[str, Any] = {"group_query_attention": True, "untie_embeddings_and_output_weights": True}
    for field in dataclasses.fields(model):
        value, name = getattr(model, field.name), attribute_of(f"model.{field.name}")
        if field.name == "share_embeddings_and_output_weights":
            found["untie_embeddings_and_output_weights"] = not value
        elif name and value != field.default and field.name not in LEFT_OUT and isinstance(value, int | float | str):
            found[name] = value
        elif name and value and isinstance(value, list):
            found[name] = every(value)
    return found


def every(layers: list[int]) -> int | str:
    """Return the kinds of layers as Megatron-LM's arguments do: N if every Nth is of the other kind, else a list."""
    period = layers.index(0) + 1 if 0 in layers else len(layers) + 1
    regular = [int((number + 1) % period != 0) for number in range(len(layers))]
    return period if layers == regular else str(layers)


def main() -> None:
    checkout, *models = sys.argv[1:]
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "launchers"), str(source_folder(Path(checkout).resolve()))]
    os.environ |= {"HF_HUB_OFFLINE": "1", "NO_VCS_VERSION": "1"}
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    importlib.import_module("bridge_stubs").install()
    known = json.loads(OUT.read_text()) if OUT.is_file() else {}
    known |= {hub: shape(Path(folder)) for hub, _, folder in (model.partition("=") for model in models)}
    OUT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
