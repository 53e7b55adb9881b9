"""Parameter type for options that take an age or a date."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import click

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Moment(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Converts an age such as `30d` or a date such as `2026-11-01` to seconds since the epoch."""

    name = "AGE|DATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if age := re.fullmatch(r"([0-9]{1,6})([mhdw])", value):
            return time.time() - int(age[1]) * _UNITS[age[2]]
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither an age such as 12h, 30d or 2w nor a date such as 2026-11-01", param, ctx)


MOMENT = Moment()
