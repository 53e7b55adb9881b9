"""Run Megatron's own validators on runs, and report their errors in the recipe's terms."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from fp8launch.check.job_paths import JobPaths, kind_of
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Rule
from fp8launch.check.validation import STAGE_CODES, Validation
from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.model_arithmetic import parse_layout
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.validators.megatron_core import NoMegatron, megatron_for
from fp8launch.plugins.validators.refusals import fix_for, names_in
from fp8launch.plugins.validators.verdict_cache import cached_verdicts
from fp8launch.plugins.validators.verdicts import MegatronVerdict, Request
from fp8launch.wording import shortened

# A file with the layers of the model, which Megatron reads while it validates.
MODEL_DESCRIPTION = "heterogeneous_layers_config_path"
# A process takes 0.4 s to start, and a run 10 to 30 ms to validate.
WORTH_A_PROCESS = 24
# Explanations of bare assertions: pattern of Megatron's message, plain message, fix.
PLAINER: tuple[tuple[str, str, str], ...] = (
    (
        r"eval_global_batch_size",
        "the global batch is not a multiple of micro batch x data parallel (Megatron reports it for the evaluation "
        "batch)",
        "choose batch.global as a multiple of batch.micro x data parallel, and megatron.eval_global_batch_size too",
    ),
    (r"^assert not args\.(bf16|fp16)", "bf16 and fp16 are both set", "remove megatron.fp16 or megatron.bf16"),
    (r"args\.min_lr <= args\.lr", "the minimum learning rate is above the learning rate", "lower train.min_lr"),
    (
        r"assert args\.save_interval",
        "a checkpoint directory is set, but no interval",
        "set checkpoint.interval (iterations)",
    ),
)


def validate_runs(
    runs: Sequence[ResolvedRun], paths: Sequence[JobPaths], say: Callable[[str], None] = lambda message: None
) -> list[Validation]:
    """Ask Megatron about each run. `say` reports a download."""
    found: list[Validation | None] = [None] * len(runs)

    def ask(share: Sequence[int]) -> None:
        requests = [request(runs[i], paths[i]) for i in share]
        try:
            verdicts = cached_verdicts(requests, megatron_for(runs[share[0]].args.version, say))
        except (NoMegatron, UserError) as exc:
            for i in share:
                found[i] = Validation(f"not run: {exc}", lacking=True)
            return
        for i, verdict in zip(share, verdicts, strict=True):
            state = "ran"
            if verdict.unanswered:
                state = f"uncertain: it needs {', '.join(verdict.unanswered)} from packages that are not installed here"
            problems = functools.partial(megatron_problems, runs[i], paths[i], verdict)
            found[i] = Validation(state, problems, lacking=bool(verdict.unanswered))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(ask, _shares([run.args.version for run in runs])))
    return [validation for validation in found if validation is not None]


def _shares(versions: Sequence[str]) -> list[list[int]]:
    """Group the indices of runs by version, one process per group; large groups are divided over the processors."""
    shares = []
    for version in dict.fromkeys(versions):
        mine = [i for i, other in enumerate(versions) if other == version]
        parts = min(os.cpu_count() or 1, max(1, len(mine) // WORTH_A_PROCESS))
        shares += [mine[part::parts] for part in range(parts)]
    return shares


def request(run: ResolvedRun, paths: JobPaths) -> Request:
    """Return the validators' input for a run."""
    found = Request(
        argv=_argv(run, paths),
        world_size=run.layout.world,
        compute_capability=run.gpu.capability,
        te_version=run.transformer_engine,
        env=run.env,
    )
    if run.gpu.name == "cpu":
        # The CPU mode reports the compute capability of an H100.
        found = replace(found, compute_capability=(9, 0), te_version=None)
    return found


def _argv(run: ResolvedRun, paths: JobPaths) -> tuple[str, ...]:
    """Return the argument list with this machine's file paths, and with placeholder sizes for an unknown model."""
    seen = _description_here(run, paths)
    common = load_schema(run.args.version)
    words: list[str] = []
    for argument in run.args.arguments:
        if common.find(argument.flag) is None:
            # Only the parser of the script knows its own flags.
            continue
        if argument.flag == MODEL_DESCRIPTION:
            if seen:
                words += [argument.words[0].partition("=")[0], str(seen)]
        elif argument.flag == "cross_entropy_fusion_impl" and _allows_te_cross_entropy(run):
            words += ["--cross-entropy-fusion-impl", "native"]
        else:
            words += argument.words
    if model_is_elsewhere(run, paths):
        words += _sizes(run)
    return tuple(words)


