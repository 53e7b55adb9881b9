"""One line of what `fp8launch doctor` finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "missing", "note"]


@dataclass(frozen=True)
class Finding:
    """Something that a machine offers or lacks: "ok", "missing" for what some run needs, or "note"."""

    state: State
    what: str
    found: str
    advice: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return asdict(self)
