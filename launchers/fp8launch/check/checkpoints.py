"""Check the checkpoint that a run starts from.

If Megatron finds no checkpoint, it starts from random weights and only prints a line about it
(megatron/training/checkpointing.py, `_load_base_checkpoint`).
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8launch.check.job_paths import RECIPE_NAMES, JobPaths, entries, kind_of, local_path_in, out_of_reach
from fp8launch.diagnostics import Problem, Severity, printable
from fp8launch.engines.base import EngineArguments
from fp8launch.injob.supervisor.checkpoint_owner import read_owner
from fp8launch.injob.supervisor.checkpoints import CONVERSION_RECORD, TRACKER, read_tracker, whole_number
from fp8launch.injob.supervisor.run_records import json_mapping
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.path_flags import LOADED
from fp8launch.megatron.schema import parser_defaults
from fp8launch.megatron.versions import SUPPORTED, minor_of, release
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.sections import Rewind, Survive
from fp8launch.rundir.registry import known_roots
from fp8launch.rundir.run_dir import MANIFEST, run_folders
from fp8launch.untyped import as_int, as_mapping

# Flags that set an attribute with a different name.
_FLAGS = {"layernorm_epsilon": "norm_epsilon"}
CODES: Mapping[str, Severity] = {
    "survive-unused": "warning",
    "health-unused": "warning",
    "health-keep": "warning",
    "converted-weights": "error",
    "checkpoint-owner": "error",
    "checkpoint-learning-rate": "error",
    "checkpoint-expert-groups": "error",
    "checkpoint-schedule": "error",
}
# Arguments that OptimizerParamScheduler compares with the checkpoint (megatron/core/optimizer_param_scheduler.py).
_SCHEDULE = (
    "train_iters", "train_samples", "global_batch_size", "lr_decay_style", "lr_decay_iters", "lr_decay_samples",
    "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "weight_decay", "weight_decay_incr_style",
    "start_weight_decay", "end_weight_decay",
)  # fmt: skip
# With any of these flags, Megatron picks one of the two schedules instead of comparing them.
_SCHEDULE_CHOICES = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")


def survival_problems(prepared: Prepared) -> Iterator[Problem]:
    """Yield a warning for settings that have no effect because the run saves no checkpoints, or loads none."""
    loaded, recipe = prepared.loaded, prepared.loaded.recipe
    if recipe.goes_on:
        return
    usual = Survive.model_construct()
    stated = [("survive", name) for name, value in recipe.survive if value != getattr(usual, name)]
    if recipe.checkpoint.keep is not None:
        stated.append(("checkpoint", "keep"))
    read = [prepared.args.attributes.get(flag) for flag in LOADED]
    if recipe.checkpoint.allow_pickle and not any([*read, *prepared.engine.read_checkpoints(loaded)]):
        stated.append(("checkpoint", "allow_pickle"))
    if stated:
        names = ", ".join(map(".".join, stated))
        verb = "has" if len(stated) == 1 else "have"
        message = f"{names} {verb} no effect: a run without checkpoints is not supervised and cannot continue"
        fix = f"set checkpoint.dir and checkpoint.interval, or remove {names}"
        yield Problem("warning", "survive-unused", message, loaded.where(*stated[0]), fix)


def health_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield warnings for health actions that can never take effect."""
    recipe = loaded.recipe
    back = [action.rewind for action in recipe.health.actions.values() if isinstance(action, Rewind)]
    acting = [code for code, action in recipe.health.actions.items() if action != "continue"]
    where = loaded.where("health", "actions")
    if acting and not recipe.goes_on:
        message = "health.actions has no effect: a run without checkpoints is not supervised and cannot be rewound"
        yield Problem("warning", "health-unused", message, where, "set checkpoint.dir and checkpoint.interval")
    if recipe.health.actions.get("slow-node", "continue") != "continue" and recipe.resources.nodes == 1:
        message = "health.actions.slow-node has no effect: the run has only one node to compare"
        yield Problem("warning", "health-unused", message, where, "remove slow-node")
    keep = recipe.checkpoint.keep
    if back and recipe.goes_on and keep is not None and keep <= max(back):
        message = (
            f"checkpoint.keep {keep} may leave no checkpoint to rewind to: one may be written between the event and "
            "its detection"
        )
        yield Problem("warning", "health-keep", message, where, f"set checkpoint.keep to at least {max(back) + 1}")


