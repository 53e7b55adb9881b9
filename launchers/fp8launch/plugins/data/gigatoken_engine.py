"""Encode with gigatoken, which is many times faster than the tokenizers library, and compare the two all the time.

Difficult texts are compared at the start, and one short document of each batch during the build. After the first
difference the build no longer uses gigatoken.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.tokenizer import Encoder, HuggingFaceEncoder

# Bytes of text between two comparisons, and the longest compared text.
COMPARE_EVERY, COMPARE_UP_TO = 1 << 20, 4096
_HOSTILE = (
    "",
    " ",
    "  \n\n\t leading and trailing  ",
    "word's we'll DON'T I'M they'RE\r\n\r\nnext\rline\x0b\x0c\x85\u2028\u2029end",
    "0 12 345 6789 0123456789 3.14159 1,000,000 0x1F ١٢٣ ½ ² Ⅷ",
    "naïve café e\u0301 a\u030a \ufb01 Ångström İstanbul ß ẞ",
    "日本語のテキスト 中文文本 한국어 텍스트 हिन्दी ไทย עברית العربية",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \u200b\u200d\ufeff\u00a0\u3000",
    "def f(x):\n        return {'a': [1, 2], \"b\": x**2}  # comment\n\n\n\n",
    "<tag attr='v'>&amp;</tag> http://example.org/a?b=c#d user@example.org",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!!!!!!!!!!!!!????",
    "\x00\x01\x02\x7f\x80\x9f\ud7ff\ue000\uffff\U00010000\U0010ffff",
)


class EngineDiffers(Exception):
    """Gigatoken and the library gave different ids; the message quotes the text."""


class GigatokenEncoder(Encoder):
    engine = "gigatoken"

    def __init__(self, file: Path, reference: HuggingFaceEncoder) -> None:
        gigatoken: Any = load("gigatoken", "the engine gigatoken")
        self._gigatoken, self._file, self._reference = gigatoken, file, reference
        self.prefix, self.suffix, self.vocab_size = reference.prefix, reference.suffix, reference.vocab_size
        self._since_comparison = COMPARE_EVERY
        try:
            self._tokenizer = gigatoken.Tokenizer(str(file))
        except Exception as exc:  # many kinds, for what it does not know
            raise EngineDiffers(f"gigatoken does not know this tokenizer: {' '.join(str(exc).split())[:200]}") from None

    def self_test(self) -> None:
        """Compare texts that tokenizers tend to differ on. Raises EngineDiffers."""
        specials = self._reference.added_tokens()[:64]
        choose = random.Random(0)
        words = [*" ".join(_HOSTILE).split(" "), *specials, "\n", "  ", "\t"]
        mixed = ["".join(choose.choices([*words, " "], k=40)) for _ in range(200)]
        chars = []
        for _ in range(200):
            chars.append("".join(chr(choose.choice(_BLOCKS) + choose.randrange(64)) for _ in range(60)))
        around = [f"x{special} y{special}{special}\n{special}" for special in specials]
        for text in (*_HOSTILE, *around, *mixed, *chars):
            self._compare(text)

    def encode(self, contents: Sequence[Any]) -> tuple[Any, Any]:
        found = self._tokenizer.encode_batch(list(contents), parallel=False).layout
        numpy: Any = load("numpy", "building a dataset")
        offsets = numpy.asarray(found.offsets.data)
        flat = numpy.asarray(found.content.data)[offsets[0] : offsets[-1]]
        self._compare_sometimes(contents, flat, offsets - offsets[0])
        return flat, numpy.diff(offsets)

    def _compare_sometimes(self, contents: Sequence[str], flat: Any, offsets: Any) -> None:
        self._since_comparison += sum(map(len, contents))
        if self._since_comparison < COMPARE_EVERY:
            return
        for at, text in enumerate(contents):
            if len(text) <= COMPARE_UP_TO:
                self._since_comparison = 0
                self._require_same(text, flat[offsets[at] : offsets[at + 1]])
                return

    def _compare(self, text: str) -> None:
        self._require_same(text, self._tokenizer.encode(text))

    def _require_same(self, text: str, found: Any) -> None:
        expected, _ = self._reference.encode([text])
        if len(expected) != len(found) or not bool((expected == found).all()):
            raise EngineDiffers(f"gigatoken and tokenizers differ on {text[:60]!r}")

    def forget(self) -> None:
        """Drop gigatoken's cache of words, which grows with the vocabulary of the text."""
        self._tokenizer = self._gigatoken.Tokenizer(str(self._file))

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)

    def id_of(self, token: str) -> int | None:
        return self._reference.id_of(token)

    def ends(self) -> list[str]:
        return self._reference.ends()


# The beginnings of scripts, and blocks of 64 characters that pre-tokenizers treat differently.
_BLOCKS = (
    0x20, 0x40, 0x80, 0xC0, 0x2C0, 0x300, 0x370, 0x400, 0x5D0, 0x620, 0x900, 0xE00, 0x1F00, 0x2000, 0x2150, 0x2460,
    0x3040, 0x4E00, 0xAC00, 0xFB00, 0x1F600,
)  # fmt: skip


def choose_engine(file: Path, wanted: str, special_tokens: bool) -> tuple[str, str | None]:
    """Return the engine for a tokenizer.json, and the reason if it is not the requested gigatoken."""
    if wanted == "tokenizers":
        return wanted, None
    try:
        import gigatoken  # noqa: F401
    except ImportError:
        return "tokenizers", "the package gigatoken is not installed"
    try:
        GigatokenEncoder(file, HuggingFaceEncoder(file, special_tokens)).self_test()
    except EngineDiffers as exc:
        return "tokenizers", str(exc)
    return "gigatoken", None
