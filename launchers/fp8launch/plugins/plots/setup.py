"""Describe what was compared: the study, the model, the hardware and the batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from fp8launch.plugins.plots.style import plain
from fp8launch.report.comparison import Comparison
from fp8launch.report.differences import Facts
from fp8launch.untyped import as_int
from fp8launch.wording import and_more


def setup_of(comparison: Comparison) -> dict[str, str]:
    """Return what was compared by title. Numbers that differ become a range, and unknown parts are omitted."""
    runs = comparison.runs()
    studies = dict.fromkeys(plain(run.study.name) for run in runs if run.study)
    found = {
        "Study": and_more(list(studies), 3),
        "Model": _model(comparison),
        "Hardware": _hardware(comparison),
        "Batch": _batch(comparison),
        "Length": _length(comparison),
    }
    return {title: text for title, text in found.items() if text}


def setup_line(comparison: Comparison) -> str:
    """Return the setup in one line, for the top of a picture."""
    return " · ".join(setup_of(comparison).values())


def training_of(comparison: Comparison) -> dict[str, str]:
    """Return how the models were trained, by title. Values that differ are listed, and unknown parts are omitted."""
    rows = comparison.rows
    found = {
        "Parameters": _range(run.setup.parameters for run in comparison.runs()),
        "Precision": _each(row.facts.get("precision") for row in rows),
        "Data": _each(_data(row.facts) for row in rows),
        "Tokenizer": _each(_tokenizer(row.facts) for row in rows),
        "Optimizer": _each(row.facts.get("optimizer") for row in rows),
        "Learning rate": _learning_rate(comparison),
        "Loss": "training loss (nats)" if any(row.loss for row in rows) else "",
    }
    return {title: text for title, text in found.items() if text}


_DATA = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")


def _data(facts: Facts) -> str:
    """Name the datasets, without folders and weights."""
    if facts.get("mock_data") is True:
        return "mock data"
    names = []
    for value in filter(None, map(facts.get, _DATA)):
        words = value if isinstance(value, list | tuple) else str(value).strip("[]").replace(",", " ").split()
        names += [PurePath(plain(str(word)).strip("'\"")).name for word in words if not _is_number(word)]
    return and_more(names, 3)


def _is_number(word: object) -> bool:
    try:
        float(str(word).strip("'\""))
    except ValueError:
        return False
    return True


def _tokenizer(facts: Facts) -> str:
    """Name the tokenizer, its model without folders, and the size of its vocabulary."""
    parts = []
    for name in ("tokenizer_type", "tokenizer_model"):
        if value := facts.get(name):
            parts.append(PurePath(plain(str(value))).name)
    if size := as_int(facts.get("vocab_size")) or as_int(facts.get("padded_vocab_size")):
        parts.append(f"vocabulary {size:,}")
    return ", ".join(parts)


def _learning_rate(comparison: Comparison) -> str:
    """Return the learning rates, their schedule, the warm-up and the minimum."""
    parts = []
    for name, form in (
        ("lr", "{}"),
        ("lr_decay_style", "{}"),
        ("min_lr", "minimum {}"),
        ("lr_warmup_iters", "{} warm-up iterations"),
        ("lr_warmup_samples", "{} warm-up samples"),
        ("lr_warmup_fraction", "warm-up fraction {}"),
    ):
        # Megatron's dump has 0 or None for the kinds of warm-up that a run does not use.
        if text := _each(row.facts.get(name) or None for row in comparison.rows):
            parts.append(form.format(text).removesuffix("s" if text == "1" else ""))
    return ", ".join(parts)


def _each(values: Iterable[object]) -> str:
    """Return the different values, each once. Numbers become a range."""
    known = [value for value in values if value not in (None, "")]
    numbers = [value for value in known if isinstance(value, int | float)]
    if numbers and len(numbers) == len(known):
        ends = sorted({min(numbers), max(numbers)})
        return " to ".join(f"{number:,}" if isinstance(number, int) else f"{number:g}" for number in ends)
    return and_more(list(dict.fromkeys(plain(str(value)) for value in known)), 3)


def _model(comparison: Comparison) -> str:
    parts = []
    for name, form in (("num_layers", "{} layers"), ("hidden_size", "hidden size {}"), ("num_experts", "{} experts")):
        if text := _range(_facts(comparison, name)):
            parts.append(form.format(text).removesuffix("s" if text == "1" else ""))
    return ", ".join(parts)


def _hardware(comparison: Comparison) -> str:
    names = [run.setup.gpu for run in comparison.runs() if run.setup.gpu]
    gpus = and_more([name.upper() for name in dict.fromkeys(names)], 3)
    count = _range(row.world for row in comparison.rows)
    if gpus == "CPU":
        return f"CPU, {count} processes" if count and count != "1" else "CPU"
    if not count:
        return gpus
    return f"{count} × {gpus}" if gpus else f"{count} GPUs"


def _batch(comparison: Comparison) -> str:
    samples = _range(_facts(comparison, "global_batch_size"))
    length = _range(_facts(comparison, "seq_length"))
    if not samples or not length:
        return ""
    return f"global batch {samples} × {length} tokens"


def _length(comparison: Comparison) -> str:
    text = _range(run.training.iteration_last for run in comparison.runs() if run.good)
    return f"{text} iterations" if text else ""


def _facts(comparison: Comparison, name: str) -> Iterable[int | None]:
    return (as_int(row.facts.get(name)) for row in comparison.rows)


def _range(numbers: Iterable[int | None]) -> str:
    known = sorted(set(filter(None, numbers)))
    if not known:
        return ""
    if len(known) == 1:
        return f"{known[0]:,}"
    return f"{known[0]:,} to {known[-1]:,}"
