"""Check that a run resumes correctly: bit for bit in the same layout, and from the same state in another layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fp8launch.plugins.prove.judge import EPSILON, MARGIN, Check, identical_tensors
from fp8launch.plugins.prove.session import NoVerdict, Session, Training
from fp8launch.plugins.prove.settings import FSDP
from fp8launch.plugins.prove.small import HALF, RAMP, SmallRun, ramped_microbatches, with_other_rate

_VOCABULARY = re.compile(r"\b(word_embeddings|output_layer)\.")

Ranks = Sequence[Mapping[str, Any]]


def whole_course(name: str, run: SmallRun, record: Mapping[str, Any]) -> Training:
    """Return the uninterrupted training, which saves at its middle and at its end."""
    return Training(name, run, record, save_interval=HALF)


def resumed(name: str, course: str, run: SmallRun, record: Mapping[str, Any]) -> Training:
    """Return the training that resumes `course` from its middle."""
    return Training(name, run, record, resumes=course, at=HALF, save_interval=HALF)


def why_not_saved(run: SmallRun, failure: NoVerdict) -> str | None:
    """Return why no checkpoint of a run can be saved, None if its training failed for another reason."""
    tied = not run.values.get("untie_embeddings_and_output_weights")
    in_output_layer = "language_module.py" in failure.content.get("at", "")
    if not (run.values.get("mtp_num_layers") and tied and run.layout.pp > 1 and in_output_layer):
        return None
    return (
        "Megatron cannot save a checkpoint of tied embeddings with multi-token prediction and PP above 1: set "
        "model.untie_embeddings_and_output_weights, or PP 1 (Megatron-LM pull request 7577)"
    )


def ignored_ramp(run: SmallRun, whole: Ranks) -> str | None:
    """Return how the batches of a training differ from the ramp of its arguments, None if they do not."""
    if not run.values.get(RAMP):
        return None
    expected, found = ramped_microbatches(run), whole[0]["microbatches"]
    if found == expected:
        return None
    return f"{RAMP} is ignored: iterations have {found} micro batches instead of {expected}"


def check_other_rate(session: Session, course: str, run: SmallRun, record: Mapping[str, Any]) -> Check | None:
    """Resume `course` with another learning rate, as a recipe that overrides the schedule does.

    Return a check that fails, or None if the learning rates are those of an uninterrupted run.
    """
    changed = with_other_rate(run)
    whole_name, name = f"{course}, other rate", f"{course}, resumed with another rate"
    try:
        whole, second = session.train(whole_course(whole_name, changed, record), resumed(name, course, changed, record))
    except NoVerdict as failure:
        return Check("resume", False, f"a saved run does not resume with another learning rate: {failure}")
    expected, found = whole[0]["rates"][HALF:], second[0]["rates"]
    if found == expected:
        return None
    detail = f"resumed with another lr, the learning rate is {max(found[-1]):.4g} instead of {max(expected[-1]):.4g}"
    return Check("resume", False, detail)


def check_resume(session: Session, course: str, run: SmallRun, record: Mapping[str, Any], whole: Ranks) -> Check:
    """Resume `course`, whose ranks recorded `whole`, in the same layout. A resume that fails is wrong."""
    name = f"{course}, resumed"
    try:
        (second,) = session.train(resumed(name, course, run, record))
        (state,) = session.compare([(course, name)], "state", at=2 * HALF)
    except NoVerdict as failure:
        return Check("resume", False, f"a saved run does not resume: {failure}")
    wrong = [*_different_records(whole, second)]
    tensors = identical_tensors(state["tensors"])
    if tensors:
        wrong.append(f"{len(tensors)} of {len(state['tensors'])} tensors of the state")
    # Megatron-FSDP restarts a count that only the log shows.
    ignored = ("rng_state", "num_floating_point_operations_so_far") if run.values.get(FSDP) else "rng_state"
    wrong += [name for name in state["objects"] if not name.startswith(ignored)]
    if wrong:
        return Check("resume", False, f"not the same as without an interruption: {', '.join(wrong)}", tuple(tensors))
    count = len(state["tensors"])
    return Check("resume", True, f"losses, batches and {count} tensors of the state are the same to the last bit")


def _different_records(whole: Ranks, second: Ranks) -> list[str]:
    """Return what the ranks of the resumed run recorded differently in its iterations."""
    found = []
    for name, title in (("losses", "losses"), ("norms", "gradient norms"), ("batches", "order of the data")):
        if any(one[name][-len(other[name]) :] != other[name] for one, other in zip(whole, second, strict=True)):
            found.append(title)
    streams = sorted(
        {name for one, other in zip(whole, second, strict=True) for name in _different_streams(one, other)}
    )
    return [*found, f"random numbers ({', '.join(streams)})"] if streams else found


def _different_streams(whole: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the streams of random numbers that a rank draws from, and that end in another state after a resume.

    A stream from which nothing is drawn has no effect, whatever its state.
    """
    ends, resumed_ends = whole["random"][-1], second["random"][-1]
    drawn = [name for name in ends if len({states[name] for states in whole["random"]}) > 1]
    return [name for name in drawn if ends[name] != resumed_ends.get(name)]


def check_reshard(
    session: Session, course: str, run: SmallRun, record: Mapping[str, Any], whole: Ranks, title: str
) -> Check:
    """Load the middle of `course` in the layout of `run`: the same state, and the same loss of the next iteration."""
    loaded, onwards = f"{course}, loaded", f"{course}, resharded"
    try:
        _, second = session.train(
            resumed(loaded, course, run, {**record, "save_loaded": True}), resumed(onwards, course, run, record)
        )
        (state,) = session.compare([(course, loaded)], "state", at=HALF)
    except NoVerdict as failure:
        return Check("reshard", False, f"{title}: the checkpoint does not load: {failure}")
    tensors = identical_tensors(state["tensors"])
    if tensors and all(_VOCABULARY.search(one.tensor) and one.relative is None for one in tensors):
        detail = f"{title}: the padded vocabulary has another size, so the loss changes with the number of its words"
        return Check("reshard", False, detail, tuple(tensors))
    if tensors:
        detail = f"{title}: {len(tensors)} of {len(state['tensors'])} tensors are not loaded as saved"
        return Check("reshard", False, detail, tuple(tensors))
    before, after = _losses(whole, HALF), _losses(second, 0)
    for name, loss in before.items():
        other = after.get(name)
        if other is None or not abs(other - loss) <= MARGIN * EPSILON * abs(loss):
            return Check("reshard", False, f"{title}: {name} of the next iteration is {other} instead of {loss:.7g}")
    message = f"{title}: {len(state['tensors'])} tensors are loaded as saved, and the loss continues"
    return Check("reshard", True, message)


def _losses(ranks: Ranks, iteration: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for rank in ranks:
        found |= rank["losses"][iteration]
    return found
