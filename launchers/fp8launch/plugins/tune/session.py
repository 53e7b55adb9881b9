"""Run a search: choose the next trial, run it, and record its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fp8launch.diagnostics import UserError
from fp8launch.plugins.tune.candidates import Base, predict, seconds_at_most
from fp8launch.plugins.tune.judgement import standing
from fp8launch.plugins.tune.memory_fit import memory_shift, why_not_fits
from fp8launch.plugins.tune.record import Record, write_record
from fp8launch.plugins.tune.rows import judged_in_words, percent
from fp8launch.plugins.tune.search import Finished, next_trial
from fp8launch.plugins.tune.state import Outcome, State, Trial, describe, predicted_gain, seconds_spent, speed_in_words
from fp8launch.plugins.tune.trials import Bound, Ended, Site, end_interrupted, run_trial
from fp8launch.submit.submit import GridPoint


@dataclass(frozen=True)
class Session:
    """A search on a site. `ends` is the command's deadline on `clock`, or None."""

    site: Site
    bases: Sequence[Base]
    ends: float | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def left(self) -> float | None:
        if self.ends is None:
            return None
        return max(self.ends - self.clock(), 0.0)


@dataclass(frozen=True)
class Halted:
    """Why a search ended. `interrupted` means Ctrl-C, after which no trial is running."""

    why: str
    interrupted: bool = False


def search(session: Session, record: Record) -> tuple[Record, Halted]:
    """Run trials until the search is complete, a limit is reached, or the user presses Ctrl-C.

    Each step is written to disk before the next one starts.
    """
    site = session.site
    while True:
        trial, again = _next(session, record)
        if isinstance(trial, Finished):
            return record, Halted(trial.why)
        before = record
        if record.open is None or again:
            record = record.opened(trial)
        try:
            write_record(site.study, record)
            ended = _ended(session, record, trial, again)
        except KeyboardInterrupt:
            # The trial's job may already be running, submitted by a command that was killed.
            ended = end_interrupted(site, _grid_point(session, record, trial))
        if ended.outcome is None:
            record = record.cut(trial, ended.seconds)
            write_record(site.study, record)
            return record, Halted(f"{ended.why} during the trial of {describe(trial.variant)}", ended.interrupted)
        record = record.with_outcome(trial, ended.outcome)
        write_record(site.study, record)
        _report(site.say, before, record, trial, ended.outcome)
        if ended.interrupted:
            return record, Halted(ended.why, True)


def _next(session: Session, record: Record) -> tuple[Trial | Finished, bool]:
    """Return the next trial, and whether it was interrupted before. Interrupted trials come first."""
    opened = record.open
    if opened is not None and not opened.cut:
        return opened.trial, False
    trial = next_trial(replace(record.state, seconds_left=session.left))
    return trial, opened is not None and trial == opened.trial


def _ended(session: Session, record: Record, trial: Trial, again: bool) -> Ended:
    site, state, variant = session.site, record.state, trial.variant
    try:
        grid = _grid_point(session, record, trial)
    except UserError as exc:
        return Ended(Outcome("refused", why=exc.problems[0].message))
    predicted = predict(grid.prepared, site.cluster)
    why = why_not_fits(state, variant, predicted.needs_gib)
    if why is not None and variant.changes:
        return Ended(Outcome("skipped", needs_gib=predicted.needs_gib, why=why))
    site.say(_title(state, trial, predicted.step_ms))
    seconds = seconds_at_most(session.bases[variant.start])
    return run_trial(site, grid, predicted, seconds, again, _bound(session, state))


def _grid_point(session: Session, record: Record, trial: Trial) -> GridPoint:
    """Return the run for a trial. Raises UserError for settings that the recipe does not accept."""
    base = session.bases[trial.variant.start]
    return GridPoint(*base.variant(record.values(trial.variant), trial.repeat))


def _title(state: State, trial: Trial, step_ms: float | None) -> str:
    """Return a trial's heading: its number, its changes, and their predicted gain over the best variant."""
    variant, best = trial.variant, standing(state).best
    parts = [describe(variant)]
    if trial.repeat > 1:
        parts.append(f"run {trial.repeat}")
    if best is not None and variant != best and variant.start == best.start:
        gain = predicted_gain(state, best, variant, step_ms)
        if gain != 1:
            parts.append(f"predicted {percent(gain)}")
    return f"trial {1 + len(state.results)}: {', '.join(parts)}"


def _bound(session: Session, state: State) -> Bound | None:
    """Return the limit that the search will reach first."""
    bounds = []
    if session.left is not None:
        bounds.append(Bound(session.left, "the time limit was reached"))
    if state.limits.seconds is not None:
        bounds.append(Bound(max(state.limits.seconds - seconds_spent(state), 0.0), "the budget was used up"))
    return min(bounds, key=lambda one: one.seconds, default=None)


def _report(say: Callable[[str], None], before: Record, after: Record, trial: Trial, outcome: Outcome) -> None:
    """Print the result of a trial."""
    if outcome.status == "skipped":
        say(f"  skipped {describe(trial.variant)}: {outcome.why}")
        return
    if outcome.status != "ok":
        say(f"  {outcome.status.replace('_', ' ')}: {outcome.why}")
    else:
        facts = [speed_in_words(outcome.tflops, outcome.step_ms)]
        if outcome.peak_gib:
            facts.append(f"{outcome.peak_gib:.1f} GiB")
        say(f"  {', '.join(facts)}, {outcome.seconds:,.0f} s")
        now = standing(after.state)
        before_open = standing(before.state).undecided
        judged = now.judgements.get(before_open or trial.variant)
        if judged is not None and judged.verdict != "start":
            say(f"  {judged_in_words(judged)}")
    shift = memory_shift(after.state)
    if abs(shift - memory_shift(before.state)) >= 0.05:
        say(f"  memory predictions are corrected by {shift:+.1f} GiB from now on")
