"""Questions of `init`, which an option answers, else the user on a terminal, else the proposal; and of submissions."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from fp8launch.cli.output import eprint
from fp8launch.diagnostics import ANSWER_IS_NO, did_you_mean, error


def confirm(question: str, what: str) -> None:
    """Ask whether to submit. Raises UserError for a no, and where nobody can be asked about `what`."""
    if not sys.stdin.isatty():
        message = f"standard input is not a terminal, so the {what} cannot be confirmed"
        raise error("not-asked", message, fix="pass --yes")
    if not click.confirm(question, err=True):
        raise error("declined", "nothing was submitted", exit_code=ANSWER_IS_NO)


class Asker:
    """Asks on a terminal, unless `yes` accepts every proposal."""

    def __init__(self, yes: bool) -> None:
        self.asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()

    def choose(
        self, what: str, option: str, stated: str | None, choices: Sequence[str], proposal: str | None
    ) -> str | None:
        """Return the stated value, the user's choice, or the proposal; None where there is nothing to choose.

        Raises UserError for a stated value that is not among them, and where nobody can be asked and there is no
        proposal.
        """
        if stated is not None:
            if choices and stated not in choices:
                fix = did_you_mean(stated, choices, f"use one of {', '.join(choices)}")
                raise error(
                    "bad-choice", f"'{stated}' is not a {what} here; there are {', '.join(choices)}", option, fix
                )
            return stated
        if len(choices) <= 1:
            return choices[0] if choices else None
        if self.asks:
            chosen: str = click.prompt(
                what[:1].upper() + what[1:],
                default=proposal,
                type=click.Choice(list(choices)),
                err=True,
                show_choices=True,
            )
            return chosen
        if proposal is None:
            message = f"the {what} is not determined: there are {', '.join(choices)}"
            raise error("not-determined", message, option, f"pass {option}")
        return proposal

    def text(self, what: str, stated: str | None, proposal: str) -> str:
        """Return a text: the stated one, the user's, else the proposal."""
        if stated is not None:
            return stated
        if self.asks:
            answer: str = click.prompt(what, default=proposal, err=True)
            return answer
        return proposal

    def count(self, what: str, proposal: int) -> int:
        """Return a number from 1 on: the user's, else the proposal."""
        if not self.asks:
            return proposal
        answer: int = click.prompt(what, default=proposal, type=click.IntRange(min=1), err=True)
        return answer

    def note(self, text: str) -> None:
        """Print what helps to answer the next question, only where it is asked."""
        if self.asks:
            eprint(text)
