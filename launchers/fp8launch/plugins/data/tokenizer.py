"""Tokenizers: Hugging Face `tokenizers`, SentencePiece, tiktoken, bytes, and ids as given.

They give the same ids as Megatron's classes (megatron/core/tokenizers/text/libraries) give for the same file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fp8launch.datasets.manifest import LARGEST_TOKENIZER
from fp8launch.diagnostics import error
from fp8launch.injob.regular_files import read_regular
from fp8launch.plugins.data.extras import load

Kind = Literal["huggingface", "sentencepiece", "tiktoken", "bytes", "ids"]
Engine = Literal["auto", "gigatoken", "tokenizers"]
# Megatron's names (--tokenizer-type). Ids and bytes need no tokenizer in training.
MEGATRON_TYPES: dict[str, str] = {
    "huggingface": "HuggingFaceTokenizer",
    "sentencepiece": "SentencePieceTokenizer",
    "tiktoken": "TikTokenizer",
    "bytes": "NullTokenizer",
    "ids": "NullTokenizer",
}
END_OF_BYTES = 256
# Common end-of-document tokens, tried if a tokenizer does not name its own.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# Megatron's special tokens for a vocabulary in JSON (tiktoken_tokenizer.py): their number and the named ones.
_SPECIAL, _NAMED = 1000, ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_MOST_TIKTOKEN = 1 << 17
# The largest published tokenizers have about 40 MiB, their settings about 1 MiB.
_LARGEST_CONFIG = 16 << 20


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer and its settings: everything that another process needs to produce the same ids."""

    kind: Kind
    file: str | None = None  # tokenizer.json, *.model, *.tiktoken or Megatron's JSON
    name: str = ""  # what the user wrote
    sha256: str | None = None
    vocab_size: int = 0
    eod: int | None = None
    special_tokens: bool = True
    pattern: str = "v2"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def megatron_model(self) -> str | None:
        """Return the value of Megatron's --tokenizer-model."""
        if self.kind == "huggingface" and self.file is not None:
            return str(Path(self.file).parent)
        return self.file


class Encoder(ABC):
    """Turns texts into token ids."""

    # Ids added around every document, in addition to the end of document.
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    vocab_size: int
    engine: str

    @abstractmethod
    def encode(self, contents: Sequence[Any]) -> tuple[Any, Any]:
        """Return all ids in one numpy array, with the number of ids of each content."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        return None

    def ends(self) -> list[str]:
        """Return the candidates for the end-of-document token, the tokenizer's own first."""
        return list(_ENDS)


