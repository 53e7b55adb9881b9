"""`fp8launch data inspect DIR`: conversations for fine-tuning, and which of their tokens are trained on."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.cli.output import echo, show_json, show_table, styled
from fp8launch.datasets.manifest import sha256
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error, exit_code
from fp8launch.injob.regular_files import open_regular
from fp8launch.plugins.data.chat.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from fp8launch.plugins.data.chat.conversations import Unusable, conversation_of
from fp8launch.plugins.data.chat.manifest import SPLITS, TEMPLATE, Lengths, lengths_of, read_chat_manifest
from fp8launch.plugins.data.find_tokenizer import tokenizer_file

SAMPLES = 2
# The characters that are shown of a sample.
_SHOWN = 1200
_BAR = 30
_LONGEST_LINE = 64 << 20
# Around trained tokens where there is no color.
_OPEN, _CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Sample:
    """A conversation as pieces of text that are trained on or not; `problem` says why there are none."""

    split: str
    line: int
    tokens: int
    trained: int
    pieces: list[tuple[str, bool]]
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        pieces = [{"text": text, "trained": trained} for text, trained in self.pieces]
        return {**vars(self), "pieces": pieces}


def is_chat_folder(folder: Path) -> bool:
    """Return whether a path is a folder of conversations."""
    return (folder / f"{SPLITS[0]}.jsonl").is_file()


def inspect_conversations(folder: Path, first: int, tokenizer: str | None, verify: bool, as_json: bool) -> int:
    """Show a folder of conversations. The exit code is 1 if files differ from the manifest, or teach nothing."""
    try:
        manifest = read_chat_manifest(folder)
    except ValueError as exc:
        raise error("data-manifest", str(exc), str(folder), "build the data again", ANSWER_IS_NO) from None
    wrong = [] if manifest is None else _differences(folder, manifest, verify)
    loaded, why_not = _tokenizer(folder, manifest, tokenizer)
    if manifest is None:
        if loaded is None:
            fix = "name the run's tokenizer with --tokenizer, or build the data with `fp8launch data build --chat`"
            raise error("data-manifest", f"{folder} has no manifest: {why_not}", str(folder), fix)
        splits = {split: _measured(folder, split, loaded, wrong) for split in SPLITS if _file(folder, split).is_file()}
    else:
        splits = manifest["splits"]
    samples = []
    if loaded is not None:
        samples = list(itertools.islice(_samples(folder, SPLITS[0], first, loaded), SAMPLES))
        wrong += [f"{sample.split}.jsonl:{sample.line}: {sample.problem}" for sample in samples if sample.problem]
    if as_json:
        show_json(
            {
                "folder": str(folder),
                "splits": {split: _summary(found, _sequence(manifest)) for split, found in splits.items()},
                "manifest": manifest,
                "problems": wrong,
                "samples": [sample.as_json() for sample in samples],
            }
        )
        return exit_code(not wrong)
    echo(str(folder))
    _show_splits(splits, _sequence(manifest))
    if manifest is not None:
        _show_packed(manifest)
        echo(f"tokenizer {manifest['tokenizer']['name']}, {manifest['tokenizer']['vocab_size']:,} tokens")
    for words in wrong:
        echo(f"problem: {words}")
    if manifest is not None and not wrong:
        echo("files have the manifest's checksums" if verify else "sizes agree with the manifest")
    if why_not:
        echo(f"no sample: {why_not}")
    for sample in samples:
        _show_sample(sample)
    return exit_code(not wrong)


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}.jsonl"


def _sequence(manifest: dict[str, Any] | None) -> int | None:
    return None if manifest is None else manifest["sequence"]


def _differences(folder: Path, manifest: dict[str, Any], verify: bool) -> list[str]:
    """Describe each file that is not as it was built."""
    files = {f"{split}.jsonl": found["file"] for split, found in manifest["splits"].items()}
    packed = manifest["packed"] or {}
    for split in SPLITS:
        if split in packed:
            files[f"packed/{split}_{packed['size']}.idx.parquet"] = packed[split]["file"]
    wrong = []
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != record["bytes"] or (verify and sha256(path) != record["sha256"]):
            wrong.append(f"{name} has changed since it was built")
    return wrong


def _tokenizer(
    folder: Path, manifest: dict[str, Any] | None, tokenizer: str | None
) -> tuple[ChatTokenizer | None, str]:
    """Return the tokenizer to show samples with, or the reason why there is none."""
    try:
        if tokenizer is not None:
            file = tokenizer_file(tokenizer)
        elif manifest is None:
            return None, "nothing names its tokenizer"
        else:
            file = Path(manifest["tokenizer"]["file"])
            if not file.is_file() or sha256(file) != manifest["tokenizer"]["sha256"]:
                return None, f"the tokenizer {file} is not there any more, or has changed; use --tokenizer"
        template = folder / TEMPLATE
        return load_chat_tokenizer(file.parent, template if template.is_file() else None), ""
    except UserError as exc:
        if tokenizer is not None:
            raise
        return None, exc.problems[0].message


def _samples(folder: Path, split: str, first: int, tokenizer: ChatTokenizer) -> Iterator[Sample]:
    with open_regular(_file(folder, split)) as stream:
        number = 0
        while raw := stream.readline(_LONGEST_LINE):
            number += 1
            if number > first:
                yield _sample(split, number, raw, tokenizer)


def _sample(split: str, number: int, raw: bytes, tokenizer: ChatTokenizer) -> Sample:
    try:
        ids, mask = tokenizer.encode(conversation_of(json.loads(raw)))
    except Unusable as exc:
        return Sample(split, number, 0, 0, [], ": ".join(filter(None, (exc.reason, exc.detail))))
    except (ValueError, RecursionError) as exc:
        return Sample(split, number, 0, 0, [], f"not valid JSON: {exc}")
    pieces = []
    begin = 0
    for trained, group in itertools.groupby(mask):
        end = begin + len(list(group))
        pieces.append((tokenizer.pieces(ids[begin:end]), bool(trained)))
        begin = end
    return Sample(split, number, len(ids), sum(mask), pieces)


def _measured(folder: Path, split: str, tokenizer: ChatTokenizer, wrong: list[str]) -> dict[str, Any]:
    """Return what a manifest says of a split, for files that were not built here. Adds to `wrong`."""
    lengths, trained, unusable = [], 0, []
    for sample in _samples(folder, split, 0, tokenizer):
        if sample.problem:
            unusable.append(sample)
        else:
            lengths.append(sample.tokens)
            trained += sample.trained
    if unusable:
        one = unusable[0]
        wrong.append(
            f"{split}.jsonl: {len(unusable):,} lines cannot be used, the first is line {one.line}: {one.problem}"
        )
    return {
        "conversations": len(lengths),
        "tokens": sum(lengths),
        "trained_tokens": trained,
        "lengths": Lengths.of(lengths).as_json(),
    }


def _summary(found: dict[str, Any], sequence: int | None) -> dict[str, Any]:
    lengths = lengths_of(found)
    return {
        **{name: found[name] for name in ("conversations", "tokens", "trained_tokens")},
        "median": lengths.quantile(0.5),
        "p95": lengths.quantile(0.95),
        "longest": lengths.longest,
        "longer_than_sequence": None if sequence is None else lengths.longer_than(sequence),
        "untrained_in_sequence": found.get("untrained_in_sequence"),
    }


def _show_splits(splits: dict[str, Any], sequence: int | None) -> None:
    rows = []
    for split, found in splits.items():
        summary = _summary(found, sequence)
        share = 100 * summary["trained_tokens"] / max(summary["tokens"], 1)
        rows.append(
            (
                split,
                f"{summary['conversations']:,}",
                f"{summary['tokens']:,}",
                f"{share:.1f} %",
                f"{summary['median']:,}",
                f"{summary['p95']:,}",
                f"{summary['longest']:,}",
            )
        )
    columns = ["split", "conversations", "tokens", "trained", "median", "p95", "longest"]
    show_table(columns, rows, right=columns[1:])
    if SPLITS[0] in splits:
        _show_lengths(lengths_of(splits[SPLITS[0]]))
    if sequence is None:
        return
    for split, found in splits.items():
        longer = lengths_of(found).longer_than(sequence)
        if longer:
            echo(f"{split}: {longer:,} conversations are longer than {sequence:,} tokens")
        if found.get("untrained_in_sequence"):
            echo(f"  {found['untrained_in_sequence']:,} of them have no trained token once they are cut")


def _show_lengths(lengths: Lengths) -> None:
    """Show how many conversations of the training have up to 2, 4, 8 ... tokens."""
    buckets: dict[int, int] = {}
    for length, count in lengths.counts.items():
        power = max(length - 1, 0).bit_length()
        buckets[power] = buckets.get(power, 0) + count
    if not buckets:
        return
    most = max(buckets.values())
    for power in range(min(buckets), max(buckets) + 1):
        count = buckets.get(power, 0)
        bar = "█" * max(round(_BAR * count / most), min(count, 1))
        echo(f"  up to {1 << power:>7,} tokens {bar:<{_BAR}} {count:,}")


def _show_packed(manifest: dict[str, Any]) -> None:
    packed = manifest["packed"]
    if not packed:
        return
    for split in SPLITS:
        if split not in packed:
            continue
        found = packed[split]
        echo(f"packed {split}: {found['sequences']:,} sequences of {packed['size']:,} tokens")
        metadata = found["metadata"]
        echo(f"  {metadata['packing_efficiency']:.1f} % full, {metadata['packing_factor']:g} conversations in each")
        if found["left_out"]:
            echo(f"  left out: {found['left_out']:,} conversations, which are longer")
        if found["cut"]:
            echo(f"  cut: {found['cut']:,} conversations, which are longer")


def _show_sample(sample: Sample) -> None:
    """Show a conversation with its trained parts in green, or between brackets where there is no color."""
    if sample.problem:
        return
    echo(f"\n{sample.split}.jsonl:{sample.line}: {sample.tokens:,} tokens, {sample.trained:,} trained on", bold=True)
    color = sys.stdout.isatty() and styled("", fg="green") != ""
    left = _SHOWN
    for text, trained in sample.pieces:
        part = text[:left]
        left -= len(part)
        if not trained:
            echo(part, nl=False)
        elif color:
            echo(part, nl=False, fg="green", bold=True)
        else:
            echo(f"{_OPEN}{part}{_CLOSE}", nl=False)
        if left <= 0:
            echo(" ...", nl=False)
            break
    echo()
