"""Divide sources into shards: parts of files, in document order, that one process reads."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8launch.datasets.manifest import read_json
from fp8launch.diagnostics import error
from fp8launch.injob.ownership import leads_elsewhere
from fp8launch.plugins.data.extras import load

Format = Literal["jsonl", "text", "lines", "parquet", "arrow"]
FORMATS: tuple[Format, ...] = ("jsonl", "text", "lines", "parquet", "arrow")
# File name suffixes, without .gz or .zst.
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
PACKED = (".gz", ".zst")

# A shard is the unit of a job array, and the most that a restart must redo.
SMALLEST_SHARD, LARGEST_SHARD = 4 << 20, 256 << 20
# The most text files in a shard, because the plan names them all.
MOST_FILES = 10_000


@dataclass(frozen=True)
class SourceFile:
    path: str
    format: Format
    bytes: int
    modified_ns: int


@dataclass(frozen=True)
class Shard:
    """A part of the input. `begin` and `end` are byte offsets, or Parquet row groups; None means the end of the file.

    Only shards of the formats text and arrow have several files.
    """

    format: Format
    files: tuple[str, ...]
    bytes: int
    begin: int = 0
    end: int | None = None


def bytes_of(parts: Iterable[SourceFile | Shard]) -> int:
    """Return the total bytes of files or shards."""
    return sum(part.bytes for part in parts)


def find_files(sources: Iterable[str], form: Format | None, patterns: Sequence[str] = ()) -> list[SourceFile]:
    """Return the files of the sources; files of a folder are sorted by path.

    Raises UserError if a source does not exist, is empty, or has an unknown format.
    """
    found: list[SourceFile] = []
    for source in sources:
        path = Path(source).expanduser().absolute()
        if path.is_dir():
            inside = _saved_dataset(path) or _below(path, form, patterns)
            if not inside:
                wanted = ", ".join(patterns) or ", ".join(SUFFIXES)
                raise error("data-source", f"{source} contains no file {wanted}", source, "name files, or use --glob")
            found += [_file(each, form) for each in inside]
        elif path.is_file():
            found.append(_file(path, form))
        else:
            raise error("data-source", f"there is no file or folder {source}", "SOURCE", "check the path")
    return found


def _saved_dataset(folder: Path) -> list[Path]:
    """Return the files of a dataset that Hugging Face's `save_to_disk` wrote, or none for any other folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent for state in folder.glob("*/state.json"))
        names = ", ".join(split.name for split in splits)
        fix = f"name {' or '.join(map(str, splits))}"
        raise error("data-source", f"{folder} contains several splits: {names}", str(folder), fix)
    state = folder / "state.json"
    if not state.is_file():
        return []
    try:
        inside = [str(each["filename"]) for each in read_json(state)["_data_files"]]
        if any(Path(name).name != name for name in inside):
            raise ValueError("a file of a dataset is in its folder")
    except (ValueError, KeyError, TypeError):
        fix = "save it again, or name its .arrow files"
        raise error("data-source", f"{state} does not list the files of a dataset", str(folder), fix) from None
    return [folder / name for name in inside]


def _below(folder: Path, form: Format | None, patterns: Sequence[str]) -> list[Path]:
    formats = set(FORMATS)
    if form is not None:
        formats = {form}
    if form == "lines":
        formats.add("text")
    found = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in names:
            path = Path(place, name)
            if patterns:
                wanted = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            else:
                wanted = _format(path) in formats
            if wanted and path.is_file():
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _format(path: Path) -> Format | None:
    if path.suffix in PACKED:
        path = path.with_suffix("")
    return SUFFIXES.get(path.suffix)


def _file(path: Path, form: Format | None) -> SourceFile:
    form = form or _format(path)
    if form is None:
        known = ", ".join(SUFFIXES)
        message = f"the name of {path} does not show its format (known: {known}; line formats also as .gz or .zst)"
        raise error("data-source", message, str(path), f"set --format {'|'.join(FORMATS)}")
    reason = leads_elsewhere(path)
    if reason is not None:
        fix = "name the file that you mean, or copy it"
        raise error("data-source", f"the dataset would get the content of a private file: {reason}", str(path), fix)
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise error("data-source", f"{path} is not a regular file", str(path), "name files or folders")
    return SourceFile(str(path), form, state.st_size, state.st_mtime_ns)


def shards_of(files: Sequence[SourceFile], workers: int, shard_bytes: int | None = None) -> list[Shard]:
    """Divide files into shards of about `shard_bytes` of input; by default, into a few for each worker."""
    total = bytes_of(files)
    size = shard_bytes or min(max(total // (8 * workers), SMALLEST_SHARD), LARGEST_SHARD)
    found: list[Shard] = []
    group: list[SourceFile] = []
    in_group = 0
    for file in files:
        is_full = in_group >= size or len(group) >= MOST_FILES
        if group and (is_full or file.format != "text"):
            found.append(_group(group))
            group, in_group = [], 0
        if file.format == "text":
            group.append(file)
            in_group += file.bytes
        else:
            found += _parts(file, size)
    if group:
        found.append(_group(group))
    return found


def _group(files: Sequence[SourceFile]) -> Shard:
    return Shard("text", tuple(file.path for file in files), bytes_of(files))


def _parts(file: SourceFile, size: int) -> Iterator[Shard]:
    if file.format in ("jsonl", "lines") and not file.path.endswith(PACKED):
        for begin in range(0, max(file.bytes, 1), size):
            end = min(begin + size, file.bytes)
            yield Shard(file.format, (file.path,), end - begin, begin, end)
    elif file.format == "parquet":
        yield from _row_groups(file, size)
    else:
        # A compressed or Arrow file can only be read from its start.
        yield Shard(file.format, (file.path,), file.bytes)


def _row_groups(file: SourceFile, size: int) -> Iterator[Shard]:
    groups = row_groups(file.path)
    if not groups:
        yield Shard("parquet", (file.path,), file.bytes)
        return
    each = max(1, len(groups) * size // max(file.bytes, 1))
    for begin in range(0, len(groups), each):
        end = min(begin + each, len(groups))
        yield Shard("parquet", (file.path,), file.bytes * (end - begin) // len(groups), begin, end)


def row_groups(path: str) -> list[int]:
    """Return the rows of each row group, or nothing if the file cannot be read, which its reader reports."""
    parquet: Any = load("pyarrow.parquet", "reading Parquet")
    try:
        with parquet.ParquetFile(path) as opened:
            return rows_by_group(opened)
    except (OSError, ValueError):
        return []


def rows_by_group(opened: Any) -> list[int]:
    """Return the number of rows of each row group of an open Parquet file."""
    return [opened.metadata.row_group(at).num_rows for at in range(opened.num_row_groups)]
