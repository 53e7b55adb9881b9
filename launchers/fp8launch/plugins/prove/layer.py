"""Layers of the check: `--prove` proves runs, `--require-proof` refuses runs that were never proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8launch.check.checker import CheckResult, by_place
from fp8launch.check.extra_layers import ExtraLayer, LayerRequest
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError
from fp8launch.job.prepared import Prepared
from fp8launch.plugins.prove.judge import listed
from fp8launch.plugins.prove.part import onwards_of, parts_of
from fp8launch.plugins.prove.proof import earlier_proof, prove_part
from fp8launch.plugins.prove.report import Proof, merged_json
from fp8launch.plugins.prove.session import Servers
from fp8launch.plugins.prove.work import STEPS
from fp8launch.wording import counted

NAME = "proof"
CODE = "proof"
REQUIRED = "required proof"


@dataclass(frozen=True)
class ProofReport:
    """The proofs of a run's phases; none if it was not proven."""

    proofs: tuple[Proof, ...] = ()

    def as_json(self) -> dict[str, Any]:
        if not self.proofs:
            return {"ok": None, "checks": [], "not_covered": []}
        return merged_json(self.proofs)

    @property
    def details(self) -> str:
        """Return every check of every phase."""
        lines: list[str] = []
        for proof in self.proofs:
            lines += proof.lines()
        return "\n".join(lines)


def _prove(request: LayerRequest) -> list[CheckResult]:
    """Prove the runs that passed the check."""
    sound = sum(result.ok for result in request.results)
    extended = []
    with Servers() as servers, request.progress(STEPS * sound) as done:
        for run, result in zip(request.runs, request.results, strict=True):
            if not result.ok:
                extended.append(_without(result, NAME, "not run: the check has errors"))
                continue
            try:
                parts = parts_of(run, request.say, request.asked_by)
                onwards = onwards_of(parts, ())
                proofs = [prove_part(part, other, servers, done) for part, other in zip(parts, onwards, strict=True)]
            except UserError as refused:
                state = f"not run: {refused.problems[0].message}"
                extended.append(replace(_without(result, NAME, state), exit_code=refused.exit_code))
                continue
            extended.append(_with(result, run, proofs))
    return extended


def _with(result: CheckResult, run: Prepared, proofs: Sequence[Proof]) -> CheckResult:
    found = list(result.problems)
    for proof in proofs:
        for check in proof.checks:
            if not check.ok:
                phase = f"phase {proof.phase}: " if proof.phase else ""
                message = f"{phase}{proof.compared}: {check.name}: {check.detail}"
                if check.differences:
                    message += f" ({listed(check.differences)})"
                fix = f"try {proof.right}" if proof.right else "`fp8launch prove` shows what differs"
                found.append(Problem("error", CODE, message, str(run.loaded.files[-1]), fix))
    report = ProofReport(tuple(proofs))
    problems = tuple(sorted(found, key=by_place))
    layers, extra = {**result.layers, NAME: "ran"}, {**result.extra, NAME: report}
    return replace(result, problems=problems, layers=layers, extra=extra)


def _without(result: CheckResult, name: str, state: str) -> CheckResult:
    return replace(result, layers={**result.layers, name: state}, extra={**result.extra, name: ProofReport()})


def _require(request: LayerRequest) -> list[CheckResult]:
    """Refuse runs of which no equal one was proven; nothing is trained."""
    extended = []
    for run, result in zip(request.runs, request.results, strict=True):
        found = list(result.problems)
        proofs = [earlier_proof(part) for part in parts_of(run, request.say, request.asked_by)]
        if None in proofs:
            message = "no run of this structure was proven on this machine"
            fix = "fp8launch prove RECIPE, or --prove"
            found.append(Problem("error", "no-proof", message, str(run.loaded.files[-1]), fix))
        elif not all(proof.ok for proof in proofs if proof):
            message = "the proof of a run of this structure found differences"
            found.append(
                Problem("error", "no-proof", message, str(run.loaded.files[-1]), "see `fp8launch prove RECIPE`")
            )
        layers = {**result.layers, REQUIRED: "ran"}
        extended.append(replace(result, problems=tuple(sorted(found, key=by_place)), layers=layers))
    return extended


def _wanted(run: Prepared, cluster: Cluster) -> bool:
    return cluster.require_proof


def _verdict(reports: Sequence[ProofReport]) -> str:
    """Say how many runs are proven."""
    if not reports:
        return ""
    proven = sum(bool(report.proofs) and all(proof.ok for proof in report.proofs) for report in reports)
    return f"{proven} of {counted(len(reports), 'run')} proven"


PROVE = ExtraLayer(
    name=NAME,
    doing="proving layouts",
    check_help="Also compare a small model in the recipe's layout with one rank (see `prove`).",
    submit_help="Compare the layout with one rank first.",
    run=_prove,
    verdict=_verdict,
)
REQUIRE = ExtraLayer(
    name=REQUIRED,
    doing="looking up proofs",
    check_help="Refuse a recipe unless `prove` has passed for its structure.",
    submit_help="Refuse runs that `prove` has not passed.",
    run=_require,
    profile_field="require_proof",
    wanted=_wanted,
)
