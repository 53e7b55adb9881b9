"""Report what a launch script does before training that a recipe cannot hold: modules, environments, a checkout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from fp8launch.diagnostics import Problem
from fp8launch.plugins.importer.launch_sections import OWN_ENTRY
from fp8launch.plugins.importer.shell_holes import Holes, is_known
from fp8launch.plugins.importer.shell_reading import Command
from fp8launch.plugins.importer.training_command import Training
from fp8launch.secrets import redacted
from fp8launch.wording import and_more

# Commands that change the shell in which training starts. `cd` matters for relative paths only.
_SETUP = ("module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "ulimit")
_SHOWN = 5


def omitted_setup(commands: Sequence[Command], training: Training, holes: Holes, name: str) -> list[Problem]:
    """Return a warning for the setup commands before the training command, and one for the user's Megatron-LM."""
    before = commands[: commands.index(training.command)]
    problems = []
    setup = [command for command in before if command.words[0] in _SETUP]
    if setup:
        lines = dict.fromkeys(redacted(" ".join(map(holes.shown, one.words)), ()) for one in setup)
        shown = and_more([f"`{line}`" for line in lines], _SHOWN)
        fix = "add what the job still needs to `setup:` of a cluster profile; an image brings its own software"
        message = f"setup of the shell was omitted: {shown}"
        problems.append(Problem("warning", "import-setup", message, f"{name}:{setup[0].line}", fix))
    script = training.script
    if script is None or not is_known(script) or PurePosixPath(script).name != OWN_ENTRY:
        return problems
    # A shell resolves a relative path against the last `cd`.
    cds = [one.words[1] for one in before if one.words[0] == "cd" and len(one.words) == 2]
    folders = [folder for folder in cds if is_known(folder)]
    path = PurePosixPath(*folders, script)
    if path.is_absolute():
        message = f"{path.parent} was omitted: fp8launch's own entry trains with the job's installed Megatron-Core"
        fix = f"if you changed that checkout, set `launch: {{script: {path}}}`"
        problems.append(Problem("warning", "import-checkout", message, f"{name}:{training.command.line}", fix))
    return problems
