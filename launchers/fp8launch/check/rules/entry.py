"""Check what fp8launch's own training entry and its CPU mode would reject at the start of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.cluster.profile import fork_schema_file
from fp8launch.diagnostics import did_you_mean
from fp8launch.injob.rank.compat import cpu_process
from fp8launch.megatron.extra_flags import EXTRA, option_of
from fp8launch.megatron.schema import load_schema
from fp8launch.megatron.versions import Release
from fp8launch.plugin_registry import offered


@rule("not-in-entry", "error", source="fp8launch injob/rank/pretrain.py NOT_HERE", scope="megatron_lm")
def not_in_entry(run: ResolvedRun) -> Iterator[Finding]:
    for name in run.entry.refuses:
        if run.on(name):
            message = f"fp8launch's own training entry does not support {name}"
            fix = "set launch.script to the script of Megatron-LM that supports it, or remove the flag"
            yield Finding(message, run.where(name), fix)


@rule("unchecked-flags", "warning", source="fp8launch megatron/extra_flags.py", scope="megatron_lm")
def unchecked_flags(run: ResolvedRun) -> Iterator[Finding]:
    """Name the flags that no other rule, and none of Megatron's own validators, can see."""
    recipe = run.loaded.recipe
    names = [option_of(name) for name, value in recipe.megatron_extra.items() if value is not None]
    known = "fork-flags" in offered("rules") and fork_schema_file(recipe.software.megatron or "").is_file()
    if not names or known:
        return
    fix = "check their spelling, and run the fork that has them"
    if recipe.launch.script is None:
        fix += "; if its training script adds them, set launch.script"
    yield Finding(f"passed on without a check: {', '.join(names)}", run.loaded.where(EXTRA), fix)


@rule(
    "cpu-flags",
    "error",
    source="injob/rank/compat/cpu_process.py FLAGS",
    says="apply_rope_fusion is not available",
    scope="megatron_lm",
)
def cpu_flags(run: ResolvedRun) -> Iterator[Finding]:
    if run.gpu.name != "cpu":
        return
    schema, missing = load_schema(run.args.version), []
    for option, value in cpu_process.FLAGS:
        flag = schema.find(option)
        assert flag is not None, option
        if run.value(flag.dest) != (value or flag.const):
            missing.append(f"{flag.name}: {value}" if value else flag.name)
    if missing:
        message = f"a run on CPUs also needs these flags: {', '.join(missing)}"
        yield Finding(message, run.where("gpu"), "add hardware/cpu to `extends`, which sets all of them")


# Values that Megatron's code supports but its validators refuse as a flag, and the first release that refuses them.
BEHIND_VALIDATORS: Mapping[tuple[str, object], Release] = {("cross_entropy_fusion_impl", "te"): (0, 18, 2)}
_TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


@rule(
    "config-unknown",
    "error",
    source="transformer_config:TransformerConfig",
    scope="hardware",
)
def config_unknown(run: ResolvedRun) -> Iterator[Finding]:
    launch, where = run.loaded.recipe.launch, run.loaded.where
    if not launch.config:
        return
    if not run.entry.sets_config:
        message = (
            "launch.config has an effect only with fp8launch's own training entry; another script builds its own config"
        )
        yield Finding(message, where("launch", "config"), "remove launch.config, or launch.script")
        return
    schema = load_schema(run.args.version)
    for name, value in launch.config.items():
        place = where("launch", "config", name)
        kind = schema.config_only.get(name)
        if (refused_from := BEHIND_VALIDATORS.get((name, value))) and run.megatron >= refused_from:
            continue
        if schema.find(name):
            yield Finding(f"{name} is a flag of Megatron-Core {schema.minor}", place, "set it under `megatron:`")
        elif kind is None:
            hint = did_you_mean(name, schema.config_only, f"valid fields: {', '.join(schema.config_only)}")
            yield Finding(
                f"TransformerConfig of Megatron-Core {schema.minor} has no field {name} that can be set here",
                place,
                hint,
            )
        elif not isinstance(value, _TYPES[kind]) or (kind != "bool" and isinstance(value, bool)):
            yield Finding(f"{name} is {value!r}, but must be of type {kind}", place, f"write a value of type {kind}")
