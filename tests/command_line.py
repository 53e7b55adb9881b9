"""fp8launch in the test's own process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from fp8launch import cli


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def name(self) -> str:
        """The run or study that it names last."""
        return self.out.split()[-1]


def said(capture: pytest.CaptureFixture[str], *words: object, expect: int = 0) -> Said:
    """Run a command, which has to end with the exit code `expect`."""
    capture.readouterr()
    status = cli.run(list(map(str, words)))
    found = Said(*capture.readouterr())
    assert status == expect, found.out + found.err
    return found
