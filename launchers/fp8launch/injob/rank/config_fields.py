"""Set fields of Megatron's config that have no flag, from a recipe's `launch.config`."""

from __future__ import annotations

import json
import os
from typing import Any


def set_config_fields(args: Any) -> None:
    """Add the fields of TransformerConfig in FP8LAUNCH_CONFIG, a JSON object, to Megatron's arguments.

    Megatron builds its config from every attribute of `args` with the name of a field.
    """
    for name, value in json.loads(os.environ.get("FP8LAUNCH_CONFIG") or "{}").items():
        setattr(args, name, value)
