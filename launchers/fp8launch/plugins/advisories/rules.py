"""Each row of the table as a rule of `check`."""

from __future__ import annotations

from fp8launch.check.rule import Rule, register
from fp8launch.plugins.advisories.table import ADVISORIES

for _row in ADVISORIES:
    _compares = _row.changes is not None
    register(Rule(_row.id, "warning", _row.source, _row.find, scope=_row.scope, known_bug=True, compares=_compares))
