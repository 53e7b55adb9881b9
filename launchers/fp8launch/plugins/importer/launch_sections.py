"""Read the environment, resources, container and training script of a launch script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from fp8launch.diagnostics import Problem
from fp8launch.megatron.schema import megatron_script
from fp8launch.plugins.importer.launch_options import SlurmWords, launcher_counts, read_options
from fp8launch.plugins.importer.shell_holes import Holes, is_known
from fp8launch.plugins.importer.training_command import LAUNCHER, Training
from fp8launch.secrets import is_secret

# Variables that change how training runs. Any other belongs to the machine or the cluster profile.
_TRAINING_ENV = re.compile(
    r"(NCCL|NVTE|CUDA|TORCH|TORCHINDUCTOR|PYTORCH|NVSHMEM|UCX|OMP|UB|GLOO|TRITON|NVLINK|USE_MNNVL|NUM_OF)(_|$)"
)
# The scheduler sets these for each process. In a recipe they would be the same for every process.
_NOT_ENV = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH")
# Options whose value the recipe keeps under `resources` or `container`.
_SIZE = re.compile(r"--?(N|n|t|c|nodes|nnodes|nproc|ntasks|gpus|gres|time|cpus|container)([-_=]|$)")
# Megatron-LM's GPT pre-training, which fp8launch's own entry replaces.
OWN_ENTRY = "pretrain_gpt.py"
# The same in scripts that fp8launch wrote.
_OWN_PROGRAM = "injob/rank/worker.py"


def assigned_by_env(words: Sequence[str]) -> dict[str, str]:
    """Return the variables of `env NAME=VALUE... PROGRAM` at the start of a command."""
    found: dict[str, str] = {}
    if not words or PurePosixPath(words[0]).name != "env":
        return found
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            break
        found[name] = value
    return found


def environment(
    exported: Mapping[str, str], holes: Holes, name: str
) -> tuple[dict[str, int | str], list[str], list[Problem]]:
    env: dict[str, int | str] = {}
    secrets: list[str] = []
    others: list[str] = []
    problems: list[Problem] = []
    for key, value in exported.items():
        if is_secret(key, value):
            secrets.append(key)
        elif key.startswith("SLURM_"):
            continue
        elif not _TRAINING_ENV.match(key) or key in _NOT_ENV:
            others.append(key)
        elif not is_known(value):
            hole = holes.of(value)[0]
            message = f"environment variable {key} is omitted: {hole}"
            problems.append(Problem("warning", "import-unresolved", message, f"{name}:{hole.line}", "add it to env:"))
        elif re.fullmatch(r"0|[1-9]\d{0,17}", value):
            env[key] = int(value)
        else:
            env[key] = value
    if others:
        message = f"environment variables of the machine were omitted: {', '.join(others)}"
        fix = "add those that training needs to env:"
        problems.append(Problem("warning", "import-env", message, name, fix))
    return env, secrets, problems


def resources_and_container(
    slurm: SlurmWords, around: Sequence[str], holes: Holes, where: str
) -> tuple[dict[str, int | str], dict[str, object], list[Problem]]:
    """Return `resources` and `container`. The launcher's counts win over srun's, and srun's over sbatch's."""
    shown = [word if is_known(word) else "" for word in around]
    step, problems = read_options(shown[: _launcher_at(shown)], where)
    launcher, more = launcher_counts(shown, where)
    problems += more
    resources = slurm.resources | step.resources
    for key, value in launcher.items():
        stated = resources.get(key, value)
        # A batch script may start torchrun on only one of its nodes, on purpose or by mistake.
        if stated != value:
            message = f"{key} is {value} for the launcher and {stated} for Slurm; the launcher's value was used"
            problems.append(Problem("warning", "import-resources", message, where, f"check resources.{key}"))
        resources[key] = value
    unknown = []
    for before, word in zip(["", *around], around, strict=False):
        option = word if word.startswith("-") else before
        if not is_known(word) and _SIZE.match(option):
            unknown.append(holes.of(word)[0])
    for hole in dict.fromkeys(unknown):
        problems.append(Problem("warning", "import-unresolved", f"resources may be incomplete: {hole}", where))
    return resources, step.container, problems


def _launcher_at(words: Sequence[str]) -> int:
    """Return the index of the program that srun starts, where Slurm's own options end."""
    for at, word in enumerate(words):
        program = PurePosixPath(word).name
        if LAUNCHER.fullmatch(program) or program in ("sh", "bash") or word.endswith(".py"):
            return at
    return len(words)


def entry(training: Training, holes: Holes, where: str) -> tuple[dict[str, object], list[Problem]]:
    """Return the `launch` section. Empty for Megatron's GPT pre-training, which fp8launch's own entry replaces."""
    if training.module is not None:
        message = (
            f"runs the module {holes.shown(training.module)}, and this recipe would train GPT by fp8launch's entry"
        )
        fix = "write a script that runs the module (runpy.run_module), and name it in launch.script"
        return {}, [Problem("error", "import-module", message, where, fix)]
    script = training.script
    if script is None or holes.shown(script).endswith((f"/{OWN_ENTRY}", _OWN_PROGRAM)) or script == OWN_ENTRY:
        return {}, []
    if is_known(script) and script.startswith("/"):
        return {"script": script}, []
    shown = holes.shown(script)
    message = f"runs {shown}, whose path in the job is not known"
    problem = Problem("warning", "import-script", message, where, "set launch.script to its absolute path")
    # Without it, fp8launch would train GPT with its own entry.
    if is_known(script):
        return {"script": script}, [problem]
    return {"script": megatron_script(shown) or PurePosixPath(shown).name}, [problem]
