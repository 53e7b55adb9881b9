"""`fp8launch completion`: print the script with which a shell completes commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from fp8launch.cli.output import echo

VARIABLE = "_FP8LAUNCH_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell's completion script. It completes commands, options, recipes, keys, runs, studies and profiles.

    \b
    bash: echo 'eval "$(fp8launch completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(fp8launch completion zsh)"' >> ~/.zshrc
    fish: fp8launch completion fish > ~/.config/fish/completions/fp8launch.fish
    """
    from fp8launch.cli import cli

    found = get_completion_class(shell)
    assert found is not None, "click has these three"
    echo(found(cli, {}, "fp8launch", VARIABLE).source(), nl=False)
