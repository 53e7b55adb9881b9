"""The scheduler of Slurm clusters: submission by sbatch, and the states, ends and resumes of all Slurm jobs.

Plugins that submit in another way subclass it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fp8launch.cluster.profile import FOR_SCHEDULER, Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import MACHINE_LACKS, Problem, Severity, UserError, error
from fp8launch.injob.slurm.job import is_impossible
from fp8launch.job.job import Job
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.rundir.registry import job_ids, newest_job
from fp8launch.rundir.run_dir import RunFolder, write_atomically
from fp8launch.schedulers.base import Capabilities, JobState, JobTimes, Scheduler, Submission
from fp8launch.schedulers.slurm import preflight, pyxis, sbatch, slurm_cli, slurm_jobs
from fp8launch.schedulers.slurm.batch_script import array_script, batch_script
from fp8launch.schedulers.slurm.inventory import Site, read_site
from fp8launch.schedulers.slurm.job_comment import text_in
from fp8launch.schedulers.slurm.options import NEUTRAL, sbatch_options, site_comment
from fp8launch.untyped import as_mapping

_HERE = "`--backend local` trains on this machine"
# Settings of a cluster profile for sbatch and srun only.
_SLURM_FIELDS = {
    *FOR_SCHEDULER, "account", "partition", "nodelist", "exclude", "exclusive", "memory", "continue_by", "arrays",
}  # fmt: skip


class SlurmScheduler(Scheduler):
    """A submission's key is the job's comment in Slurm."""

    name = "sbatch"
    capabilities = Capabilities(arrays=True, pyxis=True, holds=True, continue_by=("requeue", "dependency"))
    neutral_requests = NEUTRAL
    # Bash computes with some of these, and then evaluates an index in brackets: a[$(command)].
    script_variables = re.compile(
        r"SLURM_(ARRAY_.*|JOB_ID|JOBID|JOB_NODELIST|JOB_NUM_NODES|JOB_END_TIME|RESTART_COUNT|SUBMIT_DIR|TASKS_PER_NODE)"
    )

    def script(self, job: Job) -> tuple[str, str]:
        return "job.sbatch", batch_script(job)

    def request(self, job: Job) -> dict[str, str | None]:
        return sbatch_options(job)

    def validate(self, job: Job) -> None:
        super().validate(job)
        sbatch_options(job)

    def plan_for_supervisor(self, job: Job) -> dict[str, str]:
        return {"scheduler": "fp8launch.injob.slurm.job:SlurmJob", "comment": site_comment(job.resources)}

    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        return sbatch.submit(run.script, key, comment=site_comment(job.resources))

    def array_groups(self, jobs: Sequence[Job]) -> list[list[int]]:
        return sbatch.groups_alike(jobs)

    def submit_array(self, group: sbatch.Group, key: str, folder: Path, max_running: int | None = None) -> list[str]:
        numbers = f"0-{len(group) - 1}"
        if max_running:
            numbers += f"%{max_running}"
        options = {**sbatch.array_options(group, key, folder), "array": numbers}
        tasks = sbatch.write_tasks(group, key, folder)
        script = folder / "arrays" / f"{key}.sbatch"
        write_atomically(script, array_script(options.items(), str(tasks)))
        job = sbatch.submit(script, key, comment=site_comment(group[0][1].resources))
        return [f"{job}_{index}" for index in range(len(group))]

    def resume(self, run: RunFolder, key: str, exclude: Sequence[str] = ()) -> str:
        return _submit_again(run, key, *([f"--exclude={','.join(exclude)}"] if exclude else []))

    def submit_held(self, run: RunFolder, key: str) -> str:
        return _submit_again(run, key, "--hold")

    def release(self, run: RunFolder) -> bool:
        return slurm_cli.call("scontrol", "release", newest_job(run) or "").returncode == 0

    def is_impossible(self, refusal: UserError) -> bool:
        return any(is_impossible(problem.message) for problem in refusal.problems)

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        return slurm_jobs.find_jobs(keys)

    def recover(self, submissions: Sequence[Submission]) -> dict[RunFolder, str]:
        found = super().recover(submissions)
        for one in submissions:
            job = _job_in_a_log(one)
            if one.run not in found and job is not None:
                found[one.run] = job
        return found

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        return slurm_jobs.states(runs)

    def job_times(self, runs: Sequence[RunFolder]) -> dict[RunFolder, JobTimes]:
        shown = slurm_cli.call("squeue", "-r", "-h", "-o", "%i|%M|%l|%S|%T", "-u", str(os.getuid()), timeout=10)
        times = {}
        for line in shown.stdout.splitlines():
            if line.count("|") != 4:
                continue
            job, elapsed, limit, start, state = line.split("|")
            if state != "PENDING":
                times[job] = JobTimes(elapsed, limit)
            else:
                times[job] = JobTimes("", limit, "" if start == "N/A" else start.replace("T", " "))
        newest = {run: newest_job(run) for run in runs}
        return {run: times[job] for run, job in newest.items() if job in times}

    def cancel(self, runs: Sequence[RunFolder]) -> None:
        slurm_jobs.cancel_runs(runs)

    def problems(self, job: Job, loaded: LoadedRecipe, environment: Mapping[str, str]) -> Iterable[Problem]:
        try:
            sbatch_options(job)
        except UserError as refused:
            return refused.problems
        return preflight.problems(job, loaded, environment)

    def problem_codes(self) -> Mapping[str, Severity]:
        return preflight.CODES

    def require(self) -> None:
        stated = os.environ.get("SLURM_CONF")
        if stated and not Path(stated).is_file():
            message = f"SLURM_CONF is {stated}, which is not a file"
            raise error("no-slurm", message, "SLURM_CONF", f"correct or unset SLURM_CONF; {_HERE}", 3)
        if shutil.which("sbatch") is None:
            found = "sbatch is not installed on this machine"
        elif shutil.which("scontrol") is not None and read_site(stated) is None:
            found = "sbatch is installed here, but it finds no cluster"
        else:
            return
        fix = f"log in to a machine of the cluster; {_HERE}"
        raise error("no-slurm", f"nothing can be submitted: {found}", None, fix, MACHINE_LACKS)

    def is_expected(self, profile: Cluster) -> bool:
        return shutil.which("sbatch") is not None or bool(_SLURM_FIELDS & profile.model_fields_set)

    def has_no_cluster(self, environment: Mapping[str, str]) -> bool:
        if environment.get("SLURM_CONF") or not (shutil.which("sbatch") and shutil.which("scontrol")):
            return False
        return read_site(None) is None

    def answers(self, environment: Mapping[str, str]) -> bool:
        return isinstance(read_site(environment.get("SLURM_CONF")), Site)

    def uses_other_hosts(self, environment: Mapping[str, str]) -> bool:
        site = read_site(environment.get("SLURM_CONF"))
        if not isinstance(site, Site):
            return False
        here = os.uname().nodename.partition(".")[0]
        return any(node.name != here for partition in site.partitions.values() for node in partition.nodes)

    def container_runtimes(self, environment: Mapping[str, str]) -> Iterable[tuple[Runtime, str]]:
        return pyxis.container_runtimes(environment)

    def version(self) -> str | None:
        return slurm_cli.version()


def _submit_again(run: RunFolder, key: str, *options: str) -> str:
    """Submit the script in a run folder, with the comment that its manifest records."""
    comment = text_in(as_mapping(run.manifest().get("slurm")).get("comment"))
    return sbatch.submit(run.script, key, *options, comment=comment)


def _job_in_a_log(submission: Submission) -> str | None:
    """Return the job that began this run and that Slurm has since forgotten: its id is in the name of its log."""
    known = job_ids(submission.run)
    new = [attempt.job_id for attempt in submission.run.attempts() if attempt.job_id not in known]
    is_task = submission.index is not None
    if not new or ("_" in new[-1]) != is_task:
        return None
    return new[-1]
