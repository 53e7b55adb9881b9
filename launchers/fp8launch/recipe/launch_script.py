"""A launch script, an argument list or a JSON list to Megatron's arguments and what the script says around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from fp8launch.megatron.schema import FlagSchema
from fp8launch.problems import Problem, UserError
from fp8launch.recipe.launch_options import SlurmWords, read_options, sbatch_lines, torchrun_words
from fp8launch.recipe.shell_holes import Holes, is_known, is_secret
from fp8launch.recipe.shell_words import Command, Reading, read_list, read_script

# Variables that change how training runs; any other belongs to the machine or the cluster profile.
_TRAINING_ENV = re.compile(
    r"(NCCL|NVTE|CUDA|TORCH|TORCHINDUCTOR|PYTORCH|NVSHMEM|UCX|OMP|UB|GLOO|TRITON|NVLINK|USE_MNNVL|NUM_OF)(_|$)"
)
# The scheduler gives these to each process; a recipe that fixed them would bind every process to the same.
_NOT_ENV = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH")
# Options whose value the recipe keeps under `resources` or `container`.
_SIZE = re.compile(r"--?(N|n|t|c|nodes|nnodes|nproc|ntasks|gpus|gres|time|cpus|container)([-_=]|$)")
_OWN_ENTRY = "pretrain_gpt.py"
_FEW = 3


@dataclass(frozen=True)
class Launch:
    """What was found: Megatron's arguments, and sections of a recipe by name."""

    argv: tuple[str, ...]
    sections: Mapping[str, object] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def read_launch(text: str, name: str, schema: FlagSchema) -> Launch:
    """Megatron's arguments in `text`: a JSON list, a plain argument list or a shell script. Nothing is executed.

    Raises UserError when there are none.
    """
    argv = _json_list(text)
    if argv is None and _first_word(text).startswith("-"):
        words, holes = read_list(text, name)
        argv, problems = _without_holes(words, holes, schema, name)
        launch = Launch(tuple(argv), problems=tuple(problems))
    elif argv is not None:
        launch = Launch(tuple(argv))
    else:
        launch = _script(text, name, schema)
    if not any(re.match("--.", word) for word in launch.argv):
        nothing = Problem(
            "error",
            "nothing-to-import",
            "holds no Megatron argument",
            name,
            "give a launch script, or Megatron's arguments as text or as a JSON list of words",
        )
        raise UserError([*launch.problems, nothing])
    return launch


def _json_list(text: str) -> list[str] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and all(isinstance(word, str) for word in value) else None


def _first_word(text: str) -> str:
    rows = (row.strip() for row in text.splitlines())
    return next((row for row in rows if row and not row.startswith("#") and row != "\\"), "")


# --- a script


def _script(text: str, name: str, schema: FlagSchema) -> Launch:
    slurm, problems = read_options(sbatch_lines(text), name)
    reading = read_script(text, name, slurm.job_variables())
    found = _training(reading, schema)
    if found is None:
        return _arrays_alone(reading, schema, name, slurm, problems)
    command, start, script = found
    problems += _others(reading, schema, command, name)
    if not command.certain:
        message = "the training command stands under a condition that is not known here; it was imported as if it holds"
        problems.append(Problem("warning", "import-condition", message, f"{name}:{command.line}"))
    argv, more = _without_holes(command.words[start:], reading.holes, schema, name)
    problems += more
    env, secrets, more = _environment(command.env, reading.holes, name)
    problems += more
    around = [*(word for wrapper in command.wrappers for word in wrapper), *command.words[:start]]
    resources, container, more = _resources(slurm, around, reading.holes, f"{name}:{command.line}")
    problems += more
    launch, more = _entry(script, reading.holes, f"{name}:{command.line}")
    sections = {"env": env, "secrets": secrets, "resources": resources, "container": container, "launch": launch}
    return Launch(tuple(argv), {key: value for key, value in sections.items() if value}, (*problems, *more))


def _training(reading: Reading, schema: FlagSchema) -> tuple[Command, int, str | None] | None:
    """The command with most Megatron flags (a sure one first), where its arguments start, and its script."""
    best: tuple[Command, int, str | None] | None = None
    most = (False, 0)
    for command in reading.commands:
        start, script = _arguments_of(command.words, schema)
        flags = _count_flags(command.words[start:], schema)
        rank = (command.certain, flags)
        if flags >= (1 if script else _FEW) and rank > most:
            best, most = (command, start, script), rank
    return best


def _arguments_of(words: Sequence[str], schema: FlagSchema) -> tuple[int, str | None]:
    """The index of the first training argument: after the script, else at the first Megatron flag."""
    for at, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return at + 1, word
        if word.startswith("--") and schema.find(word.partition("=")[0]):
            return at, None
    return len(words), None


def _count_flags(words: Sequence[str], schema: FlagSchema) -> int:
    return sum(1 for word in words if word.startswith("--") and schema.find(word.partition("=")[0]))


def _others(reading: Reading, schema: FlagSchema, chosen: Command, name: str) -> Iterator[Problem]:
    for command in reading.commands:
        start, script = _arguments_of(command.words, schema)
        if command is not chosen and script and _count_flags(command.words[start:], schema) >= _FEW:
            message = f"another training command was not imported; the one of line {chosen.line} was"
            yield Problem("warning", "import-other-command", message, f"{name}:{command.line}", "import it by itself")


