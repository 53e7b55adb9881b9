"""The questions of `init`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from fp8launch.cli.output import eprint
from fp8launch.diagnostics import did_you_mean, error


class Asker:
    """Gets each answer from its option, else from the user on a terminal, else takes the proposal.

    `yes` accepts every proposal without asking.
    """

    def __init__(self, yes: bool) -> None:
        self.asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()

    def choose(
        self, what: str, option: str, stated: str | None, choices: Sequence[str], proposal: str | None
    ) -> str | None:
        """Return the stated value, the user's choice, or the proposal; None if there is nothing to choose from.

        Raises UserError if the stated value is not a choice, or if there is neither a terminal nor a proposal.
        """
        if stated is not None:
            if choices and stated not in choices:
                fix = did_you_mean(stated, choices, f"use one of {', '.join(choices)}")
                raise error("bad-choice", f"there is no {what} '{stated}' here, only {', '.join(choices)}", option, fix)
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
            message = f"cannot choose the {what} for you: there are {', '.join(choices)}"
            raise error("not-determined", message, option, f"pass {option}")
        return proposal

    def text(self, what: str, stated: str | None, proposal: str) -> str:
        """Return the stated text, the user's answer, or the proposal."""
        if stated is not None:
            return stated
        if self.asks:
            answer: str = click.prompt(what, default=proposal, err=True)
            return answer
        return proposal

    def count(self, what: str, proposal: int) -> int:
        """Return the user's answer, at least 1, or the proposal."""
        if not self.asks:
            return proposal
        answer: int = click.prompt(what, default=proposal, type=click.IntRange(min=1), err=True)
        return answer

    def note(self, text: str) -> None:
        """Print what helps to answer the next question, if it is asked."""
        if self.asks:
            eprint(text)
