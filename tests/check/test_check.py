"""The check as a whole: silenced rules, the cluster's environment, and rules that speak for Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
from sets import DELAYED, MXFP8, RULES, TP2, Set

from fp8launch.check.checker import CheckResult, check
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError

CODE = "delayed-short-history"
SHORT = {**DELAYED, "fp8_amax_history_len": None, "fp8_amax_compute_algo": None}


def checked(case: Set, folder: Path) -> CheckResult:
    return check(case.prepare(folder), layers=RULES)


# --- silence


def test_a_silenced_warning_is_kept_with_its_reason(tmp_path: Path) -> None:
    assert [p.code for p in checked(Set(SHORT), tmp_path).problems] == [CODE]
    result = checked(Set(SHORT, more={"silence": {CODE: "we compare with an old run"}}), tmp_path)
    assert result.problems == ()
    assert result.ok
    [silenced] = result.as_json()["silenced"]
    assert (silenced["code"], silenced["reason"]) == (CODE, "we compare with an old run")
    assert silenced["where"]


def test_an_error_cannot_be_silenced(tmp_path: Path) -> None:
    result = checked(Set(MXFP8, more={"silence": {"mxfp8-needs-blackwell": "I know better"}}), tmp_path)
    assert {p.code for p in result.problems} == {"mxfp8-needs-blackwell", "cannot-silence"}
    assert not result.ok


def test_an_unknown_code_is_named_with_its_nearest(tmp_path: Path) -> None:
    result = checked(Set(more={"silence": {"delayed-short-histroy": "typo"}}), tmp_path)
    [problem] = result.problems
    assert (problem.severity, problem.code) == ("error", "unknown-code")
    assert problem.fix == f"did you mean '{CODE}'?"
    assert problem.where is not None and ".yaml:" in problem.where


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_a_silence_needs_a_reason(reason: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="silence"):
        Set(SHORT, more={"silence": {CODE: reason}}).prepare(tmp_path)


def test_a_rule_speaks_instead_of_megatron(tmp_path: Path) -> None:
    [problem] = checked(Set(TP2, env={}), tmp_path).problems
    assert problem.code == "max-connections-not-1"
    assert "not set" in problem.message


# --- what else counts


def test_the_clusters_environment_counts_and_the_recipe_overrides_it(tmp_path: Path) -> None:
    site = Cluster(env={"CUDA_DEVICE_MAX_CONNECTIONS": 1})
    assert check(Set(TP2, env={}).prepare(tmp_path), site, layers=RULES).ok
    assert not check(Set(TP2, env={"CUDA_DEVICE_MAX_CONNECTIONS": 8}).prepare(tmp_path), site, layers=RULES).ok
