"""Encode the conversations of source files, by several processes for large ones, in the order of the sources."""

from __future__ import annotations

import functools
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from fp8launch.plugins.data.bad_input import BadInput
from fp8launch.plugins.data.chat.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from fp8launch.plugins.data.chat.conversations import Unusable, conversation_of
from fp8launch.plugins.data.documents import Document, Reading, json_records
from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.sources import Shard, bytes_of
from fp8launch.plugins.data.workers import WorkersEnded

# Starting a process takes as long as encoding this much.
SMALL = 8 << 20
_BATCH = 1 << 20
_AHEAD = 3

Found = tuple[Any, Document] | BadInput


class Encoded(NamedTuple):
    """A conversation: its line for Bridge, its ids, and 1 for each id that is trained on, else 0."""

    line: bytes
    ids: Any
    mask: Any
    place: Document


def encoded(
    shards: Sequence[Shard], reading: Reading, folder: Path, template: Path | None, processes: int
) -> Iterator[Encoded | BadInput]:
    """Yield each conversation of the sources, and a BadInput in place of each one that cannot be used."""
    batches = _batches(found for shard in shards for found in json_records(shard, reading))
    if processes == 1 or bytes_of(shards) < SMALL:
        tokenizer = load_chat_tokenizer(folder, template)
        for batch in batches:
            yield from map(functools.partial(_encode, tokenizer), batch)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start, (folder, template))
    ahead: deque[Future[list[Encoded | BadInput]]] = deque()
    try:
        for batch in batches:
            ahead.append(pool.submit(_encode_batch, batch))
            if len(ahead) >= _AHEAD * processes:
                yield from ahead.popleft().result()
        for future in ahead:
            yield from future.result()
    except BrokenProcessPool:
        raise WorkersEnded from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(records: Iterable[Found]) -> Iterator[list[Found]]:
    batch: list[Found] = []
    size = 0
    for found in records:
        batch.append(found)
        if not isinstance(found, BadInput):
            size += found[1].size
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch


_tokenizer: ChatTokenizer | None = None


def _start(folder: Path, template: Path | None) -> None:
    global _tokenizer
    _tokenizer = load_chat_tokenizer(folder, template)


def _encode_batch(batch: Sequence[Found]) -> list[Encoded | BadInput]:
    assert _tokenizer is not None
    return [_encode(_tokenizer, found) for found in batch]


def _encode(tokenizer: ChatTokenizer, found: Found) -> Encoded | BadInput:
    if isinstance(found, BadInput):
        return found
    record, place = found
    numpy: Any = load("numpy", "encoding conversations")
    orjson: Any = load("orjson", "writing JSON lines")
    try:
        conversation = conversation_of(record)
        line = orjson.dumps(conversation.as_json())
        ids, mask = tokenizer.encode(conversation)
    except Unusable as exc:
        return place.bad(exc.reason, exc.detail)
    except orjson.JSONEncodeError as exc:
        # Half of a surrogate pair, or a number that only Python's parser reads.
        return place.bad("not-text", str(exc))
    return Encoded(line, numpy.array(ids, numpy.int32), numpy.array(mask, numpy.uint8), place)
