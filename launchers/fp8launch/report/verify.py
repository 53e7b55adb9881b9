"""Did what was asked for run? A verdict on FP8 from the evidence in the logs of a run, the strongest first.

kernels    GEMM kernels on FP8 operands, in a profile of one iteration
modules    what each linear layer did in its last forward, and the type of its weights, as the job's own probe read it
arguments  what was asked for; proves nothing, because Megatron trains in bf16 silently where a layer ignores it

Beside it, `sharding`: whether the ranks hold parts of weights and optimizer states, where the job says how much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fp8launch.hardware.quantization import QUANTIZATION
from fp8launch.logs import Evidence, ParsedLog, Process, attempts_of
from fp8launch.report.sharding import judge_sharding
from fp8launch.untyped import as_mapping

Fp8Verdict = Literal["verified", "requested only", "not FP8", "no evidence"]
FindingKind = Literal["kernels", "modules", "arguments", "sharding"]

NOT_RUNNING = "fp8-not-running"


@dataclass(frozen=True)
class Fp8Finding:
    """One piece of evidence: `shows` is True for FP8, False for its absence where it was expected, None for neither."""

    kind: FindingKind
    shows: bool | None
    text: str
    offset: int | None = None

    def as_json(self) -> dict[str, object]:
        return {"kind": self.kind, "shows_fp8": self.shows, "text": self.text}


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
        telling = [finding for finding in self.findings if finding.shows is not None]
        return next(iter((*telling, *self.findings)), None)

    def as_json(self) -> dict[str, object]:
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "asked": self.asked,
            "recipe": self.recipe,
            "evidence": [f.as_json() for f in self.findings],
            "not_partitioned": self.not_partitioned.text if self.not_partitioned else None,
            "warnings": list(self.warnings),
        }


def verify_logs(logs: Sequence[ParsedLog], stated: Mapping[str, object] | None = None) -> Verification:
    """Judge a run by its logs, one per attempt, oldest first; see `verify`."""
    return verify(attempts_of(logs), stated)


def verify(attempts: Sequence[tuple[ParsedLog, Process]], stated: Mapping[str, object] | None = None) -> Verification:
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
        profiles += _of_kind("kernels", evidence)
        logged = process.head.arguments or logged
        if _of_kind("probe", evidence):
            deciding = log, process
    log, process = deciding
    evidence = log.evidence_of(process)
    arguments = process.head.arguments or logged
    # Megatron lists them by name, so `fp4: None` may be the last of them.
    if process.head.arguments_cut and not (arguments.get("fp4") or "fp8" in arguments or "fp8_format" in arguments):
        arguments = {}
    if not arguments and not any(one.data.get("asked") for one in evidence):
        arguments = stated or {}
    found = judge(arguments, _of_kind("probe", evidence), profiles[-1:])
    return _with_sharding(found, _of_kind("sharding", evidence)[-1:])


def _with_sharding(found: Verification, lines: Sequence[Evidence]) -> Verification:
    """Add what the ranks hold."""
    for line in lines:
        judged = judge_sharding(line.data)
        if judged is not None:
            finding = Fp8Finding("sharding", None, judged.text, line.offset)
            refuted = finding if judged.refuted else None
            found = replace(found, findings=(*found.findings, finding), not_partitioned=refuted)
    return found


def _of_kind(kind: str, evidence: Iterable[Evidence]) -> list[Evidence]:
    return [one for one in evidence if one.kind == kind]


def judge(
    arguments: Mapping[str, object], probes: Sequence[Evidence], profiles: Sequence[Evidence] = ()
) -> Verification:
    """Judge by Megatron's argument dump, the probe lines of one process, and the kernel profile if there is one."""
    asked_for: Mapping[str, Any] = arguments
    if not _states_precision(arguments) and probes:
        asked_for = as_mapping(probes[0].data.get("asked"))
    kind = asked_for.get("fp8", asked_for.get("fp8_format"))
    fp4 = asked_for.get("fp4")
    recipe = None
    if fp4:
        recipe = str(asked_for.get("fp4_recipe"))
    elif kind:
        recipe = str(asked_for.get("fp8_recipe"))
    asked = bool(kind or fp4)

    warnings: list[str] = []
    findings = list(map(_kernels, profiles))
    if probes:
        findings.append(_modules(probes, recipe, asked, bool(asked_for.get("fp8_param_gather")), warnings))
    if asked_for:
        text = "FP8 is not requested"
        if asked:
            text = f"{recipe}, {fp4 or kind} is requested"
        findings.append(Fp8Finding("arguments", None, text))
    verdict = _verdict(findings, asked, warnings)
    return Verification(verdict, asked, recipe, tuple(findings), tuple(warnings), asked_for=asked_for)


def _states_precision(arguments: Mapping[str, object]) -> bool:
    return not {"fp8", "fp4", "fp8_format"}.isdisjoint(arguments)


