"""Check schedule, evaluation, tokenizer and error handling for settings that stop a run or hide why it failed."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule


@rule(
    "warmup-too-long",
    "error",
    source=(
        "optimizer_param_scheduler:OptimizerParamScheduler.__init__: lr_warmup_steps < lr_decay_steps, a bare assertion"
    ),
    scope="megatron_lm",
)
def warmup_too_long(run: ResolvedRun) -> Iterator[Finding]:
    for unit in ("iters", "samples"):
        length = run.integer(f"train_{unit}")
        decay = run.integer(f"lr_decay_{unit}") or length
        if not length or run.on("skip_train"):
            continue
        fraction = run.value("lr_warmup_fraction")
        warmup: float = run.integer(f"lr_warmup_{unit}")
        if isinstance(fraction, (int, float)):
            warmup = fraction * decay
        if warmup >= decay:
            message = f"the warm-up of {warmup:g} {unit} does not end before the decay, which ends after {decay}"
            names = ("lr_warmup_fraction", f"lr_warmup_{unit}", f"lr_decay_{unit}", f"train_{unit}")
            yield Finding(message, run.where(*names), f"make the warm-up shorter than {decay} {unit}")
