"""Check the files of a tokenizer. Which type needs which files: megatron/core/tokenizers/utils/build_tokenizer.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fp8launch.check.job_paths import JobPaths, entries, is_remote, kind_of, missing_path, unexpanded
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.job.prepared import Prepared

# Types that need a single file, which sentencepiece or tiktoken reads.
FILE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
# Types that need a folder or a name on the Hugging Face hub, which transformers reads.
HUB_TYPES = ("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer")
# Types with files that Megatron downloads unless they are given.
VOCAB_TYPES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
}
# transformers accepts a folder with any of these files.
HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def tokenizer_problems(
    prepared: Prepared, cluster: Cluster, paths: JobPaths, environment: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield problems with the tokenizer's files."""
    args = prepared.args
    kind, model = args.values.get("tokenizer_type"), args.values.get("tokenizer_model")
    where = args.places.get("tokenizer_model") or args.places.get("tokenizer_type")
    if kind in VOCAB_TYPES:
        absent = [flag for flag in VOCAB_TYPES[str(kind)] if not args.values.get(flag)]
        if absent:
            message = f"{kind} without {' and '.join(absent)}: each node would try to download them"
            fix = f"set megatron.{absent[0]} to a local file"
            yield Problem("warning", "tokenizer-from-network", message, where, fix)
    elif kind in (*FILE_TYPES, *HUB_TYPES):
        if not isinstance(model, str) or not model:
            # A multimodal tokenizer does not need a model.
            if kind != "MultimodalTokenizer":
                message = f"{kind} needs a tokenizer model, but none is set"
                yield Problem("error", "tokenizer-missing", message, where, "set data.tokenizer.model")
        elif is_remote(model) or unexpanded(model):
            return
        elif kind in HUB_TYPES and _HUB_NAME.fullmatch(model):
            if not _cached(model, prepared, cluster, paths, environment):
                message = f"{kind} loads '{model}' from the Hugging Face hub, which compute nodes often cannot reach"
                fix = (
                    "download it once to the shared file system and use that folder, or set HF_HOME to a cache that "
                    "contains it"
                )
                yield Problem("warning", "tokenizer-from-network", message, where, fix)
        elif kind in HUB_TYPES:
            yield from _folder(str(kind), model, where, paths)
        else:
            yield from _file(str(kind), model, where, paths)


def _file(kind: str, model: str, where: str | None, paths: JobPaths) -> Iterator[Problem]:
    here = paths.here(model)
    if here is not None and kind_of(here) == "folder":
        fix = "write the path of the file inside it"
        for name in ("tokenizer.model", "tokenizer.json"):
            if name in entries(here):
                fix = f"write {model.rstrip('/')}/{name}"
                break
        yield Problem("error", "tokenizer-missing", f"{kind} reads one file, but {model} is a folder", where, fix)
    elif problem := missing_path(f"the model of {kind},", model, where, paths, code="tokenizer-missing"):
        yield problem


def _folder(kind: str, model: str, where: str | None, paths: JobPaths) -> Iterator[Problem]:
    here = paths.here(model)
    if here is not None and kind_of(here) == "file":
        return  # transformers also accepts a tokenizer file, with a warning
    if here is not None and kind_of(here) == "folder" and not set(HUB_FILES) & set(entries(here)):
        message = f"{model} contains none of {', '.join(HUB_FILES)}"
        fix = "write the path of the folder that contains the tokenizer"
        yield Problem("error", "tokenizer-missing", message, where, fix)
    elif problem := missing_path(f"the tokenizer of {kind},", model, where, paths, "folder", "tokenizer-missing"):
        yield problem


def _cached(model: str, prepared: Prepared, cluster: Cluster, paths: JobPaths, environment: Mapping[str, str]) -> bool:
    """Return whether the job's Hugging Face cache contains this model, as far as this machine can see."""
    job = {**environment, **cluster.environment, **prepared.loaded.recipe.environment}
    home = job.get("HF_HOME") or f"{job.get('XDG_CACHE_HOME') or job.get('HOME', '') + '/.cache'}/huggingface"
    hub = job.get("HF_HUB_CACHE") or f"{home}/hub"
    here = paths.here(f"{hub}/models--{model.replace('/', '--')}/snapshots")
    return here is not None and any(set(HUB_FILES) & set(entries(here / commit)) for commit in entries(here))
