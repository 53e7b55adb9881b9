"""Cluster profiles: site-specific sbatch options, mounts and environment variables.

`--cluster` names a profile, which is a YAML file, or one in `~/.config/fp8launch/clusters/`. The default is
`default.yaml` in this folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import Problem, did_you_mean, error
from fp8launch.injob.ownership import why_others_may_change
from fp8launch.recipe.field_types import EnvName, LaunchMode, Positive, RuleCode, matching
from fp8launch.recipe.sections import Section
from fp8launch.recipe.yaml_source import numbers_as_written, read_yaml

# A value in a `#SBATCH` line: one word without quotes or control characters.
Option = Annotated[
    str, matching(r"^[A-Za-z0-9_.,:;@/%+=\[\]()&|*!~^-]+$", "one word without quotes, as Slurm reads it")
]
# sbatch accepts quotes there, but a backslash escapes even between them.
OptionText = Annotated[str, matching(r"^[^\x00-\x1f\x7f\\]+$", "one line without a backslash")]
OptionName = Annotated[str, matching(r"^[a-z][a-z0-9-]*$", "the long name of an sbatch option without its dashes")]
# No leading dash, because ssh would read an option.
Host = Annotated[str, matching(r"^[A-Za-z0-9_\[][A-Za-z0-9_.:@%\[\]-]*$", "a name or an address")]


class Login(Section):
    """How the system's ssh reaches a login node, for `fp8launch --remote CLUSTER`."""

    host: Host = Field(description="name or address, or a Host of your ssh configuration")
    user: Host | None = None
    port: Positive | None = None
    identity: str | None = Field(default=None, description="file of a private key")
    config: str | None = Field(default=None, description="ssh configuration file to use instead of your own")
    command: str = Field(
        default="fp8launch", description="command that starts fp8launch there; a path if it is not on PATH"
    )


class Rehearse(Section):
    """The runs that `submit` rehearses without an option (docs/rehearsal.md)."""

    from_gpu_hours: float = Field(ge=0, description="submit rehearses runs that may cost at least this many GPU-hours")


class Network(Section):
    """The links between GPUs, for predicted steps. The defaults describe NVIDIA's reference system with this GPU."""

    gbit_per_gpu: float | None = Field(default=None, gt=0, description="network speed of one GPU, Gbit/s one way")
    nvlink_domain: Positive | None = Field(default=None, description="GPUs that NVLink connects: 8, or 72 in a rack")


class Costs(Section):
    """Prices, power and reliability, for the cost and the finish date in `estimate` (docs/speed_model.md)."""

    gpu_hour: float | None = Field(default=None, ge=0, description="price of an allocated GPU-hour")
    kwh: float | None = Field(default=None, ge=0, description="price of a kWh, if `gpu_hour` does not include it")
    currency: str = Field(default="USD", description="currency of the prices")
    gpu_watts: float | None = Field(default=None, gt=0, description="power of a GPU with its share of the node")
    pue: float = Field(default=1.0, ge=1, description="power of the site over the power of its machines")
    queue_hours: float = Field(default=0.0, ge=0, description="time that a job waits in the queue")
    gpu_mtbf_hours: float | None = Field(
        default=None, gt=0, description="mean time between failures of one GPU with its share of node and network"
    )
    restart_minutes: float = Field(default=0.0, ge=0, description="from the start of a job to its first iteration")
    save_seconds: float = Field(default=0.0, ge=0, description="time for which a checkpoint stops the training")


class Storage(Section):
    """Folders on the shared file system, for paths of recipes and commands that are not absolute."""

    data: str | None = Field(default=None, description="folder of datasets: relative `data.blend`, `data build --out`")
    checkpoints: str | None = Field(
        default=None, description="folder of checkpoints: one below it for each run with a relative `checkpoint.dir`"
    )


