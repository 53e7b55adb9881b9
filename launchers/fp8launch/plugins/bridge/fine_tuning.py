"""What a fine-tuning recipe of Megatron-Bridge needs before it can start: a checkpoint and data.

Sources, release 0.6.2: `finetune` of training/finetune.py, `_should_load_checkpoint` and
`_create_peft_pre_wrap_hook` of training/setup.py, `load_checkpoint` of training/checkpointing.py, and data/builders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8launch.diagnostics import Problem
from fp8launch.plugins.bridge.index import BridgeRecipe
from fp8launch.plugins.bridge.injob.local_files import MOCK, TRAINING_FILE
from fp8launch.plugins.bridge.section import bridge_of
from fp8launch.plugins.bridge.settings import Setting
from fp8launch.recipe.load import LoadedRecipe

_TEXT = "GPTSFTDatasetConfig"
_PRETRAINED = "checkpoint.pretrained_checkpoint"
# Fields without which a data configuration of Bridge raises, for classes whose recipes leave them out.
_NEEDED_FIELDS = {"EnergonDatasetConfig": "dataset.path"}
# Hugging Face's reader of local files, for which a recipe names none.
_LOCAL_JSON = "json"
_SOURCE = "dataset.source."


def problems(recipe: BridgeRecipe, found: Mapping[str, Setting], loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield errors for a checkpoint, data or sizes of the model that the run lacks."""
    where = loaded.where("bridge", "recipe")
    missing = [f"model.{name}" for name in recipe.missing_sizes if not _states(found, f"model.{name}")]
    if missing:
        message = f"{recipe.name} is a frame for a model of your own, whose sizes it does not set"
        yield Problem("error", "bridge-model", message, where, f"set {', '.join(missing)}")
    data = bridge_of(loaded.recipe).data
    if recipe.task == "pretrain":
        if data is not None:
            message = f"`bridge.data` is for fine-tuning; {recipe.name} is for pre-training"
            yield Problem("error", "bridge-data", message, loaded.where("bridge", "data"), "set dataset.blend instead")
        return
    if recipe.task == "peft":
        # Adapters are added to the model's weights at every start, also when the run continues.
        if not _states(found, _PRETRAINED):
            message = f"{recipe.name} adds adapters to a trained model, which it reads at every start"
            yield Problem("error", "bridge-checkpoint", message, where, _checkpoint_fix(recipe))
    elif data != MOCK and not _states(found, _PRETRAINED) and not _states(found, "checkpoint.load"):
        message = f"{recipe.name} is for fine-tuning, which starts from a checkpoint"
        yield Problem("error", "bridge-checkpoint", message, where, _checkpoint_fix(recipe))
    yield from _data_problems(recipe, found, loaded)


def hub_data(recipe: BridgeRecipe, loaded: LoadedRecipe) -> str | None:
    """Return the data set that a run reads from the Hugging Face hub when it starts, if any."""
    hub = recipe.data.get("hub")
    if hub is None or hub == _LOCAL_JSON or bridge_of(loaded.recipe).data is not None:
        return None
    return str(hub)


def _data_problems(recipe: BridgeRecipe, found: Mapping[str, Setting], loaded: LoadedRecipe) -> Iterator[Problem]:
    data, kind = bridge_of(loaded.recipe).data, recipe.data.get("class")
    where = loaded.where("bridge", "recipe")
    root = "dataset.dataset_root"
    if data is not None and kind != _TEXT:
        message = f"`bridge.data` is for text; {recipe.name} reads its data as {kind}"
        fix = "set fields of `dataset`, such as dataset.path"
        yield Problem("error", "bridge-data", message, loaded.where("bridge", "data"), fix)
    elif _states(found, root) and (data is not None or recipe.data.get("hub")):
        message = f"`{root}` is a second source of data, which Bridge refuses"
        yield Problem("error", "bridge-data", message, found[root].where, "write bridge.data=FOLDER instead")
    elif kind == _TEXT and data is None and not _states(found, root) and "hub" not in recipe.data:
        # A relative folder on the machine of the recipe's author.
        message = (
            f"{recipe.name} reads its data from {recipe.data.get('folder', 'a folder')}, which Bridge does not have"
        )
        fix = f"set bridge.data to a folder with {TRAINING_FILE}, or to `{MOCK}` for random tokens"
        yield Problem("error", "bridge-data", message, where, fix)
    field = _NEEDED_FIELDS.get(str(kind))
    if field is not None and not _states(found, field):
        message = f"{recipe.name} names no data, which {kind} requires"
        yield Problem("error", "bridge-data", message, where, f"set {field} to a folder in Energon's format")
    if recipe.data.get("hub") == _LOCAL_JSON and not any(name.lstrip("+").startswith(_SOURCE) for name in found):
        message = f"{recipe.name} reads local JSON files and names none"
        fix = f"set {_SOURCE}load_kwargs.data_files.train=FILE"
        yield Problem("error", "bridge-data", message, where, fix)


def _states(found: Mapping[str, Setting], field: str) -> bool:
    return field in found and found[field].value is not None


def _checkpoint_fix(recipe: BridgeRecipe) -> str:
    model = f" of {recipe.hub[0]}" if recipe.hub else ""
    fix = f"set {_PRETRAINED} to a checkpoint of Megatron, or to a folder with the Hugging Face model{model}"
    if recipe.task == "sft" and recipe.data.get("class") == _TEXT:
        fix += f"; or set bridge.data={MOCK} to measure speed without a checkpoint"
    return fix
