"""Small helpers of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fp8launch.problems import Problem, UserError


def refused(call: Callable[..., Any], *arguments: Any, exit_code: int = 2, **named: Any) -> tuple[Problem, ...]:
    """The problems with which a call ends; every one of them says something."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert caught.value.exit_code == exit_code
    assert caught.value.problems
    assert all(p.message and "Traceback" not in p.message for p in caught.value.problems)
    return caught.value.problems


def only(problems: tuple[Problem, ...]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]
