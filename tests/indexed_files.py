"""Writes indexed datasets byte by byte, from the format's description, to hold the reader against."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

UINT16, INT32, FLOAT32 = 8, 4, 7
WIDTH = {UINT16: 2, INT32: 4, FLOAT32: 4}


def index_bytes(lengths: Sequence[int], code: int = UINT16, version: int = 1, modes: bool = False) -> bytes:
    """An .idx of sequences of these lengths, each a document."""
    offsets, at = [], 0
    for length in lengths:
        offsets.append(at)
        at += length * WIDTH.get(code, 2)
    count = len(lengths)
    return b"".join(
        (
            b"MMIDIDX\x00\x00",
            struct.pack("<QBQQ", version, code, count, count + 1),
            struct.pack(f"<{count}i", *lengths),
            struct.pack(f"<{count}q", *offsets),
            struct.pack(f"<{count + 1}q", *range(count + 1)),
            struct.pack(f"<{count}b", *[0] * count) if modes else b"",
        )
    )


def write_dataset(prefix: Path, lengths: Sequence[int], code: int = UINT16, modes: bool = False) -> Path:
    """A .bin and an .idx that belong together; returns the prefix."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.idx").write_bytes(index_bytes(lengths, code, modes=modes))
    Path(f"{prefix}.bin").write_bytes(b"\x01" * sum(lengths) * WIDTH[code])
    return prefix
