"""Check that indexed datasets exist, are complete, and have enough documents and tokens for the run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8launch.check.job_paths import (
    JobPaths,
    entries,
    is_remote,
    kind_of,
    not_mounted,
    unexpanded,
    why_not_writable,
    with_place_here,
)
from fp8launch.datasets.index_format import BrokenIndex, Index, read_index
from fp8launch.datasets.manifest import Manifest, read_manifest, size_differences, tokenizer_sha256
from fp8launch.diagnostics import Problem, UserError, nearest
from fp8launch.injob.regular_files import read_regular
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.model_arithmetic import padded_vocab_size, steps_of_run, whole
from fp8launch.megatron.versions import release

RELATIVE = "write an absolute path, or set the folder of your datasets in the cluster profile (storage.data)"
SPLITS = ("train", "valid", "test")
# Megatron's default for --data-path without --split (megatron/training/arguments.py).
DEFAULT_SPLIT = "969, 30, 1"
_LARGEST_BLEND = 4 << 20  # bytes of a file of --data-args-path


@dataclass(frozen=True)
class Dataset:
    """One prefix of a blend. `weight` is its share of the samples, or None if Megatron weights by dataset size."""

    prefix: str
    where: str | None
    weight: float | None


@dataclass(frozen=True)
class Blend:
    """A blend of datasets. `fractions` has the share of each split in SPLITS."""

    datasets: tuple[Dataset, ...]
    fractions: tuple[float, ...]
    where: str | None


Words = Sequence[tuple[str, "str | None"]]


def blend_problems(prepared: Prepared, paths: JobPaths) -> Iterator[Problem]:
    """Yield the problems of `data.blend`, or of the Megatron data flags used instead."""
    if prepared.args.values.get("mock_data"):
        return
    for found in _blends(prepared, paths):
        if isinstance(found, Problem):
            yield found
        else:
            yield from _check(found, prepared, paths)


def _blends(prepared: Prepared, paths: JobPaths) -> Iterator[Blend | Problem]:
    """Yield the blends of a run as Megatron reads them (get_blend_and_blend_per_split)."""
    args = prepared.args
    one: list[Words] = []
    if args.values.get("data_path"):
        one.append(_words(prepared, "data_path"))
    text, where = _content(prepared, paths, "data_args_path")
    if isinstance(text, Problem):
        yield text
    elif text is not None and not text.split():
        yield Problem("error", "data-blend", "the file of data_args_path is empty", where, "list the data in it")
    elif text is not None:
        one.append([(word, where) for word in text.split()])
    if one:
        fractions = _fractions(prepared)
        if isinstance(fractions, Problem):
            yield fractions
            fractions = (1.0, 0.0, 0.0)
        yield from (_blend(words, fractions) for words in one)
        return
    per_split: dict[str, Words] = {split: _words(prepared, f"{split}_data_path") for split in SPLITS}
    text, where = _content(prepared, paths, "per_split_data_args_path")
    if isinstance(text, Problem):
        yield text
    elif text is not None:
        try:
            content = json.loads(text)
            for split in SPLITS:
                per_split[split] = [(word, where) for word in _as_words(content[split])]
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            message = f"per_split_data_args_path is not JSON with lists for train, valid and test: {exc}"
            yield Problem("error", "data-blend", message, where)
            return
    for split in SPLITS:
        if per_split[split]:
            yield _blend(per_split[split], tuple(float(split == other) for other in SPLITS))


def _words(prepared: Prepared, flag: str) -> Words:
    value, data = prepared.args.values.get(flag), prepared.loaded.recipe.data
    where = prepared.args.places.get(flag)
    if value is None:
        return []
    if not isinstance(value, list):
        value = [value]
    if flag == "data_path" and data is not None and data.blend:
        return [(str(item), prepared.loaded.where("data", "blend", i)) for i, item in enumerate(value)]
    return [(str(item), where) for item in value]


def _as_words(value: object) -> list[str]:
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list):
        return list(map(str, value))
    raise TypeError(f"{value!r} is not a list")


def _content(prepared: Prepared, paths: JobPaths, flag: str) -> tuple[str | Problem | None, str | None]:
    """Return the text of a flag's file, or why it is not checked, and its place. Others report missing files."""
    here = paths.here(prepared.args.values.get(flag))
    if here is None:
        return None, None
    try:
        return read_regular(here, _LARGEST_BLEND).decode(), str(here)
    except UnicodeDecodeError:
        why, fix = "it is not UTF-8 text, which Megatron expects unless the job's locale says otherwise", "convert it"
    except OSError:
        return None, None
    except ValueError as exc:
        why, fix = str(exc), "split the blend, or check the paths in it yourself"
    message = f"the data listed in the file of {flag} are not checked: {why}"
    return Problem("warning", "data-blend-unread", message, str(here), fix), None


