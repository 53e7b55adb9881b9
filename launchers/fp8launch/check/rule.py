"""A rule is a small function with a code, a severity and the source of the fact behind it.

    @rule("mxfp8-hopper", "error", source="TransformerEngine pytorch/quantization.py _compute_mxfp8_support")
    def mxfp8_hopper(run: ResolvedRun) -> Iterator[Finding]:
        if run.precision == "mxfp8" and run.gpu.capability < (10, 0):
            yield Finding("...", run.where("fp8_recipe"), "use ...")

To add a rule, write such a function in a module of `check/rules/`, or list it in the `rules` of a plugin. If the rule
only compares settings, add a row to `check/rules/table.yaml` instead.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fp8launch import plugin_registry
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.diagnostics import Problem, Severity
from fp8launch.engines.base import Scope


class Finding(NamedTuple):
    """What a rule found: a message in the user's terms, `file:line`, and the fix."""

    message: str
    where: str
    fix: str


Finder = Callable[[ResolvedRun], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A registered rule.

    `source` says where the fact comes from, usually a function in Megatron or Transformer Engine. `says` matches
    Megatron's own message about the same cause, which is then suppressed. `scope` names the engines that the rule
    applies to (see `engines.base.SCOPES`). A `known_bug` is reported as an advisory, and its `source` is a URL. A rule
    that `compares` uses `ResolvedRun.before`, so that it can check each phase against the previous one.
    """

    code: str
    severity: Severity
    source: str
    find: Finder
    says: str | None = None
    scope: Scope = "megatron_core"
    known_bug: bool = False
    compares: bool = False

    def problems(self, run: ResolvedRun) -> Iterator[Problem]:
        if not run.engine.covers(self.scope):
            return
        for finding in self.find(run):
            if self.known_bug:
                yield Problem(self.severity, self.code, *finding, kind="advisory", source=self.source)
            else:
                yield Problem(self.severity, self.code, *finding)


_RULES: dict[str, Rule] = {}


def rule(
    code: str, severity: Severity, *, source: str, says: str | None = None, scope: Scope = "megatron_core"
) -> Callable[[Finder], Finder]:
    """Register a rule under a unique code."""

    def decorate(find: Finder) -> Finder:
        register(Rule(code, severity, source, find, says, scope))
        return find

    return decorate


def register(new: Rule) -> None:
    assert new.code not in _RULES, f"two rules have the code {new.code}"
    _RULES[new.code] = new


@functools.cache
def all_rules() -> dict[str, Rule]:
    """Return all rules of `check/rules/` and of plugins, by code."""
    package = importlib.import_module("fp8launch.check.rules")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for _ in plugin_registry.loaded("rules"):
        pass  # importing a module registers its rules
    return dict(_RULES)
