"""Describe what was compared: the study, the model, the hardware and the batch."""

from __future__ import annotations

from collections.abc import Iterable

from fp8launch.plugins.plots.style import plain
from fp8launch.report.comparison import Comparison
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


def _model(comparison: Comparison) -> str:
    parts = []
    for name, form in (("num_layers", "{} layers"), ("hidden_size", "hidden size {}"), ("num_experts", "{} experts")):
        if text := _range(_facts(comparison, name)):
            parts.append(form.format(text))
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
