"""Decide whether the requested precision ran, from evidence in a run's logs. The strongest evidence wins:

kernels    GEMM kernels on FP8 operands, in a profile of one iteration
modules    the precision of each linear layer's last forward pass and of its weights, as read by the job's probe
arguments  what was requested; proves nothing, because a layer that ignores the request silently trains in bf16

`sharding` is judged separately: whether each rank holds only its part of weights and optimizer states, if reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from fp8launch import plugin_registry
from fp8launch.diagnostics import Problem
from fp8launch.hardware.quantization import CUSTOM, quantization_recipes, recipe_made_by
from fp8launch.logs import Evidence, LoggedProcesses, ParsedLog, attempts_of
from fp8launch.logs.evidence import of_kind
from fp8launch.report.run_report import json_list
from fp8launch.untyped import as_mapping, as_number

FindingKind = Literal["kernels", "modules", "arguments", "sharding"]


@dataclass(frozen=True)
class Fp8Finding:
    """One piece of evidence. `shows` is True for FP8, False if expected FP8 is missing, None if it proves neither."""

    kind: FindingKind
    shows: bool | None
    text: str
    offset: int | None = None

    def as_json(self) -> dict[str, object]:
        return {"kind": self.kind, "shows_fp8": self.shows, "text": self.text}


def kernels_finding(profile: Evidence) -> Fp8Finding:
    """Count the GEMM kernels on FP8 and FP4 operands, and their share of the time."""
    data = profile.data
    families = as_mapping(data.get("families"))
    counts: dict[str, float] = {}
    time: dict[str, float] = {}
    for name in ("fp8_gemm", "fp4_gemm", "gemm"):
        family = as_mapping(families.get(name))
        counts[name], time[name] = _number(family.get("count")), _number(family.get("ms"))
    low = counts["fp8_gemm"] + counts["fp4_gemm"]
    first, last = data.get("iteration"), data.get("last_iteration")
    where = f"in iteration {first}" if last in (None, first) else f"in iterations {first} to {last}"
    where += f" on rank {data.get('rank')}"
    if not any(counts.values()):
        return Fp8Finding("kernels", None, f"no GEMM kernel was recognised {where}", profile.offset)
    formats = [name for name in ("FP8", "FP4") if counts[f"{name.lower()}_gemm"]]
    kind = " and ".join(formats) or "FP8"
    share = (time["fp8_gemm"] + time["fp4_gemm"]) / max(sum(time.values()), 1e-9)
    text = f"{low:.0f} {kind} GEMM kernels of {sum(counts.values()):.0f} {where}, {share:.0%} of GEMM time"
    return Fp8Finding("kernels", low > 0, text, profile.offset)


def modules_finding(
    probes: Sequence[Evidence], recipe: str | None, asked: bool, param_gather: bool, warnings: list[str]
) -> Fp8Finding:
    """Count the linear layers that ran in FP8, and append problems to `warnings`."""
    found = _module_counts(probes)
    sums = found.sums
    if asked:
        warnings += found.unexplained
    if asked and param_gather and not sums["fp8_weights"]:
        warnings.append("FP8 parameter gather is requested, but no weight is an FP8 tensor")
    ran_as = ", ".join(sorted(found.recipes))
    quantization = quantization_recipes().get(recipe or "")
    expected = quantization.te_classes if quantization else ()
    if expected and found.recipes and found.recipes.isdisjoint(expected):
        warnings.append(f"{recipe} is requested, but the modules ran {ran_as}")
    text = f"{sums['fp8']:.0f} of {sums['linears']:.0f} linears ran in FP8"
    if ran_as:
        text += f" with {ran_as}"
    if sums["explained"]:
        reasons = "the log does not contain the reason"  # logs of older probes
        if found.reasons:
            reasons = "; ".join(f"{count}: {reason}" for reason, count in found.reasons.most_common())
        if len(found.reasons) == 1:
            reasons = next(iter(found.reasons))
        text += f", {sums['explained']:.0f} in higher precision ({reasons})"
    if sums["unexplained"]:
        text += f", {sums['unexplained']:.0f} without a reason"
    text += f"; {sums['fp8_weights']:.0f} of {sums['weights']:.0f} weights are FP8 tensors"
    if len(probes) > 1:
        text += f" ({len(probes)} model-parallel ranks)"
    return Fp8Finding("modules", sums["fp8"] > 0 and not found.stage_without_fp8, text, probes[0].offset)


@dataclass
class _ModuleCounts:
    """Sums over the probes.

    `reasons` counts linears in higher precision by reason, and `unexplained` describes the others in sentences.
    `stage_without_fp8` is true if none of a rank's linears ran in FP8 for no known reason. A known reason is a pipeline
    stage that holds only layers that stay in bf16 on purpose.
    """

    sums: dict[str, float]
    recipes: set[str]
    reasons: Counter[str]
    unexplained: list[str]
    stage_without_fp8: bool = False


def _module_counts(probes: Sequence[Evidence]) -> _ModuleCounts:
    names = ("linears", "fp8", "explained", "unexplained", "weights", "fp8_weights")
    found = _ModuleCounts(dict.fromkeys(names, 0.0), set(), Counter(), [])
    for probe in probes:
        totals = as_mapping(probe.data.get("totals"))
        for name in names:
            found.sums[name] += _number(totals.get(name))
        if _number(totals.get("fp8")) == 0 and _number(totals.get("unexplained")) > 0:
            found.stage_without_fp8 = True
        groups = probe.data.get("groups")
        for group in groups if isinstance(groups, list) else ():
            _count_group(as_mapping(group), found)
    return found


def _count_group(group: Mapping[str, Any], found: _ModuleCounts) -> None:
    """Add one group of identical modules."""
    if group.get("ran_fp8"):
        if group.get("recipe"):
            found.recipes.add(str(group["recipe"]))
    elif group.get("role") != "linear":
        return
    elif group.get("why"):
        found.reasons[str(group["why"])] += int(_number(group.get("n"))) or 1
    else:
        modules = str(group.get("modules"))
        if group.get("layers"):
            modules += f" (layers {group['layers']})"
        found.unexplained.append(f"{modules}, {group.get('class')}: not in FP8, for no known reason")


def _number(value: object) -> float:
    """Return a finite number unchanged, and 0 for anything else."""
    return as_number(value) or 0.0


NOT_PARTITIONED = "not-partitioned"
TITLES = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero1": "ZeRO 1",
    "zero2": "ZeRO 2",
    "zero3": "ZeRO 3",
}
# The states that each method shards across ranks: their names in the evidence, and in messages.
_DIVIDES: Mapping[str, Mapping[str, str]] = {
    "ddp": {},
    "zero1": {"optimizer_elements": "optimizer states"},
    "zero2": {"optimizer_elements": "optimizer states"},
    "zero3": {"optimizer_elements": "optimizer states", "weight_elements": "weights"},
    "fsdp2": {"optimizer_elements": "optimizer states", "weight_elements": "weights"},
}


@dataclass(frozen=True)
class Sharding:
    """A summary of the evidence on sharding, and whether it contradicts the request."""

    text: str
    refuted: bool


def judge_sharding(data: Mapping[str, object]) -> Sharding | None:
    """Judge one line of evidence. Return None if it is incomplete; another program may have written it."""
    asked, in_effect, total = str(data.get("asked")), str(data.get("in_effect")), data.get("parameters")
    if asked not in _DIVIDES or not isinstance(total, int) or total < 1:
        return None
    effective = TITLES.get(in_effect, "no sharding")
    for name, what in _DIVIDES[asked].items():
        held = _counts(data.get(name))
        if not held:
            return None
        if not _is_divided(held, total):
            whole = f"{what} are not partitioned: each rank holds {max(held)} of {total} elements"
            return Sharding(f"{TITLES[asked]} was requested, but {whole}; {effective} is in effect", True)
    if in_effect != asked:
        return Sharding(f"{TITLES[asked]} was requested, but {effective} is in effect", True)
    held = _counts(data.get("optimizer_elements"))
    if not held:
        return None
    on_one = " (one rank: nothing to shard)" if len(held) == 1 and _DIVIDES[asked] else ""
    return Sharding(
        f"{effective} is in effect: each rank holds {max(held)} of {total} elements of the optimizer states{on_one}",
        False,
    )


def _is_divided(held: Sequence[int], total: int) -> bool:
    """Return whether the ranks hold parts. Parts are padded, so the limit is halfway between a part and the whole."""
    return len(held) == 1 or max(held) < (total + total / len(held)) / 2


def _counts(value: object) -> list[int]:
    """Return a list of counts, or an empty list for anything else."""
    if not isinstance(value, list) or not all(isinstance(each, int) and each >= 0 for each in value):
        return []
    return value if any(value) else []


Fp8Verdict = Literal["verified", "requested only", "not FP8", "no evidence"]

NOT_RUNNING = "fp8-not-running"


@dataclass(frozen=True)
class Verification:
    """The verdict on a run. `recipe` is the requested quantization recipe.

    `no evidence` means that the logs contain neither Megatron's precision arguments nor a probe. `ok` is False if there
    is no evidence, if FP8 was requested but nothing shows that it ran, or if the ranks hold full states that should
    have been sharded (`not_partitioned`).
    """

    verdict: Fp8Verdict
    asked: bool
    recipe: str | None
    findings: tuple[Fp8Finding, ...]
    warnings: tuple[str, ...] = ()
    not_partitioned: Fp8Finding | None = None
    # The arguments with the request: Megatron's dump, or the probe's copy of it.
    asked_for: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        if self.not_partitioned is not None:
            return False
        return self.verdict == "verified" or (self.verdict == "not FP8" and not self.asked)

    @property
    def refuted(self) -> bool:
        """Return whether FP8 was requested and the evidence shows that it did not run."""
        return self.asked and self.verdict == "not FP8"

    @property
    def strongest(self) -> Fp8Finding | None:
        """The evidence for the verdict."""
        return next(iter((*_telling(self.findings), *self.findings)), None)

    def as_json(self) -> dict[str, object]:
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "asked": self.asked,
            "recipe": self.recipe,
            "evidence": json_list(self.findings),
            "not_partitioned": self.not_partitioned and self.not_partitioned.text,
            "warnings": list(self.warnings),
        }


def _telling(findings: Sequence[Fp8Finding]) -> list[Fp8Finding]:
    """Return the findings that prove FP8 or its absence."""
    return [finding for finding in findings if finding.shows is not None]


def verify_logs(logs: Sequence[ParsedLog], stated: Mapping[str, object] | None = None) -> Verification:
    """Judge a run by its logs, one per attempt, oldest first (see `verify`)."""
    return verify(attempts_of(logs), stated)


def verify(attempts: LoggedProcesses, stated: Mapping[str, object] | None = None) -> Verification:
    """Judge a run by its processes, oldest first. The last process with a probe decides.

    `stated` are the arguments that the run was submitted with, for logs that do not contain them.
    """
    if not attempts:
        return judge({}, ())
    logged: Mapping[str, object] = {}
    profiles: list[Evidence] = []
    deciding = attempts[-1]
    for log, process in attempts:
        evidence = log.evidence_of(process)
        profiles += of_kind("kernels", evidence)
        logged = process.head.arguments or logged
        if of_kind("probe", evidence):
            deciding = log, process
    log, process = deciding
    evidence = log.evidence_of(process)
    arguments = process.head.arguments or logged
    # Megatron dumps arguments in alphabetical order, so a truncated dump may end before the precision.
    if process.head.arguments_cut and not (arguments.get("fp4") or "fp8" in arguments or "fp8_format" in arguments):
        arguments = {}
    # `parse --seq-length` states nothing else, which does not mean that FP8 was not requested.
    if not arguments and set(stated or ()) - {"seq_length"} and not any(one.data.get("asked") for one in evidence):
        arguments = stated or {}
    found = judge(arguments, of_kind("probe", evidence), profiles[-1:])
    for line in of_kind("sharding", evidence)[-1:]:
        if sharding := judge_sharding(line.data):
            finding = Fp8Finding("sharding", None, sharding.text, line.offset)
            held_whole = finding if sharding.refuted else None
            found = replace(found, findings=(*found.findings, finding), not_partitioned=held_whole)
    return found


def judge(
    arguments: Mapping[str, object], probes: Sequence[Evidence], profiles: Sequence[Evidence] = ()
) -> Verification:
    """Judge by Megatron's argument dump, the probe lines of one process, and a kernel profile if available."""
    asked_for: Mapping[str, Any] = arguments
    if not _states_precision(arguments) and probes:
        asked_for = as_mapping(probes[0].data.get("asked"))
    kind, recipe = _format_and_recipe(asked_for)
    asked = bool(kind)
    if asked:
        recipe = str(recipe)
    warnings: list[str] = []
    findings = list(map(kernels_finding, profiles))
    if probes:
        findings.append(modules_finding(probes, recipe, asked, bool(asked_for.get("fp8_param_gather")), warnings))
    if asked_for:
        text = f"{recipe}, {kind} is requested" if asked else "FP8 is not requested"
        findings.append(Fp8Finding("arguments", None, text))
    verdict = _verdict(findings, asked, warnings)
    return Verification(verdict, asked, recipe, tuple(findings), tuple(warnings), asked_for=asked_for)


