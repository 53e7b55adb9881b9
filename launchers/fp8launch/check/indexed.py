"""The index of Megatron's indexed datasets, read without Megatron or numpy: a few bytes, no matter its size.

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
    """The pair of files is no dataset that Megatron can train on; the message says why."""


@dataclass(frozen=True)
class Index:
    """What a dataset holds. `sequences` is what Megatron splits by; usually each is one document."""

    token_type: str
    sequences: int
    documents: int
    tokens: int


def read_index(prefix: Path) -> Index:
    """The index of `prefix`.idx, held against the sizes of both files.

    Raises BrokenIndex for damage, OSError for files that are missing or may not be read.
    """
    idx, bin_size = Path(f"{prefix}.idx"), Path(f"{prefix}.bin").stat().st_size
    with idx.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(HEADER)
        if header[:9] != MAGIC:
            raise BrokenIndex("the .idx does not begin as an index does" if header else "the .idx is empty")
        if len(header) < HEADER:
            raise BrokenIndex(f"the .idx ends inside its header, after {len(header)} bytes")
        version, code, sequences, boundaries = struct.unpack("<QBQQ", header[9:])
        if version != 1:
            raise BrokenIndex(f"the .idx is of version {version}, and Megatron reads version 1")
        if code not in TYPES:
            raise BrokenIndex(f"the .idx names token type {code}, which Megatron does not know")
        name, width = TYPES[code]
        if name.startswith("float"):
            raise BrokenIndex(f"the .idx says that tokens are {name}; token ids are whole numbers")
        plain = HEADER + 12 * sequences + 8 * boundaries
        if size not in (plain, plain + sequences):
            state = "is cut short" if size < plain else "does not fit its own counts"
            raise BrokenIndex(
                f"the .idx {state}: {sequences:,} sequences and {boundaries:,} boundaries take {plain:,} bytes, "
                f"and it has {size:,}"
            )
        if sequences == 0 or boundaries < 2:
            raise BrokenIndex("it holds no documents")

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
        raise BrokenIndex(f"the .bin is cut short: the .idx speaks of {wanted:,} bytes, and it has {bin_size:,}")
    if bin_size > wanted:
        raise BrokenIndex(
            f"the .bin has {bin_size:,} bytes and the .idx speaks of {wanted:,}: they are not of one dataset, or it is "
            "still being written"
        )
    if wanted == 0:
        raise BrokenIndex("it holds no tokens")
    return Index(name, sequences, boundaries - 1, wanted // width)
