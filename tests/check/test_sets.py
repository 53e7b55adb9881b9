"""Bad runs are flagged as what they are, good ones pass without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bad_sets import BAD
from good_sets import GOOD

from fp8launch.check.checker import CheckResult
from fp8launch.check.rule import all_rules

Checked = Callable[[str], CheckResult]


def _bad() -> list[Any]:
    """Return the bad runs, each with the plugin without which the check cannot flag it."""
    return [
        pytest.param(name, marks=[pytest.mark.needs_plugin(case.needs)] if case.needs else [])
        for name, case in BAD.items()
    ]


@pytest.mark.parametrize("name", _bad())
def test_a_bad_run_is_flagged(name: str, checked: Checked) -> None:
    result, expected = checked(name), BAD[name]
    found = {p.code: p for p in result.problems}
    assert expected.code in found, [str(p) for p in result.problems]
    problem = found[expected.code]
    assert problem.severity == expected.severity
    assert result.ok == (expected.severity == "warning"), [str(p) for p in result.problems]
    assert problem.message
    assert (problem.where and ":" in problem.where) or problem.where.endswith(".yaml"), problem


@pytest.mark.parametrize("name", BAD)
def test_one_cause_is_reported_once(name: str, checked: Checked) -> None:
    errors = [p for p in checked(name).problems if p.severity == "error"]
    assert len(errors) <= 1, [str(p) for p in errors]


@pytest.mark.needs_plugin("validators")
@pytest.mark.parametrize("name", GOOD)
def test_a_good_run_passes_without_a_word(name: str, checked: Checked) -> None:
    result = checked(name)
    assert [str(p) for p in result.problems] == []
    assert result.layers["megatron"] == result.layers["rules"] == "ran"


def test_every_rule_has_a_run_that_it_is_for() -> None:
    covered = {case.code for case in BAD.values()}
    # The first and the last depend on the image (test_rules.py), the other on an engine without Megatron's validators
    # (tests/plugins/bridge/test_bridge_engine.py), and rules about forks on a schema that was built
    # (tests/plugins/forks). Variables of Transformer Engine have tests of their own (tests/plugins/validators).
    rules = {code for code, rule in all_rules().items() if not rule.known_bug}
    assert rules - covered == {
        *("nccl-buffers-segments", "pipeline-layout", "optional-package"),
        *("fork-flags", "fork-defaults"),
        *("te-option", "te-option-ignored", "four-over-six"),
    }


def test_every_rule_says_where_it_comes_from() -> None:
    for rule in all_rules().values():
        assert len(rule.source) > 10, rule.code
        assert rule.code == rule.code.lower().strip("-"), rule.code
