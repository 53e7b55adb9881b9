"""Statistics of FP8 tensors in a run's log: the worst value over all measured iterations and ranks.

underflow_pct, overflow_pct      % of the elements of a tensor
scale_inv_min, scale_inv_max     factor from FP8 back to values
mse, amax                        in the tensor's own units, squared for mse
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8launch.logs import Evidence, ParsedLog
from fp8launch.logs.evidence import of_kind
from fp8launch.report.run_report import ReportField
from fp8launch.report.steady_state import ranges
from fp8launch.untyped import as_mapping

# Transformer Engine's names for the three operands of a linear's GEMMs.
_NAMES = {"activation": "input", "gradient": "gradient of the output", "weight": "weight"}
_LEAST_IS_WORST = ("scale_inv_min",)


def tensor_stats(logs: Sequence[ParsedLog]) -> ReportField | None:
    """Return how often a run measured its tensors, in which iterations, and what was worst.

    The worst values come by tensor and statistic, each with its layer and iteration.
    """
    said: list[Evidence] = []
    for log in logs:
        said += of_kind("tensors", log.evidence)
    found: dict[str, dict[str, dict[str, object]]] = {}
    iterations: set[int] = set()
    for evidence in said:
        data = evidence.data
        number = data.get("iteration")
        if not isinstance(number, int):
            continue
        iterations.add(number)
        for tensor, stat, value, layer in _values(data.get("stats")):
            known = found.setdefault(tensor, {})
            if stat not in known or _worse(stat, value, known[stat]["worst"]):
                known[stat] = {"worst": value, "layer": layer, "iteration": number}
    if not found:
        return None
    summary = {"every": said[-1].data.get("every"), "iterations": sorted(iterations), "tensors": found}
    return ReportField(summary, tuple(_lines(found, sorted(iterations))))


def _values(stats: object) -> Iterable[tuple[str, str, float, str]]:
    """Yield (tensor, statistic, worst value, layer) of one line. Malformed entries are skipped."""
    for tensor, by_stat in as_mapping(stats).items():
        for stat, entry in as_mapping(by_stat).items():
            value = as_mapping(entry).get("worst")
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield str(tensor), str(stat), float(value), str(entry.get("layer"))


def _worse(stat: str, value: float, than: object) -> bool:
    assert isinstance(than, float)
    # A NaN is worse than anything, and stays.
    if value != value or than != than:
        return than == than
    if stat in _LEAST_IS_WORST:
        return value < than
    return value > than


def _lines(tensors: Mapping[str, Mapping[str, Any]], iterations: Sequence[int]) -> list[str]:
    """Describe the losses of FP8 in sentences, the worst first, and the range of values."""
    lines = []
    for stat, words in (("underflow_pct", "turned to zero"), ("overflow_pct", "clipped"), ("amax", "largest value")):
        values = _worst_first(stat, tensors)
        if values:
            lines.append(f"FP8 tensors, {words} at worst: {', '.join(values)}")
    if lines:
        lines.append(f"FP8 tensors were measured in iteration {ranges(iterations)}, which took longer")
    return lines


def _worst_first(stat: str, tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The worst value of each tensor for one statistic, with its place."""
    unit = ""
    if stat.endswith("_pct"):
        unit = " %"
    worst = []
    for name, by_stat in tensors.items():
        if stat in by_stat:
            entry = by_stat[stat]
            place = f"({entry['layer']}, iteration {entry['iteration']})"
            worst.append((entry["worst"], f"{_NAMES.get(name, name)} {entry['worst']:.4g}{unit} {place}"))
    worst.sort(key=lambda pair: -pair[0])
    return [text for _, text in worst]
