"""The core's own commands, engines, schedulers and files, declared as a plugin."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin


def _command(group: str, name: str, text: str) -> Command:
    return Command(f"fp8launch.cli.{name}:{name}", group, text)


# Headings of `fp8launch --help`, with their commands in the order shown.
_GROUPS = {
    "Prepare": {
        "recipes": "list the recipes of the pack, or explain one",
        "check": "find what would stop or spoil a run before you submit it",
        "render": "print what would run: arguments, batch script, resolved recipe",
    },
    "Run": {
        "submit": "check, then submit a run or a study",
        "runs": "list your runs and their state",
        "logs": "print the log of a run; -f follows it",
        "cancel": "cancel runs and studies",
        "resume": "continue a run that has stopped",
    },
    "Read": {
        "parse": "report the throughput of a run or a log",
        "verify": "report whether FP8 ran, with the evidence",
        "compare": "compare variants and node counts side by side",
    },
    "Site": {
        "clusters": "list your cluster profiles",
        "completion": "print the completion script for your shell",
    },
}

PLUGIN = Plugin(
    name="core",
    commands={name: _command(group, name, text) for group, texts in _GROUPS.items() for name, text in texts.items()},
    # The first engine is the default. It runs every recipe that has no key of another engine.
    engines={
        "megatron_lm": "fp8launch.engines.megatron_lm.engine:MegatronLM",
        "script": "fp8launch.engines.script.engine:Script",
    },
    schedulers={
        "sbatch": "fp8launch.schedulers.slurm.slurm_scheduler:SlurmScheduler",
        "local": "fp8launch.schedulers.local:LocalScheduler",
    },
    comparison_files={
        "csv": "fp8launch.report.comparison_files:CSV",
        "md": "fp8launch.report.comparison_files:MARKDOWN",
    },
)
