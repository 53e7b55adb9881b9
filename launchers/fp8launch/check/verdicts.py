"""Megatron's own verdict on runs, in the user's terms."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from fp8launch.check.facts import Facts
from fp8launch.check.rule import Rule
from fp8launch.check.wheel import NoMegatron, megatron_for
from fp8launch.megatron.schema import load_schema
from fp8launch.megatron.validators import Request, Verdict, validate
from fp8launch.problems import Problem, UserError

# Where neither recipe nor image says, what NVIDIA's current images hold is assumed.
ASSUMED_TE = "2.20"
# A process takes 0.4 s to start, a run 10 to 30 ms.
WORTH_A_PROCESS = 24
CODES = {
    "parse_args": "megatron-arguments",
    "validate_args": "megatron-validate",
    "TransformerConfig": "megatron-transformer-config",
    "DistributedDataParallelConfig": "megatron-ddp-config",
    "OptimizerConfig": "megatron-optimizer-config",
    "num_microbatches": "megatron-microbatches",
}
# A bare assertion is a line of Python; these are what it means. Pattern of Megatron's message to message and fix.
PLAINER: tuple[tuple[str, str, str], ...] = (
    (
        r"eval_global_batch_size",
        "the global batch is no multiple of micro batch x data parallel (Megatron says it of the evaluation batch)",
        "choose batch.global as a multiple of batch.micro x data parallel, and megatron.eval_global_batch_size too",
    ),
    (r"^assert not args\.(bf16|fp16)", "bf16 and fp16 are both set", "keep one of bf16 and fp16"),
    (r"args\.min_lr <= args\.lr", "the minimum learning rate is above the learning rate", "lower train.min_lr"),
    (
        r"assert args\.save_interval",
        "checkpoints are to be saved, but not how often",
        "state checkpoint.interval (iterations)",
    ),
)


def verdict_problems(
    runs: Sequence[Facts], say: Callable[[str], None] = lambda message: None
) -> tuple[list[Verdict | None], list[str]]:
    """The verdict on each run, and for each how the layer fared: "ran", or why it did not run."""
    verdicts: list[Verdict | None] = [None] * len(runs)
    states = ["ran"] * len(runs)

    def ask(share: Sequence[int]) -> None:
        try:
            found = validate([request(runs[i]) for i in share], megatron_for(runs[share[0]].args.version, say))
        except (NoMegatron, UserError) as exc:
            for i in share:
                states[i] = f"not run: {exc}"
            return
        for i, verdict in zip(share, found, strict=True):
            verdicts[i] = verdict

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(ask, _shares([run.args.version for run in runs])))
    return verdicts, states


def _shares(versions: Sequence[str]) -> list[list[int]]:
    """Indices by version, a process for each; of many runs of one version each processor gets a part."""
    shares = []
    for version in dict.fromkeys(versions):
        mine = [i for i, other in enumerate(versions) if other == version]
        parts = min(os.cpu_count() or 1, max(1, len(mine) // WORTH_A_PROCESS))
        shares += [mine[part::parts] for part in range(parts)]
    return shares


def request(run: Facts) -> Request:
    """What the validators are asked about a run."""
    te = run.software.transformer_engine
    stated = ".".join(map(str, te)) if te else ASSUMED_TE
    return Request(
        argv=run.args.argv,
        world_size=run.layout.world,
        # Our CPU mode answers as an H100 does.
        compute_capability=run.gpu.capability if run.gpu.name != "cpu" else (9, 0),
        te_version=stated if run.gpu.name != "cpu" else None,
        env=run.env,
    )


def problem(run: Facts, verdict: Verdict, fired: Iterable[Rule]) -> Problem | None:
    """The problem that a refusal is; None when a rule that fired already says it, in better words."""
    if verdict.ok:
        return None
    message = verdict.message or verdict.exception or "no reason given"
    if any(rule.says and re.search(rule.says, message) for rule in fired):
        return None
    where = run.where(*_named(run, message))
    for pattern, plain, fix in PLAINER:
        if re.search(pattern, message):
            return Problem("error", CODES[verdict.stage], plain, where, fix)
    text = message if len(message) <= 300 else message[:297] + "..."
    place = f"see {verdict.at} of megatron-core {run.args.version}" if verdict.at else None
    return Problem("error", CODES[verdict.stage], f"Megatron refuses: {text}", where, place)


def _named(run: Facts, message: str) -> list[str]:
    """The arguments and variables that a message of Megatron names."""
    schema = load_schema(run.args.version)
    names = []
    for word in re.findall(r"--[a-z][a-z0-9-]+|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+|\blr\b|\bfp8\b|\bfp4\b", message):
        flag = schema.find(word)
        names.append(flag.dest if flag else word)
    return names
