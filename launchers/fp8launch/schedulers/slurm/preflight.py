"""Reasons for which the local Slurm cluster would reject a job or never start it, found without submitting.

Slurm's own words are often one sentence for ten reasons ("Requested node configuration is not available"), and some
jobs it takes and never starts. So partitions and nodes are compared with the request first; `sbatch --test-only` has
the last word on everything else.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from fp8launch.diagnostics import Problem, Severity, advice_on, did_you_mean, errors_in
from fp8launch.injob.supervisor.slurm_cli import will_pass
from fp8launch.job.batch_script import batch_script
from fp8launch.job.job import Job
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.schedulers.slurm.accounts import account_names, associations, default_account, qos_names
from fp8launch.schedulers.slurm.inventory import (
    TIMEOUT,
    Node,
    Partition,
    Silent,
    Site,
    minutes,
    read_site,
)
from fp8launch.schedulers.slurm.preflight_gpus import PROFILE, first_of, gpu_problem, listed

SUBMIT_TIMEOUT = 30.0
CODES: Mapping[str, Severity] = {
    **dict.fromkeys(("slurm-partition", "slurm-time-limit", "slurm-nodes", "slurm-constraint", "slurm-gpus"), "error"),
    **dict.fromkeys(("slurm-account", "slurm-qos", "slurm-refuses"), "error"),
    **dict.fromkeys(("slurm-silent", "slurm-partition-down", "slurm-partition-closed"), "warning"),
    **dict.fromkeys(("slurm-nodes-down", "slurm-gpu-model"), "warning"),
}


def problems(job: Job, loaded: LoadedRecipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Problems that the local Slurm has with a job; none on a machine without Slurm. Submits nothing.

    The job needs no run folder yet: Slurm does not look at it before the job starts. `loaded` is its recipe,
    `environment` the submitting shell's. A controller that does not answer is a warning, `slurm-silent`.
    """
    site = read_site(environment.get("SLURM_CONF"))
    if site is None:
        return
    if isinstance(site, Silent):
        yield _silent(site.words)
        return
    found = list(_against(site, job, loaded))
    yield from found
    refusal = test_only(batch_script(job))
    if refusal is not None and not any(_explains(problem, refusal) for problem in found):
        yield _refused(refusal, dict(job.slurm), loaded)


def test_only(script: str) -> str | None:
    """Slurm's words against a batch script; None when it would take it. Nothing is submitted."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        done = slurm_cli.call("sbatch", "--test-only", file.name, timeout=SUBMIT_TIMEOUT)
    if done.returncode == 0:
        return None
    prefix = r"^(sbatch: )?(error: )?(allocation failure: )?"
    return slurm_cli.reasons(done.stderr, prefix) or "sbatch gave no reason"


def _explains(problem: Problem, refusal: str) -> bool:
    """Return whether a problem that was already reported is why Slurm refuses.

    A refusal has one reason. `--test-only` also refuses for nodes that are down or drained, where sbatch would let the
    job wait for them.
    """
    return problem.severity == "error" or (problem.code == "slurm-nodes-down" and "node configuration" in refusal)


def _silent(words: str) -> Problem:
    return Problem(
        "warning",
        "slurm-silent",
        f"the Slurm controller cannot check the job now: {words}",
        PROFILE,
        "retry later; `scontrol ping` shows whether it answers",
    )


def _against(site: Site, job: Job, loaded: LoadedRecipe) -> Iterator[Problem]:
    """Requests that none of the job's partitions can satisfy; one of several partitions is enough."""
    asked = dict(job.slurm).get("partition")
    if asked is None:
        chosen = site.defaults
        if not chosen:
            names = ", ".join(site.partitions) or "none"
            message = f"this cluster has no default partition, and none is set; partitions: {names}"
            yield Problem("error", "slurm-partition", message, PROFILE, "set `partition:` in the cluster profile")
            return
    else:
        chosen = []
        for name in asked.split(","):
            if name in site.partitions:
                chosen.append(site.partitions[name])
            else:
                yield _no_partition(name, site)
    verdicts = [list(_against_one(partition, job, loaded)) for partition in chosen]
    # Slurm takes whichever of several partitions it can.
    yield from min(verdicts, key=lambda found: (bool(errors_in(found)), len(found)), default=[])


