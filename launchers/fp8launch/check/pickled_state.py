"""Check checkpoints for delayed-scaling state, which Transformer Engine loads only from sources the user trusts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8launch.check.checkpoints import last_arguments
from fp8launch.check.job_paths import RECIPE_NAMES, JobPaths
from fp8launch.check.resolved_run import installed_software
from fp8launch.diagnostics import Problem, Severity
from fp8launch.hardware.quantization import is_stateful
from fp8launch.injob.ownership import why_others_may_replace
from fp8launch.injob.supervisor import checkpoints
from fp8launch.injob.supervisor.checkpoint_owner import UNPICKLE
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.path_flags import LOADED
from fp8launch.megatron.versions import Release

CODES: Mapping[str, Severity] = {"pickled-state": "error"}


def refuses_pickles(engine: Release | None) -> bool | None:
    """Return whether a release of Transformer Engine refuses pickled state; None if that depends on the patch release.

    It is refused since 2.18.0, and in earlier minor versions since 2.16.1 and 2.17.1. Source: set_extra_state in
    transformer_engine/pytorch/module/base.py of these wheels.
    """
    if engine is None or (engine[:2] in ((2, 16), (2, 17)) and len(engine) == 2):
        return None
    if engine[:2] in ((2, 16), (2, 17)):
        return engine[2] >= 1
    return engine >= (2, 18)


def pickled_state_problems(prepared: Prepared, paths: JobPaths, group_is_trusted: bool = False) -> Iterator[Problem]:
    """Yield reasons why a run cannot load FP8 state from its own checkpoint or from another run's.

    `group_is_trusted` is the cluster profile's `trust_run_root`.
    """
    recipe, args = prepared.loaded.recipe, prepared.args
    refuses = refuses_pickles(installed_software(prepared.loaded).transformer_engine)
    if refuses is False or recipe.resources.gpu == "cpu":
        return
    severity: Severity = "error"
    release = f"Transformer Engine {recipe.software.transformer_engine or ''}".rstrip()
    if refuses is None:
        severity, release = "warning", "Transformer Engine 2.16.1, 2.17.1, 2.18 and later"
    stated = recipe.environment.get(UNPICKLE)
    own_state = any(is_stateful(one.attributes) for one in (args, *(phase.args for phase in prepared.phases)))
    if own_state and recipe.goes_on and stated is not None and stated != "1":
        message = f"{UNPICKLE} is {stated!r}, so the run cannot resume: {release} refuses the state of delayed scaling"
        place = prepared.loaded.where("env", UNPICKLE)
        yield Problem(severity, "pickled-state", message, place, f"remove env.{UNPICKLE}")
    if stated is not None or recipe.checkpoint.allow_pickle:
        return
    saves = paths.here(recipe.checkpoint.dir)
    if own_state and recipe.goes_on and saves is not None and not group_is_trusted:
        reason = why_others_may_replace(saves)
        if reason is not None:
            message = f"the run cannot resume: {reason}, so its job will not unpickle FP8 state there, and {release}"
            fix = "choose a checkpoint.dir that only you can write to, or set checkpoint.allow_pickle: true"
            place = prepared.loaded.where("checkpoint", "dir")
            yield Problem("warning", "pickled-state", f"{message} refuses to load it otherwise", place, fix)
    for key, text, where in _sources(prepared):
        here, promise = paths.here(text), paths.promise(text)
        holds = None if here is None else holds_pickled_state(here)
        if promise is not None:
            holds = is_stateful(last_arguments(promise))
        if holds is False or (holds is None and not own_state):
            continue
        message = f"{key} {text} contains FP8 state as a Python pickle, which {release} refuses to load"
        if holds is None:
            message = f"{key} {text} cannot be read here; {release} refuses FP8 state of delayed scaling"
        fix = (
            "unpickling runs any code in the file: if you trust everyone who could have written it, set "
            "checkpoint.allow_pickle: true"
        )
        yield Problem(severity if holds else "warning", "pickled-state", message, where, fix)


def _sources(prepared: Prepared) -> Iterator[tuple[str, str, str | None]]:
    """Yield the key, path and place of each checkpoint that the run starts from."""
    args = prepared.args
    for flag in LOADED:
        text = args.values.get(flag, args.attributes.get(flag))
        if isinstance(text, str) and text.startswith("/"):
            yield RECIPE_NAMES.get(flag, flag), text, args.places.get(flag)
    yield from prepared.engine.read_checkpoints(prepared.loaded)


def holds_pickled_state(folder: Path) -> bool | None:
    """Return whether a checkpoint has delayed-scaling state; None if it is unreadable or has another format.

    `folder` is the folder of one iteration, or the folder of all checkpoints, with a tracker file.
    """
    if not (folder / ".metadata").is_file():
        try:
            name = checkpoints.read_tracker(folder)
        except (OSError, ValueError):
            return None
        number = checkpoints.whole_number(name)
        if number is not None:
            folder = checkpoints.place(folder, number)
        elif name == "release":
            folder = folder / name
    return checkpoints.holds(folder, "_extra_state", b"amax_history_fwd")
