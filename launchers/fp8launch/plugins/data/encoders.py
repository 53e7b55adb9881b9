"""The encoder that a tokenizer's spec describes."""

from __future__ import annotations

from pathlib import Path

from fp8launch.plugins.data.gigatoken_engine import GigatokenEncoder
from fp8launch.plugins.data.tokenizer import (
    ByteEncoder,
    Encoder,
    HuggingFaceEncoder,
    IdEncoder,
    SentencePieceEncoder,
    TikTokenEncoder,
    TokenizerSpec,
)


def encoder_of(spec: TokenizerSpec, engine: str = "tokenizers") -> Encoder:
    """Return the encoder that a spec describes. `engine` matters to Hugging Face tokenizers only."""
    if spec.kind == "bytes":
        return ByteEncoder()
    if spec.kind == "ids":
        return IdEncoder(spec.vocab_size)
    assert spec.file is not None
    file = Path(spec.file)
    if spec.kind == "sentencepiece":
        return SentencePieceEncoder(file)
    if spec.kind == "tiktoken":
        return TikTokenEncoder(file, spec.pattern)
    slow = HuggingFaceEncoder(file, spec.special_tokens)
    if engine == "gigatoken":
        return GigatokenEncoder(file, slow)
    return slow
