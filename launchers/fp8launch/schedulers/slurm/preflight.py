"""Find out, without submitting, why the local Slurm cluster would reject a job or never start it.

Slurm often has one message for ten reasons ("Requested node configuration is not available"), and it accepts some jobs
that it never starts. So partitions and nodes are compared with the request first; `sbatch --test-only` has the last
word on everything else.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8launch.diagnostics import Problem, Severity, advice_on, did_you_mean, errors_in, nearest
from fp8launch.injob.slurm.commands import will_pass
from fp8launch.job.job import Job
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.schedulers.slurm.batch_script import batch_script
from fp8launch.schedulers.slurm.inventory import (
    Node,
    Partition,
    Silent,
    Site,
    associations,
    default_account,
    flags_of_qos,
    gpu_model,
    minutes,
    number,
    read_site,
)
from fp8launch.schedulers.slurm.options import Options, sbatch_options
from fp8launch.wording import counted

PROFILE = "cluster profile"
SUBMIT_TIMEOUT = 30.0
CODES: Mapping[str, Severity] = {
    **dict.fromkeys(("slurm-partition", "slurm-time-limit", "slurm-nodes", "slurm-constraint", "slurm-gpus"), "error"),
    **dict.fromkeys(("slurm-account", "slurm-qos", "slurm-refuses"), "error"),
    **dict.fromkeys(("slurm-silent", "slurm-partition-down", "slurm-partition-closed"), "warning"),
    **dict.fromkeys(("slurm-nodes-down", "slurm-gpu-model"), "warning"),
}


def problems(job: Job, loaded: LoadedRecipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Return the problems that the local Slurm has with a job; none on a machine without Slurm. Submits nothing.

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
        yield _refused(refusal, sbatch_options(job), loaded)


def test_only(script: str) -> str | None:
    """Return Slurm's reason to refuse a batch script; None if it would accept it. Nothing is submitted."""
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

    A refusal has one reason. `--test-only` also refuses a job if nodes are down or drained, while sbatch would let the
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
    """Yield requests that none of the job's partitions can satisfy; one of several partitions is enough."""
    options = sbatch_options(job)
    chosen = []
    if job.resources.queue is None:
        chosen = site.defaults
        if not chosen:
            names = ", ".join(site.partitions) or "none"
            message = f"this cluster has no default partition, and none is set; partitions: {names}"
            yield Problem("error", "slurm-partition", message, PROFILE, "set `partition:` in the cluster profile")
    else:
        for name in job.resources.queue.split(","):
            if name in site.partitions:
                chosen.append(site.partitions[name])
                continue
            message = f"this cluster has no partition '{name}'; partitions: {', '.join(site.partitions)}"
            fix = did_you_mean(name, site.partitions, "set `partition:` in the cluster profile to one of them")
            yield Problem("error", "slurm-partition", message, f"{PROFILE}: partition", fix)
    verdicts = [list(_against_one(partition, job, options, loaded)) for partition in chosen]
    # Of several partitions, Slurm uses any that fits.
    yield from min(verdicts, key=lambda found: (bool(errors_in(found)), len(found)), default=[])


def _against_one(partition: Partition, job: Job, options: Options, loaded: LoadedRecipe) -> Iterator[Problem]:
    where = f"{PROFILE}: partition"
    if partition.state == "DOWN":
        message = f"partition {partition.name} is DOWN: it queues jobs and starts none"
        yield Problem("warning", "slurm-partition-down", message, where, "choose another partition, or wait")
    elif partition.state != "UP":
        message = f"partition {partition.name} is {partition.state} and does not accept jobs"
        yield Problem("error", "slurm-partition", message, where, "choose another partition")
    yield from _closed(partition, options)
    yield from _time(partition, options, loaded)
    yield from _nodes(partition, job, options, loaded)


def _closed(partition: Partition, options: Options) -> Iterator[Problem]:
    """Warn of a partition that does not admit the job's account or QOS: Slurm accepts such a job and lets it wait.

    A site's job_submit plugin may still change all three.
    """
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


