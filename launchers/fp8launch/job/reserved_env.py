"""Refuse variables that a recipe or cluster profile may not set: those of shells and schedulers, and secrets.

The batch script never sets a recipe's variables in bash, so they cannot harm the script itself. But training starts
shells of its own, for example to compile a helper, and a container runtime may be a shell script.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

from fp8launch import plugin_registry
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.yaml_source import Node
from fp8launch.secrets import is_secret, secret_in

# Names that the run's script uses.
_SCRIPT_VARIABLES = {
    "again", "attempt", "begun", "code", "environment", "home", "hosts", "image", "job", "megatron_args", "phase",
    "python", "run_folder", "runs", "status", "trusted", "FP8LAUNCH_START", "FP8LAUNCH_STOP_AT", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip
# Wrong values would make every process rank 0, or wait for ranks that do not exist.
OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
# Variables to which bash, up to 5.3, gives a value, a type or a special meaning. A test derives them from the installed
# bash. Every shell treats OPTIND as a number: bash evaluates its value as an expression, and dash refuses to start.
_BASH_VARIABLES = {
    "_", "BASH_ALIASES", "BASHOPTS", "BASHPID", "BASH_ARGC", "BASH_ARGV", "BASH_ARGV0", "BASH_CMDS", "BASH_COMMAND",
    "BASH_LINENO", "BASH_MONOSECONDS", "BASH_REMATCH", "BASH_SOURCE", "BASH_SUBSHELL", "BASH_TRAPSIG", "BASH_VERSINFO",
    "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO", "OPTARG", "OPTERR",
    "OPTIND", "PIPESTATUS", "PPID", "RANDOM", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID",
}  # fmt: skip
# Variables whose values a shell executes or expands when it finds them in its environment.
_READ_BY_SHELLS = {
    "BASH_COMPAT", "BASH_ENV", "BASH_XTRACEFD", "CDPATH", "ENV", "GLOBIGNORE", "IFS", "POSIXLY_CORRECT",
    "PROMPT_COMMAND", "PS0", "PS1", "PS2", "PS4",
}  # fmt: skip


def refuse_reserved(loaded: LoadedRecipe, cluster: Cluster) -> None:
    """Raise UserError with a problem for every reserved variable and every value that is a secret."""
    recipe = loaded.recipe
    problems: list[Problem] = []
    for name, value in recipe.env.items():
        problems += _problems(name, value, loaded.where("env", name))
    for index, name in enumerate(recipe.secrets):
        problems += _problems(name, None, loaded.where("secrets", index))
    problems += _secret_values(loaded.tree)
    problems += _of_profile(cluster)
    if problems:
        raise UserError(dict.fromkeys(problems))


def refuse_reserved_in_profile(cluster: Cluster) -> None:
    """Check a cluster profile as `refuse_reserved` does, for a job without a recipe."""
    if problems := list(_of_profile(cluster)):
        raise UserError(dict.fromkeys(problems))


def missing_secrets(loaded: LoadedRecipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each secret of a recipe that is missing in `environment`, which is the submitting shell's."""
    for index, name in enumerate(loaded.recipe.secrets):
        if not environment.get(name):
            message = f"the secret {name} is not set in this shell"
            fix = f"export {name}=... before submitting; fp8launch passes it to the job and never writes it to a file"
            yield Problem("error", "secret-missing", message, loaded.where("secrets", index), fix)


def _of_profile(cluster: Cluster) -> Iterator[Problem]:
    for name, value in cluster.env.items():
        yield from _problems(name, value, "cluster profile: env")
    yield from _secrets_of_profile(cluster)


def _problems(name: str, value: object, where: str) -> Iterator[Problem]:
    if owner := _owner_of(name):
        fix = "use another name, or remove it"
        yield Problem("error", "reserved-variable", f"the variable {name} is {owner}", where, fix)
    elif is_secret(name, value):
        fix = f"remove it, export it in your shell, and list {name} under `secrets:`, which passes only its name"
        yield Problem("error", "secret-in-env", f"the secret {name} would be written to files", where, fix)


def _secret_values(node: Node, key: str = "") -> Iterator[Problem]:
    """Yield a problem for each value that looks like a secret. `_problems` handles `env`."""
    if isinstance(node.value, dict):
        for name, child in node.value.items():
            if name != "env":
                yield from _secret_values(child, f"{key}.{name}" if key else name)
    elif isinstance(node.value, list):
        for child in node.value:
            yield from _secret_values(child, key)
    elif isinstance(node.value, str) and (kind := secret_in(node.value)):
        yield _secret_problem(f"{key} contains {kind}", node.where)


def _secret_problem(message: str, where: str) -> Problem:
    fix = "remove it, export it as a variable in your shell, and list its name under `secrets:`"
    return Problem("error", "secret-in-recipe", f"{message}, which would be written to files", where, fix)


def _secrets_of_profile(cluster: Cluster) -> Iterator[Problem]:
    if not cluster.model_fields_set:
        return  # building pydantic's serializer for a profile would take longer than the rest of planning
    profile = cluster.model_dump(exclude={"env", "ssh"}, exclude_defaults=True)
    for name, value in profile.items():
        entries = {name: value}
        if isinstance(value, dict):
            entries = {f"{name}.{key}": entry for key, entry in value.items()}
        for place, entry in entries.items():
            texts = entry if isinstance(entry, list) else [entry]
            # `setup` has shell lines. Variables that they assign are judged by name.
            found = [secret_in(str(text), assignments=name == "setup") for text in texts]
            for kind in filter(None, found):
                yield _secret_problem(f"{place} contains {kind}", f"cluster profile: {place}")


def _owner_of(name: str) -> str | None:
    """Say which program sets or reads a variable, or return None if the name is free to use."""
    if name in _SCRIPT_VARIABLES:
        return "set by the batch script"
    if name in OF_A_RANK:
        return "set for each rank when it starts"
    if name in _BASH_VARIABLES:
        return "bash's own"
    if name in _READ_BY_SHELLS:
        return "run or read as code by shells"
    if any(pattern.fullmatch(name) for pattern in _scheduler_variables()):
        return "set by the scheduler for the batch script"
    return None


@functools.cache
def _scheduler_variables() -> tuple[re.Pattern[str], ...]:
    """Return patterns for variables that schedulers set and on which the generated scripts rely."""
    made = [make() for _, make in plugin_registry.loaded("schedulers")]
    return tuple(scheduler.script_variables for scheduler in made if scheduler.script_variables)
