"""Check hybrid models for sizes that a Mamba layer refuses when it is built."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.model_arithmetic import layer_kinds

# A mixer is twice as wide as the model (its `expand`).
EXPAND = 2


@rule("mamba-heads", "error", source="mamba_mixer:MambaMixer.__init__, assertions while the model is built")
def mamba_heads(run: ResolvedRun) -> Iterator[Finding]:
    if "mamba" not in layer_kinds(run.arguments):
        return
    tp, groups, width = run.layout.tp, run.integer("mamba_num_groups"), run.integer("mamba_head_dim")
    inner = EXPAND * run.integer("hidden_size")
    stated = run.value("mamba_num_heads")
    where = run.where("mamba_num_heads", "mamba_num_groups", "mamba_head_dim", "hybrid_layer_pattern")
    if not width or not groups or not run.integer("mamba_state_dim") or stated == 0:
        message = "mamba_head_dim, mamba_num_groups, mamba_state_dim and mamba_num_heads must be above 0"
        yield Finding(message, where, "remove them to use Megatron's defaults")
        return
    if stated is None and inner % width:
        message = f"a Mamba layer is {inner} channels wide, which cannot be divided into heads of {width}"
        yield Finding(message, where, f"make mamba_head_dim a divisor of {inner}, or set mamba_num_heads")
        return
    heads = run.integer("mamba_num_heads", inner // width)
    for name, count in (("heads", heads), ("groups", groups)):
        if count % tp:
            message = f"{count} Mamba {name} cannot be divided over TP {tp}"
            yield Finding(message, where, f"make mamba_num_{name} a multiple of {tp}, or use less tensor parallelism")
            return
    if heads % groups:
        message = f"{heads} Mamba heads cannot be divided evenly over {groups} groups"
        yield Finding(message, where, "make mamba_num_heads a multiple of mamba_num_groups")
        return
    # mamba_context_parallel.py: either several ranks share a group, or each rank has whole groups.
    cp, local = run.layout.cp, groups // tp
    if heads // tp % cp or max(local, cp) % min(local, cp):
        message = f"{heads} Mamba heads in {groups} groups cannot be divided over TP {tp} and CP {cp}"
        fix = "make mamba_num_heads a multiple of TP x CP, and mamba_num_groups / TP a multiple or a divisor of CP"
        yield Finding(message, where, fix)


@rule(
    "mamba-fp8-width",
    "error",
    source="mamba_mixer:MambaMixer.__init__ and transformer_engine.gemm:general_gemm, in FP8",
)
def mamba_fp8_width(run: ResolvedRun) -> Iterator[Finding]:
    if "mamba" not in layer_kinds(run.arguments) or not run.on("fp8"):
        return
    groups, state = run.integer("mamba_num_groups"), run.integer("mamba_state_dim")
    width = run.integer("mamba_head_dim")
    if not width:
        return
    heads = run.integer("mamba_num_heads", EXPAND * run.integer("hidden_size") // width)
    size = 2 * heads * width + 2 * groups * state + heads
    tp = run.layout.tp
    for outputs, ranks in ((size, ""), (size // tp, f" on each of {tp} ranks")):
        if outputs % 16:
            message = (
                f"the input projection of a Mamba layer has {outputs} outputs{ranks}, and FP8 needs a multiple of 16"
            )
            where = run.where("mamba_num_heads", "mamba_state_dim", "mamba_head_dim", "hidden_size")
            yield Finding(message, where, f"make mamba_num_heads a multiple of {16 * tp}, or train in bf16")
            return
