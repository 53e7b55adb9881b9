"""The option `--rehearse` of `check` and `submit`, defined without importing the code that runs rehearsals."""

from __future__ import annotations

from fp8launch.check.checker import CheckResult
from fp8launch.check.extra_layers import ExtraLayer, LayerRequest
from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import Prepared
from fp8launch.plugins.rehearse.report import notes, verdict


def _run(request: LayerRequest) -> list[CheckResult]:
    from fp8launch.plugins.rehearse.layer import with_rehearsal

    return with_rehearsal(
        request.runs, request.results, request.cluster, request.say, request.progress, asked_by=request.asked_by
    )


def _wanted(run: Prepared, cluster: Cluster) -> bool:
    return cluster.rehearse is not None and run.gpu_hours_at_most >= cluster.rehearse.from_gpu_hours


LAYER = ExtraLayer(
    name="rehearsal",
    doing="rehearsing roles",
    check_help="Also run two steps of Megatron's own code for each role, without a GPU.",
    submit_help="First run two steps of Megatron's own code.",
    run=_run,
    runs_scripts=True,
    profile_field="rehearse.from_gpu_hours",
    wanted=_wanted,
    notes=notes,
    verdict=verdict,
)
