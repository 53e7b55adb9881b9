"""Options that select where a command's jobs run: cluster profile, scheduler and Slurm options."""

from __future__ import annotations

import click

from fp8launch import plugin_registry, schedulers
from fp8launch.cli.output import cluster_option


class BackendName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """The name of a scheduler from the core or a plugin. Plugins are looked up only when a command runs."""

    name = "backend"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(schedulers.names())}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in schedulers.names():
            if plugin := plugin_registry.absent_plugin("schedulers", value):
                message = plugin_registry.needs(repr(value), plugin)
                self.fail(f"{message}: {plugin_registry.how_to_activate(plugin)}", param, ctx)
            self.fail(f"{value!r} is not one of {', '.join(schedulers.names())}", param, ctx)
        return value


_slurm_options = (
    click.option("--partition", metavar="NAME", help="Slurm partition of this submission."),
    click.option("--account", metavar="NAME", help="Slurm account of this submission."),
    click.option("--qos", metavar="NAME", help="Slurm QOS of this submission."),
    click.option("--time", metavar="LIMIT", help="Time limit (resources.time), as in Slurm."),
    click.option("--nodelist", metavar="NODES", help="Nodes that the job must include."),
    click.option("--exclude", metavar="NODES", help="Nodes to avoid in addition to the profile's."),
    click.option("--reservation", metavar="NAME", help="Slurm reservation of this submission."),
    click.option("--nice", type=click.IntRange(-2147483645, 2147483645), metavar="N", help="Lower the priority by N."),
    click.option("--slurm", "extra", multiple=True, metavar="KEY=VALUE", help="Any other sbatch option; repeatable."),
)
destination_options = (
    cluster_option,
    click.option("--backend", "backend_name", type=BackendName(), help="Scheduler (default: automatic)."),
    *_slurm_options,
    click.option("--run-root", "root", help="Folder for runs, shared by all nodes."),
)
