"""Everything that a proof trains, as data, and the trainings themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fp8launch.plugins.prove.judge import Check, check_gradients, check_loss, check_norm, different_copies
from fp8launch.plugins.prove.part import Part
from fp8launch.plugins.prove.reduced_layout import layout_text
from fp8launch.plugins.prove.resuming import (
    check_other_rate,
    check_reshard,
    check_resume,
    ignored_ramp,
    whole_course,
    why_not_saved,
)
from fp8launch.plugins.prove.session import NoVerdict, Reference, Session, Training
from fp8launch.plugins.prove.settings import FSDP
from fp8launch.plugins.prove.small import SmallRun, reference, resharded_runs, resumed_run, small_run
from fp8launch.plugins.prove.trials import Trial, by_relevance, trials_of
from fp8launch.plugins.prove.uneven import stages_were_evened

# Weights of a second attempt: rounding may change the route of a token that two experts want equally.
SEEDS = (1, 2)
# Changes of one setting that are tried in search of one that is right, and for how long.
MOST_TRIALS = 8
MOST_TRIAL_SECONDS = 120.0

# How often a proof without other layouts calls `done`.
STEPS = 3

Done = Callable[[], None]


@dataclass(frozen=True)
class Reshard:
    """A training that is resumed in another layout."""

    title: str
    before: SmallRun
    after: SmallRun


@dataclass(frozen=True)
class Work:
    """All trainings of a proof, or of one of its pieces. Recipes with equal work have equal verdicts."""

    version: str
    device: str
    like_te: bool
    step: SmallRun | None
    course: SmallRun | None
    reshards: tuple[Reshard, ...] = ()
    trials: tuple[Trial, ...] = ()

    def pieces(self) -> list[Work]:
        """Return what can be judged, and kept, separately: one step, the resumed course, and each other layout."""
        pieces = []
        if self.step:
            pieces.append(replace(self, course=None, reshards=()))
        if self.course:
            pieces.append(replace(self, step=None, trials=(), reshards=()))
        for reshard in self.reshards:
            pieces.append(replace(self, step=None, trials=(), course=None, reshards=(reshard,)))
        return pieces

    @property
    def steps(self) -> int:
        """How often `carry_out` calls `done`."""
        return (2 if self.step else 0) + (1 if self.course else 0) + len(self.reshards)


@dataclass(frozen=True)
class Findings:
    """The checks, the settings that the code around each tensor reads, comparisons that did not run, `right`, the
    nearest setting with which the checks of one step pass, and how many settings were `tried` in search of it."""

    checks: tuple[Check, ...]
    readers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    right: str | None = None
    tried: int = 0

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def __add__(self, other: Findings) -> Findings:
        return Findings(
            (*self.checks, *other.checks),
            {**self.readers, **other.readers},
            (*self.unknown, *other.unknown),
            self.right or other.right,
            self.tried + other.tried,
        )


def work_of(part: Part, onwards: Sequence[Part]) -> Work:
    """Return the trainings of a part's proof, which include resuming in the layouts of `onwards`."""
    layout = part.seen.layout
    reshards = []
    for other in onwards:
        before, after = resharded_runs(part.values, layout, other.values, other.seen.layout)
        title = f"{layout_text(before.layout)} to {layout_text(after.layout)}"
        if stages_were_evened(part.values, before.values) or stages_were_evened(other.values, after.values):
            title += " (with evenly divided stages)"
        reshards.append(Reshard(title, before, after))
    return Work(
        part.seen.args.version,
        part.device,
        part.like_te,
        small_run(part.values, layout, part.device),
        resumed_run(part.values, layout, part.device),
        tuple(reshards),
        tuple(trials_of(part)),
    )


def carry_out(work: Work, session: Session, done: Done) -> Findings:
    """Train and compare. Raises NoVerdict if a training of the first comparison does not run to its end."""
    record = {"like_te": work.like_te}
    found = Findings(())
    if work.step:
        found = _step(session, work.step, work.trials, record, done)
    checks, unknown = [], []
    following = [_resume(session, work.course, record)] if work.course else []
    for reshard in work.reshards:
        following.append(_reshard(session, reshard, record))
    for check in following:
        done()
        if isinstance(check, Check):
            checks.append(check)
        else:
            unknown.append(check)
    return found + Findings(tuple(checks), unknown=tuple(unknown))


def _step(
    session: Session, small: SmallRun, trials: Sequence[Trial], record: Mapping[str, Any], done: Done
) -> Findings:
    """Compare one step, with other weights as well if it differs: an error shows with any weights."""
    checks, kinds = _compare(session, small, record, SEEDS[0], done)
    if not _all_ok(checks):
        checks, kinds = _compare(session, small, record, SEEDS[1], lambda: None)
    if _all_ok(checks):
        return Findings(checks)
    readers = session.settings_read(kinds)
    right, tried = _nearest_right(session, trials, checks, readers, record)
    return Findings(checks, readers, (), right, tried)


