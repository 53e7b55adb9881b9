"""Read Megatron's arguments, and the settings around them, from a launch script, an argument list or a JSON list."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import PurePosixPath

from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.schema import FlagSchema, load_schema
from fp8launch.plugins.importer.launch import Launch
from fp8launch.plugins.importer.launch_options import SlurmWords, read_options, sbatch_lines
from fp8launch.plugins.importer.launch_sections import assigned_by_env, entry, environment, resources_and_container
from fp8launch.plugins.importer.omitted_setup import omitted_setup
from fp8launch.plugins.importer.shell_interpreter import read_list, read_script
from fp8launch.plugins.importer.shell_reading import Reading
from fp8launch.plugins.importer.training_command import argument_variables, other_trainings, training_command
from fp8launch.plugins.importer.unresolved import without_holes
from fp8launch.plugins.importer.yaml_formats import read_yaml_launch
from fp8launch.secrets import is_secret, secret_in


@dataclass(frozen=True)
class ScriptStart:
    """How a user starts a launch script: its arguments, or None if they are unknown, and variables of the shell."""

    arguments: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)


AS_IS = ScriptStart()


def read_launch(text: str, name: str, schema: FlagSchema, start: ScriptStart = AS_IS) -> Launch:
    """Read Megatron's arguments from a JSON list, a plain argument list, YAML or a shell script. Nothing is executed.

    Raises UserError if there are none.
    """
    launch = _without_secrets(_read(text, name, schema, start), schema, name)
    if not any(re.match("--.", word) for word in launch.argv):
        nothing = Problem(
            "error",
            "nothing-to-import",
            "contains no Megatron arguments",
            name,
            "pass a launch script, or Megatron's arguments as text or as a JSON list of strings",
        )
        raise UserError([*launch.problems, nothing])
    return launch


def _without_secrets(launch: Launch, schema: FlagSchema, name: str) -> Launch:
    """Remove arguments, and an image, that contain secrets. No Megatron flag takes a secret."""
    fix = "export it as a variable in your shell, and list the name under `secrets:`"
    problems = list(launch.problems)
    argv: list[str] = []
    for group in _by_flag(launch.argv):
        flag = group[0].partition("=")[0]
        value = group[0].partition("=")[2]
        if len(group) > 1:
            value = group[1]
        held = secret_in(" ".join(group))
        if held is None and schema.find(flag) is None and is_secret(flag, value):
            held = f"the value of {flag}"
        if held:
            message = f"{flag} is left out: its value looks like a secret ({held})"
            problems.append(Problem("warning", "import-secret", message, name, fix))
        else:
            argv += group
    sections = dict(launch.sections)
    container = sections.get("container")
    if isinstance(container, dict) and (held := secret_in(str(container.get("image")))):
        sections["container"] = {key: value for key, value in container.items() if key != "image"}
        message = f"container.image is omitted, because it contains {held}"
        fix = "write the image without the login; store logins in the container tool's credential file"
        problems.append(Problem("warning", "import-secret", message, name, fix))
    return replace(launch, argv=tuple(argv), sections=sections, problems=tuple(problems))


def _by_flag(argv: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def _read(text: str, name: str, schema: FlagSchema, start: ScriptStart) -> Launch:
    argv = _json_list(text)
    if argv is not None:
        return Launch(tuple(argv))
    read = read_yaml_launch(text, name, schema)
    if read is not None:
        return read
    if _first_word(text).startswith("-"):
        words, holes = read_list(text, name)
        argv, problems = without_holes(words, holes, schema, name)
        return Launch(tuple(argv), problems=tuple(problems))
    return _script(text, name, schema, start)


def _json_list(text: str) -> list[str] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return None
    return value


def _first_word(text: str) -> str:
    """Return the first line with a word, skipping comments and lone backslashes."""
    for row in map(str.strip, text.splitlines()):
        if row and not row.startswith("#") and row != "\\":
            return row
    return ""


# --- a script


def _script(text: str, name: str, schema: FlagSchema, start: ScriptStart) -> Launch:
    slurm, problems = read_options(sbatch_lines(text), name)
    reading = read_script(text, name, {**slurm.job_variables(), **start.env}, start.arguments)
    holes = reading.holes
    training = training_command(reading, schema)
    if training is None:
        return _arguments_alone(reading, schema, name, slurm, problems)
    command = training.command
    where = f"{name}:{command.line}"
    problems += other_trainings(reading, schema, training, name)
    if not command.certain:
        message = (
            "the training command depends on a condition whose value is unknown; it was imported as if the "
            "condition were true"
        )
        problems.append(Problem("warning", "import-condition", message, where))
    script = None
    if training.script:
        script = holes.shown(training.script)
    # Without a script, these words may name the program, and hold its first flags.
    before = [word for word in command.words[: training.start] if holes.fill(word)]
    if training.script or training.module:
        before = []
    argv, more = without_holes([*before, *training.arguments], holes, load_schema(schema.version, script), name)
    problems += more
    exported = {**command.env, **assigned_by_env(command.words[: training.start])}
    env, secrets, more = environment(exported, holes, name)
    problems += more
    around = [*chain.from_iterable(command.wrappers), *command.words[: training.start]]
    resources, container, more = resources_and_container(slurm, around, holes, where)
    problems += more
    launch, more = entry(training, holes, where)
    problems += more
    problems += omitted_setup(reading.commands, training, holes, name)
    sections = {"env": env, "secrets": secrets, "resources": resources, "container": container, "launch": launch}
    stated = {key: value for key, value in sections.items() if value}
    program = None
    if script:
        program = PurePosixPath(script).name
    return Launch(tuple(argv), stated, tuple(problems), program)


def _arguments_alone(
    reading: Reading, schema: FlagSchema, name: str, slurm: SlurmWords, problems: list[Problem]
) -> Launch:
    """Read a file that only assigns arguments to variables, for use by another script."""
    variables = argument_variables(reading, schema)
    argv, more = without_holes(list(chain.from_iterable(variables.values())), reading.holes, schema, name)
    if variables:
        taken = f"the variable {', '.join(variables)} was"
        if len(variables) > 1:
            taken = f"the variables {', '.join(variables)} were"
        message = f"no training command was found; {taken} taken as its arguments"
        problems.append(Problem("warning", "import-no-command", message, name))
    sections = {}
    if slurm.resources:
        sections["resources"] = slurm.resources
    return Launch(tuple(argv), sections, (*problems, *more))