class Cluster(Section):
    """The settings of one cluster. All are optional; an empty profile uses the cluster's defaults."""

    name: str = ""
    description: str = ""
    account: Option | None = None
    partition: Option | None = None
    qos: Option | None = None
    reservation: Option | None = None
    constraint: Option | None = None
    nodelist: Option | None = None
    exclude: Option | None = None
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gres_type: Option | None = None
    segment: Positive | None = None
    exclusive: bool = False
    memory: Option | None = None
    requeue: bool | None = None
    continue_by: Literal["requeue", "dependency"] | None = Field(
        default=None,
        description="how the next attempt starts: the same job again (requeue), or a job waiting for it (dependency)",
    )
    rules: dict[RuleCode, Literal["go-on", "free", "exclude", "stop"]] = Field(
        default={}, description="action when an attempt ends, by cause (docs/survival.md)"
    )
    ask_gpu_hours: float = Field(default=500, description="submit asks for confirmation above this number of GPU-hours")
    network: Network | None = Field(default=None, description="links between GPUs, for predictions")
    costs: Costs | None = Field(default=None, description="prices, power and reliability, for estimate")
    rehearse: Rehearse | None = Field(default=None, description="submit rehearses runs from a cost on")
    require_proof: bool = Field(default=False, description="submit refuses runs whose structure `prove` has not passed")
    arrays: bool = Field(default=True, description="submit the points of a grid as job arrays")
    mpi: Option | None = None
    launch: LaunchMode | None = None
    health_check: bool = Field(default=False, description="test every node before training, unless the recipe sets it")
    options: dict[OptionName, OptionText | int | bool] = Field(default={}, description="any other sbatch option")
    setup: list[str] = Field(default=[], description="shell lines run on the batch host before the training step")
    env: dict[EnvName, str | int | float] = Field(default={})
    runtime: Runtime | None = None
    images: dict[str, str] = Field(default={}, description="this site's path or URI of each image, by the image's name")
    mounts: list[str] = Field(default=[])
    python: str | None = Field(default=None, description="interpreter of jobs without a container")
    run_root: str | None = Field(default=None, description="folder on the shared file system for run folders")
    tracking: dict[str, Any] = Field(default={}, description="`tracking` of recipes that do not state it themselves")
    storage: Storage = Field(default=Storage.model_construct(), description="folders for data and checkpoints")
    shared_folders: list[str] = Field(
        default=[], description="folders that every node sees; a run root outside all of them is refused"
    )
    trust_run_root: bool = Field(
        default=False, description="submit even if the group or owner of the run root may replace a job's files"
    )
    ssh: Login | None = Field(default=None, description="login node, for machines that reach the cluster only by ssh")
    # Options of the command line in place of the profile's, by the field that they replace.
    _origins: Mapping[str, str] = PrivateAttr(default={})

    @property
    def environment(self) -> dict[str, str]:
        """The profile's environment variables as text."""
        return {name: str(value) for name, value in self.env.items()}

    def stated_by(self, origins: Mapping[str, str]) -> Cluster:
        """Return this profile, which blames these options of the command line for the fields that they replace."""
        changed = self.model_copy()
        changed._origins = origins
        return changed

    def blamed(self, problem: Problem) -> Problem:
        """Return a problem with this profile, at the command line's option if that states the field."""
        name = (problem.where or "").removeprefix("cluster profile: ")
        if option := self._origins.get(name):
            fix = (problem.fix or "").replace(f"set `{name}:` in the cluster profile", f"set {option}")
            return replace(problem, where=option, fix=fix.replace("in the cluster profile", "on the command line"))
        for option in self._origins.values():
            key = option.rpartition("--")[2].removeprefix("slurm ")
            # Slurm's own words name the option, as in "unrecognized option '--mail-tpe=END'".
            if problem.code == "slurm-refuses" and f"--{key}" in problem.message:
                return replace(problem, where=option, fix=f"correct or remove {option}")
        return problem


# Settings that only the scheduler reads; settings that every scheduler knows are in `job.job.Resources`.
FOR_SCHEDULER = ("qos", "reservation", "constraint", "gpus", "gres_type", "segment", "requeue", "mpi", "options")


def config_folder() -> Path:
    """Return the folder of the user's cluster profiles."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "fp8launch" / "clusters"


def fork_schema_file(version: str) -> Path:
    """Return the file for the flags of a fork, which a Megatron version names after a plus sign: 0.19+fork."""
    return config_folder().with_name("forks") / f"{version.partition('+')[2] or 'none'}.json"


def cluster_files() -> dict[str, Path]:
    """Return the user's profiles by name."""
    return {path.stem: path for path in sorted(config_folder().glob("*.yaml"))}


def load_cluster(name: str | None, option: str = "--cluster") -> Cluster:
    """Load the profile named by `option` (a name or a file); without a name `default`, else an empty profile."""
    files = cluster_files()
    if name is None:
        if "default" not in files:
            return Cluster.model_construct()
        path = _of_this_user(files["default"])
    elif name in files:
        path = _of_this_user(files[name])
    elif "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
    else:
        known = ", ".join(files) or "none"
        raise error(
            "unknown-cluster",
            f"no cluster profile '{name}' in {config_folder()} (profiles there: {known})",
            option,
            did_you_mean(name, files, "pass a file, or a name that `fp8launch clusters` lists"),
        )
    cluster = Cluster.from_node(read_yaml(path).changed(("env",), numbers_as_written))
    if cluster.name:
        return cluster
    return cluster.model_copy(update={"name": path.stem})


def _of_this_user(path: Path) -> Path:
    """Raise UserError for a named profile that other users could have written, because it may contain shell lines."""
    reason = why_others_may_change(path)
    if reason is not None:
        message = f"other users could change the shell lines of this cluster profile: {reason}"
        fix = f"make it your own (chmod go-w), or pass it by its path after you have read it: --cluster {path}"
        raise error("not-yours", message, str(path), fix)
    return path
