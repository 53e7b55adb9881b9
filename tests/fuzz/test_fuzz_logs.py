"""Logs that are cut, mixed and made up: a report, or why there is none."""

from __future__ import annotations

import functools
import gzip
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox import Sandbox
from support import log_bytes, real_logs
from wild import damaged, share

from fp8launch.logs.open_log import logs_in

PIECES = (
    b"\x1b]0;owned\x07", b"\x1b[2J", b"\x00", b"\xff\xfe", b"\r", b"1: ", b"iteration ", b"| ", b"arguments", b"nan",
    b"[[",
    b"torch.OutOfMemoryError: CUDA out of memory.", b"fp8launch-node: {", b"fp8launch: ", b"[default0]:",
    b"<script>", b"{" * 300,
    b"(" * 300, b"time (ms): 1 ", b"srun: error: n1: task 0: Killed", b"Traceback (most recent call last):",
    b"throughput",
)  # fmt: skip
VERBS = (
    ("parse",), ("parse", "--json"), ("parse", "--json", "--gpu", "h100"), ("verify",), ("verify", "--json"),
    ("compare",),
    ("compare", "--json", "--force"), ("compare", "--csv", "o.csv", "--md", "o.md"),
)  # fmt: skip


@functools.cache
def log_texts() -> tuple[bytes, ...]:
    files = [*logs_in(real_logs("runs")), *logs_in(real_logs("h200"))]
    # The end holds the failure, the middle the iterations: each is drawn from.
    texts = [log_bytes(file) for file in files]
    compressed = gzip.compress(texts[0]), lzma.compress(texts[0])
    return (*compressed, *(part for text in texts for part in (text, text[-20_000:], _iterations(text))))


def _iterations(text: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(keepends=True) if b"iteration " in line)


@share(0.1)
@given(data=st.data(), verb=st.sampled_from(VERBS))
def test_logs(box: Sandbox, data: st.DataObject, verb: tuple[str, ...]) -> None:
    names = []
    for number in range(data.draw(st.integers(1, 2))):
        file = box.work / f"{number}.log"
        file.write_bytes(data.draw(damaged(log_texts(), PIECES)))
        names.append(str(file))
    box(verb[0], *names, *verb[1:])


@pytest.mark.needs_plugin("plots")
@share(0.002)
@given(data=st.data())
def test_reports_as_html(box: Sandbox, data: st.DataObject) -> None:
    (box.work / "1.log").write_bytes(data.draw(damaged(log_texts(), PIECES)))
    box("compare", "1.log", "--html", "o.html", "--force")
    assert b"<script>alert" not in (box.work / "o.html").read_bytes() if (box.work / "o.html").exists() else True


@share(0.03)
@given(content=st.binary(max_size=300))
def test_event_files(box: Sandbox, content: bytes) -> None:
    (box.work / "events.out.tfevents.1.x").write_bytes(content)
    box("parse", "events.out.tfevents.1.x")
