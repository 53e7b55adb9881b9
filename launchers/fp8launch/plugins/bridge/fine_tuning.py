"""What a fine-tuning recipe of Megatron-Bridge needs before it can start: a checkpoint and data.

Sources, release 0.6.2: `finetune` of training/finetune.py, `_should_load_checkpoint` and
`_create_peft_pre_wrap_hook` of training/setup.py, `load_checkpoint` of training/checkpointing.py, and data/builders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8launch.diagnostics import Problem
from fp8launch.plugins.bridge.index import BridgeRecipe
from fp8launch.plugins.bridge.injob import chat_data
from fp8launch.plugins.bridge.injob.local_files import MOCK, TRAINING_FILE
from fp8launch.plugins.bridge.section import bridge_of
from fp8launch.plugins.bridge.settings import Setting, size
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.untyped import as_int

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


def chat_warnings(recipe: BridgeRecipe, found: Mapping[str, Setting], loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield warnings for conversations of `data build --chat` that the run does not use as they were built."""
    stated = bridge_of(loaded.recipe)
    if stated.data in (None, MOCK) or recipe.data.get("class") != _TEXT:
        return
    where, folder = loaded.where("bridge", "data"), Path(str(stated.data))
    yield from _stale_indexes(folder, where)
    try:
        data = chat_data.read(folder)
    except (OSError, ValueError) as failure:
        message = f"{folder / chat_data.MANIFEST} cannot be read: {failure}"
        yield Problem("warning", "chat-manifest", message, where, "build the data again")
        return
    if data is None:
        return
    sequence = _number(found, "dataset.seq_length") or recipe.sequence
    packs = bool(recipe.data.get("packed"))
    if "dataset.enable_offline_packing" in found:
        packs = found["dataset.enable_offline_packing"].value is True
    tokenizer = found["tokenizer.tokenizer_model"].value if "tokenizer.tokenizer_model" in found else stated.model
    reason = None if tokenizer is None else chat_data.differs(data, Path(str(tokenizer)))
    if reason is not None:
        message = f"{folder} was built with {reason} than {tokenizer} has: {data.tokenizer}"
        effect = "the job packs it again, and `data inspect` shows other tokens than it trains on"
        yield Problem(
            "warning", "chat-tokenizer", f"{message}; {effect}", where, f"build it with --tokenizer {tokenizer}"
        )
    if sequence is None:
        return
    longer = data.longer_than(sequence)
    if longer:
        share = f"{longer:,} of {sum(data.lengths.values()):,} conversations"
        message = f"{share} are longer than the run's {sequence:,} tokens, and are cut"
        if packs:
            message = f"{share} are longer than the run's {sequence:,} tokens; Bridge leaves them out when it packs"
        yield Problem("warning", "chat-length", message, where, "set a longer dataset.seq_length, or shorten them")
    multiple = _packing_multiple(found, recipe)
    if packs and data.packed is not None and (data.packed["size"], data.packed["multiple"]) != (sequence, multiple):
        packed = f"sequences of {data.packed['size']:,} tokens, padded to multiples of {data.packed['multiple']}"
        message = f"{folder} has packed {packed}; the run needs {sequence:,} and {multiple}, so the job packs again"
        fix = f"build it with --sequence {sequence} --pack --pad-to {multiple}"
        yield Problem("warning", "chat-packing", message, where, fix)


def _stale_indexes(folder: Path, where: str) -> Iterator[Problem]:
    """Bridge keeps the places of lines in a file next to the data, and does not see that the data are newer."""
    for split in ("training", "validation", "test"):
        lines, index = folder / f"{split}.jsonl", folder / f"{split}.jsonl.idx.npy"
        try:
            is_stale = index.stat().st_mtime < lines.stat().st_mtime
        except OSError:
            continue
        if is_stale:
            message = f"{index} is older than {lines.name}, and Bridge would cut the new lines at the old places"
            yield Problem(
                "warning", "chat-index", message, where, f"delete {index}, {split}.jsonl.idx.info and packed/"
            )


def _packing_multiple(found: Mapping[str, Setting], recipe: BridgeRecipe) -> int:
    """Return the multiple that Bridge pads conversations to, as `align` of injob/fine_tuning.py sets it."""
    context = size("model.context_parallel_size", dict(found), recipe)
    tensor = size("model.tensor_model_parallel_size", dict(found), recipe)
    sequence_parallel = recipe.settings.get("sequence_parallel")
    if "model.sequence_parallel" in found:
        sequence_parallel = found["model.sequence_parallel"].value
    stated = _number(found, "dataset.offline_packing_specs.pad_seq_to_mult") or 1
    multiples = [stated]
    if context > 1:
        multiples.append(2 * context)
    if sequence_parallel and tensor > 1:
        multiples.append(context * tensor)
    return math.lcm(*multiples)


def _number(found: Mapping[str, Setting], field: str) -> int | None:
    return as_int(found[field].value) if field in found else None


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
