"""What a rule is: a small function with a code, a severity and the source of what it knows.

    @rule("mxfp8-hopper", "error", source="TransformerEngine pytorch/quantization.py _compute_mxfp8_support")
    def mxfp8_needs_blackwell(run: Facts) -> Iterator[Finding]:
        if run.precision == "mxfp8" and run.gpu.capability < (10, 0):
            yield Finding("...", run.where("fp8_recipe"), "use ...")

Put it into any module of `check/rules/`; that is all there is to adding one.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fp8launch.check.facts import Facts
from fp8launch.problems import Problem, Severity


class Finding(NamedTuple):
    """What a rule found: a message in the user's terms, `file:line`, and what to change."""

    message: str
    where: str
    fix: str


Finder = Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """`source` says where the fact comes from. `says` is a pattern of Megatron's own message of the same cause, which
    is then left out."""

    code: str
    severity: Severity
    source: str
    find: Finder
    says: str | None = None

    def problems(self, run: Facts) -> Iterator[Problem]:
        for finding in self.find(run):
            yield Problem(self.severity, self.code, *finding)


_RULES: dict[str, Rule] = {}


def rule(code: str, severity: Severity, *, source: str, says: str | None = None) -> Callable[[Finder], Finder]:
    """Register a rule under a code of its own."""

    def register(find: Finder) -> Finder:
        assert code not in _RULES, f"two rules have the code {code}"
        _RULES[code] = Rule(code, severity, source, find, says)
        return find

    return register


@functools.cache
def all_rules() -> dict[str, Rule]:
    """Every rule of `check/rules/`, by code."""
    package = importlib.import_module("fp8launch.check.rules")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_RULES)
