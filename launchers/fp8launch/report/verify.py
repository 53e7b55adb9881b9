"""Did what was asked for run? A verdict on FP8 from the evidence in the logs of a run, the strongest first.

kernels    GEMM kernels on FP8 operands, in a profile of one iteration
modules    what each linear layer did in its last forward, and the type of its weights, as the job's own probe read it
arguments  what was asked for; proves nothing, because Megatron trains in bf16 silently where a layer ignores it

Beside it, `sharding`: whether the ranks hold parts of weights and optimizer states, where the job says how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from fp8launch.logs import Evidence, LoggedProcesses, ParsedLog, attempts_of
from fp8launch.logs.evidence import of_kind
from fp8launch.report.fp8_evidence import FindingKind, Fp8Finding, kernels_finding, modules_finding
from fp8launch.report.json_values import json_list
from fp8launch.report.sharding import judge_sharding
from fp8launch.untyped import as_mapping

Fp8Verdict = Literal["verified", "requested only", "not FP8", "no evidence"]

NOT_RUNNING = "fp8-not-running"


@dataclass(frozen=True)
class Verification:
    """The verdict on a run. `recipe` is Megatron's name of what was asked for.

    `no evidence` means that the logs hold neither Megatron's arguments of the precision nor a probe. `ok` is False for
    it, where FP8 was asked for and is not shown to run, and where the ranks hold whole what they were to divide
    (`not_partitioned`).
    """

    verdict: Fp8Verdict
    asked: bool
    recipe: str | None
    findings: tuple[Fp8Finding, ...]
    warnings: tuple[str, ...] = ()
    not_partitioned: Fp8Finding | None = None
    # Where that was read: Megatron's arguments, or what the probe says was asked for.
    asked_for: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        if self.not_partitioned is not None:
            return False
        return self.verdict == "verified" or (self.verdict == "not FP8" and not self.asked)

    @property
    def refuted(self) -> bool:
        """FP8 was asked for, and the evidence shows that it did not run."""
        return self.asked and self.verdict == "not FP8"

    @property
    def strongest(self) -> Fp8Finding | None:
        """The evidence for the verdict."""
        ordered = (*_telling(self.findings), *self.findings)
        if not ordered:
            return None
        return ordered[0]

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
    """The findings that show FP8 or its absence."""
    return [finding for finding in findings if finding.shows is not None]


def verify_logs(logs: Sequence[ParsedLog], stated: Mapping[str, object] | None = None) -> Verification:
    """Judge a run by its logs, one per attempt, oldest first; see `verify`."""
    return verify(attempts_of(logs), stated)


def verify(attempts: LoggedProcesses, stated: Mapping[str, object] | None = None) -> Verification:
    """Judge a run by its processes, oldest first; the last one with a probe decides.

    `stated` are the arguments that it was submitted with, for logs that do not hold them.
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
    # Megatron lists them by name, so `fp4: None` may be the last of them.
    if process.head.arguments_cut and not (arguments.get("fp4") or "fp8" in arguments or "fp8_format" in arguments):
        arguments = {}
    if not arguments and not any(one.data.get("asked") for one in evidence):
        arguments = stated or {}
    found = judge(arguments, of_kind("probe", evidence), profiles[-1:])
    return _with_sharding(found, of_kind("sharding", evidence)[-1:])


def _with_sharding(found: Verification, lines: Sequence[Evidence]) -> Verification:
    """Add what the ranks hold."""
    for line in lines:
        judged = judge_sharding(line.data)
        if judged is not None:
            finding = Fp8Finding("sharding", None, judged.text, line.offset)
            found = replace(found, findings=(*found.findings, finding), not_partitioned=None)
            if judged.refuted:
                found = replace(found, not_partitioned=finding)
    return found


def judge(
    arguments: Mapping[str, object], probes: Sequence[Evidence], profiles: Sequence[Evidence] = ()
) -> Verification:
    """Judge by Megatron's argument dump, the probe lines of one process, and the kernel profile if there is one."""
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
        text = "FP8 is not requested"
        if asked:
            text = f"{recipe}, {kind} is requested"
        findings.append(Fp8Finding("arguments", None, text))
    verdict = _verdict(findings, asked, warnings)
    return Verification(verdict, asked, recipe, tuple(findings), tuple(warnings), asked_for=asked_for)


def _states_precision(arguments: Mapping[str, object]) -> bool:
    return not {"fp8", "fp4", "fp8_format"}.isdisjoint(arguments)


def _format_and_recipe(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """The number format that arguments ask for, FP4 before FP8, and its recipe; None for both if they ask for none."""
    if arguments.get("fp4"):
        return arguments["fp4"], arguments.get("fp4_recipe")
    kind = arguments.get("fp8", arguments.get("fp8_format"))
    if kind:
        return kind, arguments.get("fp8_recipe")
    return None, None


def precision_asked_for(args: Mapping[str, object], found: Verification) -> dict[str, object] | None:
    """Describe what the arguments asked for, whether it ran and how we know; None where the log has neither."""
    if not found.findings:
        return None
    if not _states_precision(args):
        args = found.asked_for
    kind, recipe = _format_and_recipe(args)
    bf16_layers = None
    if args.get("first_last_layers_bf16"):
        bf16_layers = {"start": args.get("num_layers_at_start_in_bf16"), "end": args.get("num_layers_at_end_in_bf16")}
    gathers = args.get("fp8_param_gather") or args.get("fp4_param_gather")
    evidence: FindingKind = "arguments"
    if found.strongest:
        evidence = found.strongest.kind
    return {
        "requested": found.asked or bool(kind),
        "recipe": recipe,
        "format": kind,
        "param_gather": bool(gathers and kind),
        "bf16_layers": bf16_layers,
        "verified": found.verdict == "verified",
        "verdict": found.verdict,
        "evidence": evidence,
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
        # FP8 kernels can only come from FP8, whatever the modules report.
        return "verified"
    if contradicting:
        # The kernels of modules that report FP8 may match none of our patterns.
        return "requested only"
    return "not FP8"
