"""The name of a search: the same recipes, knobs and short runs have the same one, so that a second command finds it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from fp8launch.submit.grid import Point, point_key
from fp8launch.tuning.candidates import Base
from fp8launch.tuning.knobs import Knob


def study_name(bases: Sequence[Base], knobs: Sequence[Knob], numerics: str) -> str:
    """Return the name of the study."""
    keys = [point_key(Point(base.name, None), base.prepared) for base in bases]
    content = [keys, [knob.name for knob in knobs], numerics]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:6]
    return f"{bases[0].prepared.loaded.recipe.name}-tune-{digest}"