def _arrays_alone(
    reading: Reading, schema: FlagSchema, name: str, slurm: SlurmWords, problems: list[Problem]
) -> Launch:
    """A fragment that fills arrays and never shows the command that uses them."""
    arrays = {key: words for key, words in reading.arrays.items() if _count_flags(words, schema)}
    argv, more = _without_holes([w for words in arrays.values() for w in words], reading.holes, schema, name)
    if arrays:
        message = f"no training command was found; the arrays {', '.join(arrays)} were taken as its arguments"
        problems.append(Problem("warning", "import-no-command", message, name))
    resources = {"resources": slurm.resources} if slurm.resources else {}
    return Launch(tuple(argv), resources, (*problems, *more))


# --- what only the shell could tell


def _without_holes(
    words: Sequence[str], holes: Holes, schema: FlagSchema, name: str
) -> tuple[list[str], list[Problem]]:
    """The arguments without those that cannot be known, each of which is told."""
    kept: list[str] = []
    problems: list[Problem] = []
    at = 0
    while at < len(words):
        end = at + 1
        flag = schema.find(words[at].partition("=")[0]) if words[at].startswith("--") else None
        if flag and flag.takes_value and "=" not in words[at]:
            limit = len(words) if flag.nargs in ("+", "*") else int(flag.nargs or 1)
            while end < len(words) and end - at <= limit and not words[end].startswith("--"):
                end += 1
        group = words[at:end]
        unknown = [hole for word in group for hole in holes.of(word)]
        if unknown:
            text = " ".join(map(holes.shown, group))
            reasons = "; ".join(dict.fromkeys(map(str, unknown)))
            if text == "".join(hole.raw for hole in unknown):
                text = "` or `".join(hole.raw for hole in unknown)
                reasons = "it " + "; it ".join(dict.fromkeys(hole.why for hole in unknown))
            problems.append(
                Problem(
                    "warning",
                    "import-unresolved",
                    f"`{text}` is left out: {reasons}",
                    f"{name}:{unknown[0].line}",
                    "add it to the recipe with its value" if flag else "add to the recipe what it stands for",
                )
            )
        else:
            kept += group
        at = end
    return kept, problems


# --- environment, resources, entry


def _environment(
    exported: Mapping[str, str], holes: Holes, name: str
) -> tuple[dict[str, int | str], list[str], list[Problem]]:
    env: dict[str, int | str] = {}
    secrets: list[str] = []
    others: list[str] = []
    problems: list[Problem] = []
    for key, value in exported.items():
        if is_secret(key):
            secrets.append(key)
        elif key.startswith("SLURM_"):
            continue
        elif not _TRAINING_ENV.match(key) or key in _NOT_ENV:
            others.append(key)
        elif not is_known(value):
            hole = holes.of(value)[0]
            message = f"environment variable {key} is left out: {hole}"
            problems.append(Problem("warning", "import-unresolved", message, f"{name}:{hole.line}", "add it to env:"))
        else:
            env[key] = int(value) if re.fullmatch(r"0|[1-9]\d{0,17}", value) else value
    if others:
        message = f"environment variables that belong to the machine were left out: {', '.join(others)}"
        fix = "add to env: what training needs"
        problems.append(Problem("warning", "import-env", message, name, fix))
    return env, secrets, problems


def _resources(
    slurm: SlurmWords, around: Sequence[str], holes: Holes, where: str
) -> tuple[dict[str, int | str], dict[str, object], list[Problem]]:
    """`resources` and `container`: torchrun says best how many processes there are, then srun, then sbatch."""
    shown = [word if is_known(word) else "" for word in around]
    step, problems = read_options(shown[: _launcher_at(shown)], where)
    torchrun, more = torchrun_words(shown, where)
    problems += more
    resources = slurm.resources | step.resources
    for key, value in torchrun.items():
        stated = resources.get(key, value)
        # A batch script may well run its torchrun on one node of several, or the other way round by mistake.
        if stated != value:
            message = f"torchrun says {key} {value}, Slurm says {stated}; torchrun's was taken"
            problems.append(Problem("warning", "import-resources", message, where, f"check resources.{key}"))
        resources[key] = value
    unknown = [
        holes.of(word)[0]
        for before, word in zip(["", *around], around, strict=False)
        if not is_known(word) and _SIZE.match(word if word.startswith("-") else before)
    ]
    for hole in dict.fromkeys(unknown):
        problems.append(Problem("warning", "import-unresolved", f"resources may be incomplete: {hole}", where))
    return resources, step.container, problems


def _launcher_at(words: Sequence[str]) -> int:
    """Where Slurm's own options end: at the program that srun starts."""
    for at, word in enumerate(words):
        if re.fullmatch(r"(torchrun|python[\d.]*|(ba)?sh)", PurePosixPath(word).name) or word.endswith(".py"):
            return at
    return len(words)


def _entry(script: str | None, holes: Holes, where: str) -> tuple[dict[str, object], list[Problem]]:
    """`launch.script`, unless it is Megatron's GPT pre-training, which fp8launch's own entry does."""
    if script is None or PurePosixPath(holes.shown(script)).name == _OWN_ENTRY:
        return {}, []
    if is_known(script) and script.startswith("/"):
        return {"script": script}, []
    message = f"runs {holes.shown(script)}, whose path in the job is not known here"
    return {}, [Problem("warning", "import-script", message, where, "set launch.script to its absolute path")]
