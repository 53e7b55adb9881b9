"""The baseline of a comparison: which rows belong to it, and which of them each row is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations, product, starmap

from fp8launch.diagnostics import did_you_mean, error
from fp8launch.hardware.quantization import UNQUANTIZED
from fp8launch.report.differences import parity_differences, speed_comparability
from fp8launch.report.grouping import ComparisonRow, labels_of


def baseline_rows(rows: Sequence[ComparisonRow], wanted: str | None) -> list[ComparisonRow]:
    """Return the rows that `wanted` names; by default those in bf16, else the first variant; none for one variant.

    Raises UserError if it names no row.
    """
    labels = labels_of(rows)
    if wanted is None:
        if len(labels) < 2:
            return []
        return _default_baseline(rows)
    found = [row for row in rows if _is_meant(row, wanted)]
    if not found:
        names = "', '".join(labels)
        hint = did_you_mean(wanted, labels, "pass a variant, a precision, key=value or a run's name")
        raise error("unknown-baseline", f"'{wanted}' is not a row; rows: '{names}'", "--baseline", hint)
    return found


def _default_baseline(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Unquantized rows if another row did the same work, else the first variant of those that have most in common.

    So a single row of other work than the rest is the one that cannot be compared, whatever its precision.
    """
    partners = _partners(rows)
    for name in UNQUANTIZED:
        plain: list[ComparisonRow] = []
        others: list[ComparisonRow] = []
        for row in rows:
            if row.facts.get("precision") == name:
                plain.append(row)
            else:
                others.append(row)
        if plain and others and (not partners or any(starmap(_alike, product(others, plain)))):
            return plain
    first = max(rows, key=lambda row: partners.get(row.name, 0))
    return [row for row in rows if row.label == first.label]


def _alike(a: ComparisonRow, b: ComparisonRow) -> bool:
    return speed_comparability(a.facts, b.facts).comparable


def _partners(rows: Sequence[ComparisonRow]) -> dict[str, int]:
    """With how many rows each row can be compared, where there are any."""
    found: Counter[str] = Counter()
    for row, other in permutations(rows, 2):
        if row.label != other.label and _alike(row, other):
            found[row.name] += 1
    return found


def _is_meant(row: ComparisonRow, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    if equals:
        return value in _stated(row, key)
    precision = str(row.facts.get("precision", ""))
    names = {row.label, row.name, precision}
    if " then " not in precision:
        names.add(precision.split(" ")[0])
    for run in row.runs:
        names.update((run.name, *run.sources))
    return wanted in names


def _stated(row: ComparisonRow, key: str) -> set[str]:
    """The values of a key in a row, from its facts and from the axes of its study."""
    found = {str(row.facts.get(key))}
    for run in row.runs:
        if run.study:
            found.add(str(run.study.point.get(key)))
    return found


def baseline_name(bases: Sequence[ComparisonRow], wanted: str | None) -> str | None:
    """Return what the baseline rows have in common: their label, else `wanted`, else their precision."""
    labels = labels_of(bases)
    if len(labels) == 1:
        return labels[0]
    if wanted or not bases:
        return wanted
    return str(bases[0].facts.get("precision"))


def counterpart(row: ComparisonRow, bases: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return the most similar baseline row: same GPUs, sequence, layout and learning rate if there is one."""
    if row in bases:
        return row

    def distance(base: ComparisonRow) -> tuple[int, int, int]:
        found = speed_comparability(row.facts, base.facts)
        return len(found.unlike), len(found.noted), len(parity_differences(row.facts, base.facts))

    return min(bases, key=distance)
