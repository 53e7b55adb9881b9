"""Write text as one of Megatron's indexed datasets, one token per byte: PREFIX.bin, PREFIX.idx and PREFIX.json.

    python tools/text_dataset.py PREFIX                  # the sources of this Python's standard library
    python tools/text_dataset.py PREFIX FOLDER FILE...   # *.py, *.rst, *.md and *.txt below FOLDER, and FILE

This is real text that every machine has, so that a loss curve needs no download: one document per file, in the order
of their paths, without tests. Tokens are the bytes, 0 to 255, and 256 ends a document: train with `vocab_size: 257` and
`tokenizer: {type: NullTokenizer}`. A byte holds less than a word of text, so a loss is in nats per byte: ln(257) = 5.5
without training, 1 to 2 after some millions of bytes; it does not predict the loss of a model with words.

PREFIX.json says what it is made of: files, tokens, the sha256 of PREFIX.bin. Needs nothing but Python. Exit code 2
if there is no text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

UINT16, TOKEN_BYTES = 8, 2  # Megatron's code for the type of the tokens, and its size
END_OF_DOCUMENT = 256
VOCABULARY = 257
SUFFIXES = frozenset({".py", ".rst", ".md", ".txt"})
# Tests are full of tables, and not every distribution has them. Packages installed next to the library do not belong.
LEFT_OUT = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})


def texts(places: Iterable[Path]) -> Iterator[Path]:
    """The files that `places` name or hold, those of a folder in the order of their paths below it."""
    for place in places:
        if place.is_file():
            yield place
            continue
        below = [path.relative_to(place) for path in place.rglob("*") if path.suffix in SUFFIXES]
        wanted = (path for path in below if not LEFT_OUT & set(path.parts) and not path.name.startswith("_sysconfig"))
        yield from (
            place / path for path in sorted(wanted, key=lambda path: path.as_posix()) if (place / path).is_file()
        )


def write(prefix: Path, files: Iterable[Path]) -> dict[str, object]:
    """Write the dataset; what it is made of. Files without a byte are left out."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths = []
    digest = hashlib.sha256()
    with Path(f"{prefix}.bin").open("wb") as out:
        for file in files:
            if content := file.read_bytes():
                document = struct.pack(f"<{len(content) + 1}H", *content, END_OF_DOCUMENT)
                out.write(document)
                digest.update(document)
                lengths.append(len(content) + 1)
    Path(f"{prefix}.idx").write_bytes(index(lengths))
    return {"documents": len(lengths), "tokens": sum(lengths), "vocabulary": VOCABULARY, "sha256": digest.hexdigest()}


def index(lengths: Sequence[int]) -> bytes:
    """An .idx of documents of these lengths in tokens, as Megatron's IndexedDataset reads it (version 1).

    Magic, version, type of the tokens, number of sequences and of document boundaries; then the sequences' lengths in
    tokens, where each begins in bytes, and the boundaries. Every document is one sequence.
    """
    count = len(lengths)
    begins = [TOKEN_BYTES * begin for begin in accumulate(lengths, initial=0)][:-1]
    return b"".join(
        (
            b"MMIDIDX\0\0",
            struct.pack("<QBQQ", 1, UINT16, count, count + 1),
            struct.pack(f"<{count}i", *lengths),
            struct.pack(f"<{count}q", *begins),
            struct.pack(f"<{count + 1}q", *range(count + 1)),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Write text as one of Megatron's indexed datasets, a byte a token.")
    parser.add_argument("prefix", type=Path, help="the files' name without .bin and .idx")
    parser.add_argument("places", nargs="*", type=Path, help="files and folders (default: the standard library)")
    options = parser.parse_args()
    if missing := [str(place) for place in options.places if not place.exists()]:
        print(f"text_dataset: there is no {', '.join(missing)}", file=sys.stderr)
        return 2
    files = list(texts(options.places or [Path(sysconfig.get_path("stdlib"))]))
    if not any(file.stat().st_size for file in files):
        print(f"text_dataset: no {', '.join(sorted(SUFFIXES))} files with text there", file=sys.stderr)
        return 2
    made = write(options.prefix, files)
    of = [str(place) for place in options.places] or [f"standard library of Python {platform.python_version()}"]
    text = json.dumps({"of": of, **made})
    Path(f"{options.prefix}.json").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
