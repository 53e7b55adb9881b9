"""Check what one stage hands over to the next, before anything is submitted.

Whether the later run can load the earlier one's checkpoint at all is for the core: it knows the arguments of the run
that will write the checkpoint (`LoadedRecipe.promised`), as it knows those of a run that has written one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8launch.check.checkpoint_space import gib, space_for
from fp8launch.check.phases import Border, border_problems
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.model_arithmetic import padded_vocab_size
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.init.hf_config import read_config

# Settings of a Hugging Face model that training does not share with what loads its weights.
_NOT_OF_THE_WEIGHTS = frozenset(
    ("max_position_embeddings", "attention_dropout", "hidden_dropout", "init_method_std", "moe_aux_loss_coeff",
     "moe_router_load_balancing_type", "vocab_size", "make_vocab_size_divisible_by")
)  # fmt: skip
_WEIGHTS = ("phase-model", "phase-checkpoint-format")
_STATES = ("phase-states", "phase-resharding", "phase-optimizer-states")


@dataclass(frozen=True)
class Result:
    """What a stage called `name` hands over: a folder of checkpoints or, if `is_model`, a Hugging Face model.

    `model` is the Hugging Face model that corresponds to its weights, None if unknown.
    """

    name: str
    result: Path
    is_model: bool
    model: str | None


@dataclass(frozen=True)
class Linked(Result):
    """A stage that is ready to be checked, and what it hands over.

    `iterations` is the number of its last checkpoint, None if unknown. `trained_by` is the stage that trained the
    weights, None for this one. `promises` is as in `LoadedRecipe.promised`.
    """

    where: str
    folder: Path
    prepared: Prepared
    source: str | None
    iterations: int | None
    trained_by: Linked | None = None
    promises: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return self.trained_by is None

    @property
    def by_megatron(self) -> bool:
        """Whether its arguments are known by Megatron's names."""
        return self.prepared.engine.description.covers("megatron_core")


def handover_problems(stage: Linked, stages: Mapping[str, Linked]) -> Iterator[Problem]:
    """Yield what keeps a stage from starting with the result of the stage that it names."""
    before = stages.get(stage.source or "")
    if before is None:
        return
    trained = before.trained_by or before
    if before.trains and not before.prepared.loaded.recipe.goes_on:
        message = f"starts from {before.name}, which writes no checkpoints"
        fix = f"set checkpoint.dir and checkpoint.interval of stage {before.name}"
        yield Problem("error", "stage-checkpoint", message, stage.where, fix)
        return
    if not trained.by_megatron:
        return
    earlier = resolve_run(trained.prepared.parts[-1])
    if not stage.trains or before.is_model:
        if before.trains and earlier.value("ckpt_format") not in (None, "torch_dist"):
            message = f"starts from {before.name}, whose megatron.ckpt_format is {earlier.value('ckpt_format')}"
            fix = f"set megatron.ckpt_format: torch_dist in stage {before.name}"
            yield Problem("error", "stage-format", message, stage.where, fix)
        if before.trains and stage.model is not None:
            yield from _other_model(stage, before, earlier, stage.model)
        return
    yield from _next_training(stage, before, earlier)


def _next_training(stage: Linked, before: Linked, earlier: ResolvedRun) -> Iterator[Problem]:
    """Yield what differs between two trainings, of which one starts from the checkpoint of the other."""
    later = resolve_run(stage.prepared.parts[0])
    yield from _other_tokenizer(before, earlier, later)
    if not (stage.by_megatron and earlier.engine.covers("megatron_lm") and later.engine.covers("megatron_lm")):
        return
    weights_only = later.on("finetune")
    border = Border(earlier, later, (before.name, stage.name))
    codes = _WEIGHTS if weights_only else _WEIGHTS + _STATES
    fix = f"use the values of stage {before.name}, from which it starts"
    yield from border_problems(border, codes, fix)
    end, begin = later.value("train_iters"), before.iterations
    if not weights_only and isinstance(end, int) and begin is not None and end <= begin:
        message = f"train.iterations is {end}, but it continues at iteration {begin} of {before.name}"
        fix = f"set train.iterations above {begin}, or megatron.finetune: true to start at 0 with the weights only"
        yield Problem("error", "stage-iterations", message, later.where("train_iters"), fix)


