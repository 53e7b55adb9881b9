"""Pack conversations into sequences of one length, with the rows that Megatron-Bridge would write itself.

Source: data/packing/offline.py, algorithms.py and parquet.py of Bridge 0.6.2 (`first_fit_shuffle`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.plugins.data.extras import load

ROWS_PER_GROUP = 500
# The ids of a conversation by its number, and 1 for each that is trained on, else 0.
Content = Callable[[int], tuple[Any, Any]]


@dataclass(frozen=True)
class Packing:
    """How to pack. Sequences have `size` tokens, and each conversation a multiple of `multiple`, padded with `pad`."""

    size: int
    multiple: int = 1
    seed: int = 1234
    pad: int = 0


@dataclass(frozen=True)
class Packed:
    """The conversations of each packed sequence by their numbers, and Bridge's metadata of them.

    `left_out` counts conversations that are longer than a sequence, `cut` those that were cut to it.
    """

    rows: list[list[int]]
    left_out: int
    cut: int
    metadata: dict[str, Any]


def stored_length(length: int, packing: Packing) -> int:
    """Return the tokens that are stored of a conversation: one more than the model sees, for the last label."""
    if packing.multiple == 1:
        return length
    most = packing.size // packing.multiple * packing.multiple
    return min(most, -(-max(length - 1, 0) // packing.multiple) * packing.multiple) + 1


def pack(lengths: Sequence[int], packing: Packing) -> Packed:
    """Assign conversations to sequences: Bridge's first fit of shuffled lengths, with its random numbers."""
    numpy: Any = load("numpy", "packing")
    of_length: dict[int, list[int]] = {}
    left_out = cut = 0
    for number, length in enumerate(lengths):
        stored = stored_length(length, packing)
        if stored - 1 > packing.size:
            left_out += 1
            continue
        cut += stored < length
        of_length.setdefault(stored - 1, []).append(number)
    random = numpy.random.RandomState(packing.seed)
    shuffled = [size for size in sorted(of_length) for _ in of_length[size]]
    random.shuffle(shuffled)
    bins = _first_fit(shuffled, packing.size)
    waiting = {}
    for size in sorted(of_length):
        numbers = of_length[size]
        waiting[size] = [numbers[at] for at in random.permutation(len(numbers))]
    rows = [[waiting[size].pop() for size in sizes] for sizes in bins]
    return Packed(rows, left_out, cut, _metadata(bins, packing.size))


def _metadata(bins: Sequence[Sequence[int]], size: int) -> dict[str, Any]:
    if not bins:
        return {}
    filled = [sum(sizes) for sizes in bins]
    return {
        "dataset_max_seqlen": max(map(max, bins)),
        "max_samples_per_bin": max(map(len, bins)),
        "packing_factor": round(sum(map(len, bins)) / len(bins), 2),
        "packing_efficiency": round(sum(filled) / len(filled) / size * 100, 2),
        "pack_size": size,
        "min_packed_seqlen": min(filled),
    }


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each size into the first bin with room for it. A tree of the bins' free room finds it in log(n) steps."""
    leaves = 1
    while leaves < len(sizes):
        leaves *= 2
    # A bin that is not there yet has all of its room, as in Bridge's own search, where it ends the search.
    free = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for size in sizes:
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < size:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(size)
        free[node] -= size
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bins


def packed_row(numbers: Iterable[int], content: Content, packing: Packing) -> dict[str, list[int]]:
    """Return a packed sequence as Bridge stores it. Its mask is shifted: it marks the tokens before trained ones."""
    ids: list[int] = []
    mask: list[int] = []
    starts: list[int] = []
    for number in numbers:
        own_ids, own_mask = (part.tolist() for part in content(number))
        stored = stored_length(len(own_ids), packing)
        added = max(stored - len(own_ids), 0)
        starts.append(len(ids))
        ids += own_ids[:stored] + [packing.pad] * added
        mask += [*(own_mask[:stored] + [0] * added)[1:], 0]
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}


def write_packed(path: Path, rows: Iterator[dict[str, list[int]]]) -> None:
    """Write packed sequences to a Parquet file with Bridge's columns and groups of rows."""
    arrow: Any = load("pyarrow", "writing packed sequences")
    parquet: Any = load("pyarrow.parquet", "writing packed sequences")
    whole, bit = arrow.list_(arrow.int64()), arrow.list_(arrow.int8())
    schema = arrow.schema([("input_ids", whole), ("loss_mask", bit), ("seq_start_id", whole)])
    with parquet.ParquetWriter(path, schema) as writer:
        while group := list(itertools.islice(rows, ROWS_PER_GROUP)):
            columns = {name: [row[name] for row in group] for name in schema.names}
            writer.write_table(arrow.table(columns, schema=schema), row_group_size=ROWS_PER_GROUP)