def _time(partition: Partition, options: Options, loaded: LoadedRecipe) -> Iterator[Problem]:
    text = options.get("time") or ""
    asked, limit = minutes(text), partition.max_minutes
    if asked is None or limit is None or asked <= limit or _qos_lifts(options, "PartitionTimeLimit"):
        return
    days, rest = divmod(limit, 24 * 60)
    clock = (f"{days}-" if days else "") + f"{rest // 60:02d}:{rest % 60:02d}:00"
    # Most sites let such a job in (EnforcePartLimits=NO), where it waits forever.
    message = f"the time limit is {text}, but partition {partition.name} ends jobs after {clock}"
    fix = f"set resources.time to {clock} or less, or choose another partition"
    yield Problem("error", "slurm-time-limit", message, loaded.where("resources", "time"), fix)


def _nodes(partition: Partition, job: Job, options: Options, loaded: LoadedRecipe) -> Iterator[Problem]:
    where, needs = loaded.where("resources", "nodes"), f"the job needs {counted(job.nodes, 'node')}, but"
    name, most = partition.name, partition.max_nodes
    if job.nodes > partition.total_nodes:
        message = f"{needs} partition {name} has {partition.total_nodes}"
        yield Problem("error", "slurm-nodes", message, where, f"use --nodes {partition.total_nodes} or less")
        return
    if most is not None and job.nodes > most and not _qos_lifts(options, "PartitionMaxNodes"):
        message = f"{needs} partition {name} allows {most} per job"
        yield Problem("error", "slurm-nodes", message, where, f"use --nodes {most} or less, or another partition")
    if job.nodes < partition.min_nodes:
        message = f"{needs} partition {name} accepts only jobs of {partition.min_nodes} or more"
        yield Problem("error", "slurm-nodes", message, where, f"use --nodes {partition.min_nodes} or more")
    if not partition.nodes:
        return
    yield from _constraint(partition, options)
    problem, fitting = _gpu_problem(partition, job, options, loaded)
    if problem is not None:
        yield problem
        return
    out = [node for node in fitting if not node.in_service]
    up = len(fitting) - len(out)
    if job.nodes > up:
        states = _first_of([f"{node.name} {node.state}" for node in out], 8)
        message = (
            f"{needs} only {up} of the {len(fitting)} suitable ones in partition {name} are in service: it will wait "
            f"for the others ({states})"
        )
        yield Problem("warning", "slurm-nodes-down", message, where, f"use --nodes {up} or less" if up else None)


def _constraint(partition: Partition, options: Options) -> Iterator[Problem]:
    # The features in a constraint such as `[rack1|rack2]&ib*4`, without counts and operators.
    constraint = re.sub(r"\*\d+", "", options.get("constraint") or "")
    features = {word for word in re.findall(r"[\w.:/=-]+", constraint) if not word.isdigit()}
    known = {feature for node in partition.nodes for feature in node.features}
    for feature in sorted(features - known):
        message = f"no node of partition {partition.name} has the feature '{feature}'; features: {_listed(known)}"
        fix = did_you_mean(feature, known, "correct `constraint:` in the cluster profile")
        yield Problem("error", "slurm-constraint", message, f"{PROFILE}: constraint", fix)


def _gpu_problem(
    partition: Partition, job: Job, options: Options, loaded: LoadedRecipe
) -> tuple[Problem | None, Sequence[Node]]:
    """Return the problem of the GPUs that the job requests, and the nodes that have enough of them."""
    kind, count = _asked_gpus(options)
    if not count:
        return None, partition.nodes
    fitting = [node for node in partition.nodes if node.gpus_of(kind) >= count]
    if len(fitting) >= job.nodes:
        return _other_gpus(fitting, kind, loaded, partition), fitting
    name = partition.name
    kinds = sorted({kind for node in partition.nodes for kind in node.gpus})
    if not kinds:
        message = f"the job needs {counted(count, 'GPU')} per node, but Slurm knows no GPUs in partition {name}"
        fix = (
            "choose a partition with GPUs; if its nodes have GPUs that Slurm does not manage, set `gpus: none` in the "
            "cluster profile"
        )
        return Problem("error", "slurm-gpus", message, f"{PROFILE}: gpus", fix), fitting
    if kind is not None and kind not in kinds:
        return _no_such_gpus(kind, kinds, name), fitting
    most = max(node.gpus_of(kind) for node in partition.nodes)
    have, fix = f"its nodes have {most}", f"set resources.gpus_per_node to {most} or less"
    if fitting:
        have, fix = f"{len(fitting)} of its nodes have as many", f"use --nodes {len(fitting)} or less"
    gpus = f"{kind} GPUs" if kind else "GPUs"
    message = f"the job needs {job.nodes} x {count} {gpus}, but in partition {name} {have}"
    return Problem("error", "slurm-gpus", message, loaded.where("resources", "gpus_per_node"), fix), fitting


