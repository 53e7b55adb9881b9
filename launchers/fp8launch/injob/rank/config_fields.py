"""Megatron's config: made from its arguments, and from a recipe's `launch.config` for fields that have no flag."""
# mypy: disable-error-code="import-not-found"

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


def transformer_config(args: Any) -> Any:
    """Return the TransformerConfig that Megatron's arguments describe."""
    try:
        from megatron.training.argument_utils import core_transformer_config_from_args
    except ImportError:  # 0.17
        from megatron.training.arguments import core_transformer_config_from_args
    return core_transformer_config_from_args(args)
