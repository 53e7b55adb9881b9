"""Rules that only compare settings: the rows of `table.yaml`, which explains how to write one.

A condition is a Python expression, evaluated without builtins. Like pip's environment markers it consists of names and
values: `tp > 1 and not swiglu`. A name is, in this order, one of `_FACTS`, a condition or value under `names:` in the
table, an environment variable if it is in capitals, or an argument by Megatron's attribute name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

import yaml

from fp8launch.check.gemm_shapes import heads_fit, sequence_parallel
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, Rule, register, rule
from fp8launch.megatron.model_arithmetic import (
    expert_tensor_size,
    graph_modules,
    head_width,
    layer_kinds,
    query_groups,
    recomputed_modules,
)
from fp8launch.wording import shortened

TABLE = Path(__file__).parent / "table.yaml"


def _expandable_segments(run: ResolvedRun) -> str | None:
    """Return the name of the variable that enables expandable segments, if any."""
    variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return next((name for name in variables if "expandable_segments:True" in run.env.get(name, "")), None)


def _one_or_several(value: Any) -> frozenset[str]:
    """Return the words of an argument that takes one word or a list."""
    return frozenset([value] if isinstance(value, str) else value or ())


def _resumes(run: ResolvedRun) -> bool:
    """Return whether the run loads checkpoints that it saved: in another attempt, or in the next phase."""
    recipe = run.loaded.recipe
    return recipe.goes_on and (recipe.survive.attempts > 1 or bool(recipe.phases))


def _has_auxiliary_loss(run: ResolvedRun) -> bool:
    loss = run.value("moe_aux_loss_coeff")
    losses = [loss] if isinstance(loss, (int, float)) else loss
    return any(losses or ())


# Names that are neither arguments nor variables. Versions are tuples: `te >= (2, 10)`.
_FACTS: Mapping[str, Callable[[ResolvedRun], Any]] = {
    **{name: attrgetter(name) for name in ("megatron", "precision", "quantized", "fsdp", "uses_te")},
    **{name: attrgetter(f"layout.{name}") for name in ("world", "tp", "pp", "vp", "cp", "dp", "ep", "global_batch")},
    "te": lambda run: run.software.transformer_engine,
    "cuda": lambda run: run.software.cuda,
    "torch": lambda run: run.software.pytorch,
    "gpu": lambda run: run.gpu.name,
    "capability": lambda run: run.gpu.capability,
    "gpus_per_node": lambda run: run.loaded.recipe.resources.gpus_per_node,
    "etp": lambda run: expert_tensor_size(run.arguments),
    "least_te": lambda run: run.quantization.least_te if run.quantization else None,
    "overlap_multiple": lambda run: run.quantization.overlap_multiple if run.quantization else 1,
    "gather_flags": lambda run: run.quantization.gather_flags if run.quantization else (),
    "linear_biases": lambda run: run.has_linear_biases,
    "splits_sequence": sequence_parallel,
    "heads_fit": heads_fit,
    "query_groups": lambda run: query_groups(run.arguments),
    "head_width": lambda run: head_width(run.arguments),
    "layer_kinds": lambda run: layer_kinds(run.arguments),
    "graph_modules": lambda run: graph_modules(run.arguments),
    "recomputed_modules": lambda run: recomputed_modules(run.arguments),
    "cp_comm_types": lambda run: _one_or_several(run.value("cp_comm_type") or "p2p"),
    "load_balancing": lambda run: _one_or_several(run.value("moe_router_load_balancing_type")),
    "auxiliary_loss": _has_auxiliary_loss,
    "expandable_segments": _expandable_segments,
    "script": lambda run: run.loaded.recipe.launch.script,
    "tensor_stats": lambda run: run.loaded.recipe.launch.tensor_stats,
    "config": lambda run: run.loaded.recipe.launch.config,
    "stated": lambda run: run.given,
    "filled_in": lambda run: run.entry.fills_in,
    "resumes": _resumes,
    "of_megatron_lm": lambda run: run.engine.covers("megatron_lm"),
    "of_bridge": lambda run: run.software.megatron_bridge is not None,
}
# The arguments and variables that decide a fact, if a recipe can set them.
_DECIDED_BY: Mapping[str, tuple[str, ...]] = {
    "gpu": ("gpu",),
    "tp": ("tensor_model_parallel_size",),
    "pp": ("pipeline_model_parallel_size",),
    "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "global_batch": ("global_batch_size",),
    "precision": ("fp8_recipe", "fp8", "fp4"),
    "linear_biases": ("add_bias_linear",),
    "splits_sequence": ("sequence_parallel",),
    "fsdp": ("use_megatron_fsdp", "use_torch_fsdp2"),
    "head_width": ("kv_channels",),
    "layer_kinds": ("moe_layer_freq",),
    "graph_modules": ("cuda_graph_modules",),
    "recomputed_modules": ("recompute_modules",),
    "load_balancing": ("moe_router_load_balancing_type",),
    "auxiliary_loss": ("moe_aux_loss_coeff",),
    "expandable_segments": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}


class Names(dict[str, Any]):
    """The values of names for one run, looked up on first use. An unknown name raises NameError in a condition."""

    def __init__(self, run: ResolvedRun) -> None:
        super().__init__()
        self.run = run

    def __missing__(self, name: str) -> Any:
        if name in _FACTS:
            value = _FACTS[name](self.run)
        elif name in table().names:
            value = self._value(table().names[name])
        elif name.isupper():
            value = self.run.env.get(name)
        else:
            value = self.run.value(name)
        self[name] = value
        return value

    def satisfy(self, condition: str) -> bool:
        return bool(self._value(condition))

    def _value(self, expression: str) -> Any:
        try:
            # The table is part of this package, like code: no recipe can put text here.
            return eval(_compiled(expression), {"__builtins__": {}}, self)
        except TypeError:
            return False  # an unset value is neither above nor below a number, and contains nothing

    def fill(self, text: str) -> str:
        """Replace each `{name}` by its value."""
        return re.sub(r"\{(\w+)\}", lambda match: _shown(self[match[1]]), text)


@functools.cache
def _compiled(condition: str) -> CodeType:
    return compile(condition, str(TABLE), "eval")


def names_in(condition: str) -> list[str]:
    """Return the names in a condition, in their order."""
    found = [node for node in ast.walk(ast.parse(condition, mode="eval")) if isinstance(node, ast.Name)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(node.id for node in found))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))
    return str(value)


def _settings(condition: str) -> Iterator[str]:
    """Yield the arguments and variables that decide a condition."""
    for name in names_in(condition):
        if name in table().names:
            yield from _settings(table().names[name])
        elif name in _FACTS:
            yield from _DECIDED_BY.get(name, ())
        else:
            yield name


@dataclass(frozen=True)
class Case:
    """A case of a rule; the table explains the fields."""

    when: str
    message: str
    fix: str
    where: Sequence[str] = ()
    flags: Sequence[str] = ()
    bridge_fix: str | None = None

    def finding(self, run: ResolvedRun) -> Finding | None:
        names = Names(run)
        if self.flags:
            names["flag"] = next((name for name in self.flags if run.on(name)), None)
            if names["flag"] is None:
                return None
        if not names.satisfy(self.when):
            return None
        fix = self.fix
        if self.bridge_fix and names["of_bridge"]:
            fix = self.bridge_fix
        return Finding(names.fill(self.message), self._place(names), names.fill(fix))

    def _place(self, names: Names) -> str:
        settings = self.where or list(_settings(self.when))
        if settings and "." in settings[0]:
            return names.run.loaded.where(*settings[0].split("."))
        return names.run.where(*(names["flag"] if setting == "flag" else setting for setting in settings))


@dataclass(frozen=True)
class Table:
    """The sections of the table."""

    names: Mapping[str, str]
    rules: Mapping[str, Mapping[str, Any]]
    without_effect: Sequence[Mapping[str, Any]]
    value_ranges: Sequence[Mapping[str, Any]]
    phases: Mapping[str, Mapping[str, Any]]


@functools.cache
def table() -> Table:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return Table(**yaml.load(TABLE.read_text(encoding="utf-8"), loader))


def cases_of(entry: Mapping[str, Any]) -> list[Case]:
    """Return the cases of a rule. Raises TypeError for keys that no rule has."""
    case = {key: value for key, value in entry.items() if key not in ("source", "severity", "scope", "says", "cases")}
    if "cases" not in entry:
        return [Case(**case)]
    return [Case(**{**case, **each}) for each in entry["cases"]]


def _rule(code: str, entry: Mapping[str, Any]) -> Rule:
    cases = cases_of(entry)

    def find(run: ResolvedRun) -> Iterator[Finding]:
        return (finding for case in cases if (finding := case.finding(run)))

    severity, scope = entry.get("severity", "error"), entry.get("scope", "megatron_core")
    return Rule(code, severity, entry["source"], find, entry.get("says"), scope)


@rule("flag-without-effect", "warning", source="the reason of each row", scope="megatron_lm")
def flag_without_effect(run: ResolvedRun) -> Iterator[Finding]:
    """Report only flags that a recipe sets to a value other than the default."""
    names = Names(run)
    for row in table().without_effect:
        for flag in row["flags"]:
            value = run.given.get(flag)
            if value not in (None, run.defaults.get(flag)) and names.satisfy(row["when"]):
                message = f"{_flag_and_value(flag, value)} has no effect: {row['because']}"
                yield Finding(message, run.where(flag), row.get("fix", "remove it"))


def _flag_and_value(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return flag
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return f"{flag} {shortened(str(value), 40)}"


for _code, _entry in table().rules.items():
    register(_rule(_code, _entry))
