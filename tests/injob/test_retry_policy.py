"""What follows an attempt: the rules, and that the causes that logs show all have one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.injob.supervisor.failure_patterns import PATTERNS
from fp8launch.injob.supervisor.retry_policy import ACTIONS, RULES, Ended, Limits, decide
from fp8launch.job.prepared import prepare
from fp8launch.schedulers.slurm.slurm_scheduler import SlurmScheduler
from fp8launch.submit.new_run import plan_run
from fp8launch.submit.supervisor_plan import survival_text

FIVE = Limits(attempts=5, without_progress=2)


def after(
    cause: str, before: int = 0, now: int = 10, counted: int = 0, stuck: int = 0, **more: str
) -> tuple[bool, bool]:
    decision = decide(Ended(cause, before, now, **more), counted, stuck, FIVE)
    return decision.continues, decision.counts


def test_every_cause_that_a_log_can_show_has_a_rule() -> None:
    assert {pattern.code for pattern in PATTERNS} <= set(RULES)
    assert set(RULES.values()) <= set(ACTIONS)


@pytest.mark.parametrize("cause", ["out-of-memory", "nan", "bad-arguments", "missing-data", "exception", "cancelled"])
def test_what_would_fail_again_stops_at_once(cause: str) -> None:
    decision = decide(Ended(cause, 0, 10), 0, 0, FIVE)
    assert not decision.continues
    assert cause in decision.reason


def test_a_time_limit_goes_on_until_the_attempts_are_used() -> None:
    assert after("time-limit", counted=3) == (True, True)
    last = decide(Ended("time-limit", 0, 10), 4, 0, FIVE)
    assert not last.continues
    assert "5 of 5" in last.reason


@pytest.mark.parametrize("cause", ["interrupted", "preempted", "signal", "phase-end"])
def test_what_nobody_can_help_is_not_counted(cause: str) -> None:
    assert after(cause, before=10, now=10, counted=4, stuck=1) == (True, False)


def test_a_run_may_wait_for_its_user_between_phases() -> None:
    decision = decide(Ended("phase-end", 0, 10), 0, 0, FIVE, {**RULES, "phase-end": "stop"})
    assert not decision.continues
    assert decision.reason == "phase-end: the run stops between phases, as its rules say"


def test_two_attempts_without_a_newer_checkpoint_are_enough() -> None:
    assert after("killed", before=10, now=10, stuck=0) == (True, True)
    assert after("killed", before=10, now=10, stuck=1) == (False, True)
    assert after("killed", before=10, now=11, stuck=1) == (True, True)


def test_the_node_that_failed_is_left_out() -> None:
    decision = decide(Ended("cuda-error", 0, 10, "node3"), 0, 0, FIVE)
    assert (decision.continues, decision.exclude) == (True, "node3")
    assert "node3" in decision.reason
    unknown = decide(Ended("nccl", 0, 10), 0, 0, FIVE)
    assert (unknown.continues, unknown.exclude) == (True, None)
    assert "not known" in unknown.reason


def test_a_cause_that_no_rule_knows_stops() -> None:
    assert after("something-new") == (False, True)


def test_a_rule_can_be_changed() -> None:
    rules = {**RULES, "nccl": "stop", "nan": "go-on"}
    assert not decide(Ended("nccl", 0, 10), 0, 0, FIVE, rules).continues
    assert decide(Ended("nan", 0, 10), 0, 0, FIVE, rules).continues
    assert decide(Ended("out-of-memory", 0, 10), 0, 0, FIVE, rules).continues is False


@given(st.lists(st.tuples(st.sampled_from(sorted(RULES)), st.integers(0, 3)), max_size=60), st.integers(1, 9))
def test_whatever_happens_no_more_attempts_count_than_were_allowed(ends: list[tuple[str, int]], attempts: int) -> None:
    counted = stuck = at = 0
    limits = Limits(attempts, without_progress=2)
    for cause, progress in ends:
        decision = decide(Ended(cause, at, at + progress), counted, stuck, limits)
        if decision.counts:
            counted += 1
            stuck = 0 if progress else stuck + 1
        at += progress
        assert counted <= attempts
        if not decision.continues:
            break
        assert counted < attempts and stuck < 2


def test_a_rule_for_a_cause_that_there_is_not_is_refused(tmp_path: Path) -> None:
    prepared = prepare("tiny_cpu", ["checkpoint={dir: c, interval: 5}", "survive.rules={ncll: stop}"])
    job = plan_run(prepared, Cluster(), tmp_path / "run", SlurmScheduler())
    with pytest.raises(UserError, match="ncll") as refused:
        survival_text(prepared, Cluster(), job, SlurmScheduler())
    assert "nccl" in str(refused.value.problems[0].fix)


def test_attempts_without_checkpoints_are_refused() -> None:
    with pytest.raises(UserError, match=r"checkpoint\.interval"):
        prepare("tiny_cpu", ["survive.attempts=3"])


def test_the_documentation_names_the_action_of_every_cause() -> None:
    page = (Path(__file__).parents[2] / "docs" / "survival.md").read_text()
    documented = {}
    for row in page.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if row.startswith("|") and len(cells) == 2 and cells[1].strip("`") in ACTIONS:
            documented.update(dict.fromkeys(cells[0].split(", "), cells[1].strip("`")))
    assert documented == dict(RULES)
