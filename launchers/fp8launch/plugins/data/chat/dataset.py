"""Build a folder of conversations that Megatron-Bridge fine-tunes on, with their packed sequences.

Everything is written to a folder next to the final one, which is then renamed: indexes and packed files that Bridge has
left in a folder of older data never meet new data.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from fp8launch import __version__
from fp8launch.datasets.manifest import sha256
from fp8launch.diagnostics import ANSWER_IS_NO, MACHINE_LACKS, error
from fp8launch.injob.regular_files import open_regular
from fp8launch.plugins.data.bad_input import HARMLESS, BadInput, first_few, summary
from fp8launch.plugins.data.build import MOST_SOURCES, Totals
from fp8launch.plugins.data.chat.chat_tokenizer import ChatTokenizer
from fp8launch.plugins.data.chat.encoding import Encoded, encoded
from fp8launch.plugins.data.chat.manifest import FORMAT, MANIFEST, SPLITS, TEMPLATE, Lengths, read_chat_manifest
from fp8launch.plugins.data.chat.packing import Packing, pack, packed_row, write_packed
from fp8launch.plugins.data.documents import Reading
from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.files import only_one, write_json
from fp8launch.plugins.data.plan import make_folder
from fp8launch.plugins.data.sources import Shard, SourceFile, bytes_of
from fp8launch.plugins.data.workers import WorkersEnded

PACKED = "packed"
# What a folder of conversations may hold: our files, and the indexes and packed files that Bridge writes.
_OWN = (
    MANIFEST,
    TEMPLATE,
    PACKED,
    *(f"{split}.jsonl{end}" for split in SPLITS for end in ("", ".idx.npy", ".idx.info")),
)
_SPOOLS = ("lines", "ids", "mask")


@dataclass(frozen=True)
class ChatPlan:
    """A build: sources, tokenizer, the shares of the splits, the sequence length of the run, and how to pack."""

    out: Path
    files: tuple[SourceFile, ...]
    shards: tuple[Shard, ...]
    tokenizer_file: Path
    tokenizer_name: str
    template_file: Path | None
    reading: Reading
    shares: tuple[float, ...]
    seed: int
    sequence: int | None
    packing: Packing | None

    @property
    def tokenizer_folder(self) -> Path:
        return self.tokenizer_file.parent

    @property
    def building(self) -> Path:
        """The folder to build in."""
        return self.out.with_name(f".{self.out.name}.building")

    def fingerprint(self, tokenizer: ChatTokenizer) -> str:
        """Return the checksum of everything that the content of the folder depends on."""
        sources = [(file.path, file.format, file.bytes, file.modified_ns) for file in self.files]
        settings = (self.shares, self.seed, self.sequence, self.packing and vars(self.packing), self.reading.max_bytes)
        described = json.dumps([FORMAT, sources, sha256(self.tokenizer_file), tokenizer.template, settings])
        return hashlib.sha256(described.encode()).hexdigest()


@dataclass
class Counts:
    """What was found in the sources so far. `beyond` are conversations that are longer than the sequence length."""

    lengths: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    line_bytes: list[int] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[BadInput] = field(default_factory=list)
    beyond: list[BadInput] = field(default_factory=list)


@dataclass(frozen=True)
class ChatOutcome:
    """A finished folder; `built` is false if it existed before."""

    manifest: dict[str, Any]
    examples: list[BadInput]
    beyond: list[BadInput]
    built: bool = True


def build_chat(
    plan: ChatPlan,
    tokenizer: ChatTokenizer,
    processes: int,
    skip: bool,
    overwrite: bool,
    progress: Callable[[Totals], None],
) -> ChatOutcome:
    """Build the folder of a plan. Raises UserError for the first bad input, unless `skip` is set."""
    there = _already_built(plan, tokenizer, overwrite)
    if there is not None:
        return ChatOutcome(there, [], [], built=False)
    make_folder(plan.building)
    with only_one(plan.building):
        try:
            # Another process may have built it since this command looked.
            if (there := _already_built(plan, tokenizer, overwrite)) is not None:
                return ChatOutcome(there, [], [], built=False)
            _clear(plan.building)
            counts = _spool(plan, processes, skip, progress)
            if not counts.lengths:
                message = "no conversation can be used"
                if counts.examples:
                    message += f": {summary(counts.skipped)}; the first is {counts.examples[0].words()}"
                raise error("data-nothing", message, "SOURCE", "name sources with conversations", ANSWER_IS_NO)
            if tokenizer_template := plan.template_file and tokenizer.template:
                (plan.building / TEMPLATE).write_text(tokenizer_template, encoding="utf-8")
            manifest = _write_splits(plan, tokenizer, counts)
            write_json(plan.building / MANIFEST, manifest)
            for name in _SPOOLS:
                (plan.building / f"{name}.spool").unlink()
            _rename(plan)
        except WorkersEnded:
            fix = "it most likely needed more memory: use fewer --workers or a smaller --max-document"
            raise error("data-killed", "a process was killed", str(plan.building), fix, MACHINE_LACKS) from None
        except OSError as exc:
            message = f"{exc.filename or plan.building}: {exc.strerror or exc}"
            raise error("data-disk", message, "--out", "correct this, then repeat the command", MACHINE_LACKS) from None
        finally:
            shutil.rmtree(plan.building, ignore_errors=True)
    return ChatOutcome(manifest, first_few(counts.examples), counts.beyond)


def _already_built(plan: ChatPlan, tokenizer: ChatTokenizer, overwrite: bool) -> dict[str, Any] | None:
    """Return the manifest if exactly this data exists. Raises UserError if the folder has other content."""
    if not plan.out.exists():
        return None
    if not plan.out.is_dir():
        raise error("data-out", f"{plan.out} is a file", "--out", "name a folder")
    try:
        manifest = read_chat_manifest(plan.out)
    except ValueError:
        manifest = None
    names = {path.name for path in plan.out.iterdir()}
    if manifest is not None and manifest.get("fingerprint") == plan.fingerprint(tokenizer):
        return manifest
    others = sorted(names - set(_OWN))
    if others:
        message = f"{plan.out} contains {others[0]}, which no build of conversations wrote"
        raise error("data-folder", message, "--out", "choose another folder", ANSWER_IS_NO)
    if names and not overwrite:
        message = f"{plan.out} already contains conversations, from other input or another program"
        raise error("data-exists", message, "--out", "choose another folder, or add --overwrite", ANSWER_IS_NO)
    return None


def _clear(folder: Path) -> None:
    """Remove what a killed build has left."""
    for path in folder.iterdir():
        if path.name == PACKED:
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def _rename(plan: ChatPlan) -> None:
    (plan.building / ".lock").unlink()
    if plan.out.is_dir():
        shutil.rmtree(plan.out)
    plan.building.rename(plan.out)


# --- reading ----------------------------------------------------------------------------------------------------------


def _spool(plan: ChatPlan, processes: int, skip: bool, progress: Callable[[Totals], None]) -> Counts:
    """Write the lines, ids and masks of all conversations to files, in the order of the sources."""
    counts = Counts()
    of_bytes = bytes_of(plan.files)
    tokens = read = 0
    streams: list[BinaryIO] = [(plan.building / f"{name}.spool").open("wb") for name in _SPOOLS]
    try:
        for found in encoded(plan.shards, plan.reading, plan.tokenizer_folder, plan.template_file, processes):
            if isinstance(found, BadInput):
                _note(found, skip, counts)
                continue
            for stream, content in zip(
                streams, (found.line + b"\n", found.ids.tobytes(), found.mask.tobytes()), strict=True
            ):
                stream.write(content)
            counts.lengths.append(len(found.ids))
            counts.trained.append(int(found.mask.sum()))
            counts.line_bytes.append(len(found.line) + 1)
            if plan.sequence is not None and len(found.ids) - 1 > plan.sequence:
                _note_long(found, plan, counts)
            tokens += len(found.ids)
            read += found.place.taken
            progress(Totals(len(counts.lengths), tokens, read, of_bytes))
    finally:
        for stream in streams:
            stream.close()
    return counts


def _note(bad: BadInput, skip: bool, counts: Counts) -> None:
    if not skip and bad.reason not in HARMLESS:
        message = f"this conversation cannot be used: {bad.why()}"
        fix = "correct the input, or leave such conversations out with --on-error skip; then repeat the command"
        raise error(f"data-{bad.reason}", message, bad.place(), fix, ANSWER_IS_NO)
    counts.skipped[bad.reason] = counts.skipped.get(bad.reason, 0) + 1
    counts.examples = first_few([*counts.examples, bad])


def _note_long(found: Encoded, plan: ChatPlan, counts: Counts) -> None:
    assert plan.sequence is not None
    detail = f"{len(found.ids):,} tokens"
    if not found.mask[1 : plan.sequence + 1].any():
        detail += ", none of the first ones is trained on"
    counts.beyond = first_few([*counts.beyond, found.place.bad("beyond-sequence", detail)])


# --- writing ----------------------------------------------------------------------------------------------------------


def split_numbers(count: int, shares: Sequence[float], seed: int) -> list[list[int]]:
    """Assign conversations to splits at random; each split keeps their order.

    Shares are relative. A split with a share gets at least one conversation, if there are enough.
    """
    numpy: Any = load("numpy", "splitting conversations")
    sizes = [int(count * share / sum(shares)) for share in shares]
    for at, share in enumerate(shares[1:], 1):
        if share and not sizes[at] and count > len(shares):
            sizes[at] = 1
    sizes[0] = count - sum(sizes[1:])
    order = numpy.random.RandomState(seed).permutation(count)
    found, begin = [], 0
    for size in sizes:
        found.append(sorted(order[begin : begin + size].tolist()))
        begin += size
    return found


def _write_splits(plan: ChatPlan, tokenizer: ChatTokenizer, counts: Counts) -> dict[str, Any]:
    numpy: Any = load("numpy", "writing conversations")
    offsets = numpy.concatenate(([0], numpy.cumsum(counts.line_bytes)))
    starts = numpy.concatenate(([0], numpy.cumsum(counts.lengths)))
    ids = numpy.memmap(plan.building / "ids.spool", numpy.int32, "r")
    mask = numpy.memmap(plan.building / "mask.spool", numpy.uint8, "r")

    def content(number: int) -> tuple[Any, Any]:
        part = slice(int(starts[number]), int(starts[number + 1]))
        return ids[part], mask[part]

    splits, packed = {}, {}
    packing = plan.packing and replace(plan.packing, pad=tokenizer.eos)
    for split, numbers in zip(SPLITS, split_numbers(len(counts.lengths), plan.shares, plan.seed), strict=True):
        if not numbers:
            continue
        path = plan.building / f"{split}.jsonl"
        with open_regular(plan.building / "lines.spool") as lines, path.open("wb") as stream:
            for number in numbers:
                lines.seek(int(offsets[number]))
                stream.write(lines.read(counts.line_bytes[number]))
        lengths = [counts.lengths[number] for number in numbers]
        splits[split] = {
            "conversations": len(numbers),
            "tokens": sum(lengths),
            "trained_tokens": sum(counts.trained[number] for number in numbers),
            "untrained_in_sequence": _untrained(plan.sequence, numbers, counts, content),
            "file": {"bytes": path.stat().st_size, "sha256": sha256(path)},
            "lengths": Lengths.of(lengths).as_json(),
        }
        # Bridge does not pack the data of its test.
        if packing is not None and split != "test":
            packed[split] = _write_packed(plan.building, split, numbers, lengths, packing, content)
    if packing is not None:
        # Bridge keeps the metadata of all splits in one file, which is JSON despite its name.
        metadata = [found["metadata"] for found in packed.values()]
        path = plan.building / PACKED / f"{packing.size}_metadata.jsonl"
        path.write_text(json.dumps(metadata), encoding="utf-8")
    return _manifest(plan, tokenizer, counts, splits, packed)


def _untrained(sequence: int | None, numbers: Sequence[int], counts: Counts, content: Any) -> int:
    """Count the conversations of which nothing is trained within the first tokens that a sequence holds."""
    if sequence is None:
        return 0
    long = (number for number in numbers if counts.lengths[number] - 1 > sequence)
    return sum(not content(number)[1][1 : sequence + 1].any() for number in long)


def _write_packed(
    folder: Path, split: str, numbers: Sequence[int], lengths: Sequence[int], packing: Packing, content: Any
) -> dict[str, Any]:
    """Write the packed sequences of a split. Return their record for the manifest."""
    found = pack(lengths, packing)
    if not found.rows:
        message = f"no conversation of {split}.jsonl fits into a sequence of {packing.size} tokens"
        raise error("data-nothing", message, "--sequence", "use a longer one", ANSWER_IS_NO)
    path = folder / PACKED / f"{split}_{packing.size}.idx.parquet"
    path.parent.mkdir(exist_ok=True)

    def rows() -> Iterator[dict[str, list[int]]]:
        for row in found.rows:
            yield packed_row([numbers[at] for at in row], content, packing)

    write_packed(path, rows())
    return {
        "sequences": len(found.rows),
        "left_out": found.left_out,
        "cut": found.cut,
        "metadata": found.metadata,
        "file": {"bytes": path.stat().st_size, "sha256": sha256(path)},
    }


def _manifest(
    plan: ChatPlan, tokenizer: ChatTokenizer, counts: Counts, splits: dict[str, Any], packed: dict[str, Any]
) -> dict[str, Any]:
    packing = plan.packing
    return {
        "format": FORMAT,
        "made_by": f"fp8launch {__version__}",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "conversations": len(counts.lengths),
        "tokens": sum(counts.lengths),
        "trained_tokens": sum(counts.trained),
        "sequence": plan.sequence,
        "splits": splits,
        "packed": packing and {"size": packing.size, "multiple": packing.multiple, "seed": packing.seed, **packed},
        "tokenizer": {
            "name": plan.tokenizer_name,
            "file": str(plan.tokenizer_file),
            "sha256": sha256(plan.tokenizer_file),
            "vocab_size": len(tokenizer.tokenizer),
            "template_sha256": hashlib.sha256(tokenizer.template.encode()).hexdigest(),
            "own_template": plan.template_file is None,
        },
        "skipped": counts.skipped,
        "seed": plan.seed,
        "source_files": len(plan.files),
        "source_bytes": bytes_of(plan.files),
        "sources": [{"path": file.path, "bytes": file.bytes} for file in plan.files[:MOST_SOURCES]],
        "fingerprint": plan.fingerprint(tokenizer),
    }
