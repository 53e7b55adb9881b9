"""The common part of all schedulers on Slurm: states, cancelling, finding jobs, resuming. Only submitting differs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import MACHINE_LACKS, Problem, error
from fp8launch.job.batch_script import batch_script
from fp8launch.job.job import Job
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.rundir.registry import job_ids, newest_job
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import Finding, JobState, JobTimes, Scheduler, Submission
from fp8launch.schedulers.site_offers import SiteOffers
from fp8launch.schedulers.slurm import cancellation, job_states, sbatch_calls, slurm_cli
from fp8launch.schedulers.slurm.arrays import groups_alike
from fp8launch.untyped import as_mapping

_HERE = "`--backend local` trains on this machine"
# What a cluster profile says to sbatch and srun alone.
_SLURM_FIELDS = {
    "account", "partition", "qos", "reservation", "constraint", "nodelist", "exclude", "gpus", "gres_type", "segment",
    "exclusive", "memory", "requeue", "continue_by", "arrays", "mpi", "options",
}  # fmt: skip


class SlurmScheduler(Scheduler):
    """A submission's key is the job's comment in Slurm."""

    def script(self, job: Job) -> tuple[str, str]:
        return "job.sbatch", batch_script(job)

    def array_groups(self, jobs: Sequence[Job]) -> list[list[int]]:
        return groups_alike(jobs)

    def resume(self, run: RunFolder, key: str, exclude: Sequence[str] = ()) -> str:
        options = []
        if exclude:
            options.append(f"--exclude={','.join(exclude)}")
        comment = as_mapping(run.manifest().get("slurm")).get("comment")
        return sbatch_calls.sbatch(run.script, key, *options, comment=comment)

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        return sbatch_calls.find_jobs(keys)

    def submit_script(self, script: Path, key: str, options: Sequence[str] = (), comment: str | None = None) -> str:
        return sbatch_calls.sbatch(script, key, *options, comment=comment)

    def waiting_or_running(self, jobs: Sequence[str]) -> list[str]:
        # Not asked by number: squeue calls the number of a job that ended long ago an error.
        shown = slurm_cli.call("squeue", "-h", "-o", "%F", "-u", str(os.getuid()))
        if shown.returncode:
            raise error("slurm-silent", slurm_cli.trouble(shown), None, "try again when Slurm answers", MACHINE_LACKS)
        known = shown.stdout.split()
        return [job for job in jobs if job in known]

    def array_limit(self) -> int:
        return slurm_cli.array_limit()

    def recover(self, submissions: Sequence[Submission]) -> dict[RunFolder, str]:
        found = super().recover(submissions)
        for one in submissions:
            job = _job_in_a_log(one)
            if one.run not in found and job is not None:
                found[one.run] = job
        return found

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        return job_states.states(runs)

    def job_times(self, runs: Sequence[RunFolder]) -> dict[RunFolder, JobTimes]:
        shown = slurm_cli.call("squeue", "-r", "-h", "-o", "%i|%M|%l|%S|%T", "-u", str(os.getuid()), timeout=10)
        times = {}
        for line in shown.stdout.splitlines():
            if line.count("|") != 4:
                continue
            job, elapsed, limit, start, state = line.split("|")
            if state != "PENDING":
                times[job] = JobTimes(elapsed, limit)
            elif start == "N/A":
                times[job] = JobTimes("", limit)
            else:
                times[job] = JobTimes("", limit, start.replace("T", " "))
        found = {}
        for run in runs:
            newest = newest_job(run)
            if newest in times:
                found[run] = times[newest]
        return found

    def cancel(self, runs: Sequence[RunFolder]) -> None:
        cancellation.cancel_runs(runs)

    def problems(self, job: Job, loaded: LoadedRecipe, environment: Mapping[str, str]) -> Iterable[Problem]:
        from fp8launch.schedulers.slurm import preflight

        return preflight.problems(job, loaded, environment)

    def require(self) -> None:
        from fp8launch.schedulers.slurm.inventory import read_site

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

    def answers(self, environment: Mapping[str, str]) -> bool:
        from fp8launch.schedulers.slurm.inventory import Site, read_site

        return isinstance(read_site(environment.get("SLURM_CONF")), Site)

    def uses_other_hosts(self, environment: Mapping[str, str]) -> bool:
        from fp8launch.schedulers.slurm.inventory import Site, read_site

        site = read_site(environment.get("SLURM_CONF"))
        if not isinstance(site, Site):
            return False
        here = os.uname().nodename.partition(".")[0]
        names: set[str] = set()
        for partition in site.partitions.values():
            names.update(map(attrgetter("name"), partition.nodes))
        return bool(names - {here})

    def describe(self, cluster: Cluster, environment: Mapping[str, str]) -> Iterable[Finding]:
        from fp8launch.schedulers.slurm import describe

        return describe.describe(cluster, environment)

    def container_runtimes(self, environment: Mapping[str, str]) -> Iterable[tuple[str, str]]:
        from fp8launch.schedulers.slurm import describe

        return describe.container_runtimes(environment)

    def offers(self) -> SiteOffers:
        from fp8launch.schedulers.slurm import offers

        return offers.site_offers()

    def refusal(self, options: Mapping[str, str]) -> str | None:
        from fp8launch.schedulers.slurm import offers

        return offers.refusal(options)

    def version(self) -> str | None:
        return slurm_cli.version()


def _job_in_a_log(submission: Submission) -> str | None:
    """Return the job that began this run and that Slurm has forgotten since: the name of its log has its id."""
    run = submission.run
    known = job_ids(run)
    new = [attempt.job_id for attempt in run.attempts() if attempt.job_id not in known]
    is_task = submission.index is not None
    if not new or ("_" in new[-1]) != is_task:
        return None
    return new[-1]