def _no_partition(name: str, site: Site) -> Problem:
    message = f"this cluster has no partition '{name}'; partitions: {', '.join(site.partitions)}"
    fix = did_you_mean(name, site.partitions, "set `partition:` in the cluster profile to one of them")
    return Problem("error", "slurm-partition", message, f"{PROFILE}: partition", fix)


def _against_one(partition: Partition, job: Job, loaded: LoadedRecipe) -> Iterator[Problem]:
    if partition.state not in ("UP", "DOWN"):
        message = f"partition {partition.name} is {partition.state} and does not accept jobs"
        yield Problem("error", "slurm-partition", message, f"{PROFILE}: partition", "choose another partition")
    elif partition.state == "DOWN":
        message = f"partition {partition.name} is DOWN: it queues jobs and starts none"
        yield Problem(
            "warning", "slurm-partition-down", message, f"{PROFILE}: partition", "choose another partition, or wait"
        )
    yield from _closed(partition, job)
    yield from _time(partition, job, loaded)
    yield from _nodes(partition, job, loaded)


def _closed(partition: Partition, job: Job) -> Iterator[Problem]:
    """Warn of a partition that does not admit the job's account or QOS: Slurm lets such a job in, where it waits.

    A site's job_submit plugin may still change all three.
    """
    options = dict(job.slurm)
    account = options.get("account")
    if account is None and (partition.accounts.restricts or partition.qos.restricts):
        account = default_account()
    if account is not None and not partition.accounts.admits(account):
        yield _closed_to(partition, f"account {account}", f"accounts {partition.accounts}", "account")
    if not partition.qos.restricts:
        return
    qos = options.get("qos")
    if qos is None:
        qos = next((one.default_qos for one in associations() if one.account == account), None)
    if qos is not None and not partition.qos.admits(qos):
        yield _closed_to(partition, f"QOS {qos}", f"QOS {partition.qos}", "qos")


def _closed_to(partition: Partition, used: str, admitted: str, field: str) -> Problem:
    message = f"partition {partition.name} is closed to {used}, so the job would wait forever; it admits {admitted}"
    fix = f"choose another partition, or set `{field}:` in the cluster profile to one that it admits"
    return Problem("warning", "slurm-partition-closed", message, f"{PROFILE}: partition", fix)


def _time(partition: Partition, job: Job, loaded: LoadedRecipe) -> Iterator[Problem]:
    options = dict(job.slurm)
    text = options.get("time") or ""
    asked, limit = minutes(text), partition.max_minutes
    if asked is None or limit is None or asked <= limit or _qos_lifts(options.get("qos"), "PartitionTimeLimit"):
        return
    # Most sites let such a job in (EnforcePartLimits=NO), where it waits for ever.
    yield Problem(
        "error",
        "slurm-time-limit",
        f"the time limit is {text}, but partition {partition.name} ends jobs after {_clock(limit)}",
        loaded.where("resources", "time"),
        f"set resources.time to {_clock(limit)} or less, or choose another partition",
    )


def _nodes(partition: Partition, job: Job, loaded: LoadedRecipe) -> Iterator[Problem]:
    where = loaded.where("resources", "nodes")
    if job.nodes > partition.total_nodes:
        message = f"the job needs {job.nodes} nodes, but partition {partition.name} has {partition.total_nodes}"
        yield Problem("error", "slurm-nodes", message, where, f"use --nodes {partition.total_nodes} or less")
        return
    yield from _node_limits(partition, job, where)
    if not partition.nodes:
        return
    yield from _constraint(partition, job)
    problem, fitting = gpu_problem(partition, job, loaded)
    if problem is not None:
        yield problem
    else:
        yield from _nodes_out_of_service(partition, fitting, job, where)


def _node_limits(partition: Partition, job: Job, where: str) -> Iterator[Problem]:
    wanted, name, limit = job.nodes, partition.name, partition.max_nodes
    if limit is not None and wanted > limit and not _qos_lifts(dict(job.slurm).get("qos"), "PartitionMaxNodes"):
        message = f"the job needs {wanted} nodes, but partition {name} allows {limit} per job"
        yield Problem("error", "slurm-nodes", message, where, f"use --nodes {limit} or less, or another partition")
    if wanted < partition.min_nodes:
        message = (
            f"the job needs {wanted} nodes, but partition {name} accepts only jobs of {partition.min_nodes} or more"
        )
        yield Problem("error", "slurm-nodes", message, where, f"use --nodes {partition.min_nodes} or more")