def precision_asked_for(args: Mapping[str, object], found: Verification) -> dict[str, object] | None:
    """Describe what the arguments asked for, whether it ran and how we know; None where the log has neither."""
    if not found.findings:
        return None
    if not _states_precision(args):
        args = found.asked_for
    kind = args.get("fp8", args.get("fp8_format"))
    fp4 = args.get("fp4")
    recipe = None
    if fp4:
        recipe = args.get("fp4_recipe")
    elif kind:
        recipe = args.get("fp8_recipe")
    bf16_layers = None
    if args.get("first_last_layers_bf16"):
        bf16_layers = {"start": args.get("num_layers_at_start_in_bf16"), "end": args.get("num_layers_at_end_in_bf16")}
    gathers = args.get("fp8_param_gather") or args.get("fp4_param_gather")
    evidence: FindingKind = "arguments"
    if found.strongest:
        evidence = found.strongest.kind
    return {
        "requested": found.asked or bool(kind or fp4),
        "recipe": recipe,
        "format": fp4 or kind or None,
        "param_gather": bool(gathers and (kind or fp4)),
        "bf16_layers": bf16_layers,
        "verified": found.verdict == "verified",
        "verdict": found.verdict,
        "evidence": evidence,
        "findings": [finding.as_json() for finding in found.findings],
        "warnings": list(found.warnings),
    }


def _verdict(findings: Sequence[Fp8Finding], asked: bool, warnings: list[str]) -> Fp8Verdict:
    if not findings:
        return "no evidence"
    telling = [finding for finding in findings if finding.shows is not None]
    if not telling and asked:
        return "requested only"
    if not telling:
        return "not FP8"
    contradicting = len({finding.shows for finding in telling}) > 1
    if contradicting:
        warnings.append("the evidence contradicts itself: " + "; ".join(finding.text for finding in telling))
    if telling[0].shows:
        # FP8 kernels can only come from FP8, whatever the modules report.
        return "verified"
    if contradicting:
        # The kernels of modules that report FP8 may match none of our patterns.
        return "requested only"
    return "not FP8"


def _kernels(profile: Evidence) -> Fp8Finding:
    data = profile.data
    families = as_mapping(data.get("families"))
    counts = {name: _number(as_mapping(families.get(name)).get("count")) for name in ("fp8_gemm", "fp4_gemm", "gemm")}
    time = {name: _number(as_mapping(families.get(name)).get("ms")) for name in counts}
    low = counts["fp8_gemm"] + counts["fp4_gemm"]
    where = f"in iteration {data.get('iteration')} on rank {data.get('rank')}"
    if not any(counts.values()):
        return Fp8Finding("kernels", None, f"no GEMM kernel was recognised {where}", profile.offset)
    kind = "FP8"
    if counts["fp4_gemm"]:
        kind = "FP4"
    share = (time["fp8_gemm"] + time["fp4_gemm"]) / max(sum(time.values()), 1e-9)
    text = f"{low:.0f} {kind} GEMM kernels of {sum(counts.values()):.0f} {where}, {share:.0%} of GEMM time"
    return Fp8Finding("kernels", low > 0, text, profile.offset)


def _modules(
    probes: Sequence[Evidence], recipe: str | None, asked: bool, param_gather: bool, warnings: list[str]
) -> Fp8Finding:
    found = _module_counts(probes)
    sums = found.sums
    if asked:
        warnings += found.unexplained
    if asked and param_gather and not sums["fp8_weights"]:
        warnings.append("FP8 parameter gather is requested, but no weight is an FP8 tensor")
    ran_as = ", ".join(sorted(found.recipes))
    quantization = QUANTIZATION.get(recipe or "")
    expected = quantization.te_classes if quantization else ()
    if expected and found.recipes and found.recipes.isdisjoint(expected):
        warnings.append(f"{recipe} is requested, but the modules ran {ran_as}")
    text = f"{sums['fp8']:.0f} of {sums['linears']:.0f} linears ran in FP8"
    if ran_as:
        text += f" with {ran_as}"
    if sums["explained"]:
        text += f", {sums['explained']:.0f} in higher precision ({_stated(found.reasons)})"
    if sums["unexplained"]:
        text += f", {sums['unexplained']:.0f} without a reason"
    text += f"; {sums['fp8_weights']:.0f} of {sums['weights']:.0f} weights are FP8 tensors"
    if len(probes) > 1:
        text += f" ({len(probes)} model-parallel places)"
    return Fp8Finding("modules", sums["fp8"] > 0 and not found.stage_without_fp8, text, probes[0].offset)


@dataclass
class _ModuleCounts:
    """Sums over the probes: `reasons` counts the linears kept in higher precision by why, `unexplained` has sentences.

    `stage_without_fp8` says that a place has linears of which none ran in FP8, for no known reason. A pipeline stage
    may hold only layers that are to stay in bf16.
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
        for group in _mappings(probe.data.get("groups")):
            _count_group(group, found)
    return found


def _count_group(group: Mapping[str, Any], found: _ModuleCounts) -> None:
    """Add one group of modules that are alike."""
    if group.get("ran_fp8"):
        found.recipes.add(str(group.get("recipe")))
    elif group.get("role") != "linear":
        return
    elif group.get("why"):
        found.reasons[str(group["why"])] += int(_number(group.get("n"))) or 1
    else:
        modules = str(group.get("modules"))
        if group.get("layers"):
            modules += f" (layers {group['layers']})"
        found.unexplained.append(f"{modules}, {group.get('class')}: not in FP8, for no known reason")


def _stated(reasons: Counter[str]) -> str:
    """The reasons, with counts where there are several; a log of an older probe may state none."""
    if not reasons:
        return "the log does not contain the reason"
    if len(reasons) == 1:
        return next(iter(reasons))
    return "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())


def _mappings(value: object) -> list[Mapping[str, Any]]:
    """The mappings in a list; none where the value is not a list."""
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def _number(value: object) -> float:
    """A number as it is; 0 for NaN and for anything else."""
    if isinstance(value, int | float) and value == value:
        return float(value)
    return 0.0
