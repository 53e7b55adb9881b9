"""Proofs of layouts: see docs/prove.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin

PLUGIN = Plugin(
    name="prove",
    requires=("rehearse", "validators"),
    commands={
        "prove": Command(
            "fp8launch.plugins.prove.cli:prove", "Prepare", "show that a layout trains the same model as one rank"
        ),
    },
    check_layers={
        "prove": "fp8launch.plugins.prove.layer:PROVE",
        "require_proof": "fp8launch.plugins.prove.layer:REQUIRE",
    },
)
