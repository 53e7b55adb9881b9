"""Find the tokenizer that --tokenizer names."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.injob.regular_files import open_regular, read_regular
from fp8launch.plugins.data.encoders import encoder_of
from fp8launch.plugins.data.tokenizer import END_OF_BYTES, PATTERNS, Encoder, Kind, TokenizerSpec, sha256_of

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def find_tokenizer(
    text: str,
    *,
    append_eod: bool = True,
    eod_token: str | None = None,
    vocab_size: int | None = None,
    special_tokens: bool = True,
    pattern: str = "auto",
) -> TokenizerSpec:
    """Return the tokenizer that `text` names: `bytes`, `ids`, a file, a folder, or a name in the Hugging Face cache.

    Raises UserError if it does not exist, cannot be read, or lacks a required end-of-document token.
    """
    if pattern not in PATTERNS:
        raise error("data-tokenizer", f"no tiktoken pattern {pattern}", "--pattern", f"one of {', '.join(PATTERNS)}")
    if text == "bytes":
        spec = TokenizerSpec("bytes", None, text, None, END_OF_BYTES + 1)
        if append_eod:
            return dataclasses.replace(spec, eod=END_OF_BYTES)
        return spec
    if text == "ids":
        return _ids(append_eod, eod_token, vocab_size)
    file = tokenizer_file(text)
    kind = _kind_of(file)
    # Other kinds ignore it, so the fingerprints of their datasets stay the same.
    if kind != "tiktoken":
        pattern = "v2"
    spec = TokenizerSpec(kind, str(file), text, sha256_of(file), special_tokens=special_tokens, pattern=pattern)
    encoder = encoder_of(spec)
    eod = None
    if append_eod:
        eod = _end_of_document(encoder, eod_token, text)
    return dataclasses.replace(spec, vocab_size=encoder.vocab_size, eod=eod)


def _ids(append_eod: bool, eod_token: str | None, vocab_size: int | None) -> TokenizerSpec:
    if vocab_size is None:
        raise error(
            "data-tokenizer", "token ids need the size of their vocabulary", "--tokenizer", "add --vocab-size N"
        )
    eod = None
    if append_eod:
        if eod_token is None or not eod_token.isdecimal() or int(eod_token) >= vocab_size:
            message = "the end of document must be an id below --vocab-size with --tokenizer ids"
            raise error("data-eod", message, "--eod-token", "name the id, or add --no-eod")
        eod = int(eod_token)
    return TokenizerSpec("ids", None, "ids", None, vocab_size, eod)


def tokenizer_file(text: str) -> Path:
    """Return the file of a tokenizer: a path, a file in a folder, or from the Hugging Face cache. Raises UserError."""
    path = Path(text).expanduser().absolute()
    if path.is_file():
        return path
    if path.is_dir():
        inside = _file_in(path)
        if inside is None:
            message = f"{text} contains none of tokenizer.json, tokenizer.model and *.tiktoken"
            raise error("data-tokenizer", message, "--tokenizer", "name the file of the tokenizer")
        return inside
    if text.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(text):
        message = f"there is no tokenizer {text}"
        fix = "a file or folder, a name in the Hugging Face cache, `bytes` or `ids`"
        raise error("data-tokenizer", message, "--tokenizer", fix)
    return _from_cache(text)


def _file_in(folder: Path) -> Path | None:
    names = ["tokenizer.json", "tokenizer.model", *sorted(path.name for path in folder.glob("*.tiktoken"))]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _from_cache(name: str) -> Path:
    """Return the tokenizer of this name from the local Hugging Face cache. Nothing is downloaded.

    The cache's layout is models--ORG--NAME/refs/main, which holds a commit, and snapshots/COMMIT.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or f"{home}/hub"
    model = Path(hub).expanduser().absolute() / f"models--{name.replace('/', '--')}"
    commits = sorted(path.name for path in model.glob("snapshots/*"))
    main = model / "refs" / "main"
    if main.is_file():
        commits.insert(0, read_regular(main, 4096).decode().strip())
    for commit in commits:
        found = _file_in(model / "snapshots" / commit)
        if found is not None:
            return found
    message = f"there is no file or folder {name}, and the Hugging Face cache {hub} has no tokenizer of that name"
    fix = (
        f"name a folder with tokenizer.json; or fill the cache where there is a network, with `hf download {name} "
        "tokenizer.json tokenizer_config.json` (HF_TOKEN in the environment for a gated model)"
    )
    raise error("data-tokenizer", message, "--tokenizer", fix, MACHINE_LACKS)


def _kind_of(file: Path) -> Kind:
    with open_regular(file) as stream:
        begin = stream.read(4096).lstrip()
    if begin[:1] == b"{":
        return "huggingface"
    if begin[:1] == b"[" or re.match(rb"[A-Za-z0-9+/]+=* \d+(?:[\r\n]|\Z)", begin):
        return "tiktoken"
    return "sentencepiece"


def _end_of_document(encoder: Encoder, wanted: str | None, text: str) -> int:
    if wanted is not None:
        found = encoder.id_of(wanted)
        if found is None:
            raise error("data-eod", f"the tokenizer {text} has no token '{wanted}'", "--eod-token", "name one it has")
        return found
    for token in encoder.ends():
        found = encoder.id_of(token)
        if found is not None:
            return found
    message = f"the tokenizer {text} does not define an end-of-document token"
    raise error("data-eod", message, "--tokenizer", "name it with --eod-token TOKEN, or add --no-eod")
