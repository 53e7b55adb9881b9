"""Check the environment variables by which Transformer Engine's recipes take options that Megatron has no flag for.

Megatron-Core 0.17 to 0.19 build each recipe with its format only (`core/fp8_utils.py`, `core/fp4_utils.py`), so the
other options keep their defaults, which come from these variables (`transformer_engine/common/recipe/__init__.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule

BACKWARD = "NVTE_BACKWARD_OVERRIDE"
FOUR_OVER_SIX = "NVTE_NVFP4_4OVER6"
NO_HADAMARD = "NVTE_NVFP4_DISABLE_RHT"


class Option(NamedTuple):
    """`values` are allowed, `off` is the default, and `since` the first release that is known to read the variable."""

    values: tuple[str, ...]
    off: str | None
    since: tuple[int, ...]


_SCOPES = ("none", "weights", "activations", "all")
OPTIONS = {
    BACKWARD: Option(("high_precision", "dequantized"), None, (2, 16)),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": Option(("0", "1"), "0", (2, 16)),
    FOUR_OVER_SIX: Option(_SCOPES, "none", (2, 20)),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": Option(_SCOPES, "all", (2, 20)),
    "NVTE_NVFP4_4OVER6_ERR_MODE": Option(("MAE", "MSE"), "MAE", (2, 20)),
}


def _given(run: ResolvedRun) -> dict[str, str]:
    """Return the variables that change something."""
    if not run.uses_te:
        return {}
    values = {name: run.env[name] for name in OPTIONS if name in run.env}
    if "NVTE_NVFP4_4OVER6_ERR_MODE" in values:
        values["NVTE_NVFP4_4OVER6_ERR_MODE"] = values["NVTE_NVFP4_4OVER6_ERR_MODE"].upper()
    return {name: value for name, value in values.items() if value != OPTIONS[name].off}


def _applies(name: str, run: ResolvedRun) -> str | None:
    """Return why the run ignores a variable, or None if it does not."""
    te = run.software.transformer_engine
    if te is not None and te < OPTIONS[name].since:
        return f"Transformer Engine {run.transformer_engine} does not read it"
    if "NVFP4" in name and run.precision != "nvfp4":
        return f"precision {run.precision} does not read it"
    if not run.quantized:
        return f"precision {run.precision} quantizes nothing"
    return None


@rule("te-option", "error", source="transformer_engine.common.recipe: __post_init__")
def te_option(run: ResolvedRun) -> Iterator[Finding]:
    given = _given(run)
    for name, value in given.items():
        allowed = OPTIONS[name].values
        if _applies(name, run):
            continue
        if value not in allowed:
            message = f"{name} has no value {value!r}; values are {', '.join(allowed)}"
            yield Finding(message, run.where(name), f"write one of them, or remove {name}")
        elif name == BACKWARD and run.precision == "delayed":
            message = f"delayed scaling refuses {BACKWARD}: its backward pass always uses FP8"
            yield Finding(message, run.where(name), f"remove {BACKWARD}, or choose another precision")
        elif name == FOUR_OVER_SIX and value in ("activations", "all") and run.env.get(NO_HADAMARD) != "1":
            message = f"{FOUR_OVER_SIX}={value} is refused with random Hadamard transforms of activations"
            fix = f"set `env: {{{FOUR_OVER_SIX}: weights}}`, or {NO_HADAMARD}: 1, which changes the training recipe"
            yield Finding(message, run.where(name), fix)


@rule("te-option-ignored", "warning", source="transformer_engine.common.recipe")
def te_option_ignored(run: ResolvedRun) -> Iterator[Finding]:
    for name, value in _given(run).items():
        if reason := _applies(name, run):
            yield Finding(f"{name}={value} has no effect: {reason}", run.where(name), f"remove {name}")


@rule("four-over-six", "warning", source="transformer_engine.common.recipe:NVFP4BlockScaling")
def four_over_six(run: ResolvedRun) -> Iterator[Finding]:
    trained = run.on("finetune") or run.value("pretrained_checkpoint")
    if FOUR_OVER_SIX in _given(run) and not _applies(FOUR_OVER_SIX, run) and not trained:
        message = f"{FOUR_OVER_SIX} is documented for reinforcement learning and post-training, not for pre-training"
        yield Finding(message, run.where(FOUR_OVER_SIX), "compare the loss with a run without it before a long run")
