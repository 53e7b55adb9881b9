"""What a proof reports."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8launch.plugins.prove.judge import Check
from fp8launch.wording import counted

# Columns of a terminal, and how far a line is indented that continues another.
_WIDTH = 80
_INDENT = " " * 8
# Longer lists of tensors are cut on the terminal; --json has all.
MOST_TENSORS = 6


@dataclass(frozen=True)
class Proof:
    """The verdict on one run, or on one phase of it.

    `settings` are recipe settings that the code around the tensors reads that differ, with their values. `right` is the
    nearest setting with which they do not differ; `tried` settings were changed to find it. `layout` and `compared`
    describe the recipe's layout and the proof's.
    `earlier` is true if the verdict was stored by an identical run.
    """

    checks: tuple[Check, ...]
    not_covered: tuple[str, ...]
    layout: str
    compared: str
    phase: str | None = None
    settings: tuple[str, ...] = ()
    right: str | None = None
    tried: int = 0
    earlier: bool = False
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "checks": [check.as_json() for check in self.checks],
            "not_covered": list(self.not_covered),
            "layout": self.layout,
            "compared": self.compared,
            "phase": self.phase,
            "settings": list(self.settings),
            "nearest_right": self.right,
            "seconds": round(self.seconds, 1),
        }

    def lines(self) -> Iterator[str]:
        """Yield one paragraph per check, and below it what differs, in lines that fit a terminal."""
        for paragraph in self._paragraphs():
            yield from folded(paragraph)

    def _paragraphs(self) -> Iterator[str]:
        for check in self.checks:
            yield f"{check.name:<10} {'ok' if check.ok else 'WRONG':<6} {check.detail}"
            for difference in check.differences[:MOST_TENSORS]:
                yield f"    {difference.text}"
            if len(check.differences) > MOST_TENSORS:
                yield f"    and {len(check.differences) - MOST_TENSORS} more (--json lists all)"
        if self.settings:
            yield f"settings that the code there reads: {', '.join(self.settings)}"
        if self.right:
            yield f"right with: {self.right}"
        elif self.tried:
            yield f"right with: none of {counted(self.tried, 'changed setting')}"


def folded(text: str) -> list[str]:
    """Break a text into lines that fit a terminal. A number stays with its percent sign."""
    bound = text.lstrip().replace(" %", "\xa0%")
    lines = textwrap.wrap(
        bound,
        _WIDTH,
        initial_indent=" " * (len(text) - len(text.lstrip())),
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0%", " %") for line in lines]


def merged_json(proofs: Sequence[Proof]) -> dict[str, Any]:
    """Return the JSON of a run: its only part, or a summary of all phases with each phase in `phases`."""
    if len(proofs) == 1:
        return proofs[0].as_json()
    checks = []
    for proof in proofs:
        checks += [{**check.as_json(), "detail": f"phase {proof.phase}: {check.detail}"} for check in proof.checks]
    not_covered = dict.fromkeys(text for proof in proofs for text in proof.not_covered)
    return {
        "ok": all(proof.ok for proof in proofs),
        "checks": checks,
        "not_covered": list(not_covered),
        "phases": [proof.as_json() for proof in proofs],
    }
