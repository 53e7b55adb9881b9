"""The quotes $'...' as bash reads them."""

from __future__ import annotations

import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from fp8launch.plugins.importer.from_argv import import_text
from fp8launch.plugins.importer.shell_lexer import tokens
from fp8launch.plugins.importer.shell_tokens import Opaque

PIECES = [
    r"\x41", r"\x4", r"\x", r"\x{41}", r"\x{141}", r"\x{}", r"\x{4", r"\x{zz}", r"\xff", r"\xc3\xa9", r"\101", r"\1",
    r"\0", r"\377", r"\400", r"\8", r"\u00e9", r"\u20ac", r"\u", r"\ud800", r"\U0001F600", r"\cA", r"\ca", r"\c?",
    "\\c\\\\",
    r"\n", r"\t", r"\r", r"\a", r"\b", r"\e", r"\E", r"\f", r"\v", "\\\\", r"\'", r"\"", r"\?", r"\q", "a", "1",
    " ", "é", "$x",
]  # fmt: skip


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=6), min_size=60, max_size=60))
@settings(max_examples=10)
def test_bash_reads_them_so(texts: list[list[str]]) -> None:
    quoted = [f"$'{''.join(pieces)}'z" for pieces in texts]
    script = "\n".join(f"printf '%s\\0' {word}" for word in quoted)
    done = subprocess.run(["bash", "-c", script], capture_output=True, env={"LC_ALL": "C.UTF-8"}, check=True)
    expected = done.stdout.split(b"\0")[:-1]
    for word, text in zip(quoted, expected, strict=True):
        (token,) = tokens(word, "test")
        try:
            meant = text.decode()
        except UnicodeDecodeError:
            assert isinstance(token.parts[0], Opaque), word  # type: ignore[union-attr]
            continue
        assert "".join(part.text for part in token.parts) == meant, word  # type: ignore[union-attr]


def test_a_launch_script_s_value_is_decoded() -> None:
    words = "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
    recipe, _ = import_text(f"{words} --save $'/d\\x41ta/\\u00e9'", "run.sh", None)
    assert "/dAta/é" in recipe
    _, problems = import_text(f"{words} --save $'\\xff'", "run.sh", None)
    assert any("means bytes that are not UTF-8 text" in problem.message for problem in problems)