def _allows_te_cross_entropy(run: ResolvedRun) -> bool:
    """Return whether the run's Megatron allows Transformer Engine's cross entropy; the validators' release may not.

    A minor version is validated by one release of it: 0.18.2 refuses this one, and 0.18.0, which NVIDIA's image holds,
    allows it (arguments.py of both; no other check differs).
    """
    return (0, 18) <= run.megatron < (0, 18, 2)


def _description_here(run: ResolvedRun, paths: JobPaths) -> Path | None:
    """Return this machine's path of the file in `heterogeneous_layers_config_path`; None if unset or in an image."""
    here = paths.here(run.value(MODEL_DESCRIPTION))
    if here is None or kind_of(here) != "file":
        return None
    return here


def model_is_elsewhere(run: ResolvedRun, paths: JobPaths) -> bool:
    """Return whether the model's sizes are in a checkpoint, or in a file that only the container has."""
    in_image = run.value(MODEL_DESCRIPTION) is not None and _description_here(run, paths) is None
    return in_image or run.on("use_checkpoint_args")


def _sizes(run: ResolvedRun) -> list[str]:
    """Return sizes that pass all divisibility checks, for the sizes that neither flags nor readable files give."""
    layout = run.layout
    per_chunk = run.integer("num_layers_per_virtual_pipeline_stage") or 1
    first, last = run.integer("decoder_first_pipeline_num_layers"), run.integer("decoder_last_pipeline_num_layers")
    pieces = parse_layout(str(run.value("pipeline_model_parallel_layout") or ""))
    if pieces:
        layers = sum(piece.count("t") for piece in pieces)
    else:
        equal_stages = max(layout.pp - bool(first) - bool(last), 0)
        layers = first + last + equal_stages * layout.vp * per_chunk * 2
    heads = 8 * layout.tp * layout.cp
    sizes = {
        "num_layers": layers,
        "hidden_size": 128 * heads,
        "num_attention_heads": heads,
        "max_position_embeddings": run.integer("seq_length"),
    }
    if run.on("group_query_attention"):
        sizes["num_query_groups"] = heads
    words = []
    for name, size in sizes.items():
        if name not in run.given:
            words += ["--" + name.replace("_", "-"), str(size)]
    return words


def megatron_problems(
    run: ResolvedRun, paths: JobPaths, verdict: MegatronVerdict, fired: Iterable[Rule]
) -> Iterator[Problem]:
    """Yield the problems of a verdict, except problems that a rule already reported."""
    if model_is_elsewhere(run, paths):
        source = MODEL_DESCRIPTION
        if run.on("use_checkpoint_args"):
            source = "use_checkpoint_args"
        message = (
            f"{source} reads the model from a file that this machine cannot read, so sizes and memory are not checked"
        )
        fix = "set the model's sizes under `model:` as well, or silence this warning"
        yield Problem("warning", "model-not-known-here", message, run.where(source), fix)
    if verdict.no_answer:
        fix = "run `fp8launch check` on this recipe alone; the same arguments would probably end the job as well"
        yield Problem("error", "megatron-no-verdict", verdict.no_answer, run.where(), fix)
        return
    if verdict.ok:
        return
    if verdict.unanswered:
        message = f"Megatron's validators need packages that are not installed here ({', '.join(verdict.unanswered)})"
        fix = "set software.megatron, or FP8LAUNCH_MEGATRON, to a supported Megatron-Core"
        yield Problem("error", "megatron-no-verdict", message, run.where(), fix)
        return
    message = verdict.message or verdict.exception or "no reason given"
    if any(rule.says and re.search(rule.says, message) for rule in fired):
        return
    where = run.where(*names_in(run, message))
    for pattern, plain, fix in PLAINER:
        if re.search(pattern, message):
            yield Problem("error", STAGE_CODES[verdict.stage], plain, where, fix)
            return
    rejected = f"Megatron rejects it: {shortened(message, 300)}"
    yield Problem("error", STAGE_CODES[verdict.stage], rejected, where, fix_for(run, message))
