"""`fp8launch_tiny`, a task without a download: which word continues a sequence of words?

It is made of words that small tokenizers have, and is for tests of the way to a result. Its accuracy says nothing
about a language model.
"""

from __future__ import annotations

import json
from pathlib import Path

NAME = "fp8launch_tiny"
_WORDS = ("the", "and", "of", "to", "in", "is", "it", "was")
_QUESTIONS = 64
_CHOICES = 4


def write(folder: Path) -> None:
    """Write the task and its questions to a folder, which lm-eval accepts as `--include_path`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{NAME}.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions()))
    # JSON is YAML, and quotes any path.
    task = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
        "metadata": {"version": 1.0},
    }
    (folder / f"{NAME}.yaml").write_text(json.dumps(task, indent=1) + "\n")


def questions() -> list[dict[str, object]]:
    """Return the questions: two words repeat in turn, and the answer is the word whose turn it is."""
    found: list[dict[str, object]] = []
    for number in range(_QUESTIONS):
        first = number % len(_WORDS)
        second = (first + 1 + number // len(_WORDS) % (len(_WORDS) - 1)) % len(_WORDS)
        others = [word for index, word in enumerate(_WORDS) if index not in (first, second)]
        choices = [_WORDS[second], *others[: _CHOICES - 1]]
        turn = number % _CHOICES
        choices = choices[-turn:] + choices[:-turn] if turn else choices
        context = " ".join([_WORDS[first], _WORDS[second]] * 3 + [_WORDS[first]])
        found.append({"context": context, "choices": choices, "answer": choices.index(_WORDS[second])})
    return found
