"""Fields of Megatron's config that no flag of Megatron sets, from a recipe's `launch.config`."""

from __future__ import annotations

import json
import os
from typing import Any


def set_config_fields(args: Any) -> None:
    """FP8LAUNCH_CONFIG, a JSON object: fields of Megatron's TransformerConfig that its command line leaves out.

    Megatron builds its config from every attribute of `args` that bears the name of a field.
    """
    for name, value in json.loads(os.environ.get("FP8LAUNCH_CONFIG") or "{}").items():
        setattr(args, name, value)