def owner_problems(loaded: LoadedRecipe, paths: JobPaths) -> Iterator[Problem]:
    """Yield an error if the checkpoint folder belongs to another run. The two would overwrite each other's progress."""
    stated = loaded.recipe.checkpoint.dir
    here = paths.here(stated) if stated and stated.startswith("/") else None
    if here is None or loaded.recipe.continues_its_folder:
        return
    try:
        record = read_owner(here)
    except (OSError, ValueError):
        return
    # The owner may be this run itself: checked again, or submitted again after an interruption.
    if record is None or record.get("run") in (here.name, loaded.files[-1].parent.name):
        return
    owner = printable(str(record.get("run"))[:100])
    message = (
        f"checkpoint.dir {stated} belongs to the run {owner}: this run would continue its training and remove its "
        "checkpoints"
    )
    fix = "choose another folder; to continue that run on purpose, set checkpoint.load to this folder as well"
    yield Problem("error", "checkpoint-owner", message, loaded.where("checkpoint", "dir"), fix)


def load_problems(args: EngineArguments, paths: JobPaths, defaults: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of the checkpoints given by `load` and `pretrained_checkpoint`.

    `defaults` are the engine's values for arguments that are not in `args`.
    """
    save = args.values.get("save")
    for flag in LOADED:
        text = local_path_in(args.values.get(flag))
        if text is None:
            continue
        # A run that loads from its own save folder resumes after a restart. At the first start, the folder is empty.
        resumes = flag == "load" and isinstance(save, str) and posixpath.normpath(save) == posixpath.normpath(text)
        problem = _problem(flag, text, args, paths, resumes)
        if problem is not None:
            yield problem
        elif (here := paths.here(text)) is not None or paths.promise(text):
            if here is not None:
                yield from _converted(flag, text, here, args, defaults)
            if flag == "load" and not resumes:
                yield from _parameter_groups(text, args, paths)
            if flag == "load":
                yield from _schedule(text, args, paths, defaults, resumes)


def writing_run(load: object, paths: JobPaths) -> Mapping[str, Any] | None:
    """Return the manifest of the run that wrote a checkpoint, or None if its run folder is not visible."""
    if promise := paths.promise(load):
        return promise
    here = paths.here(load)
    if here is None:
        return None
    # The path may be RUN/checkpoints or the folder of one iteration.
    for folder in (here, *here.parents[:2]):
        manifest = json_mapping(folder / MANIFEST)
        if isinstance(manifest.get("arguments"), Mapping):
            return manifest
        with contextlib.suppress(OSError, ValueError):
            if owner := read_owner(folder):
                return _manifest_of(owner)
    return None


def continues_another(arguments: Mapping[str, Any]) -> bool:
    """Return whether a run may continue another run's training, including its optimizer states."""
    load = arguments.get("load")
    if not load or arguments.get("finetune") or arguments.get("no_load_optim"):
        return False
    # A relative folder is inside the run folder, which is new.
    return load != arguments.get("save") or str(load).startswith("/")


def arguments_before(load: object, paths: JobPaths) -> Mapping[str, Any] | None:
    """Return the arguments, with defaults, of the run that wrote a checkpoint; None if that run is unknown."""
    manifest = writing_run(load, paths)
    if manifest is None:
        return None
    version = str(as_mapping(manifest.get("megatron")).get("version") or "")
    defaults = parser_defaults(version) if minor_of(version) in SUPPORTED else {}
    return {**defaults, **last_arguments(manifest)}


def _manifest_of(owner: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the manifest of the run that owns a checkpoint folder, or None if no run root contains that run."""
    for root in known_roots():
        for run in run_folders(root):
            if run.path.name == owner.get("run"):
                manifest = json_mapping(run.path / MANIFEST)
                # A copied run root has the same run ids, so compare more than the id.
                if manifest.get("created") == owner.get("created") and isinstance(manifest.get("arguments"), Mapping):
                    return manifest
    return None


def last_arguments(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that a run ended with. If it has phases, they are those of the last one."""
    phases = manifest.get("phases")
    last = as_mapping(phases[-1]) if isinstance(phases, list) and phases else manifest
    return as_mapping(last.get("arguments"))


def _parameter_groups(text: str, args: EngineArguments, paths: JobPaths) -> Iterator[Problem]:
    """Yield reasons why a run cannot find its parameter groups in the checkpoint of another run.

    Megatron identifies parameter groups by whether they are expert parallel and, since 0.19, by their learning rates
    (megatron/core/optimizer/optimizer.py, `param_group_identifier_keys`). If there is no match, it fails with
    `KeyError: Could not find parameter group`, even with `override_opt_param_scheduler`. Before 0.19, it keeps the
    checkpoint's learning rates (advisory `override-sched-ignored`).
    """
    if args.values.get("finetune") or args.values.get("no_load_optim"):
        return
    manifest = writing_run(text, paths)
    if manifest is None:
        return
    before = last_arguments(manifest)
    experts = before.get("num_experts")
    name = "expert_model_parallel_size"
    ep, before_ep = int(args.attributes.get(name) or 1), as_int(before.get(name)) or 1
    if experts and min(ep, before_ep) == 1 < max(ep, before_ep):
        message = (
            f"EP is {ep}, but {before_ep} in the run that wrote {text}; Megatron matches the experts' optimizer states "
            "by whether they are expert parallel, so the load fails"
        )
        place = args.attribute_places.get(name)
        fix = f"set parallel.ep to {before_ep}, or megatron.finetune: true to load only the weights"
        yield Problem("error", "checkpoint-expert-groups", message, place, fix)
    if release(args.version) < (0, 19):
        return
    for name in ("lr", "min_lr"):
        mine, theirs = args.attributes.get(name), before.get(name)
        if isinstance(mine, int | float) and isinstance(theirs, int | float) and mine != theirs:
            message = (
                f"{name} is {mine:g}, but {theirs:g} in the run that wrote {text}; Megatron 0.19 finds optimizer "
                "states by this value, so the load fails"
            )
            fix = f"set train.{name} to {theirs:g}, or megatron.finetune: true to load only the weights"
            yield Problem("error", "checkpoint-learning-rate", message, args.attribute_places.get(name), fix)


def _schedule(
    text: str, args: EngineArguments, paths: JobPaths, defaults: Mapping[str, Any], resumes: bool
) -> Iterator[Problem]:
    """Yield an error if a run continues another run with a different learning rate schedule.

    Megatron compares the schedules in samples, and fails with an assertion if they differ. For learning rates, see
    `_parameter_groups` and the advisory `override-sched-ignored`.
    """
    mine = {**defaults, **args.attributes}
    if any(mine.get(name) for name in ("finetune", "no_load_optim", *_SCHEDULE_CHOICES)):
        return
    manifest = writing_run(text, paths)
    if manifest is None or (resumes and manifest.get("phases")):
        return  # it is unknown in which phase the run resumes
    theirs = {**defaults, **last_arguments(manifest)}
    if theirs.get("use_checkpoint_opt_param_scheduler"):
        return  # that run took its schedule from yet another checkpoint
    changed = [name for name in _SCHEDULE if mine.get(name) != theirs.get(name)]
    if changed and _steps(mine) != _steps(theirs):
        words = ", ".join(f"{name} is {mine.get(name)}, but {theirs.get(name)}" for name in changed)
        message = f"{words} in the run that wrote {text}; Megatron refuses checkpoints with another schedule"
        fix = (
            "set megatron.override_opt_param_scheduler: true for the schedule of this recipe, or "
            "megatron.use_checkpoint_opt_param_scheduler: true for the checkpoint's"
        )
        yield Problem("error", "checkpoint-schedule", message, args.attribute_places.get(changed[0]), fix)


def _steps(arguments: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what the scheduler compares, in samples (`get_optimizer_param_scheduler` in Megatron's training.py)."""

    def number(name: str) -> float:
        value = arguments.get(name)
        return value if isinstance(value, int | float) else 0

    unit, batch = "iters", number("global_batch_size")
    if arguments.get("train_samples"):
        unit, batch = "samples", 1
    total = number(f"train_{unit}") * batch
    decay = number(f"lr_decay_{unit}") * batch or total
    warmup = number(f"lr_warmup_{unit}") * batch
    if arguments.get("lr_warmup_fraction") is not None:
        warmup = number("lr_warmup_fraction") * decay
    style = arguments.get("weight_decay_incr_style")
    ends = (arguments.get("start_weight_decay"), arguments.get("end_weight_decay"))
    if style in (None, "constant"):
        ends = (arguments.get("weight_decay"),) * 2
    return (total, decay, warmup, arguments.get("lr_decay_style"), style, *ends)


def _converted(
    flag: str, text: str, here: Path, args: EngineArguments, defaults: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield problems of weights written by `fp8launch convert`. Megatron does not compare any setting with them."""
    settings = json_mapping(here / CONVERSION_RECORD).get("settings")
    if not isinstance(settings, Mapping):
        return
    where = args.places.get(flag)
    if flag == "load" and not args.values.get("finetune"):
        message = f"load {text} has converted weights, but no optimizer state to continue from"
        fix = "set megatron.finetune: true, which loads only the weights and starts at iteration 0"
        yield Problem("error", "converted-weights", message, where, fix)
    of_run = {**defaults, **args.attributes}
    if not of_run.get("group_query_attention"):
        of_run["num_query_groups"] = of_run.get("num_attention_heads")
    for name, value in settings.items():
        mine = of_run.get(name)
        if mine is not None and mine != value:
            message = f"{name} is {mine}, but {value} in the model that {text} was converted from"
            key = _FLAGS.get(name, name)
            fix = f"set model.{key}: {json.dumps(value)}"
            yield Problem("error", "converted-weights", message, args.attribute_places.get(name, where), fix)


def _problem(flag: str, text: str, args: EngineArguments, paths: JobPaths, resumes: bool) -> Problem | None:
    where = args.places.get(flag)
    if resumes and not text.startswith("/"):
        return None
    fix = "write an absolute path, or the same path as checkpoint.dir to resume after a restart"
    if problem := out_of_reach(RECIPE_NAMES.get(flag, flag), text, where, paths, fix):
        return problem
    here = paths.here(text)
    if here is None:
        return None
    found = _wanted(here, as_int(args.values.get("ckpt_step")))
    if found is None or (resumes and not _iterations(here)):
        return None
    message, fix = found
    return Problem("error", "checkpoint-missing", f"{flag} {text} {message}", where, fix)


def _wanted(here: Path, step: int | None) -> tuple[str, str] | None:
    """Return why Megatron would find no checkpoint in a folder, and the fix; None if it would find one."""
    random = "Megatron would start from random weights"
    found = kind_of(here)
    if found != "folder":
        states = {"file": "is a file, not a folder", "denied": "is not readable by you"}
        return states.get(found, f"does not exist: {random}"), "correct the path"
    if step:
        name, source = f"iter_{step:07d}", "ckpt_step"
    else:
        source = TRACKER
        if kind_of(here / TRACKER) == "missing":
            return f"has no {TRACKER}: {random}", _advice(here)
        try:
            name = read_tracker(here)
        except (OSError, ValueError) as exc:
            return f"has a {TRACKER} that cannot be read: {exc}", "correct it"
        number = whole_number(name)
        if number is not None:
            name = f"iter_{number:07d}"
        elif name != "release":
            return f"has a {TRACKER} with '{name[:40]}', which is not an iteration", _advice(here)
    if kind_of(here / name) == "missing":
        there = ", ".join(_iterations(here)[-3:]) or "none"
        fix = f"existing checkpoints: {there}; choose one with megatron.ckpt_step"
        return f"lacks {name}, to which {source} refers", fix
    if kind_of(here / name) == "folder" and not entries(here / name):
        return f"has an empty {name}", "choose another iteration with megatron.ckpt_step"
    return None


def _iterations(here: Path) -> list[str]:
    return [name for name in entries(here) if re.fullmatch(r"iter_\d{7,}", name)]


def _advice(here: Path) -> str:
    if match := re.fullmatch(r"iter_(\d+)", here.name):
        return f"use its parent folder, {here.parent}, and set megatron.ckpt_step: {int(match[1])}"
    if iterations := _iterations(here):
        return (
            f"set megatron.ckpt_step: {int(iterations[-1].removeprefix('iter_'))}, or write this number into {TRACKER}"
        )
    names = entries(here)
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return f"this is a Hugging Face model: `fp8launch convert hf-to-megatron {here} DIR`, then load DIR"
    return "use the checkpoint.dir of an earlier run"