def _other_tokenizer(before: Linked, earlier: ResolvedRun, later: ResolvedRun) -> Iterator[Problem]:
    for name in ("tokenizer_type", "tokenizer_model"):
        was, now = earlier.given.get(name), later.given.get(name)
        if was is not None and now is not None and was != now and "NullTokenizer" not in (was, now):
            message = f"{name} is {now}, but {was} in stage {before.name}, whose weights belong to that vocabulary"
            fix = f"use the tokenizer of stage {before.name}"
            yield Problem("error", "stage-vocabulary", message, later.where(name), fix)
    was, now = (padded_vocab_size(run.arguments) for run in (earlier, later))
    if was and now and was != now:
        message = f"the padded vocabulary has {now} tokens, but {was} in stage {before.name}"
        fix = "set model.vocab_size, model.make_vocab_size_divisible_by and the tokenizer as in that stage"
        yield Problem("error", "stage-vocabulary", message, later.where("vocab_size", "tokenizer_model"), fix)


def _other_model(stage: Linked, before: Linked, earlier: ResolvedRun, model: str) -> Iterator[Problem]:
    """Yield the settings of a Hugging Face model that differ from the training whose weights get its form."""
    config = Path(model, "config.json")
    if not config.is_file():
        return  # of the hub
    try:
        stated = read_config(config).model
    except UserError:
        return  # a model that only Bridge knows; the job compares it with the checkpoint
    schema = load_schema(earlier.args.version)
    for name, value in stated.items():
        flag = schema.find(name)
        # Bare flags may set the opposite of what their attribute is called.
        dest = name if flag is None or isinstance(value, bool) else flag.dest
        trained = earlier.arguments.get(dest)
        if name not in _NOT_OF_THE_WEIGHTS and trained is not None and trained != value:
            message = f"{name} is {value} in {config}, but {trained} in stage {before.name}"
            fix = f"name the model that stage {before.name} trains, or set its model.{name}"
            yield Problem("error", "stage-model", message, stage.where, fix)
    padded = padded_vocab_size(earlier.arguments)
    if padded and padded != stated["vocab_size"]:
        message = f"vocab_size is {stated['vocab_size']} in {config}, but {padded} with padding in stage {before.name}"
        fix = f"set model.vocab_size and model.make_vocab_size_divisible_by of stage {before.name} to match"
        yield Problem("error", "stage-vocabulary", message, stage.where, fix)


def space_problems(stages: Sequence[Linked], cluster: Cluster) -> dict[str, list[Problem]]:
    """Return the problems of stages whose checkpoints do not fit next to those of all earlier stages."""
    taken: dict[int, int] = defaultdict(int)
    found: dict[str, list[Problem]] = {}
    for stage in stages:
        space = space_for(stage.prepared.parts[0], cluster) if stage.trains and stage.by_megatron else None
        if space is None:
            continue
        disk = space.folder.stat().st_dev
        earlier = taken[disk]
        taken[disk] += space.count * space.size
        # A stage that does not fit alone is reported by its own check.
        if earlier and space.free >= space.count * space.size and space.free < taken[disk]:
            message = (
                f"the checkpoints up to this stage need {gib(taken[disk])}, and {space.folder} has "
                f"{gib(space.free)} free"
            )
            fix = "free disk space, or set checkpoint.keep in the stages"
            where = stage.prepared.loaded.where("checkpoint", "dir")
            found[stage.name] = [Problem("error", "stage-space", message, where, fix)]
    return found
