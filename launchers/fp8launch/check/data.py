"""Do the files exist that a run reads, and can it write where it wants to? Only what this machine can see is judged.

Megatron's validators know nothing of files: all of this would end, or silently spoil, a run after the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fp8launch.check.blends import blend_problems
from fp8launch.check.checkpoints import load_problems
from fp8launch.check.job_paths import (
    JobPaths,
    Kind,
    is_remote,
    job_paths,
    missing_path,
    not_mounted,
    unexpanded,
    why_not_writable,
)
from fp8launch.check.tokenizers import tokenizer_problems
from fp8launch.job.cluster import Cluster
from fp8launch.megatron.translate import MegatronArgs
from fp8launch.problems import Problem, Severity

if TYPE_CHECKING:
    from fp8launch.runs.submit import Prepared

# Flags that name one file to read, from the schemas of 0.17 to 0.19. Those of the tokenizer, of data and of checkpoints
# have rules of their own; those of REALM and ICT (titles, evidence, embeddings, blocks) train no GPT.
READ_FILES = (
    "vocab_file",
    "merge_file",
    "tokenizer_metadata",
    "te_precision_config_file",
    "kitchen_config_file",
    "tp_comm_overlap_cfg",
    "data_args_path",
    "per_split_data_args_path",
    "per_dataset_sequences_path",
    "nccl_communicator_config_path",
    "heterogeneous_layers_config_path",
    "yaml_cfg",
    "langrl_env_config",
)
READ_FOLDERS = ("logits_load_dir",)
# Folders that are made when they are missing.
WRITTEN_FOLDERS = (
    "save",
    "data_cache_path",
    "tensorboard_dir",
    "wandb_save_dir",
    "non_persistent_global_ckpt_dir",
    "logits_save_dir",
    "config_logger_dir",
    "rl_profile_dir",
    "moe_routing_trace_path",
    "ckpt_convert_save",
)

CODES: Mapping[str, Severity] = {
    **dict.fromkeys(("path-not-expanded", "path-relative", "file-missing", "not-writable"), "error"),
    **dict.fromkeys(("data-blend", "data-split", "data-missing", "data-unreadable", "data-broken"), "error"),
    **dict.fromkeys(("data-cache", "data-too-short", "tokenizer-missing", "checkpoint-missing"), "error"),
    **dict.fromkeys(("path-not-mounted", "data-epochs", "tokenizer-from-network"), "warning"),
}


def problems(prepared: Prepared, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Problem]:
    """What is wrong with the files of a run: data, tokenizer, checkpoints, caches, and whatever else a flag names.

    `environment` is the submitting shell's, for where the Hugging Face cache is.
    """
    args, paths = prepared.args, job_paths(prepared.loaded, cluster)
    yield from _unexpanded(args)
    yield from _named_files(args, paths)
    yield from blend_problems(prepared, paths)
    yield from tokenizer_problems(prepared, cluster, paths, environment)
    yield from load_problems(args, paths)
    yield from _written(args, paths)


def _texts(args: MegatronArgs, *flags: str) -> Iterator[tuple[str, str]]:
    """The flags that are set to a text, with it."""
    for flag in flags:
        value = args.values.get(flag)
        if isinstance(value, str) and value:
            yield flag, value


def _unexpanded(args: MegatronArgs) -> Iterator[Problem]:
    flags = (*READ_FILES, *READ_FOLDERS, *WRITTEN_FOLDERS, "tokenizer_model", "load", "pretrained_checkpoint")
    blends = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    texts = [*_texts(args, *flags)]
    for flag in blends:
        value = args.values.get(flag)
        texts += [(flag, str(item)) for item in (value if isinstance(value, list) else [value]) if item is not None]
    for flag, text in texts:
        if unexpanded(text):
            yield Problem(
                "error",
                "path-not-expanded",
                f"{flag} is '{text}', and arguments reach Megatron as they are written: no shell expands '~' or '$'",
                args.places.get(flag),
                "write the path in full",
            )


def _named_files(args: MegatronArgs, paths: JobPaths) -> Iterator[Problem]:
    for flag, text in _texts(args, *READ_FILES, *READ_FOLDERS):
        if is_remote(text) or unexpanded(text):
            continue
        wanted: Kind = "folder" if flag in READ_FOLDERS else "file"
        if problem := missing_path(flag, text, args.places.get(flag), paths, wanted):
            yield problem


def _written(args: MegatronArgs, paths: JobPaths) -> Iterator[Problem]:
    for flag, text in _texts(args, *WRITTEN_FOLDERS):
        # What is relative lies in the run folder, which is ours.
        if is_remote(text) or not text.startswith("/"):
            continue
        here = paths.here(text)
        if mount := paths.read_only(text):
            why: str | None = f"the mount {mount} is read-only"
        elif paths.forgotten(text):
            yield not_mounted(flag, text, args.places.get(flag), text)
            continue
        else:
            why = why_not_writable(here) if here is not None else None
        if why:
            fix = "choose a folder that the job can write, on the shared file system"
            yield Problem("error", "not-writable", f"{flag} {text}: {why}", args.places.get(flag), fix)
