"""The data and tokenizer of a fine-tuning run, and what Bridge's own runner aligns before it starts one.

Sources: scripts/training/run_recipe.py and recipe_runner.py of 0.6.0, recipes/utils/dataset_utils.py and
data/builders/gpt_sft.py of 0.6.2.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from fp8launch.injob.rank import worker
from fp8launch.injob.regular_files import open_regular
from fp8launch.plugins.bridge.injob import chat_data
from fp8launch.plugins.bridge.injob.local_files import MOCK, TRAINING_FILE, has_tokenizer

DATASETS = "megatron.bridge.recipes.utils.dataset_utils"
# A line with one of these is a conversation, which the tokenizer's chat template turns into text.
_CONVERSATIONS = ("messages", "conversation", "conversations")
# Keys of a prompt and its completion.
_PAIRS = (("input", "output"), ("prompt", "completion"))


def use_data(config: Any, data: str) -> None:
    """Let a run train on a folder's `training.jsonl`, or on random tokens, instead of the recipe's data."""
    datasets: Any = importlib.import_module(DATASETS)
    if data == MOCK:
        config.dataset = datasets.build_dataset_config(config, "mock")
        config.dataset.split = "99990,8,2"  # as in Bridge's runner, whose benchmarks are short
        return
    folder = Path(data)
    config.dataset = dataclasses.replace(
        config.dataset,
        dataset_root=str(folder),
        hf_dataset=None,
        hf_validation_dataset=None,
        hf_test_dataset=None,
        hf_output_root=None,
        hf_validation_proportion=None,
        hf_rewrite=False,
        preprocessing=_preprocessing(datasets, folder / TRAINING_FILE),
        do_validation=(folder / "validation.jsonl").is_file(),
        do_test=(folder / "test.jsonl").is_file(),
    )
    if not config.dataset.do_validation:
        config.validation.eval_iters = 0


def _preprocessing(datasets: Any, file: Path) -> Any:
    """Return how Bridge reads a file's lines, by the keys of the first one. Exits if it is neither kind."""
    first: Any = None
    try:
        with open_regular(file) as lines:
            first = json.loads(next((line for line in lines if line.strip()), b"null"))
    except OSError as failure:
        worker.stop(worker.MACHINE_LACKS, f"bridge.data: {file} cannot be read: {failure.strerror or failure}")
    except (ValueError, RecursionError):
        pass  # reported below
    keys = set(first) if isinstance(first, dict) else set()
    if keys.intersection(_CONVERSATIONS):
        return datasets.ChatSFTPreprocessingConfig()
    fitting = [pair for pair in _PAIRS if keys.issuperset(pair)]
    if not fitting:
        pairs = " or ".join(f"`{prompt}` and `{completion}`" for prompt, completion in _PAIRS)
        worker.stop(
            worker.WRONG_REQUEST,
            f"bridge.data: the first line of {file} must be a JSON object with `{_CONVERSATIONS[0]}`, or with {pairs}",
        )
    prompt, completion = fitting[0]
    return datasets.PromptCompletionSFTPreprocessingConfig(
        prompt_column=prompt, completion_column=completion, separator=" "
    )


def use_tokenizer(config: Any, folder: Path) -> None:
    """Read the tokenizer from the model's folder instead of the hub, if the folder has one."""
    if config.tokenizer.tokenizer_type == "HuggingFaceTokenizer" and has_tokenizer(folder):
        config.tokenizer.tokenizer_model = str(folder)


def use_template(config: Any, data: str) -> None:
    """Render conversations with the template that they were built with, if the folder has its own."""
    template = Path(data) / chat_data.TEMPLATE
    tokenizer = config.tokenizer
    if template.is_file() and not tokenizer.chat_template and not getattr(tokenizer, "chat_template_path", None):
        tokenizer.chat_template_path = str(template)


def use_packed_files(config: Any, data: str) -> None:
    """Train on the packed sequences that `data build --chat` wrote, if Bridge would pack them in the same way.

    Otherwise Bridge packs the conversations again, in the folder of the data.
    """
    packing = getattr(config.dataset, "offline_packing_specs", None)
    if packing is None or not config.dataset.enable_offline_packing or packing.packed_train_data_path is not None:
        return
    try:
        found = chat_data.read(Path(data))
    except (OSError, ValueError) as failure:
        print(f"fp8launch: {data}/{chat_data.MANIFEST} cannot be read: {failure}", file=sys.stderr)
        return
    if found is None or packing.max_single_sequence_length is not None:
        return
    files = found.packed_files(packing.packed_sequence_size, packing.pad_seq_to_mult or 1)
    reason = chat_data.differs(found, Path(str(config.tokenizer.tokenizer_model)))
    if files is None and found.packed is not None:
        reason = f"sequences of {found.packed['size']} tokens, padded to multiples of {found.packed['multiple']}"
    if files is None or reason is not None:
        if reason is not None:
            print(f"fp8launch: the packed files in {data} are not used: they are for {reason}", file=sys.stderr)
        return
    for name, file in files.items():
        setattr(packing, name, str(file) if name != "packed_metadata_path" else file)


def align(config: Any) -> None:
    """Set what Bridge requires of the loss with context parallelism, and pad packed sequences for the layout.

    Bridge's runner does both for every fine-tuning run, and its `validate` raises without the first.
    """
    dataset, model = config.dataset, config.model
    if not hasattr(dataset, "enable_offline_packing") and not hasattr(dataset, "enable_in_batch_packing"):
        return
    contexts = {model.context_parallel_size}
    if getattr(config.dist, "eval_context_parallel_size", None) is not None:
        contexts.add(config.dist.eval_context_parallel_size)
    if max(contexts) > 1:
        model.calculate_per_token_loss = True
        config.ddp.average_in_collective = False
    if not getattr(dataset, "enable_offline_packing", False):
        return
    packing = dataset.offline_packing_specs
    packing.packed_sequence_size = dataset.seq_length
    shards = 1
    if model.sequence_parallel:
        shards = model.tensor_model_parallel_size
    multiples = [size * 2 for size in contexts if size > 1] + [size * shards for size in contexts if shards > 1]
    packing.pad_seq_to_mult = math.lcm(packing.pad_seq_to_mult or 1, *multiples)
