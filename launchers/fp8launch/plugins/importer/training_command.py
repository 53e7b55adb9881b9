"""Find the training command of a launch script, the program that it starts, and where its arguments begin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fp8launch.diagnostics import Problem
from fp8launch.megatron.schema import FlagSchema
from fp8launch.plugins.importer.shell_holes import is_known
from fp8launch.plugins.importer.shell_reading import Command, Reading

# Programs that start the training's processes; their own options come before the script's name.
LAUNCHER = re.compile(r"(torchrun|ft_launcher|accelerate|deepspeed|horovodrun|python[\d.]*)")
# Modules that do the same; the program that they start comes after them.
_LAUNCHER_MODULES = re.compile(r"(torch\.distributed|accelerate|deepspeed)(\..*)?")
# `launch` is accelerate's verb.
_RUNNERS = ("launch", "srun", "mpirun", "mpiexec", "sbatch", "salloc", "numactl", "env", "nsys", "uv", "run")
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# Scripts print the training command before they run it.
_PRINTING = ("echo", "printf")
# Portable scripts of fp8launch pass it the training's arguments, too.
_RECORDER = "injob/slurm/portable_run.py"
# A command without a script and with fewer flags is another program that shares a few names.
_FEW = 3


@dataclass(frozen=True)
class Training:
    """A training command. Its arguments begin at `start`. It runs `script` or `module`, or neither is known."""

    command: Command
    start: int
    script: str | None = None
    module: str | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.command.words[self.start :]


def training_command(reading: Reading, schema: FlagSchema) -> Training | None:
    """Return the command with the most Megatron flags, preferring commands that are certainly reached."""
    best: Training | None = None
    most = (False, 0)
    for command in _that_run(reading):
        found = _training(command, schema)
        flags = count_flags(found.arguments, schema)
        rank = (command.certain, flags)
        needed = 1 if found.script or found.module else _FEW
        if flags >= needed and rank > most:
            best, most = found, rank
    return best


def other_trainings(reading: Reading, schema: FlagSchema, chosen: Training, name: str) -> Iterator[Problem]:
    """Return a warning for each further training command of a script."""
    for command in _that_run(reading):
        found = _training(command, schema)
        started = found.script or found.module
        if command is not chosen.command and started and count_flags(found.arguments, schema) >= _FEW:
            message = f"another training command was not imported; the one in line {chosen.command.line} was"
            yield Problem("warning", "import-other-command", message, f"{name}:{command.line}", "import it separately")


def _that_run(reading: Reading) -> Iterator[Command]:
    """Return the commands that start a program, without those that only print or record their words."""
    for command in reading.commands:
        if command.words[0] not in _PRINTING and not any(word.endswith(_RECORDER) for word in command.words):
            yield command


def argument_variables(reading: Reading, schema: FlagSchema) -> dict[str, list[str]]:
    """Return the variables at the end of a script that hold arguments and are not part of another variable."""
    variables = {**reading.arrays, **reading.texts}
    found = {key: words for key, words in variables.items() if count_flags(words, schema)}
    texts = {key: f" {' '.join(words)} " for key, words in found.items()}
    whole: dict[str, str] = {}
    for key, text in texts.items():
        part_of_another = any(text in other and text != other for other in texts.values())
        if not part_of_another and text not in whole.values():
            whole[key] = text
    return {key: found[key] for key in whole}


def count_flags(words: Sequence[str], schema: FlagSchema) -> int:
    """Return how many of these words are Megatron's flags."""
    return sum(1 for word in words if is_flag(word, schema))


def is_flag(word: str, schema: FlagSchema) -> bool:
    return word.startswith("--") and schema.find(word.partition("=")[0]) is not None


def _training(command: Command, schema: FlagSchema) -> Training:
    words = command.words
    launched = False
    for at, word in enumerate(words):
        if LAUNCHER.fullmatch(PurePosixPath(word).name):
            launched = True
        elif launched and word in ("-m", "--module") and _names_module(words[at + 1 : at + 2]):
            if not _LAUNCHER_MODULES.fullmatch(words[at + 1]):
                return Training(command, at + 2, module=words[at + 1])
        elif word.endswith(".py") and not word.startswith("-"):
            # Programs of Python's argparse take `--` in front of their arguments.
            return Training(command, at + 2 if words[at + 1 : at + 2] == ("--",) else at + 1, script=word)
        elif is_flag(word, schema):
            return Training(command, _first_argument(words, at))
    return Training(command, len(words))


def _names_module(words: Sequence[str]) -> bool:
    return bool(words) and (_MODULE_NAME.fullmatch(words[0]) is not None or not is_known(words[0]))


def _first_argument(words: Sequence[str], known: int) -> int:
    """Return where the arguments of a command without a Python file begin; its first Megatron flag is at `known`.

    In `run --mine 3 --num-layers 2`, the flags before the first known one are arguments as well. If the program is
    not clear, as behind a launcher's bare options, they may be the launcher's.
    """
    for at in reversed(range(known)):
        behind_option = at > 0 and words[at - 1].startswith("-") and "=" not in words[at - 1]
        if not words[at].startswith("-") and not behind_option:
            if _starts_another(words[at]):
                return known
            return at + 1
    return known


def _starts_another(word: str) -> bool:
    """Return whether a word belongs to a launcher, which starts another program and has its own options."""
    name = PurePosixPath(word).name
    return LAUNCHER.fullmatch(name) is not None or name in _RUNNERS
