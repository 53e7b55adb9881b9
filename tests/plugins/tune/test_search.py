"""The search of `tune`, driven by machines that Hypothesis makes up: whatever they answer, its promises hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fp8launch.plugins.tune.judgement import MOST_RUNS, standing
from fp8launch.plugins.tune.knobs import knobs
from fp8launch.plugins.tune.memory_fit import FILLED, fits, memory_shift, needs_gib
from fp8launch.plugins.tune.record import Record
from fp8launch.plugins.tune.rows import rows
from fp8launch.plugins.tune.search import LEAST_PREDICTED, Finished, next_trial
from fp8launch.plugins.tune.state import (
    Candidate,
    Limits,
    Outcome,
    Start,
    State,
    Trial,
    Variant,
    gain_over,
    seconds_spent,
    trials_run,
)

CAPACITY = 140.0


def state(*candidates: Candidate, memory: float | None = 100.0, **more: object) -> State:
    return State((Start("recipe", candidates, memory),), capacity_gib=CAPACITY, **more)  # type: ignore[arg-type]


def ran(at: State, speed: float, spread: float = 0.001, seconds: float = 60.0, **more: object) -> State:
    """The state after its next trial ran at about this speed."""
    speeds = tuple(speed * (1 + spread * (i % 5 - 2)) for i in range(7))
    return ended(at, Outcome("ok", speeds=speeds, seconds=seconds, **more))  # type: ignore[arg-type]


def ended(at: State, outcome: Outcome) -> State:
    trial = next_trial(at)
    assert isinstance(trial, Trial), trial
    return replace(at, results=(*at.results, (trial, outcome)))


def wanted(at: State) -> tuple[str, ...]:
    trial = next_trial(at)
    assert isinstance(trial, Trial), trial
    return trial.variant.changes


# --- examples ---------------------------------------------------------------------------------------------------------


def test_a_prediction_is_for_the_change_to_the_best_before_it() -> None:
    """The table predicted +112 % for a grouped GEMM, its gain at micro batch 1; at micro batch 4 it gained 11 %."""
    at = ran(state(Candidate("batch", "1", 2.5), Candidate("gemm", "2", 2.1)), 100, predicted_ms=1000.0)
    at = ran(at, 280, predicted_ms=400.0)
    at = ran(at, 310, predicted_ms=350.0)
    assert [trial.variant.changes for trial, _ in at.results] == [(), ("batch",), ("batch", "gemm")]
    found = {row.change: row for row in rows(Record(at, ({},), ((),), 1), {}, "")}
    assert found["batch"].predicted == 2.5
    assert found["gemm"].predicted == 400 / 350


def test_a_change_that_the_model_does_not_cover_keeps_its_own_prediction() -> None:
    at = ran(state(Candidate("graphs", "1", 1.1)), 100, predicted_ms=1000.0)
    at = ran(at, 108, predicted_ms=1000.0)
    assert [row.predicted for row in rows(Record(at, ({},), ((),), 1), {}, "")] == [None, 1.1]


def test_the_speed_of_several_runs_is_their_median() -> None:
    """Three runs of 337, 340 and 261 TFLOP/s were listed as 261 with a gain of 0.3 %."""
    at = ran(state(Candidate("a", "1", 1.04)), 100)
    variant = Variant(0, ("a",))
    for repeat, tflops in enumerate((337.0, 340.1, 260.7), 1):
        outcome = Outcome("ok", speeds=(tflops,) * 7, tflops=tflops, step_ms=1000 / tflops)
        at = replace(at, results=(*at.results, (Trial(variant, repeat), outcome)))
    row = rows(Record(at, ({},), ((),), 1), {}, "")[1]
    assert (row.tflops_per_gpu, row.step_time_ms) == (337.0, 1000 / 337.0)


def test_the_recipe_runs_first_then_the_best_prediction() -> None:
    at = state(Candidate("a", "1", 1.01), Candidate("b", "2", 1.05), Candidate("c", "3", 1.02))
    assert wanted(at) == ()
    at = ran(at, 100)
    assert wanted(at) == ("b",)
    at = ran(at, 104)
    assert wanted(at) == ("b", "c"), "what was kept stays"
    at = ran(at, 103)
    assert wanted(at) == ("b", "a"), "what was not kept goes"


def test_pairs_come_after_single_changes_and_only_those_that_can_win() -> None:
    """A change that needs memory, with one that frees it; alone the one does not fit, and the other is slower."""
    large, frees, slow = Candidate("large", "1", 1.08, 50.0), Candidate("frees", "2", 0.97, -30.0), Candidate("c", "3")
    at = ran(state(large, frees, slow), 100)
    assert wanted(at) == ("c",)
    at = ran(at, 90)
    assert wanted(at) == ("large", "frees")
    at = ran(at, 104)
    assert standing(at).best == Variant(0, ("large", "frees"))
    assert isinstance(next_trial(at), Finished), "c was a tenth slower"


def test_an_undecided_trial_runs_again_and_a_clear_one_does_not() -> None:
    at = ran(state(Candidate("a", "1")), 100, spread=0.02)
    at = ran(at, 100.5, spread=0.02)
    assert standing(at).undecided == Variant(0, ("a",))
    assert next_trial(at) == Trial(Variant(0, ("a",)), 2)
    clear = ran(ran(state(Candidate("a", "1")), 100), 103)
    assert standing(clear).undecided is None and standing(clear).best == Variant(0, ("a",))


def test_a_gain_too_small_to_matter_is_not_run_again() -> None:
    at = ran(ran(state(Candidate("a", "1")), 100, spread=0.0005), 100.02, spread=0.0005)
    assert standing(at).judgements[Variant(0, ("a",))].verdict == "same"


def test_a_change_that_looks_slower_is_not_run_again() -> None:
    """Six of seven runs of a real search went into one such change, while four predicted gains were left untried."""
    at = ran(state(Candidate("a", "1"), Candidate("b", "2")), 100, spread=0.02)
    at = ran(at, 99.5, spread=0.02)
    assert wanted(at) == ("b",)


def test_the_first_trial_does_not_say_how_long_another_takes() -> None:
    """It fills the caches of compilers too: 73 s where the next four took 50, and 71 were left."""
    at = state(Candidate("a", "1"), Candidate("b", "2"), Candidate("c", "3"), Candidate("d", "4"))
    for speed, seconds in ((100, 73), (102, 49), (104, 52), (106, 49)):
        at = ran(at, speed, seconds=seconds)
    assert wanted(replace(at, seconds_left=71)) == ("a", "b", "c", "d")
    assert isinstance(next_trial(replace(at, seconds_left=51)), Finished)


def test_an_option_of_a_knob_takes_the_place_of_another() -> None:
    at = state(Candidate("micro 2", "micro", 1.05), Candidate("micro 4", "micro", 1.06), memory=None)
    at = ran(ran(at, 100), 110)
    assert standing(at).best == Variant(0, ("micro 4",))
    assert wanted(at) == ("micro 2",)


def test_several_recipes_run_first_and_the_fastest_is_improved() -> None:
    starts = (Start("one", (Candidate("a", "1"),)), Start("two", (Candidate("b", "1"),)))
    at = State(starts)
    at = ran(at, 100)
    assert next_trial(at) == Trial(Variant(1))
    at = ran(at, 120)
    assert next_trial(at) == Trial(Variant(1, ("b",)))


def test_without_a_recipe_that_runs_there_is_nothing_to_tune() -> None:
    at = ended(state(Candidate("a", "1")), Outcome("failed", why="no GPU"))
    assert isinstance(next_trial(at), Finished) and standing(at).best is None


def test_an_out_of_memory_end_corrects_the_memory_model() -> None:
    at = state(
        Candidate("a", "1", 1.05, 30.0), Candidate("b", "2", 1.04, 28.0), Candidate("c", "3", 1.03, 4.0)
    )  # fmt: skip
    at = ran(at, 100, needs_gib=100.0, predicted_gib=97.0, peak_gib=97.5)
    assert memory_shift(at) == 0.5
    assert wanted(at) == ("a",)
    at = ended(at, Outcome("out_of_memory", needs_gib=130.0, predicted_gib=127.0, seconds=30.0))
    assert memory_shift(at) == 10.0, "it needed all of 140 GiB, at least"
    assert wanted(at) == ("c",), "b would need 128 + 10 GiB, c only 104 + 10"


def test_what_fitted_is_never_said_not_to_fit() -> None:
    at = ran(state(Candidate("a", "1", 1.05, 1.0), memory=120.0), 100, needs_gib=120.0, predicted_gib=118.0)
    at = ended(at, Outcome("out_of_memory", needs_gib=121.0, seconds=30.0))
    assert memory_shift(at) == 19.0
    assert fits(at, Variant(0)), "the recipe itself ran"


def test_more_of_what_ran_out_of_memory_is_skipped_without_a_memory_model() -> None:
    levels = (Candidate("micro 2", "micro", level=2), Candidate("micro 4", "micro", level=4), Candidate("a", "1"))
    at = ran(state(*levels, memory=None), 100)
    at = ended(at, Outcome("out_of_memory", seconds=10.0))
    assert wanted(at) == ("a",)


def test_a_change_on_a_kept_pair_is_not_a_pair_that_failed() -> None:
    first = (Candidate("a", "1", gain=1.25), Candidate("b", "1", gain=1.25))
    second = (Candidate("c", "2", gain=0.875), Candidate("d", "2", gain=0.875))
    at = ran(state(*first, *second), 80)
    at = ended(ran(at, 80), Outcome("out_of_memory", seconds=20.0))
    assert wanted(at) == ("b", "c")
    at = ran(ended(at, Outcome("failed", seconds=5.0)), 81)
    best = standing(at).best
    assert best is not None
    assert best.changes == ("b", "d")
    assert isinstance(next_trial(at), Finished)


def test_the_clock_and_the_budget_end_it() -> None:
    at = ran(state(Candidate("a", "1"), limits=Limits(seconds=100.0)), 100)
    assert "budget" in next_trial(at).why  # type: ignore[union-attr]
    at = replace(at, limits=Limits(), seconds_left=59.0)
    assert "time" in next_trial(at).why  # type: ignore[union-attr]
    assert isinstance(next_trial(replace(at, seconds_left=61.0)), Trial)


# --- properties -------------------------------------------------------------------------------------------------------

candidates = st.lists(
    st.builds(
        Candidate,
        name=st.integers(0, 30).map("change {}".format),
        knob=st.integers(0, 5).map("knob {}".format),
        gain=st.floats(0.8, 1.3),
        memory_gib=st.floats(-30, 60),
        level=st.none() | st.integers(2, 8),
    ),
    max_size=8,
    unique_by=lambda one: one.name,
)
outcomes = st.one_of(
    st.builds(
        lambda speed, spread, seconds: Outcome(
            "ok",
            speeds=tuple(speed * (1 + spread * (i * 7 % 5 - 2)) for i in range(5)),
            seconds=seconds,
            peak_gib=100.0,
            predicted_gib=101.0,
        ),
        st.floats(80, 120),
        st.floats(0, 0.05),
        st.floats(1, 100),
    ),
    st.sampled_from(
        [Outcome("out_of_memory", seconds=20.0), Outcome("failed", seconds=5.0), Outcome("refused"), Outcome("skipped")]
    ),
)


@settings(max_examples=60)
@given(
    candidates=candidates,
    answers=st.lists(outcomes, min_size=1, max_size=12),
    trials=st.none() | st.integers(1, 20),
    seconds=st.none() | st.floats(10, 1000),
    data=st.data(),
)
def test_whatever_the_machine_answers(
    candidates: list[Candidate], answers: list[Outcome], trials: int | None, seconds: float | None, data: st.DataObject
) -> None:
    at = state(*candidates, limits=Limits(trials, seconds), expected_seconds=data.draw(st.floats(1, 50)))
    seen: set[Trial] = set()
    for step in range(300):
        trial = next_trial(at)
        assert next_trial(at) == trial, "the same state has the same next trial"
        if isinstance(trial, Finished):
            break
        assert trial not in seen, "nothing runs twice"
        seen.add(trial)
        now = standing(at)
        assert trials is None or trials_run(at) < trials
        assert seconds is None or seconds_spent(at) < seconds
        knobs = {candidate.name: candidate.knob for candidate in candidates}
        turned = [knobs[name] for name in trial.variant.changes]
        assert len(set(turned)) == len(turned), "one option of a knob"
        if now.best is not None and trial.variant not in now.judgements:
            new = set(trial.variant.changes) - set(now.best.changes)
            assert 1 <= len(new) <= 2
            assert len(new) == 2 or gain_over(at, now.best, trial.variant) >= LEAST_PREDICTED
            need = needs_gib(at, trial.variant)
            held = [one.needs_gib or 0.0 for _, one in at.results if one.status == "ok"]
            assert need is not None
            assert need + memory_shift(at) <= FILLED * CAPACITY + 1e-9 or need <= max(held)
        outcome = answers[step % len(answers)]
        needs = needs_gib(at, trial.variant)
        at = replace(at, results=(*at.results, (trial, replace(outcome, needs_gib=needs))))
        after = standing(at)
        if after.best is not None and after.best != now.best and now.best is not None:
            judged = after.judgements[after.best]
            assert judged.interval is not None and judged.interval.low > 1, "only what is surely faster is kept"
        repeated = [len(runs) for variant, runs in after.runs.items() if variant != after.best]
        assert max(repeated, default=0) <= MOST_RUNS
    else:
        raise AssertionError("the search does not end")


def test_every_knob_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/tune.md").read_text(encoding="utf-8")
    for name, knob in knobs().items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line)
        assert ("numerics" in row) is not knob.keeps_numerics, row
