"""The format of Megatron's indexed datasets, and its header, read without Megatron or numpy, whatever the size.

Format (megatron/core/datasets/indexed_dataset.py, `_IndexWriter`), little-endian, without padding:

    9 bytes   magic                      8 bytes   version, 1
    1 byte    code of the token type     8 bytes   S, number of sequences
    8 bytes   D, number of document boundaries, one more than documents
    S x int32 tokens in each sequence    S x int64 byte offset of each sequence in the .bin
    D x int64 first sequence of each document, and S at the end
    S x int8  modes, in multimodal datasets only
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fp8launch.injob.regular_files import open_regular

MAGIC = b"MMIDIDX\x00\x00"
HEADER = 34
# Code to name and bytes, `DType` in the same file. Tokens are whole numbers, so the float types are of no use.
TYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float64", 8),
    7: ("float32", 4),
    8: ("uint16", 2),
}


class BrokenIndex(Exception):
    """Megatron cannot train on this pair of files; the message says why."""


@dataclass(frozen=True)
class Index:
    """The contents of a dataset. Megatron splits by `sequences`, each of which is usually one document."""

    token_type: str
    sequences: int
    documents: int
    tokens: int


def read_index(prefix: Path) -> Index:
    """Read `prefix`.idx and compare it with the sizes of both files.

    Raises BrokenIndex for damaged files, OSError for missing or unreadable ones.
    """
    idx, bin_size = Path(f"{prefix}.idx"), Path(f"{prefix}.bin").stat().st_size
    with open_regular(idx) as file:
        size = os.fstat(file.fileno()).st_size
        code, sequences, boundaries = _read_header(file)
        name, width = TYPES[code]
        plain = HEADER + 12 * sequences + 8 * boundaries
        if size not in (plain, plain + sequences):
            state = "contradicts its own counts"
            if size < plain:
                state = "is cut short"
            raise BrokenIndex(
                f"the .idx {state}: {sequences:,} sequences and {boundaries:,} boundaries need {plain:,} bytes, and "
                f"it has {size:,}"
            )
        if sequences == 0 or boundaries < 2:
            raise BrokenIndex("it contains no documents")

        def number(offset: int, form: str) -> int:
            file.seek(offset)
            value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
            return value

        offsets = HEADER + 4 * sequences
        documents = offsets + 8 * sequences
        first, last = number(offsets, "<q"), number(offsets + 8 * (sequences - 1), "<q")
        length = number(HEADER + 4 * (sequences - 1), "<i")
        begin, end = number(documents, "<q"), number(documents + 8 * (boundaries - 1), "<q")
    if first != 0 or last < 0 or length < 0 or begin != 0 or end != sequences:
        raise BrokenIndex("the tables of the .idx contradict each other")
    wanted = last + length * width
    if bin_size < wanted:
        raise BrokenIndex(f"the .bin is cut short: the .idx lists {wanted:,} bytes, and it has {bin_size:,}")
    if bin_size > wanted:
        raise BrokenIndex(
            f"the .bin has {bin_size:,} bytes, but the .idx lists {wanted:,}: they belong to different datasets, or "
            "are still being written"
        )
    if wanted == 0:
        raise BrokenIndex("it contains no tokens")
    return Index(name, sequences, boundaries - 1, wanted // width)


def _read_header(file: BinaryIO) -> tuple[int, int, int]:
    """Read the code of the token type, and the numbers of sequences and of document boundaries."""
    header = file.read(HEADER)
    if not header:
        raise BrokenIndex("the .idx is empty")
    if header[:9] != MAGIC:
        raise BrokenIndex("the .idx is not an index of Megatron: its first bytes differ")
    if len(header) < HEADER:
        raise BrokenIndex(f"the .idx ends inside its header, after {len(header)} bytes")
    version, code, sequences, boundaries = struct.unpack("<QBQQ", header[9:])
    if version != 1:
        raise BrokenIndex(f"the .idx has version {version}, but Megatron reads only version 1")
    if code not in TYPES:
        raise BrokenIndex(f"the .idx has token type {code}, which Megatron does not know")
    name = TYPES[code][0]
    if name.startswith("float"):
        raise BrokenIndex(f"the .idx has token type {name}, but token ids are whole numbers")
    return code, sequences, boundaries


def code_of(token_type: str) -> int:
    """Return the code of a token type."""
    return next(code for code, (name, _) in TYPES.items() if name == token_type)


def header(token_type: str, sequences: int, boundaries: int) -> bytes:
    """Return the first bytes of an .idx."""
    return MAGIC + struct.pack("<QBQQ", 1, code_of(token_type), sequences, boundaries)