def _blend(words: Words, fractions: tuple[float, ...]) -> Blend | Problem:
    """Parse prefixes, or alternating weights and prefixes, as Megatron's get_blend_from_list does."""
    where = words[0][1]
    numbers = [_number(text) for text, _ in words]
    weights = [number for number in numbers[::2] if number is not None]
    if len(words) % 2 == 0 and len(weights) == len(words) // 2:
        if min(weights) < 0 or not 0 < sum(weights) < math.inf:
            message = f"the weights of the blend are {weights}, but they must be positive"
            return Problem("error", "data-blend", message, where, "write positive weights")
        weighted = zip(words[1::2], weights, strict=True)
        datasets = tuple(Dataset(text.strip(), place, weight) for (text, place), weight in weighted)
        return Blend(datasets, fractions, where)
    if numbers.count(None) < len(numbers):
        message = "the blend mixes weights and paths: " + " ".join(text for text, _ in words)
        fix = "write a weight before every path, or no weights at all: blend: [0.3, /data/a, 0.7, /data/b]"
        return Problem("error", "data-blend", message, where, fix)
    datasets = tuple(Dataset(text.strip(), place, None) for text, place in words)
    return Blend(datasets, fractions, where)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _fractions(prepared: Prepared) -> tuple[float, ...] | Problem:
    """Parse a split as Megatron's parse_and_normalize_split does."""
    text = str(prepared.args.values.get("split") or DEFAULT_SPLIT)
    try:
        parts = list(map(float, re.findall(r"[.0-9]+", text)))
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or sum(parts) <= 0 or "-" in text:
        message = f"split is '{text}', but it must be one to three shares: training, validation, test"
        return Problem("error", "data-split", message, prepared.args.places.get("split"), 'write for example "99,1,0"')
    return tuple(part / sum(parts) for part in [*parts, 0.0, 0.0][:3])


def _check(blend: Blend, prepared: Prepared, paths: JobPaths) -> Iterator[Problem]:
    known: list[tuple[Dataset, Index]] = []
    for dataset in blend.datasets:
        found = _dataset(dataset, paths)
        if isinstance(found, Problem):
            yield found
        elif found is not None:
            known.append((dataset, found))
            yield from _empty_splits(dataset, found, blend, prepared)
            yield from _cache(dataset, prepared, paths)
            here = paths.here(dataset.prefix)
            if here is not None:
                yield from _manifest(dataset, here, found, prepared, paths)
    if len(known) == len(blend.datasets) and blend.fractions[0] > 0:
        yield from _tokens(known, blend, prepared)


def _dataset(dataset: Dataset, paths: JobPaths) -> Index | Problem | None:
    """Return the index of a prefix, or a problem; None if this machine cannot access the files."""
    prefix, where = dataset.prefix, dataset.where
    if is_remote(prefix) or unexpanded(prefix):
        return None
    if not prefix.startswith("/"):
        message = f"data '{prefix}' is relative to the run folder, which is new for each run"
        return Problem("error", "path-relative", message, where, RELATIVE)
    if not paths.visible(f"{prefix}.bin") and not paths.visible(f"{prefix}.idx"):
        return not_mounted("data", prefix, where, paths, "read")
    here = paths.here(prefix)
    if here is None:
        return None
    absent = [f".{end}" for end in ("bin", "idx") if kind_of(Path(f"{here}.{end}")) in ("missing", "folder")]
    if absent:
        message = f"data {with_place_here(prefix, here)} has no {' and no '.join(absent)} file"
        fix = "copy it next to the other file, or build the dataset again" if len(absent) == 1 else _meant(prefix, here)
        return Problem("error", "data-missing", message, where, fix)
    try:
        return read_index(here)
    except BrokenIndex as exc:
        return Problem(
            "error", "data-broken", f"data {prefix}: {exc}", where, "build it again with `fp8launch data build`"
        )
    except OSError as exc:
        return Problem("error", "data-unreadable", f"data {prefix} cannot be read: {exc.strerror}", where)