def _constraint(partition: Partition, job: Job) -> Iterator[Problem]:
    features = _features(dict(job.slurm).get("constraint") or "")
    known: set[str] = set()
    for node in partition.nodes:
        known |= node.features
    for feature in sorted(features - known):
        message = f"no node of partition {partition.name} has the feature '{feature}'; features: {listed(known)}"
        fix = did_you_mean(feature, known, "correct `constraint:` in the cluster profile")
        yield Problem("error", "slurm-constraint", message, f"{PROFILE}: constraint", fix)


def _nodes_out_of_service(partition: Partition, fitting: Sequence[Node], job: Job, where: str) -> Iterator[Problem]:
    out = [node for node in fitting if not node.in_service]
    up = len(fitting) - len(out)
    if job.nodes > up:
        states = first_of([f"{node.name} {node.state}" for node in out], 8)
        fix = f"use --nodes {up} or less" if up else None
        message = (
            f"the job needs {job.nodes} nodes, but only {up} of the {len(fitting)} suitable ones in partition "
            f"{partition.name} are in service: it will wait for the others ({states})"
        )
        yield Problem("warning", "slurm-nodes-down", message, where, fix)


def _features(constraint: str) -> set[str]:
    """The names in a constraint such as `[rack1|rack2]&ib*4`; those of counts and operators are none."""
    return {word for word in re.findall(r"[\w.:/=-]+", re.sub(r"\*\d+", "", constraint)) if not word.isdigit()}


def _qos_lifts(qos: str | None, flag: str) -> bool:
    """A QOS can lift the limits of a partition."""
    if qos is None:
        return False
    shown = slurm_cli.call("sacctmgr", "-n", "-P", "show", "qos", qos, "format=flags", timeout=TIMEOUT)
    return shown.returncode == 0 and flag in shown.stdout


def _refused(words: str, options: Mapping[str, str | None], loaded: LoadedRecipe) -> Problem:
    """Slurm's refusal, with what this user may use where that is the reason."""
    if will_pass(words):
        return _silent(words)
    if slurm_cli.waits_for_nodes(words):
        message = (
            f"the Slurm controller has just started and waits for its nodes, so it rejects the job for now: {words}"
        )
        return Problem("warning", "slurm-silent", message, PROFILE, "run the check again in a minute")
    account, qos = options.get("account"), options.get("qos")
    low = words.lower()
    if "account" in low and "combination" in low:
        accounts = account_names()
        message = "no account is set, and you have no default account"
        if account:
            message = f"you cannot use account '{account}'"
        if accounts:
            message += f"; your accounts: {listed(accounts)}"
        fix = did_you_mean(account or "", accounts, "set `account:` in the cluster profile")
        return Problem("error", "slurm-account", message, f"{PROFILE}: account", fix)
    if "qos" in low and "invalid" in low:
        allowed = qos_names()
        message = f"Slurm does not let you use QOS '{qos}'"
        if allowed:
            message += f"; you may use: {listed(allowed)}"
        fix = did_you_mean(qos or "", allowed, "set `qos:` in the cluster profile to one that you may use")
        return Problem("error", "slurm-qos", message, f"{PROFILE}: qos", fix)
    fixes = {
        "group not permitted": "choose another partition: this one admits only the members of certain groups",
        "policy": "lower resources.time or nodes, or choose another `qos:`; `sacctmgr show qos` shows the limits",
        "reservation": "correct `reservation:` in the cluster profile; `scontrol show reservation` lists them",
        "node name": "correct `nodelist:` or `exclude:` in the cluster profile",
        "node configuration": "lower cpus_per_task, gpus_per_node or `memory:`, or choose another partition",
        "unrecognized option": "this Slurm does not have the option; correct `options:` in the cluster profile",
    }
    if named := [f"`{name}:`" for name in ("nodelist", "exclude") if options.get(name)]:
        # Slurm has the same words for too few nodes and for nodes that are too small.
        other = fixes["node configuration"]
        fixes["node configuration"] = f"leave the job more nodes in {' and '.join(named)}, or {other}"
    advice = advice_on(words, fixes, "run `sbatch --test-only` on the rendered script for details")
    return Problem("error", "slurm-refuses", f"Slurm would reject the job: {words}", loaded.where("resources"), advice)


def _clock(minutes: int) -> str:
    days, rest = divmod(minutes, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    if days:
        return f"{days}-{clock}"
    return clock
