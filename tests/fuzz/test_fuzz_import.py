"""Argument lists and launch scripts that are nearly right: a recipe that loads, or why not. Nothing is run."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import published_arguments
from sandbox import Sandbox
from wild import damaged, filled, share, texts

pytestmark = pytest.mark.needs_plugin("importer")

TESTS = Path(__file__).parents[1]
PIECES = (
    b"$(touch CANARY)", b"`touch CANARY`", b"${A:-$(touch CANARY)}", b"${", b"$((", b"$((a[$(touch CANARY)]))",
    b"{1..999999999}",
    b"{a,b}{c,d}", b"<<EOF\n", b"<(", b"\\\n", b"'", b'"', b"$'", b"\\", b"(", b")", b"{", b"}", b"[[", b"A=(",
    b"eval ", b"source ",
    b"$A", b"${A[@]}", b"${!A}", b"${A//x/y}", b"for i in 1 2; do ", b"done", b"case x in ", b"if true; then ",
    b"fi", b"--", b"--fp8-format",
    b"A=$A$A$A$A\n" * 30, b"torchrun ", b"exec ", b"trap 'touch CANARY' EXIT\n", b"\x00", b"$" * 200, b"(" * 2000,
    b"$(" * 500,
)  # fmt: skip


@functools.cache
def originals() -> tuple[bytes, ...]:
    files = [*published_arguments(), *sorted((TESTS / "plugins/importer/data").rglob("*.sh"))]
    texts = [file.read_bytes() for file in files]
    # Argument lists are a line or a line each: also in short lines, for mutations that count by line.
    return (*texts, *(text.replace(b" --", b" \\\n  --") for text in texts))


@share(0.09)
@given(data=st.data())
def test_launch_scripts(box: Sandbox, data: st.DataObject) -> None:
    content = data.draw(damaged(originals(), PIECES)).replace(b"CANARY", str(box.canary).encode())
    (box.work / "s.sh").write_bytes(content)
    code, recipe, _ = box("import", "s.sh")
    if code == 0:
        (box.work / "made.yaml").write_text(recipe)
        box("render", "made.yaml")


@share(0.05)
@given(words=st.lists(texts, max_size=8), data=st.data())
def test_argument_lists(box: Sandbox, words: list[str], data: st.DataObject) -> None:
    flags = ("--num-layers", "--fp8-format", "--lr", "--data-path", "--tensor-model-parallel-size", "--bf16", "--save")
    mixed = [word for one in words for word in (data.draw(st.sampled_from(flags)), one)]
    (box.work / "s.json").write_text(json.dumps(filled(mixed, box.canary)))
    code, recipe, _ = box("import", "s.json")
    if code == 0:
        (box.work / "made.yaml").write_text(recipe)
        box("render", "made.yaml")