def _all_ok(checks: Sequence[Check]) -> bool:
    return all(check.ok for check in checks)


def _compare(
    session: Session, small: SmallRun, record: Mapping[str, Any], seed: int, done: Done
) -> tuple[tuple[Check, ...], dict[str, list[str]]]:
    """Compare one step with the reference. Return the checks, and for each tensor the classes of its modules."""
    alone = _reference(session, reference(small), record, seed)
    done()
    divided = session.new_name("the layout")
    (ranks,) = session.train(Training(divided, small, {**record, "members": True, "kinds": True}, alone.start))
    (candidate,) = session.compare([(alone.name, divided)], "step")
    done()
    # In low precision, copies that are computed on each rank differ by rounding.
    copies = [] if small.low_precision else different_copies([rank["weights"] for rank in ranks])
    checks = (
        check_loss(alone.losses, alone.rounded_losses, _losses(ranks), small.low_precision),
        check_gradients(alone.rounding, candidate, copies, small.low_precision),
        check_norm(ranks[0]["norms"][0], ranks[0]["members"], candidate["gradients"]),
    )
    kinds: dict[str, list[str]] = {}
    for rank in ranks:
        kinds |= rank["kinds"]
    return checks, kinds


def _reference(session: Session, alone: SmallRun, record: Mapping[str, Any], seed: int) -> Reference:
    """Train one rank from random weights, and once more from weights that differ by rounding.

    Changes of settings that only divide work have the same reference, which is trained once.
    """
    key = json.dumps(alone.values, sort_keys=True), seed
    known = session.references.get(key)
    if known is not None:
        return known
    start, name, rounded = (session.new_name(title) for title in ("the start", "one rank", "rounding"))
    session.train(Training(start, alone, {**record, "noise": seed}))
    first, second = session.train(
        Training(name, alone, record, start), Training(rounded, alone, {**record, "epsilon": seed}, start)
    )
    (rounding,) = session.compare([(name, rounded)], "step")
    found = Reference(start, name, _losses(first), _losses(second), rounding)
    session.references[key] = found
    return found


def _losses(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the losses of the first step, which only ranks of the last stage have."""
    found: dict[str, float] = {}
    for rank in ranks:
        found |= rank["losses"][0]
    return found


def _nearest_right(
    session: Session,
    trials: Sequence[Trial],
    wrong: Sequence[Check],
    readers: Mapping[str, Sequence[str]],
    record: Mapping[str, Any],
) -> tuple[str | None, int]:
    """Return the first change of one setting with which the comparison of a step passes, and how many were tried."""
    read: list[str] = []
    for check in wrong:
        for difference in check.differences:
            read += readers.get(difference.tensor, ())
    ends = time.monotonic() + MOST_TRIAL_SECONDS
    tried = 0
    for trial in by_relevance(trials, read)[:MOST_TRIALS]:
        if time.monotonic() > ends:
            break
        tried += 1
        try:
            checks, _ = _compare(session, trial.run, record, SEEDS[1], lambda: None)
        except NoVerdict:
            continue  # the other settings need this one
        if _all_ok(checks):
            return trial.text, tried
    return None, tried


def _resume(session: Session, run: SmallRun, record: Mapping[str, Any]) -> Check | str:
    """Return the verdict on a resumed run, or why there is none."""
    course = session.new_name("the course")
    record = {**record, "unused_weights": True}
    try:
        (whole,) = session.train(whole_course(course, run, record))
    except NoVerdict as missing:
        unsaved = why_not_saved(run, missing)
        if unsaved:
            return Check("resume", False, unsaved)
        return f"resume: the uninterrupted training ended with {missing}"
    ramp = ignored_ramp(run, whole)
    if ramp:
        return Check("resume", False, ramp)
    check = check_resume(session, course, run, record, whole)
    if check.ok and run.values.get("override_opt_param_scheduler"):
        return check_other_rate(session, course, run, record) or check
    return check


def _reshard(session: Session, reshard: Reshard, record: Mapping[str, Any]) -> Check | str:
    """Return the verdict on a run that is resumed in another layout, or the reason for having none."""
    if reshard.before.values.get(FSDP) or reshard.after.values.get(FSDP):
        return "reshard: not compared for checkpoints of Megatron-FSDP"
    name = session.new_name("the course")
    record = {**record, "unused_weights": True}
    try:
        (whole,) = session.train(whole_course(name, reshard.before, record))
    except NoVerdict as missing:
        unsaved = why_not_saved(reshard.before, missing)
        if unsaved:
            return Check("reshard", False, f"{reshard.title}: {unsaved}")
        return f"reshard: the uninterrupted training ended with {missing}"
    return check_reshard(session, name, reshard.after, record, whole, reshard.title)
