"""What the core calls for recipes with stages."""

from __future__ import annotations

from pathlib import Path

from fp8launch.injob.supervisor.run_records import json_mapping
from fp8launch.job.job import Job
from fp8launch.job.script import host_python
from fp8launch.plugins.stages.chain import position, resume
from fp8launch.plugins.stages.injob.next_stage import STUDY, next_run
from fp8launch.plugins.stages.linked import prepare
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.recipe_kinds import RecipeKind

STAGES = RecipeKind(prepare, resume, position)
_PROGRAM = '"$code/../plugins/stages/injob/next_stage.py"'


def start_next_stage(job: Job, scheduler: Scheduler) -> str | None:
    """Return the command that releases the next stage at the end of a stage's job; None for other jobs."""
    folder = Path(job.folder or "/")
    if json_mapping(folder.parent / STUDY).get("kind") != "stages" or next_run(folder) is None:
        return None
    half = scheduler.plan_for_supervisor(job)["scheduler"]
    return f'{host_python(job)} {_PROGRAM} "$run_folder" "$attempt" "$ended" {half}'