def _states_precision(arguments: Mapping[str, object]) -> bool:
    return not {"fp8", "fp4", "fp8_format"}.isdisjoint(arguments)


def _format_and_recipe(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the requested number format (FP4 before FP8) and its recipe, or None for both."""
    if arguments.get("fp4"):
        return arguments["fp4"], _quantization(arguments, "fp4")
    kind = arguments.get("fp8", arguments.get("fp8_format"))
    if kind:
        return kind, _quantization(arguments, "fp8")
    return None, None


def _quantization(arguments: Mapping[str, Any], operands: str) -> Any:
    """Return the name of the quantization recipe, or None if the arguments leave it to Megatron."""
    name = arguments.get(f"{operands}_recipe")
    return recipe_made_by(arguments.get(f"{operands}_quantizer_factory")) if name == CUSTOM else name


def precision_asked_for(args: Mapping[str, object], found: Verification) -> dict[str, object] | None:
    """Describe the requested precision, whether it ran, and the evidence. Return None if the log has no information."""
    if not found.findings:
        return None
    if not _states_precision(args):
        args = found.asked_for
    kind, recipe = _format_and_recipe(args)
    bf16_layers = None
    if args.get("first_last_layers_bf16"):
        bf16_layers = {"start": args.get("num_layers_at_start_in_bf16"), "end": args.get("num_layers_at_end_in_bf16")}
    gathers = args.get("fp8_param_gather") or args.get("fp4_param_gather")
    return {
        "requested": found.asked or bool(kind),
        "recipe": recipe,
        "format": kind,
        "param_gather": bool(gathers and kind),
        "bf16_layers": bf16_layers,
        "verified": found.verdict == "verified",
        "verdict": found.verdict,
        "evidence": found.strongest.kind if found.strongest else "arguments",
        "findings": json_list(found.findings),
        "warnings": list(found.warnings),
    }


def _verdict(findings: Sequence[Fp8Finding], asked: bool, warnings: list[str]) -> Fp8Verdict:
    if not findings:
        return "no evidence"
    telling = _telling(findings)
    if not telling and asked:
        return "requested only"
    if not telling:
        return "not FP8"
    contradicting = len(set(map(attrgetter("shows"), telling))) > 1
    if contradicting:
        warnings.append("the evidence contradicts itself: " + "; ".join(map(attrgetter("text"), telling)))
    if telling[0].shows:
        # FP8 kernels prove FP8, whatever the modules report.
        return "verified"
    if contradicting:
        # The kernels of modules that report FP8 may match none of our patterns.
        return "requested only"
    return "not FP8"


# A plugin's report about a finished run or one of its phases. Takes the processes (oldest first), the arguments that
# the run was submitted with (empty for a log without a run folder), and the manifest.
Verifier = Callable[[LoggedProcesses, Mapping[str, object], Mapping[str, Any]], Sequence[Problem]]


def plugin_problems(
    parts: Sequence[tuple[LoggedProcesses, Mapping[str, object]]], manifest: Mapping[str, Any]
) -> dict[str, list[Problem] | None]:
    """Return the problems that plugins report about a run, by JSON field; None if the plugin is not active.

    `parts` has the processes and arguments of each phase. Each code is reported only once.
    """
    found: dict[str, list[Problem] | None] = dict.fromkeys(plugin_registry.absent("verifications"))
    for name, verifier in plugin_registry.loaded("verifications"):
        by_code: dict[str, Problem] = {}
        for processes, arguments in parts:
            for problem in verifier(processes, arguments, manifest):
                by_code.setdefault(problem.code, problem)
        found[name] = list(by_code.values())
    return found
