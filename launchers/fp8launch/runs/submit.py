"""From a recipe's name to a submitted run."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8launch.backends import slurm
from fp8launch.backends.base import Backend
from fp8launch.job.cluster import Cluster, Runtime
from fp8launch.job.images import local_path
from fp8launch.job.job import Job
from fp8launch.job.plan import plan, probe_runtime
from fp8launch.megatron.phases import Phase, phases_of
from fp8launch.megatron.schema import normalize
from fp8launch.megatron.translate import Layout, MegatronArgs, layout, translate
from fp8launch.problems import Problem, UserError, error
from fp8launch.recipe.load import LoadedRecipe, load_recipe
from fp8launch.recipe.schema import FlagValue
from fp8launch.recipe.write_yaml import write_yaml
from fp8launch.runs.attempts import SURVIVE
from fp8launch.runs.disk import Busy, held
from fp8launch.runs.folder import MANIFEST, RunFolder, create_run_folder
from fp8launch.runs.provenance import Origin, image_record, origin_of
from fp8launch.runs.store import default_root, remember_root
from fp8launch.runs.submission import HELD_SECONDS, adopt, content_key, cut_off, now, opening, record_job, submit_job
from fp8launch.runs.survival import survival_text
from fp8launch.secrecy import redacted, refuse_secrets

__all__ = [
    "Prepared", "make_run", "new_run_id", "now", "origin", "plan_run", "prepare", "record_job", "resolved_yaml",
    "run_root", "submit",
]  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """A recipe that is ready to be planned: loaded, translated, and found to divide.

    Of a recipe with phases, arguments and layout are those of the first.
    """

    loaded: LoadedRecipe
    args: MegatronArgs
    layout: Layout
    phases: tuple[Phase, ...] = ()

    @property
    def parts(self) -> tuple[Prepared, ...]:
        """What is checked and reckoned by itself: each phase, or the one that there is."""
        return tuple(Prepared(one.loaded, one.args, one.layout) for one in self.phases) or (self,)

    @property
    def jobs_at_most(self) -> int:
        """Time limits that the run may use: its attempts, and one more for each phase after the first."""
        return self.loaded.recipe.survive.attempts + len(self.parts) - 1

    @property
    def gpu_hours_at_most(self) -> float:
        """What the run can cost: its GPUs for every time limit that it may use; attempts that do not count aside."""
        return self.loaded.recipe.resources.gpu_hours * self.jobs_at_most


def prepare(name: str, overrides: Sequence[str] = (), nodes: int | None = None) -> Prepared:
    """Load and translate a recipe, for another number of nodes if given. Raises UserError with every problem."""
    loaded = load_recipe(name, overrides)
    if nodes is not None:
        loaded = load_recipe(name, [*overrides, *_for_nodes(loaded, nodes)])
    phases = phases_of(loaded)
    if phases:
        return Prepared(loaded, phases[0].args, phases[0].layout, phases)
    args = translate(loaded)
    return Prepared(loaded, args, layout(args, loaded))


def _for_nodes(loaded: LoadedRecipe, nodes: int) -> list[str]:
    """Overrides that put a recipe on `nodes` nodes; in weak scaling the global batch grows with them."""
    recipe = loaded.recipe
    changes = [f"resources.nodes={nodes}"]
    own = recipe.resources.nodes
    batches: dict[tuple[str, str], FlagValue] = {("batch", "global"): recipe.batch.global_}
    for flag, value in recipe.megatron.items():
        if normalize(flag) == "global_batch_size":
            batches["megatron", flag] = value
    for path, batch in batches.items():
        if not isinstance(batch, int) or recipe.batch.scaling != "weak":
            continue
        if batch * nodes % own:
            raise error(
                "batch-size",
                f"global batch {batch} on {own} nodes does not scale to a whole number on {nodes}",
                loaded.where(*path),
                "set batch.global, or batch.scaling: strong",
            )
        changes.append(f"{'.'.join(path)}={batch * nodes // own}")
    return changes


def run_root(cluster: Cluster, stated: str | None) -> Path:
    """Where run folders go: `--run-root`, else the cluster profile, else the default."""
    root = stated or cluster.run_root
    return local_path(os.path.expandvars(root), "the run root") if root else default_root()


def new_run_id(name: str) -> str:
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def plan_run(prepared: Prepared, cluster: Cluster, folder: Path, backend: Backend) -> Job:
    """The job of a run that will really be submitted: runtime probed, image, mounts and secrets checked."""
    recipe = prepared.loaded.recipe
    missing = [name for name in recipe.secrets if not os.environ.get(name)]
    if missing:
        raise UserError(
            Problem(
                "error",
                "secret-missing",
                f"the secret {name} is not set in this shell",
                prepared.loaded.where("secrets", i),
                f"export {name}=... before submitting; it is passed on by name and written nowhere",
            )
            for i, name in enumerate(recipe.secrets)
            if name in missing
        )
    if backend.name == "local" and recipe.survive.attempts > 1:
        raise error(
            "local-attempts",
            "a run on this machine is one attempt: there is no time limit to outlive",
            prepared.loaded.where("survive", "attempts"),
            "leave it out, or submit to Slurm",
        )
    runtime: Runtime = "none"
    if recipe.container.image is not None:
        runtime = probe_runtime(cluster, slurm.clean_environment())
        if backend.name == "local" and runtime == "pyxis":
            runtime = "none"
    return plan(prepared.loaded, prepared.args, cluster, folder, phases=prepared.phases, runtime=runtime)


def submit(
    prepared: Prepared, cluster: Cluster, root: Path, backend: Backend, checked: dict[str, Any] | None = None
) -> RunFolder:
    """Make the run folder and submit its job. What was made is kept when Slurm refuses, for the error to point at.

    A submission of the same that was cut off is completed instead. `checked` is what the check found, for the manifest.
    """
    name = prepared.loaded.recipe.name
    content = content_key(prepared)
    cut = cut_off(root, name, content, backend)
    folder = cut.path if cut else root / new_run_id(name)
    try:
        with held(folder, HELD_SECONDS) if cut else nullcontext():
            if cut and adopt([cut], backend):
                return cut
            job = plan_run(prepared, cluster, folder, backend)
            entries = {"check": checked, "content": content, "submission": opening(folder.name)}
            run = make_run(prepared, cluster, job, backend, origin(prepared, backend), replace=bool(cut), **entries)
        remember_root(root)
        with held(folder, HELD_SECONDS):
            submit_job(run, job, backend)
    except Busy:
        raise error(
            "run-busy", f"another launcher is submitting {folder.name}", str(folder), "try again in a minute", 3
        ) from None
    return run


def origin(prepared: Prepared, backend: Backend) -> Origin:
    """Where a run of this recipe comes from, for its manifest."""
    return origin_of(prepared.loaded.files[-1], None if backend.name == "local" else slurm.version())


def make_run(
    prepared: Prepared,
    cluster: Cluster,
    job: Job,
    backend: Backend,
    origin: Origin,
    replace: bool = False,
    **entries: Any,
) -> RunFolder:
    """The run folder of a planned job, with everything but Slurm's answer. `entries` go into the manifest."""
    folder = Path(job.folder or "")
    name, text = backend.script(job)
    files = {name: text, "recipe.yaml": resolved_yaml(prepared)}
    survival = survival_text(prepared.loaded, prepared.args, cluster, job)
    if survival is not None and backend.name != "local":
        files[SURVIVE] = survival
    manifest = {**_manifest(prepared, cluster, job, backend, origin), **entries}
    refuse_secrets({**files, MANIFEST: json.dumps(manifest)}, job.secrets)
    if origin.diff:
        files["git.diff"] = redacted(origin.diff, job.secrets)
    return create_run_folder(folder.parent, folder.name, files, manifest, replace)