def _no_such_gpus(kind: str, kinds: Sequence[str], partition: str) -> Problem:
    have = _listed(k or "some without a type" for k in kinds)
    message = f"the job needs GPUs of type '{kind}', but partition {partition} has {have}"
    near = kinds[0] if len(kinds) == 1 else nearest(kind, kinds)
    fix = "remove `gres_type:`"
    if near:
        fix = f"set `gres_type: {near}`"
    elif any(kinds):
        fix = "correct `gres_type:`"
    return Problem("error", "slurm-gpus", message, f"{PROFILE}: gres_type", f"{fix} in the cluster profile")


def _other_gpus(nodes: Sequence[Node], kind: str | None, loaded: LoadedRecipe, partition: Partition) -> Problem | None:
    """Warn if the nodes' GPU types show that they have other GPUs than the recipe is for."""
    wanted = loaded.recipe.resources.gpu
    types = {type for node in nodes for type in node.gpus if type}
    if kind is not None:
        types &= {kind}
    models = set(filter(None, map(gpu_model, types)))
    if not models or wanted in models or len(models) < len(types):
        return None
    message = f"the recipe is for {wanted}, but the GPUs of partition {partition.name} are {_listed(types)}"
    where = loaded.where("resources", "gpu")
    return Problem("warning", "slurm-gpu-model", message, where, f"set resources.gpu to {sorted(models)[0]}")


def _asked_gpus(options: Options) -> tuple[str | None, int]:
    """Return the GPU type and the count per node that a job requests."""
    text = options.get("gpus-per-node") or ""
    if not text:
        resources = (options.get("gres") or "").split(",")
        text = next((one.removeprefix("gpu:") for one in resources if one.startswith("gpu:")), "")
    kind, _, count = text.rpartition(":")
    return kind or None, number(count) or 0


def _qos_lifts(options: Options, flag: str) -> bool:
    """Return whether the job's QOS lifts this limit of the partition."""
    qos = options.get("qos")
    return qos is not None and flag in flags_of_qos(qos)


def _refused(words: str, options: Options, loaded: LoadedRecipe) -> Problem:
    """Describe Slurm's refusal, with the accounts or QOS that this user may use instead."""
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
        accounts = [one.account for one in associations()]
        message = "no account is set, and you have no default account"
        if account:
            message = f"you cannot use account '{account}'"
        if accounts:
            message += f"; your accounts: {_listed(accounts)}"
        fix = did_you_mean(account or "", accounts, "set `account:` in the cluster profile to one that you may use")
        return Problem("error", "slurm-account", message, f"{PROFILE}: account", fix)
    if "qos" in low and "invalid" in low:
        allowed = {qos for one in associations() for qos in one.qos}
        message = f"Slurm does not let you use QOS '{qos}'"
        if allowed:
            message += f"; you may use: {_listed(allowed)}"
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
        # Slurm prints the same message for too few nodes and for nodes that are too small.
        other = fixes["node configuration"]
        fixes["node configuration"] = f"leave the job more nodes in {' and '.join(named)}, or {other}"
    advice = advice_on(words, fixes, "run `sbatch --test-only` on the rendered script for details")
    return Problem("error", "slurm-refuses", f"Slurm would reject the job: {words}", loaded.where("resources"), advice)


def _listed(names: Iterable[str]) -> str:
    """Return sorted names for a message."""
    return _first_of(sorted(names), 12) or "none"


def _first_of(words: Sequence[str], most: int) -> str:
    """Return the first `most` words, with dots for the others."""
    if len(words) > most:
        words = [*words[:most], "..."]
    return ", ".join(words)
