"""Variables that a recipe or a cluster profile may not set: they would not arrive, or would be run, or are secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fp8launch.job.cluster import Cluster
from fp8launch.job.script import BASH_VARIABLES, OWN_VARIABLES
from fp8launch.problems import Problem, UserError
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.secrecy import names_a_secret

# What shells run, or expand as if it were code, when they find it in their environment.
_READ_BY_SHELLS = {
    "BASH_ENV", "BASH_XTRACEFD", "CDPATH", "ENV", "GLOBIGNORE", "IFS", "POSIXLY_CORRECT", "PROMPT_COMMAND", "PS0",
    "PS1", "PS2", "PS4",
}  # fmt: skip
# The batch script reckons with these, and bash runs what a number has in brackets: a[$(command)].
_OF_THE_JOB = re.compile(
    r"SLURM_(ARRAY_.*|JOB_ID|JOBID|JOB_NODELIST|JOB_NUM_NODES|JOB_END_TIME|RESTART_COUNT|SUBMIT_DIR|TASKS_PER_NODE)"
)


def refuse_reserved(loaded: LoadedRecipe, cluster: Cluster) -> None:
    """Raises UserError for every variable that may not be set."""
    recipe = loaded.recipe
    named = [(name, value, loaded.where("env", name)) for name, value in recipe.env.items()]
    named += [(name, None, loaded.where("secrets", i)) for i, name in enumerate(recipe.secrets)]
    named += [(name, value, "cluster profile: env") for name, value in cluster.env.items()]
    problems = [problem for name, value, where in named for problem in _problems(name, value, where)]
    if problems:
        raise UserError(problems)


def _problems(name: str, value: object, where: str) -> Iterator[Problem]:
    whose = (
        "set by the batch script"
        if name in OWN_VARIABLES
        else "bash's own"
        if name in BASH_VARIABLES
        else "run or read as code by shells"
        if name in _READ_BY_SHELLS
        else "what Slurm tells the batch script"
        if _OF_THE_JOB.fullmatch(name)
        else None
    )
    if whose:
        fix = "use another name, or drop it"
        yield Problem("error", "reserved-variable", f"the variable {name} is {whose}", where, fix)
    elif value not in (None, "") and names_a_secret(name):
        fix = f"take it out, export it in your shell, and list {name} under `secrets:`: it is passed on by name"
        yield Problem("error", "secret-in-env", f"the secret {name} would be written into files", where, fix)
