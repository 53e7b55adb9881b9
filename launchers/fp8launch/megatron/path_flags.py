"""Megatron's flags that name files or folders, by how a run uses them.

From the schemas of 0.17 to 0.19. A test compares the flags with every schema, so a new version's path flags cannot be
overlooked.
"""

from __future__ import annotations

# The checkpoints that a run starts from.
LOADED = ("load", "pretrained_checkpoint")
READ_FOLDERS = ("bert_load", "ict_load", "logits_load_dir")
READ_FILES = (
    # Data.
    "data_args_path", "per_split_data_args_path", "per_dataset_sequences_path", "evidence_data_path", "block_data_path",
    "embedding_path",
    # Tokenizer.
    "tokenizer_metadata", "vocab_file", "merge_file",
    # Configuration.
    "yaml_cfg", "te_precision_config_file", "kitchen_config_file", "tp_comm_overlap_cfg",
    "nccl_communicator_config_path", "heterogeneous_layers_config_path", "langrl_env_config",
)  # fmt: skip
# Prefixes of datasets, to which Megatron adds .bin and .idx.
DATASETS = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "titles_data_path")
WRITTEN_FOLDERS = (
    # Checkpoints.
    "save", "ckpt_convert_save", "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir",
    # Caches.
    "data_cache_path", "object_storage_cache_path",
    # Logs, traces and other outputs.
    "logits_save_dir", "tensorboard_dir", "wandb_save_dir", "config_logger_dir", "rl_profile_dir",
    "moe_routing_trace_path",
)  # fmt: skip
# Megatron adds an ending to flight_recorder_dump_path.
WRITTEN_FILES = (
    "memory_snapshot_path", "flight_recorder_dump_path", "result_rejected_tracker_filename",
    "dump_param_to_param_group_map",
)  # fmt: skip
# tokenizer_model is a file, a folder or a name on the Hugging Face hub.
PATH_FLAGS = (
    *LOADED, *READ_FOLDERS, *READ_FILES, *DATASETS, *WRITTEN_FOLDERS, *WRITTEN_FILES, "tokenizer_model",
)  # fmt: skip
