"""What the core itself offers, described like a plugin."""

from __future__ import annotations

from fp8launch.plugin_registry import Command, Plugin


def _command(group: str, name: str, text: str) -> Command:
    return Command(f"fp8launch.cli.{name}:{name}", group, text)


# Headings of `fp8launch --help`, with the commands in their order.
_GROUPS = {
    "Prepare": {
        "init": "write a first cluster profile or recipe",
        "recipes": "list the recipes of the pack, or explain one",
        "data": "build datasets from text; inspect, split and blend them",
        "check": "find what would stop or spoil a run, before it is submitted",
        "estimate": "estimate parameters, memory per GPU, time of a step, GPU-hours",
        "plan": "predict the fastest layouts that fit a number of GPUs",
        "render": "print what would run: arguments, batch script, resolved recipe",
        "diff": "show what differs between two recipes, and what it affects",
    },
    "Run": {
        "submit": "check, then submit a run or a study",
        "runs": "list your runs and their state",
        "watch": "watch runs and their logs on the full screen",
        "logs": "print the log of a run; -f follows it",
        "cancel": "end runs",
        "resume": "continue a run that has stopped",
        "tune": "find the fastest settings of a recipe by short runs",
    },
    "Read": {
        "parse": "report the throughput of a run or a log",
        "verify": "report whether FP8 ran, with the evidence",
        "compare": "compare variants and node counts side by side",
        "archive": "write a run to one file for a bug report, without secrets",
        "export": "export runs to W&B, MLflow or TensorBoard",
    },
    "Site": {
        "clusters": "list your cluster profiles",
        "images": "list container images, or import one as a file",
        "doctor": "report what this machine and cluster provide and lack",
        "completion": "print the completion script of your shell",
    },
}

PLUGIN = Plugin(
    name="core",
    commands={name: _command(group, name, text) for group, texts in _GROUPS.items() for name, text in texts.items()},
    # A recipe that states no key of another engine means the first.
    engines={
        "megatron_lm": "fp8launch.engines.megatron_lm.engine:MegatronLM",
        "script": "fp8launch.engines.script.engine:Script",
    },
    schedulers={
        "sbatch": "fp8launch.schedulers.slurm.sbatch:SbatchScheduler",
        "submitit": "fp8launch.schedulers.slurm.submitit:SubmititScheduler",
        "nemo-run": "fp8launch.schedulers.slurm.nemo_run:NemoRunScheduler",
        "local": "fp8launch.schedulers.local:LocalScheduler",
    },
)