def _meant(prefix: str, here: Path) -> str:
    if here.suffix in (".bin", ".idx") and kind_of(here) == "file":
        return f"remove the extension: Megatron adds .bin and .idx to {prefix.removesuffix(here.suffix)}"
    folder, base = here.parent, prefix.rpartition("/")[0]
    if kind_of(here) == "folder":
        folder, base = here, prefix.rstrip("/")
    there = [name.removesuffix(".idx") for name in entries(folder) if name.endswith(".idx")]
    if not there:
        return "write the common path of the .bin and .idx files, without extension"
    return f"did you mean {base}/{nearest(here.name, there) or there[0]}?"


def _empty_splits(dataset: Dataset, index: Index, blend: Blend, prepared: Prepared) -> Iterator[Problem]:
    """Find splits whose share rounds to no document. Megatron would hang while building the dataset.

    `_get_num_epochs` in megatron/core/datasets/gpt_dataset.py adds up epochs until there are enough tokens. If an epoch
    has none, it never stops.
    """
    begin = 0.0
    for split, fraction in zip(SPLITS, blend.fractions, strict=True):
        end = begin + fraction
        # Python's round() rounds half to even, as Megatron's builder does.
        if fraction > 0 and round(begin * index.sequences) == round(end * index.sequences):
            yield Problem(
                "error",
                "data-split",
                f"data {dataset.prefix} has {index.sequences:,} documents, and {100 * fraction:.3g} % of them for "
                f"{split} rounds to none: Megatron would hang while it builds the dataset",
                prepared.args.places.get("split") or dataset.where,
                f'set the share of {split} to 0, as in split: "1,0,0", or use data with more documents',
            )
        begin = end


def _cache(dataset: Dataset, prepared: Prepared, paths: JobPaths) -> Iterator[Problem]:
    """Check the default cache. Without data.cache, Megatron writes its index to a folder named after the prefix."""
    if prepared.args.values.get("data_cache_path"):
        return
    cache = f"{dataset.prefix}/cache"
    here = paths.here(cache)
    mount = paths.read_only(cache)
    why = f"the mount {mount} is read-only" if mount else here and why_not_writable(here)
    if why:
        message = f"Megatron writes its index of the data to {cache}, but {why}"
        fix = "set data.cache to a folder that the job can write to"
        yield Problem("error", "data-cache", message, dataset.where, fix)


def asked_tokens(prepared: Prepared) -> int:
    """Return the number of tokens that a run trains on, or 0 if the recipe does not set its length."""
    args, batch = prepared.args.attributes, prepared.layout.global_batch
    return (steps_of_run(args, batch) or 0) * batch * (whole(args, "seq_length") or 0)


def train_fraction(prepared: Prepared) -> float:
    """Return the share of the data used for training. Raises UserError for an invalid split."""
    fractions = _fractions(prepared)
    if isinstance(fractions, Problem):
        raise UserError([fractions])
    return fractions[0]


