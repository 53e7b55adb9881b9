"""Data for GPT pre-training: Megatron's datasets, and the part of each batch that one rank needs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core import utils as core_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.training import get_args, get_tokenizer
from megatron.training import utils as training_utils

# In the order of the model's parameters. All other fields are for packed sequences only.
FIELDS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
PACKED_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")


def call_with(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Call `function` with those values for which it has parameters.

    From 0.17 to 0.19, Megatron's helpers gained parameters, but kept the names of existing ones.
    """
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in names})


def builds_mtp(config: Any, vp_stage: int | None) -> bool:
    """Return whether this stage has multi-token-prediction layers, which need tokens and labels wherever they are."""
    if not config.mtp_num_layers:
        return False
    values = {
        "config": config,
        "layout": config.pipeline_model_parallel_layout,
        "mtp_num_layers": config.mtp_num_layers,
        "ignore_virtual": False,
        "vp_stage": vp_stage,
    }
    return bool(call_with(mtp_on_this_rank, values))


def embedding_ranks(config: Any, pipeline_ranks: list[int]) -> list[int]:
    """Return the pipeline ranks that have word embeddings: the first and last stage, and stages with MTP layers."""
    ranks = {pipeline_ranks[0], pipeline_ranks[-1]}
    if config.mtp_num_layers:
        ranks |= set(get_mtp_ranks(pipeline_ranks, config))
    return sorted(ranks)


def batch_for_this_rank(
    samples: Iterator[dict[str, Any]] | None, config: Any, vp_stage: int | None
) -> dict[str, torch.Tensor | None]:
    """Return one micro batch on the device: FIELDS, each [micro batch, sequence / context parallel size], or None.

    Tensor-parallel rank 0 reads the batch and broadcasts it to its group. Inner pipeline stages do not read data,
    because their input comes from the previous stage.
    """
    args = get_args()
    has_mtp = builds_mtp(config, vp_stage)
    if not training_utils.is_first_or_last_pipeline_stage(vp_stage) and not has_mtp:
        return dict.fromkeys(FIELDS)

    values = {
        "mtp_on_this_rank": has_mtp,
        "broadcast_src_rank": parallel_state.get_tensor_model_parallel_src_rank(),
        "broadcast_group": parallel_state.get_tensor_model_parallel_group(),
        "is_sft": False,
        "has_cu_seqlens": False,
        "is_hybrid_cp": False,
        "create_attention_mask_in_dataloader": args.create_attention_mask_in_dataloader,
        "cp_size": args.context_parallel_size,
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "micro_batch_size": args.micro_batch_size,
        "seq_length": args.seq_length,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "is_pipeline_first_stage": parallel_state.is_pipeline_first_stage(),
        "is_pipeline_last_stage": parallel_state.is_pipeline_last_stage(),
        "cp_group": parallel_state.get_context_parallel_group(),
    }
    if hasattr(core_utils, "get_batch_on_this_tp_rank"):  # since 0.18, it only broadcasts
        batch: dict[str, Any] = {}
        if values["tp_rank"] == 0:
            assert samples is not None
            sample = next(samples)
            batch = {name: _on_device(sample.get(name)) for name in (*FIELDS, *PACKED_FIELDS)}
        batch = call_with(core_utils.get_batch_on_this_tp_rank, {**values, "batch": batch})
    else:  # in 0.17, it reads the batch, moves it to the device and broadcasts it
        batch = call_with(training_utils.get_batch_on_this_tp_rank, {**values, "data_iterator": samples})
        batch = {name: batch.get(name) for name in FIELDS}
    batch = call_with(core_utils.get_batch_on_this_cp_rank, {**values, "batch": batch})
    return {name: batch.get(name) for name in FIELDS}


def _on_device(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.cuda(non_blocking=True)


def _reads_data(vp_stage: int | None) -> bool:
    """Return whether this rank reads data: it must be tensor-parallel rank 0 of a stage that uses tokens or labels."""
    args = get_args()
    used = training_utils.is_first_or_last_pipeline_stage(vp_stage) or args.mtp_num_layers
    return bool(used) and parallel_state.get_tensor_model_parallel_rank() == 0


def datasets(sample_counts: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return training, validation and test datasets with these sample counts; None for a dataset that is not used.

    A count of None means one epoch. With `--mock-data`, the data is generated. Otherwise it comes from the indexed
    files of `--data-path` and similar arguments, blended and split accordingly.
    """
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(
        kind, sample_counts, functools.partial(_reads_data, vp_stage), dataset_config(args)
    )
    # Without evaluation (--eval-iters 0), Megatron would fail to create a data loader for zero samples.
    built = list(builder.build())
    for i, count in enumerate(sample_counts):
        if count == 0:
            built[i] = None
    train, valid, test = built
    return train, valid, test


# Makes Megatron call this function on every rank, not only on tensor-parallel rank 0.
datasets.is_distributed = True  # type: ignore[attr-defined]


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Return Megatron's dataset configuration. Fields that are not set below are filled from arguments by name."""
    blend, blend_per_split = training_utils.get_blend_and_blend_per_split(args)
    renamed = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    names = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    same = {name: getattr(args, name) for name in names - renamed.keys() if hasattr(args, name)}
    return GPTDatasetConfig(**same, **renamed)
