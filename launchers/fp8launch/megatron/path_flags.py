"""Megatron's flags that name files or folders, and how a run uses them.

From the schemas of 0.17 to 0.19. A test compares the table with every schema, so a new version's path flags cannot be
overlooked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Access = Literal["read", "write"]
# Megatron adds an ending to a `prefix`. A `name` may also be a name on the Hugging Face hub.
Kind = Literal["file", "folder", "prefix", "name"]


@dataclass(frozen=True)
class PathFlag:
    """`kept` is false for files that are not needed after the run, such as a cache."""

    access: Access
    kind: Kind
    kept: bool = True


_READ_FILE, _READ_FOLDER, _BLEND = PathFlag("read", "file"), PathFlag("read", "folder"), PathFlag("read", "prefix")
_WRITTEN_FILE, _WRITTEN_FOLDER = PathFlag("write", "file"), PathFlag("write", "folder")

PATH_FLAGS: Mapping[str, PathFlag] = {
    # Checkpoints.
    "save": _WRITTEN_FOLDER,
    "load": _READ_FOLDER,
    "pretrained_checkpoint": _READ_FOLDER,
    "ckpt_convert_save": _WRITTEN_FOLDER,
    "non_persistent_global_ckpt_dir": _WRITTEN_FOLDER,
    "non_persistent_local_ckpt_dir": _WRITTEN_FOLDER,
    "bert_load": _READ_FOLDER,
    "ict_load": _READ_FOLDER,
    # Data.
    "data_path": _BLEND,
    "train_data_path": _BLEND,
    "valid_data_path": _BLEND,
    "test_data_path": _BLEND,
    "data_args_path": _READ_FILE,
    "per_split_data_args_path": _READ_FILE,
    "per_dataset_sequences_path": _READ_FILE,
    "data_cache_path": PathFlag("write", "folder", kept=False),
    "object_storage_cache_path": PathFlag("write", "folder", kept=False),
    "titles_data_path": _BLEND,
    "evidence_data_path": _READ_FILE,
    "block_data_path": _READ_FILE,
    "embedding_path": _READ_FILE,
    # Tokenizer.
    "tokenizer_model": PathFlag("read", "name"),
    "tokenizer_metadata": _READ_FILE,
    "vocab_file": _READ_FILE,
    "merge_file": _READ_FILE,
    # Configuration files.
    "yaml_cfg": _READ_FILE,
    "te_precision_config_file": _READ_FILE,
    "kitchen_config_file": _READ_FILE,
    "tp_comm_overlap_cfg": _READ_FILE,
    "nccl_communicator_config_path": _READ_FILE,
    "heterogeneous_layers_config_path": _READ_FILE,
    "langrl_env_config": _READ_FILE,
    # Distillation.
    "logits_load_dir": _READ_FOLDER,
    "logits_save_dir": _WRITTEN_FOLDER,
    # Logs, traces and dumps.
    "tensorboard_dir": _WRITTEN_FOLDER,
    "wandb_save_dir": _WRITTEN_FOLDER,
    "config_logger_dir": _WRITTEN_FOLDER,
    "rl_profile_dir": _WRITTEN_FOLDER,
    "moe_routing_trace_path": _WRITTEN_FOLDER,
    "memory_snapshot_path": _WRITTEN_FILE,
    "flight_recorder_dump_path": PathFlag("write", "prefix"),
    "result_rejected_tracker_filename": _WRITTEN_FILE,
    "dump_param_to_param_group_map": _WRITTEN_FILE,
}


def path_flags(access: Access, *kinds: Kind) -> Iterator[str]:
    """Return the flags whose paths a run reads or writes, of these kinds or of all."""
    for name, flag in PATH_FLAGS.items():
        if flag.access == access and (not kinds or flag.kind in kinds):
            yield name
