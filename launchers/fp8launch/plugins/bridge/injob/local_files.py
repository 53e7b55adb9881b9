"""Names in `bridge.data` and `bridge.model`, for the check on the login node and for the job."""

from __future__ import annotations

# The value of `bridge.data` for random tokens, which Bridge's own runner benchmarks fine-tuning with.
MOCK = "mock"
# The file that Bridge requires in a folder with data. `validation.jsonl` and `test.jsonl` may be missing.
TRAINING_FILE = "training.jsonl"
# A folder with one of these has a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
