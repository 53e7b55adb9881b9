"""Predicted step times and layouts: see docs/plan.md and docs/speed_model.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="plan",
    requires=("estimate", "plots"),
    commands={
        "plan": Command(
            "fp8launch.plugins.plan.cli:plan", "Prepare", "predict the fastest layouts that fit a number of GPUs"
        ),
    },
    rules={
        "fp8-experts-slower": "fp8launch.plugins.plan.rules:fp8_experts_slower",
        "gpu-never-measured": "fp8launch.plugins.plan.rules:gpu_never_measured",
        "time-limit-too-short": "fp8launch.plugins.plan.rules:time_limit_too_short",
    },
    run_costs={"run_cost": "fp8launch.plugins.plan.run_cost:run_cost"},
    estimates={"predicted": "fp8launch.plugins.plan.predicted:estimate_step"},
)
