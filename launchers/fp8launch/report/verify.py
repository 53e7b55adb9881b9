"""Did FP8 run? A verdict from what the logs of a run show, the strongest evidence first. Pure.

kernels    GEMM kernels on FP8 operands, in a profile of one iteration
modules    what each linear did in its last forward, and what its weights are, as the job's own probe read it
arguments  what was asked for, which proves nothing: Megatron trains in bf16 without a word where a layer ignores it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fp8launch.logs import Evidence, ParsedLog, Process

Word = Literal["verified", "requested only", "not FP8"]
Kind = Literal["kernels", "modules", "arguments"]

# Transformer Engine's recipe class for each of Megatron's recipe names.
RECIPES = {
    "delayed": ("DelayedScaling", "TEDelayedScaling"),
    "tensorwise": ("Float8CurrentScaling", "torchao.tensorwise"),
    "blockwise": ("Float8BlockScaling",),
    "mxfp8": ("MXFP8BlockScaling",),
    "nvfp4": ("NVFP4BlockScaling",),
}
NOT_RUNNING = "fp8-not-running"


@dataclass(frozen=True)
class Finding:
    """One piece of evidence: `shows` is True for FP8, False for its absence where it was to be, None for neither."""

    kind: Kind
    shows: bool | None
    text: str
    offset: int | None = None

    def as_json(self) -> dict[str, object]:
        return {"kind": self.kind, "shows_fp8": self.shows, "text": self.text}


@dataclass(frozen=True)
class Verification:
    """`ok` unless FP8 was asked for and is not shown to run. `recipe` is Megatron's name of what was asked for."""

    verdict: Word
    asked: bool
    recipe: str | None
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict == "verified" or (self.verdict == "not FP8" and not self.asked)

    @property
    def refuted(self) -> bool:
        """FP8 was asked for, and the evidence shows that it did not run."""
        return self.asked and self.verdict == "not FP8"

    @property
    def strongest(self) -> Finding | None:
        """What the verdict rests on."""
        return next((f for f in self.findings if f.shows is not None), self.findings[0] if self.findings else None)

    def as_json(self) -> dict[str, object]:
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "asked": self.asked,
            "recipe": self.recipe,
            "evidence": [f.as_json() for f in self.findings],
            "warnings": list(self.warnings),
        }


def verify_logs(logs: Sequence[ParsedLog]) -> Verification:
    """The verdict on a run from its logs, one per attempt, oldest first."""
    return verify([(log, process) for log in logs for process in log.processes])


def verify(attempts: Sequence[tuple[ParsedLog, Process]]) -> Verification:
    """The verdict on a run from its processes, oldest first; the last one that left evidence speaks for the run."""
    by_process = [(p.head.arguments, log.evidence_of(p)) for log, p in attempts]
    telling = [(a, e) for a, e in by_process if any(x.kind == "probe" for x in e)] or by_process
    arguments, evidence = telling[-1] if telling else ({}, ())
    arguments = arguments or next((a for a, _ in reversed(by_process) if a), {})
    profiles = [x for _, e in by_process for x in e if x.kind == "kernels"]
    return judge(arguments, [e for e in evidence if e.kind == "probe"], profiles[-1:])


def judge(
    arguments: Mapping[str, object], probes: Sequence[Evidence], profiles: Sequence[Evidence] = ()
) -> Verification:
    """The verdict from Megatron's argument dump, the probe lines of one process, and the kernel profile if any."""
    asked_for: Mapping[str, Any] = arguments
    if not ({"fp8", "fp4", "fp8_format"} & set(arguments)) and probes:
        asked_for = _mapping(probes[0].data.get("asked"))
    kind = asked_for.get("fp8", asked_for.get("fp8_format"))
    fp4 = asked_for.get("fp4")
    recipe = str(asked_for.get("fp4_recipe" if fp4 else "fp8_recipe")) if kind or fp4 else None
    asked = bool(kind or fp4)

    warnings: list[str] = []
    findings = [_kernels(profile) for profile in profiles]
    if probes:
        findings.append(_modules(probes, recipe, asked, bool(asked_for.get("fp8_param_gather")), warnings))
    if asked_for:
        text = f"{recipe}, {fp4 or kind} is asked for" if asked else "FP8 is not asked for"
        findings.append(Finding("arguments", None, text))
    return Verification(_verdict(findings, asked, warnings), asked, recipe, tuple(findings), tuple(warnings))


