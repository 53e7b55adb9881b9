"""Evaluation of models and checkpoints with lm-evaluation-harness: see docs/evaluate.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="evaluate",
    requires=("convert",),
    commands={
        "evaluate": Command(
            "fp8launch.plugins.evaluate.cli:evaluate", "Run", "evaluate a checkpoint with lm-evaluation-harness"
        ),
    },
    engines={"evaluate": "fp8launch.plugins.evaluate.engine:Evaluate"},
    recipe_sections={"evaluate": "fp8launch.plugins.evaluate.section:Evaluate"},
    report_fields={"evaluations": "fp8launch.plugins.evaluate.results:report_field"},
    comparison_columns={"evaluations": "fp8launch.plugins.evaluate.results:COLUMN"},
    in_job=("fp8launch.plugins.evaluate.injob",),
)
