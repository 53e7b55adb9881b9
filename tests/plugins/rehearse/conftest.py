"""What tests of rehearsals share."""

from __future__ import annotations

import pytest

from fp8launch.check.rule import all_rules


@pytest.fixture
def unlearned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rehearsal refused became a rule: without the rule it is the rehearsal that says it."""
    monkeypatch.delitem(all_rules(), "quantile-balancing-router")
