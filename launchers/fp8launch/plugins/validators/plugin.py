"""Megatron's own validators, run without torch or a GPU, and rules for options of Transformer Engine's recipes."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

PLUGIN = Plugin(
    name="validators",
    validators={"megatron_lm": "fp8launch.plugins.validators.layer:validate_runs"},
    rules={
        "te-option": "fp8launch.plugins.validators.te_options:te_option",
        "te-option-ignored": "fp8launch.plugins.validators.te_options:te_option_ignored",
        "four-over-six": "fp8launch.plugins.validators.te_options:four_over_six",
    },
)
