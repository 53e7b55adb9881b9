"""What the manifest of a dataset (`fp8launch data build`) says, held against its files, the model and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fp8launch.check.job_paths import JobPaths, kind_of
from fp8launch.data.index_format import Index
from fp8launch.data.manifest import Manifest, read_manifest, size_differences
from fp8launch.data.tokenizer import sha256_of
from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.model_arithmetic import padded_vocab_size

if TYPE_CHECKING:
    from fp8launch.job.prepared import Prepared


def manifest_problems(
    prefix: str, here: Path, where: str | None, index: Index, prepared: Prepared, paths: JobPaths
) -> Iterator[Problem]:
    """Yield the problems of a dataset that has a manifest."""
    try:
        manifest = read_manifest(here)
    except (OSError, ValueError) as exc:
        message = f"the manifest of data {prefix} cannot be read: {exc}"
        yield Problem("warning", "data-manifest-unread", message, where, "build the dataset again, or remove it")
        return
    if manifest is None:
        return
    wrong = _contradictions(here, manifest, index)
    if wrong:
        message = f"data {prefix} is not what its manifest says: {'; '.join(wrong)}"
        fix = f"`fp8launch data inspect {prefix} --verify`; copy it again, or build it again"
        yield Problem("error", "data-manifest", message, where, fix)
        return
    yield from _vocabulary(prefix, where, manifest, prepared)
    yield from _tokenizer(prefix, where, manifest, prepared, paths)


def _contradictions(here: Path, manifest: Manifest, index: Index) -> list[str]:
    found = size_differences(here, manifest)
    for name, there, said in (
        ("tokens", index.tokens, manifest.tokens),
        ("documents", index.documents, manifest.documents),
    ):
        if there != said:
            found.append(f"it has {there:,} {name}, and had {said:,} when it was made")
    return found


def _vocabulary(prefix: str, where: str | None, manifest: Manifest, prepared: Prepared) -> Iterator[Problem]:
    """Ids past the embedding table: an assertion on the GPU in the first iterations that meets one.

    Without padded_vocab_size Megatron takes the vocabulary of its tokenizer, and vocab_size with NullTokenizer only,
    which adds one for its own end of document.
    """
    args = prepared.args
    size = args.integer("vocab_size", 0)
    if args.values.get("padded_vocab_size"):
        embeddings = padded_vocab_size(args.values)
    elif args.values.get("tokenizer_type") == "NullTokenizer" and size:
        embeddings = padded_vocab_size({**args.values, "vocab_size": size + 1})
    else:
        return
    if embeddings is None or manifest.vocab_limit <= embeddings:
        return
    yield Problem(
        "error",
        "data-vocabulary",
        f"data {prefix} may hold token ids up to {manifest.vocab_limit - 1}, and the model has {embeddings} embeddings",
        where,
        f"set model.vocab_size to {manifest.vocab_limit} or more",
    )


def _tokenizer(
    prefix: str, where: str | None, manifest: Manifest, prepared: Prepared, paths: JobPaths
) -> Iterator[Problem]:
    model = prepared.args.values.get("tokenizer_model")
    made_with = manifest.tokenizer
    here = paths.here(model)
    if here is None or made_with is None or made_with.sha256 is None:
        return
    if kind_of(here) == "folder":
        here /= "tokenizer.json"
    try:
        now = sha256_of(here)
    except (OSError, UserError):
        return
    if now != made_with.sha256:
        message = f"data {prefix} was made with another tokenizer ({made_with.file}) than data.tokenizer.model, {model}"
        fix = "name the tokenizer that the data was made with, or build the data again"
        yield Problem("error", "data-other-tokenizer", message, where, fix)
