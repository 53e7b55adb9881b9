"""Names in `bridge.data` and `bridge.model`, for the check on the login node and for the job."""

from __future__ import annotations

from pathlib import Path

# The value of `bridge.data` for random tokens, which Bridge's own runner benchmarks fine-tuning with.
MOCK = "mock"
# The file that Bridge requires in a folder with data. `validation.jsonl` and `test.jsonl` may be missing.
TRAINING_FILE = "training.jsonl"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder with a Hugging Face model also has its tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)