def _verdict(findings: Sequence[Finding], asked: bool, warnings: list[str]) -> Word:
    shown = [f.shows for f in findings if f.shows is not None]
    if not shown:
        return "requested only" if asked else "not FP8"
    if True in shown and False in shown:
        warnings.append(
            "the evidence contradicts itself: " + "; ".join(f.text for f in findings if f.shows is not None)
        )
        # FP8 kernels can only come from FP8; modules that say so without a kernel may be shown by no pattern of ours.
        return "verified" if shown[0] else "requested only"
    return "verified" if shown[0] else "not FP8"


def _kernels(profile: Evidence) -> Finding:
    data = profile.data
    families = _mapping(data.get("families"))
    counts = {name: _number(_mapping(families.get(name)).get("count")) for name in ("fp8_gemm", "fp4_gemm", "gemm")}
    time = {name: _number(_mapping(families.get(name)).get("ms")) for name in counts}
    low = counts["fp8_gemm"] + counts["fp4_gemm"]
    where = f"in iteration {data.get('iteration')} on rank {data.get('rank')}"
    if not any(counts.values()):
        return Finding("kernels", None, f"no GEMM kernel was recognised {where}", profile.offset)
    kind = "FP4" if counts["fp4_gemm"] else "FP8"
    share = (time["fp8_gemm"] + time["fp4_gemm"]) / max(sum(time.values()), 1e-9)
    text = f"{low:.0f} {kind} GEMM kernels of {sum(counts.values()):.0f} {where}, {share:.0%} of GEMM time"
    return Finding("kernels", low > 0, text, profile.offset)


def _modules(
    probes: Sequence[Evidence], recipe: str | None, asked: bool, param_gather: bool, warnings: list[str]
) -> Finding:
    sums = dict.fromkeys(("linears", "fp8", "explained", "unexplained", "weights", "fp8_weights"), 0.0)
    missing = False
    ran_as: set[str] = set()
    for probe in probes:
        mine = {name: _number(_mapping(probe.data.get("totals")).get(name)) for name in sums}
        for name, value in mine.items():
            sums[name] += value
        # A pipeline stage may hold nothing but layers that are to stay in bf16.
        missing = missing or (mine["fp8"] == 0 and mine["unexplained"] > 0)
        for group in _list(probe.data.get("groups")):
            if group.get("ran_fp8"):
                ran_as.add(str(group.get("recipe")))
            elif asked and group.get("role") == "linear" and not group.get("why"):
                layers = f" (layers {group['layers']})" if group.get("layers") else ""
                warnings.append(
                    f"{group.get('modules')}{layers}, {group.get('class')}: not in FP8, for no known reason"
                )
    if asked and param_gather and not sums["fp8_weights"]:
        warnings.append("FP8 parameter gather is asked for, and no weight is an FP8 tensor")
    expected = RECIPES.get(recipe or "")
    if expected and ran_as and not ran_as & set(expected):
        warnings.append(f"{recipe} is asked for, and the modules ran {', '.join(sorted(ran_as))}")
    how = f" with {', '.join(sorted(ran_as))}" if ran_as else ""
    stayed = f", {sums['explained']:.0f} in higher precision for a stated reason" if sums["explained"] else ""
    stayed += f", {sums['unexplained']:.0f} without a reason" if sums["unexplained"] else ""
    text = (
        f"{sums['fp8']:.0f} of {sums['linears']:.0f} linears ran in FP8{how}{stayed}; "
        f"{sums['fp8_weights']:.0f} of {sums['weights']:.0f} weights are FP8 tensors"
    )
    shows = sums["fp8"] > 0 and not missing
    if len(probes) > 1:
        text += f" ({len(probes)} model-parallel places)"
    return Finding("modules", shows, text, probes[0].offset)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Mapping[str, Any]]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0
