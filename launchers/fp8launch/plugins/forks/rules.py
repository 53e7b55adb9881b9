"""Check a recipe against the flags of the fork that it names."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.extra_flags import EXTRA, option_of
from fp8launch.megatron.flag_problems import check_values
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.forks.store import fork_of

# More would hide the other findings.
MOST_DEFAULTS = 12
_UNSET: tuple[object, ...] = (None, False, "", [])


@rule("fork-flags", "error", source="fp8launch schema build", scope="megatron_lm")
def fork_flags(run: ResolvedRun) -> Iterator[Finding]:
    """Find flags and values that the parser of the recipe's fork would refuse."""
    recipe = run.loaded.recipe
    fork = fork_of(recipe.software.megatron)
    if fork is None:
        return
    given = {name: (value, run.where(name)) for name, value in run.args.values.items() if value is not None}
    for name, value in recipe.megatron_extra.items():
        if value is not None:
            given[option_of(name)] = value, run.loaded.where(EXTRA, name)
    for name, (value, where) in given.items():
        flag = fork.schema.find(name)
        if flag is None and recipe.launch.script is not None and name not in run.args.values:
            # The training script may add it.
            continue
        if flag is not None and flag.nargs is None and isinstance(value, list) and len(value) == 1:
            value = value[0]
        for problem in check_values({name: value}, fork.schema):
            message = problem.message.partition("; ")[0].replace("Megatron-Core", f"fork {fork.name} of Megatron-Core")
            remedy = "correct the value"
            if problem.code == "flag-unknown":
                message = f"{fork.name} has no flag {option_of(name)}"
                remedy = "remove it"
            fix = problem.fix or f"{remedy}, or build the schema again if {fork.source} has changed"
            yield Finding(message, where, fix)


@rule("fork-defaults", "warning", source="fp8launch schema build", scope="megatron_lm")
def fork_defaults(run: ResolvedRun) -> Iterator[Finding]:
    """Name the defaults in which the fork differs from the release that estimates and other rules assume."""
    fork = fork_of(run.loaded.recipe.software.megatron)
    if fork is None:
        return
    base = load_schema(run.args.version)
    different = []
    for flag in fork.schema.flags():
        upstream = base.find(flag.options[0])
        if upstream is None or flag.dest in run.given or flag.options[0] in fork.uncertain:
            continue
        both_unset = upstream.default in _UNSET and flag.default in _UNSET
        if upstream.action == flag.action and upstream.default != flag.default and not both_unset:
            different.append(f"{flag.options[0]} ({upstream.default} -> {flag.default})")
    if different:
        shown = ", ".join(different[:MOST_DEFAULTS])
        more = f" and {len(different) - MOST_DEFAULTS} more" if len(different) > MOST_DEFAULTS else ""
        message = f"defaults of {fork.name} differ from Megatron-Core {base.minor}: {shown}{more}"
        yield Finding(message, run.where("software.megatron"), "set the flags that matter, so that both read the same")