def _tokens(known: list[tuple[Dataset, Index]], blend: Blend, prepared: Prepared) -> Iterator[Problem]:
    args, share = prepared.args, blend.fractions[0]
    asked = asked_tokens(prepared)
    there = share * sum(index.tokens for _, index in known)
    if not asked:
        return
    if known[0][0].weight is None and len(known) > 1:
        # A blend without weights is limited to its size, and Megatron's default data loader reads it only once.
        if asked > there and args.values.get("dataloader_type") != "cyclic":
            yield Problem(
                "error",
                "data-too-short",
                f"the run needs {_count(asked)} tokens, but this blend without weights has {_count(there)} for "
                "training: Megatron reads it once, then fails",
                blend.where,
                "write a weight before each path, so that Megatron repeats the data; or train for fewer iterations",
            )
        return
    total = sum(dataset.weight or 0 for dataset, _ in known) or 1.0
    for dataset, index in known:
        part: float = asked
        if dataset.weight is not None:
            part *= dataset.weight / total
        epochs = part / (share * index.tokens)
        if epochs > 1:
            yield Problem(
                "warning",
                "data-epochs",
                f"the run reads {_count(part)} tokens of {dataset.prefix}, which has {_count(share * index.tokens)} "
                f"for training: each token is read {epochs:.3g} times",
                dataset.where,
                "use more data or fewer iterations, or silence this warning if the repetition is intended",
            )


def _count(tokens: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= 0.9995 * unit:  # what three digits round to this unit
            return f"{tokens / unit:.3g} {name}"
    return f"{tokens:.0f}"


def _manifest(dataset: Dataset, here: Path, index: Index, prepared: Prepared, paths: JobPaths) -> Iterator[Problem]:
    """Compare a dataset's manifest, written by `fp8launch data build`, with its files, the model and the tokenizer."""
    prefix, where = dataset.prefix, dataset.where
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
        message = f"data {prefix} does not match its manifest: {'; '.join(wrong)}"
        fix = f"run `fp8launch data inspect {prefix} --verify`; copy or build it again"
        yield Problem("error", "data-manifest", message, where, fix)
        return
    yield from _vocabulary(dataset, manifest, prepared)
    yield from _tokenizer(dataset, manifest, prepared, paths)


def _contradictions(here: Path, manifest: Manifest, index: Index) -> list[str]:
    found = size_differences(here, manifest)
    counts = (("tokens", index.tokens, manifest.tokens), ("documents", index.documents, manifest.documents))
    for name, there, said in counts:
        if there != said:
            found.append(f"it has {there:,} {name}, and had {said:,} when it was made")
    return found


def _vocabulary(dataset: Dataset, manifest: Manifest, prepared: Prepared) -> Iterator[Problem]:
    """Find token ids beyond the embedding table. They trigger an assertion on the GPU as soon as a batch contains one.

    Without padded_vocab_size, Megatron uses the vocabulary size of its tokenizer. Only with NullTokenizer does it use
    vocab_size; before 0.18, it adds one for the end-of-document token.
    """
    args = prepared.args
    size = args.integer("vocab_size", 0)
    if args.values.get("padded_vocab_size"):
        embeddings = padded_vocab_size(args.values)
    elif args.values.get("tokenizer_type") == "NullTokenizer" and size:
        embeddings = padded_vocab_size({**args.values, "vocab_size": size + (release(args.version) < (0, 18))})
    else:
        return
    if embeddings is None or manifest.vocab_limit <= embeddings:
        return
    largest = manifest.vocab_limit - 1
    message = f"data {dataset.prefix} may have token ids up to {largest}, but the model has {embeddings} embeddings"
    yield Problem("error", "data-vocabulary", message, dataset.where, f"set model.vocab_size to {largest + 1} or more")


def _tokenizer(dataset: Dataset, manifest: Manifest, prepared: Prepared, paths: JobPaths) -> Iterator[Problem]:
    model = prepared.args.values.get("tokenizer_model")
    made_with = manifest.tokenizer
    here = paths.here(model)
    if here is None or made_with is None or made_with.sha256 is None:
        return
    if kind_of(here) == "folder":
        here /= "tokenizer.json"
    try:
        now = tokenizer_sha256(here)
    except (OSError, ValueError):
        return
    if now != made_with.sha256:
        message = (
            f"data {dataset.prefix} was built with tokenizer {made_with.file}, but data.tokenizer.model is {model}"
        )
        fix = "set the tokenizer with which the data was built, or build the data again"
        yield Problem("error", "data-other-tokenizer", message, dataset.where, fix)