def resolved_yaml(prepared: Prepared) -> str:
    """The recipe with everything that it extends, in the recipe format."""
    return write_yaml(_plain(prepared))


def _plain(prepared: Prepared) -> dict[str, Any]:
    plain: dict[str, Any] = prepared.loaded.tree.plain()
    # A run is one point: submitted again, it must not become the whole study.
    plain = {key: value for key, value in plain.items() if key not in ("axes", "nodes")}
    order = ["name", "description"]
    return {**{k: plain[k] for k in order if k in plain}, **{k: v for k, v in plain.items() if k not in order}}


def _manifest(prepared: Prepared, cluster: Cluster, job: Job, backend: Backend, origin: Origin) -> dict[str, Any]:
    recipe = prepared.loaded.recipe
    return {
        "format": 1,
        "run_id": Path(job.folder or "").name,
        "name": recipe.name,
        "created": now(),
        "backend": backend.name,
        "host": os.uname().nodename if backend.name == "local" else None,
        "jobs": [],
        "command": sys.argv[1:],
        "recipe": _plain(prepared),
        "recipe_files": [str(path) for path in prepared.loaded.files],
        "megatron": {"version": prepared.args.version, "argv": list(prepared.args.argv)},
        "phases": [phase_entry(one) for one in prepared.phases],
        "layout": asdict(prepared.layout),
        "gpu": recipe.resources.gpu,
        "environment": dict(job.environment),
        "secrets": list(job.secrets),
        "slurm": dict(job.slurm),
        "cluster": cluster.name or None,
        "python": job.python,
        "image": image_record(job.container.image if job.container else None),
        "runtime": job.container.runtime if job.container else None,
        "git": origin.git,
        "versions": origin.versions,
    }


def phase_entry(one: Phase) -> dict[str, Any]:
    """A phase as manifests have it: complete by itself."""
    own = {"environment": one.loaded.recipe.environment, "argv": list(one.args.argv), "layout": asdict(one.layout)}
    return {"name": one.name, "begin": one.begin, "end": one.end, **own}