def joined(lists: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Return lists of ids as one array, with their lengths."""
    numpy: Any = load("numpy", "building a dataset")
    lengths = numpy.fromiter(map(len, lists), dtype=numpy.int64, count=len(lists))
    flat = numpy.empty(int(lengths.sum()), dtype=numpy.int64)
    at = 0
    for each in lists:
        flat[at : at + len(each)] = each
        at += len(each)
    return flat, lengths


class ByteEncoder(Encoder):
    """Encodes each byte as a token; 256 ends a document."""

    vocab_size = END_OF_BYTES + 1
    engine = "numpy"

    def encode(self, contents: Sequence[Any]) -> tuple[Any, Any]:
        numpy: Any = load("numpy", "building a dataset")
        raw = [content.encode() for content in contents]
        lengths = numpy.fromiter(map(len, raw), dtype=numpy.int64, count=len(raw))
        return numpy.frombuffer(b"".join(raw), dtype=numpy.uint8), lengths

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(each for each in ids if each < END_OF_BYTES).decode("utf-8", errors="replace")


class IdEncoder(Encoder):
    """Passes on ids that the field already holds."""

    engine = "numpy"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, contents: Sequence[Any]) -> tuple[Any, Any]:
        clipped = []
        for content in contents:
            clipped.append([min(max(each, -1), 1 << 31) for each in content])
        return joined(clipped)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class HuggingFaceEncoder(Encoder):
    """Encodes with a tokenizer.json and Hugging Face's library."""

    engine = "tokenizers"

    def __init__(self, file: Path, special_tokens: bool) -> None:
        tokenizers: Any = load("tokenizers", "this tokenizer")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as exc:  # the library raises this very class
            message = f"{file} is not a tokenizer that `tokenizers` reads: {' '.join(str(exc).split())[:200]}"
            raise error("data-tokenizer", message, "--tokenizer", "name another tokenizer.json") from None
        # transformers turns both off, whatever the file says.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._file = file
        if special_tokens:
            self._find_template()

    def _find_template(self) -> None:
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        extra = len(full) - len(bare)
        for before in range(extra + 1):
            if full[before : before + len(bare)] == bare:
                self.prefix, self.suffix = tuple(full[:before]), tuple(full[before + len(bare) :])
                return

    def encode(self, contents: Sequence[Any]) -> tuple[Any, Any]:
        found = self._tokenizer.encode_batch_fast(list(contents), add_special_tokens=False)
        return joined([each.ids for each in found])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def added_tokens(self) -> list[str]:
        """Return the texts that always are a single token."""
        return [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()]

    def ends(self) -> list[str]:
        found = []
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            try:
                config = json.loads(read_regular(self._file.parent / name, _LARGEST_CONFIG))
            except (OSError, ValueError, RecursionError):
                continue
            if not isinstance(config, dict):
                continue
            token = config.get("eos_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                found.append(token)
        return [*found, *_ENDS]


class SentencePieceEncoder(Encoder):
    engine = "sentencepiece"

    def __init__(self, file: Path) -> None:
        sentencepiece: Any = load("sentencepiece", "this tokenizer")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as exc:
            message = f"{file} is not a SentencePiece model: {' '.join(str(exc).split())[:200]}"
            raise error("data-tokenizer", message, "--tokenizer", "name another file") from None
        self.vocab_size = self._model.get_piece_size()

    def encode(self, contents: Sequence[Any]) -> tuple[Any, Any]:
        return joined(self._model.encode(list(contents), num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([each for each in map(int, ids) if each < self.vocab_size]))

    def id_of(self, token: str) -> int | None:
        found = int(self._model.piece_to_id(token))
        if self._model.id_to_piece(found) != token:
            return None
        return found

    def ends(self) -> list[str]:
        own = int(self._model.eos_id())
        if own < 0:
            return list(_ENDS)
        return [str(self._model.id_to_piece(own)), *_ENDS]


class TikTokenEncoder(Encoder):
    """Encodes with tiktoken: Megatron's JSON with 1000 special tokens in front, or a .tiktoken file of ranks."""

    engine = "tiktoken"

    def __init__(self, file: Path, pattern: str) -> None:
        tiktoken: Any = load("tiktoken", "this tokenizer")
        text = _content(file)
        specials: Mapping[str, int]
        usual = "v2"
        if text.lstrip()[:1] == b"[":
            ranks, specials = _megatron_ranks(text, file)
        else:
            ranks = _plain_ranks(text, file)
            usual, specials = _PUBLISHED.get(len(ranks), (usual, {"<|endoftext|>": max(ranks.values()) + 1}))
        if pattern == "auto":
            pattern = usual
        self._encoding = tiktoken.Encoding(
            file.name, pat_str=_PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=dict(specials)
        )
        self._specials = specials
        self.vocab_size = int(self._encoding.n_vocab)

    def encode(self, contents: Sequence[Any]) -> tuple[Any, Any]:
        return joined([self._encoding.encode(text, allowed_special="all") for text in contents])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode(list(map(int, ids))))

    def id_of(self, token: str) -> int | None:
        return self._specials.get(token)

    def ends(self) -> list[str]:
        return ["</s>", "<|endoftext|>", "<|end_of_text|>"]


# From Megatron (tiktoken_tokenizer.py), tiktoken (tiktoken_ext/openai_public.py) and Llama 3 (tokenizer.py).
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
}
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PATTERNS |= {
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
PATTERNS = ("auto", *_PATTERNS)
# Published rank files by their number of ranks: pattern, end of document, and last token of the vocabulary.
_PUBLISHED: dict[int, tuple[str, Mapping[str, int]]] = {
    50_256: ("gpt2", {"<|endoftext|>": 50_256}),
    100_256: ("cl100k", {"<|endoftext|>": 100_257, "<|endofprompt|>": 100_276}),
    128_000: (
        "llama3",
        {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|reserved_special_token_250|>": 128_255},
    ),
    199_998: ("o200k", {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}),
}


def _megatron_ranks(text: bytes, file: Path) -> tuple[dict[bytes, int], dict[str, int]]:
    try:
        entries = json.loads(text)
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
        in_order = all(entry["rank"] == at for at, entry in enumerate(entries))
    except (ValueError, KeyError, TypeError, RecursionError):
        tokens, in_order = [], False
    if not tokens or not in_order:
        fix = 'a list of {"rank": N, "token_bytes": BASE64, "token_str": TEXT}, in the order of ranks'
        raise error("data-tokenizer", f"{file} is not a tiktoken vocabulary for Megatron", "--tokenizer", fix)
    names = [*_NAMED, *(f"<SPECIAL_{at}>" for at in range(len(_NAMED), _SPECIAL))]
    kept = tokens[: _MOST_TIKTOKEN - _SPECIAL]
    ranks = {token: at + _SPECIAL for at, token in enumerate(kept)}
    return ranks, {name: at for at, name in enumerate(names)}


def _plain_ranks(text: bytes, file: Path) -> dict[bytes, int]:
    ranks = {}
    try:
        for line in text.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        ranks = {}
    if not ranks:
        raise error("data-tokenizer", f"{file} is not a list of BASE64 RANK lines", "--tokenizer", "name another file")
    return ranks


def sha256_of(file: Path) -> str:
    """Return the checksum of a tokenizer's file."""
    return hashlib.sha256(_content(file)).hexdigest()


def _content(file: Path) -> bytes:
    """Read a tokenizer's file. Raises OSError, and UserError if it is too large or not a regular file."""
    try:
        return read_regular(file, LARGEST_TOKENIZER)
    except ValueError as exc:
        fix = "name another file"
        raise error("data-tokenizer", f"{file} cannot be a tokenizer: {exc}", "--tokenizer", fix) from None
