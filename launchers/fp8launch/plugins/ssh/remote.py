"""`fp8launch --remote CLUSTER VERB ...`: run a command on a cluster's login node from a laptop that has only ssh.

As with git and rsync, the same program runs at the other end. Everything is therefore checked where the images, the
data and Slurm are, every backend works, and runs belong to the login node's user. Only recipes (resolved here), the
cluster profile and secrets are sent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from fp8launch import __version__, schedulers
from fp8launch.cli import Verbs, commands
from fp8launch.cli.output import eprint
from fp8launch.cluster.profile import Cluster, Login, load_cluster
from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.plugins.ssh import ssh
from fp8launch.recipe.load import load_recipe, read_recipe
from fp8launch.recipe.write_yaml import write_yaml
from fp8launch.secrets import refuse_secrets

# Command arguments that take recipes.
RECIPE_ARGUMENTS = ("recipes", "recipe")
# Commands that only work on local files and never query a cluster.
HERE = frozenset(("import", "recipes", "images", "clusters", "diff", "completion"))


def run_remote(name: str, arguments: Sequence[str]) -> int:
    """Run `fp8launch ARGUMENTS` on the login node of the cluster profile `name`, and return its exit code."""
    profile = load_cluster(name, "--remote")
    if profile.ssh is None:
        raise error(
            "no-ssh", f"the cluster profile '{profile.name}' does not set a login node", name, "add `ssh: {host: ...}`"
        )
    if not arguments or arguments[0] not in commands():
        raise click.UsageError("--remote CLUSTER needs a command after it, such as `runs`")
    verb = arguments[0]
    if verb in HERE:
        raise click.UsageError(f"`{verb}` works on local files; remove --remote")
    try:
        words, files, secrets = _prepare(verb, list(arguments[1:]), profile)
    except click.exceptions.Exit as shown:  # the command printed its help
        return shown.exit_code
    login = profile.ssh
    refuse_secrets({"the command line of ssh": "\0".join(words), **files}, secrets)
    if files:
        folder = ssh.put(login, files)
        for at, word in enumerate(words):
            if word in files:
                words[at] = str(folder / word)
    return _exit_code(login, verb, ssh.run_there(login, [login.command, verb, *words], secrets))


def _prepare(verb: str, words: list[str], profile: Cluster) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return the words of the remote command, the files that they refer to, and the secrets that its recipes need."""
    command = _command(verb)
    # Report wrong usage here, before connecting.
    context = command.make_context(verb, list(words))
    files: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for recipe in _recipes(context):
        source = read_recipe(recipe)
        loaded = load_recipe(source, context.params.get("overrides", ()))
        file = f"{len(files)}-{loaded.recipe.name}.yaml"
        files[file] = write_yaml(load_recipe(source).tree.plain())
        words[words.index(recipe)] = file
        for name in loaded.recipe.secrets:
            if value := os.environ.get(name):
                secrets[name] = value
    if any("--cluster" in parameter.opts for parameter in command.params):
        if context.params.get("cluster"):
            raise click.UsageError("--remote already selects the cluster; remove --cluster")
        files["cluster.yaml"] = write_yaml(profile.model_dump(exclude={"ssh"}, exclude_defaults=True))
        words = ["--cluster", "cluster.yaml", *words]
    if verb == "submit":
        chosen = context.params.get("backend_name")
        if chosen and schedulers.by_name(chosen).capabilities.on_this_machine:
            raise click.UsageError("login nodes are not for training; choose another --backend")
        if not chosen:
            # If the login node had no Slurm, the default would be to train on it.
            words = ["--backend", schedulers.CLUSTER_DEFAULT, *words]
        return words, files, secrets
    return words, files, {}


def _command(verb: str) -> click.Command:
    found = Verbs(name="fp8launch").get_command(click.Context(click.Command("fp8launch")), verb)
    assert found is not None
    return found


def _recipes(context: click.Context) -> list[str]:
    found: list[str] = []
    for name in RECIPE_ARGUMENTS:
        value = context.params.get(name) or ()
        if isinstance(value, str):
            found.append(value)
        else:
            found += value
    return found


def _exit_code(login: Login, verb: str, status: int) -> int:
    """Translate ssh's exit code. Raise UserError if ssh failed rather than fp8launch."""
    if status == ssh.FAILED:
        again = "run it again"
        if verb == "submit":
            again = "`fp8launch --remote ... runs` shows whether the run was submitted"
        raise ssh.failed(login, "the connection failed or was lost", again)
    if status == ssh.NOT_FOUND:
        raise error(
            "not-there",
            f"'{login.command}' was not found on the login node {login.host}",
            "cluster profile: ssh.command",
            f"run `python3 -m pip install .` there in a checkout of fp8launch {__version__}, or set `ssh.command` to "
            "its path",
            exit_code=3,
        )
    if status < 0 or status > MACHINE_LACKS:
        eprint(f"fp8launch on {login.host} exited with status {status}")
        return MACHINE_LACKS
    return status
