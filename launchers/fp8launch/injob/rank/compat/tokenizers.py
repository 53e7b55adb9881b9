"""Import Megatron without the package transformers where the run's tokenizer does not use it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator

_WITHOUT = ("NullTokenizer", "TikTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


@contextlib.contextmanager
def without_transformers(tokenizer: str | None) -> Iterator[None]:
    """Hide transformers while Megatron is imported, if `tokenizer` (--tokenizer-type) is one that does without.

    Megatron imports all of its tokenizers at once. transformers, with scikit-learn and SciPy, takes four to six of the
    seconds before the first step. Source: core/tokenizers/text/libraries of Megatron-Core 0.17 to 0.19, where
    a missing package only disables the tokenizers that need it.
    """
    if tokenizer not in _WITHOUT or "transformers" in sys.modules:
        yield
        return
    sys.modules["transformers"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    try:
        yield
        importlib.import_module("megatron.core.tokenizers.text.libraries")
    finally:
        del sys.modules["transformers"]
