"""Findings on FP8 from one kind of evidence: the kernels of a profile, or the modules that the job's probe read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fp8launch.hardware.quantization import QUANTIZATION
from fp8launch.logs import Evidence
from fp8launch.untyped import as_mapping

FindingKind = Literal["kernels", "modules", "arguments", "sharding"]


@dataclass(frozen=True)
class Fp8Finding:
    """One piece of evidence: `shows` is True for FP8, False for its absence where it was expected, None for neither."""

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
    where = f"in iteration {data.get('iteration')} on rank {data.get('rank')}"
    if not any(counts.values()):
        return Fp8Finding("kernels", None, f"no GEMM kernel was recognised {where}", profile.offset)
    kind = "FP8"
    if counts["fp4_gemm"]:
        kind = "FP4"
    share = (time["fp8_gemm"] + time["fp4_gemm"]) / max(sum(time.values()), 1e-9)
    text = f"{low:.0f} {kind} GEMM kernels of {sum(counts.values()):.0f} {where}, {share:.0%} of GEMM time"
    return Fp8Finding("kernels", low > 0, text, profile.offset)


def modules_finding(
    probes: Sequence[Evidence], recipe: str | None, asked: bool, param_gather: bool, warnings: list[str]
) -> Fp8Finding:
    """Count the linears that ran in FP8; problems are added to `warnings`."""
    found = _module_counts(probes)
    sums = found.sums
    if asked:
        warnings += found.unexplained
    if asked and param_gather and not sums["fp8_weights"]:
        warnings.append("FP8 parameter gather is requested, but no weight is an FP8 tensor")
    ran_as = ", ".join(sorted(found.recipes))
    quantization = QUANTIZATION.get(recipe or "")
    expected: Sequence[str] = ()
    if quantization:
        expected = quantization.te_classes
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
    """Sums over the probes: `reasons` counts the linears in higher precision by reason, `unexplained` has sentences.

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
