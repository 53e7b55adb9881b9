"""The division of a run's GPUs by Megatron's arguments."""

from __future__ import annotations

from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError
from fp8launch.engines.base import EngineArguments, Layout
from fp8launch.megatron.model_arithmetic import virtual_stages
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.wording import counted


def layout(args: EngineArguments, loaded: LoadedRecipe) -> Layout:
    """Return the division of a run's GPUs. Raises UserError if GPUs or batch cannot be divided."""
    world = loaded.recipe.resources.world_size
    tp = args.integer("tensor_model_parallel_size", 1)
    pp = args.integer("pipeline_model_parallel_size", 1)
    cp = args.integer("context_parallel_size", 1)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    batches = ("micro_batch_size", "global_batch_size")
    problems = []
    for flag in (*sizes, *batches):
        if args.integer(flag, 1) < 1:
            message = f"{flag} is {args.values[flag]}"
            problems.append(Problem("error", "size", message, args.places[flag], "use 1 or more"))
    if problems:
        raise UserError(problems, ANSWER_IS_NO)
    if world % (tp * pp * cp):
        groups = tp * pp * cp
        message = f"{counted(world, 'GPU')} cannot be divided into groups of TP {tp} x PP {pp} x CP {cp} = {groups}"
        stated = [args.places[flag] for flag in sizes if args.integer(flag, 1) > 1]
        fix = f"use a multiple of {groups} GPUs (nodes x gpus_per_node), or less parallelism"
        raise UserError([Problem("error", "world-size", message, stated[0], fix)], ANSWER_IS_NO)
    dp = world // (tp * pp * cp)
    micro = args.integer("micro_batch_size", 1)
    batch = args.integer("global_batch_size", micro * dp)
    if batch % (micro * dp):
        step = micro * dp
        fix = f"use {(batch // step + 1) * step}"
        if batch > step:
            fix = f"use {batch // step * step} or {(batch // step + 1) * step}"
        message = f"global batch {batch} is not a multiple of micro batch {micro} x data parallel {dp} = {step}"
        where = args.places.get("global_batch_size")
        raise UserError([Problem("error", "batch-size", message, where, fix)], ANSWER_IS_NO)
    return Layout(
        world=world,
        tp=tp,
        pp=pp,
        vp=virtual_stages(args.values, pp),
        cp=cp,
        ep=args.integer("expert_model_parallel_size", 1),
        dp=dp,
        micro_batch=micro,
        global_batch=batch,
        microbatches=batch // (micro * dp),
    )
