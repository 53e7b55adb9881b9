"""The search with its effects: asks for the next trial, runs it, writes down what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fp8launch.diagnostics import UserError
from fp8launch.tuning.candidates import Base, predict, seconds_at_most
from fp8launch.tuning.judgement import standing
from fp8launch.tuning.memory_fit import memory_shift, why_not_fits
from fp8launch.tuning.record import Record, write_record
from fp8launch.tuning.rows import judged_in_words, percent
from fp8launch.tuning.search import Finished, next_trial
from fp8launch.tuning.state import Outcome, State, Trial, describe, gain_over, seconds_spent, speed_in_words
from fp8launch.tuning.trials import Bound, Ended, Site, run_trial


@dataclass(frozen=True)
class Session:
    """A search on a site. `ends` is the time of `clock` when the command has to be over, None for no bound."""

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
    """Why a search ended. `interrupted`: by Ctrl-C, and nothing of it runs on."""

    why: str
    interrupted: bool = False


def search(session: Session, record: Record) -> tuple[Record, Halted]:
    """Run trials until the search is over, a limit is reached, or Ctrl-C; return the record and the reason for the end.

    Every step is on disk before the next one begins.
    """
    site = session.site
    while True:
        trial, again = _next(session, record)
        if isinstance(trial, Finished):
            return record, Halted(trial.why)
        before = record
        if record.open is None or again:
            record = record.opened(trial)
        write_record(site.study, record)
        ended = _ended(session, record, trial, again)
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
    """The next trial, and whether its run was cut off before; first of all the one that a killed command was at."""
    opened = record.open
    if opened is not None and not opened.cut:
        return opened.trial, False
    trial = next_trial(replace(record.state, seconds_left=session.left))
    return trial, opened is not None and trial == opened.trial


def _ended(session: Session, record: Record, trial: Trial, again: bool) -> Ended:
    site, state, variant = session.site, record.state, trial.variant
    base, values = session.bases[variant.start], record.values(variant)
    try:
        need = predict(base.variant(values, trial.repeat)[1]).needs_gib
    except UserError as exc:
        return Ended(Outcome("refused", why=exc.problems[0].message))
    why = why_not_fits(state, variant, need)
    if why is not None and variant.changes:
        return Ended(Outcome("skipped", needs_gib=need, why=why))
    site.say(_title(state, trial))
    return run_trial(site, base, values, trial.repeat, seconds_at_most(base), again, _bound(session, state))


def _title(state: State, trial: Trial) -> str:
    """The line above a trial: its number, its changes, and their predicted gain over the best."""
    variant, best = trial.variant, standing(state).best
    parts = [describe(variant)]
    if trial.repeat > 1:
        parts.append(f"run {trial.repeat}")
    if best is not None and variant != best and variant.start == best.start:
        gain = gain_over(state, best, variant)
        if gain != 1:
            parts.append(f"predicted {percent(gain)}")
    return f"trial {1 + len(state.results)}: {', '.join(parts)}"


def _bound(session: Session, state: State) -> Bound | None:
    """The nearest limit of the search."""
    bounds = []
    if session.left is not None:
        bounds.append(Bound(session.left, "the time was up"))
    if state.limits.seconds is not None:
        bounds.append(Bound(max(state.limits.seconds - seconds_spent(state), 0.0), "the budget was used up"))
    return min(bounds, key=lambda one: one.seconds, default=None)


def _report(say: Callable[[str], None], before: Record, after: Record, trial: Trial, outcome: Outcome) -> None:
    """Say what a trial brought."""
    if outcome.status == "skipped":
        say(f"  {describe(trial.variant)} is skipped: {outcome.why}")
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
        say(f"  predictions of memory are corrected by {shift:+.1f} GiB from here on")
