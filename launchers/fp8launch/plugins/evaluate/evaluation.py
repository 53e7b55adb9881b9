"""The input of an evaluation, and the recipe for its job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.plugins.convert.conversion import GPUS_OF_A_NODE
from fp8launch.plugins.evaluate.section import FOLLOWER_STATE
from fp8launch.recipe.load import RecipeSource
from fp8launch.recipe.write_yaml import write_yaml
from fp8launch.recipe.yaml_source import parse_yaml

RUN_PREFIX = "evaluate_"
_TASK = re.compile(r"[A-Za-z0-9][\w.+-]*")


def tasks_named(text: str) -> list[str]:
    """Return the names of a comma-separated list. Raises UserError for what cannot be a task's name."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if _TASK.fullmatch(name) is None:
            message = f"'{name}' is not the name of a task"
            fix = "separate names with commas, such as arc_easy,hellaswag; a task of your own also needs --task-folder"
            raise error("evaluate-tasks", message, "--tasks", fix)
    return list(dict.fromkeys(names))


def task_folder_at(folder: Path) -> Path:
    """Return the absolute folder of task files. Raises UserError if it has none."""
    folder = folder.expanduser().absolute()
    if not any(folder.rglob("*.yaml")):
        message = f"{folder} has no task: no *.yaml in it or below"
        fix = "name a folder that `lm_eval --include_path` accepts"
        raise error("evaluate-tasks", message, "--task-folder", fix)
    return folder


def recipe_of(
    stated: Mapping[str, Any],
    sizes: Mapping[str, int],
    gpu: str,
    image: str | None,
    env: Mapping[str, str],
    secrets: Iterable[str],
    attempts: int = 1,
    time: str = "04:00:00",
) -> RecipeSource:
    """Return the job's recipe. The Hugging Face backend is a single process, Megatron's has one for each part.

    `attempts` are for a job that follows a run (`evaluate.every`).
    """
    processes = sizes["tp"] * sizes["pp"] * sizes["ep"]
    if stated["backend"] == "hf" and processes > 1:
        message = f"--engine hf is one process, but TP x PP x EP is {processes}"
        fix = "leave out --tp, --pp and --ep, or use --engine megatron"
        raise error("evaluate-world", message, "--tp, --pp, --ep", fix)
    if sizes["ep"] > 1 and sizes["tp"] * sizes["pp"] > 1:
        message = f"lm-eval's Megatron backend does not combine EP {sizes['ep']} with TP or PP"
        raise error("evaluate-world", message, "--ep", "use --ep alone, or --tp and --pp")
    nodes = -(-processes // GPUS_OF_A_NODE)
    if processes % nodes:
        message = f"TP x PP x EP is {processes} processes, which do not fill nodes with {GPUS_OF_A_NODE} each"
        raise error("evaluate-world", message, "--tp, --pp, --ep", f"choose a multiple of {GPUS_OF_A_NODE}")
    of = Path(stated.get("run") or stated.get("checkpoint") or stated["model"]).name
    recipe: dict[str, Any] = {
        "name": RUN_PREFIX + re.sub(r"[^A-Za-z0-9_.-]", "_", of)[:40],
        "description": f"{', '.join(stated['tasks'])} by lm-evaluation-harness",
        "engine": "evaluate",
        "evaluate": {key: value for key, value in stated.items() if value is not None},
        "parallel": dict(sizes),
        "resources": {"gpu": gpu, "nodes": nodes, "gpus_per_node": processes // nodes, "time": time},
        "env": dict(env),
        "secrets": list(secrets),
    }
    if image is not None:
        recipe["container"] = {"image": image, "mounts": list(_mounts(stated))}
    if stated.get("every"):
        # Evaluations of a large model may be silent for long, and none of them counts as a newer checkpoint.
        recipe["checkpoint"] = {"dir": FOLLOWER_STATE, "interval": 1}
        recipe["survive"] = {"attempts": attempts, "stuck": attempts, "hang_after": 0}
    text = write_yaml(recipe)
    return RecipeSource(Path(__file__), parse_yaml(text, "fp8launch evaluate", numbered=False), (Path(__file__),))


def _mounts(stated: Mapping[str, Any]) -> Iterable[str]:
    """Return the folders that the job reads and writes, including the targets of links, which the hub's cache uses."""
    found = []
    for key in ("run", "task_folder"):
        if stated.get(key):
            found.append(Path(stated[key]))
    if stated.get("checkpoint"):
        # Megatron reads the tracker next to the iteration.
        found.append(Path(stated["checkpoint"]).parent)
    if stated.get("checkpoints"):
        # The run creates it when it starts.
        folder = Path(stated["checkpoints"])
        if Path(stated["run"]) not in folder.parents:
            found.append(next(each for each in (folder, *folder.parents) if each.is_dir()))
    model = Path(stated["model"])
    if model.is_absolute():
        found.append(model)
    if model.is_absolute() and model.is_dir():  # an earlier stage may still have to write it
        found += sorted({file.resolve().parent for file in model.iterdir()})
    return dict.fromkeys(map(str, found))
