"""The `fp8launch` command. Each verb is a module of its own, imported when it is used: `--help` imports none."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

import click

from fp8launch import __version__
from fp8launch.problems import MACHINE_LACKS, UserError

# Verb, module in this package, and what it does: the order is that of a day's work.
VERBS = {
    "recipes": ("pack", "the recipes that come with fp8launch, or one of them explained"),
    "check": ("check", "what would stop or spoil a run, before it is submitted"),
    "estimate": ("estimate", "parameters, memory per GPU, FLOPs and GPU-hours of a run"),
    "render": ("render", "what would run: arguments, batch script, resolved recipe"),
    "diff": ("diff", "in what two recipes differ, and what it touches"),
    "submit": ("submit", "check, then submit a run"),
    "runs": ("runs", "your runs and their state"),
    "logs": ("logs", "the log of a run, followed with -f"),
    "cancel": ("cancel", "end runs"),
    "resume": ("resume", "go on with a run that has stopped"),
    "parse": ("parse", "throughput of a run or a log"),
    "verify": ("verify", "did FP8 run? with the evidence"),
    "compare": ("compare", "variants and node counts side by side"),
    "export": ("export", "runs handed to W&B, MLflow or TensorBoard"),
    "import": ("import_", "a Megatron argument list or launch script as a recipe"),
    "images": ("images", "the container images that recipes can name; import of one as a file"),
    "clusters": ("pack", "your cluster profiles"),
    "doctor": ("doctor", "what this machine and cluster offer and lack"),
}


class Verbs(click.Group):
    """Loads a verb's module only when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"fp8launch.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('import', 'import_')}")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in VERBS:
            from fp8launch.problems import nearest

            near = nearest(args[0], VERBS)
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"no command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fp8launch")
@click.option("--at", metavar="CLUSTER", expose_value=False, help="Do it on the login node of this profile, by ssh.")
def cli() -> None:
    """Launch FP8 pre-training with Megatron-Core on Slurm, and measure it.

    A recipe is a short YAML file; `fp8launch submit recipes/llama8b_fp8.yaml` makes it a Slurm job.
    """


def main() -> None:
    """Entry point: every way to end is an exit code from 0 to 3 and a message, never a traceback."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    from fp8launch.cli.output import complain, say

    # Neither run folders nor what their jobs write may be changed by everyone: a job inherits this from sbatch.
    os.umask(os.umask(0o022) | 0o002)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names may hold what the terminal's encoding, or any, does not.
            stream.reconfigure(errors="backslashreplace")
    try:
        if arguments[:1] == ["--at"] and len(arguments) > 1:
            from fp8launch.cli.at import run_at

            return run_at(arguments[1], arguments[2:])
        result = cli.main(arguments, prog_name="fp8launch", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except UserError as exc:
        complain(exc.problems)
        return exc.exit_code
    except click.ClickException as exc:
        exc.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        return 1
    except BrokenPipeError:
        # The reader (head, less) went away; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as exc:
        say(f"fp8launch: {exc.filename or ''}: {exc.strerror or exc}")
        return MACHINE_LACKS
    except Exception as exc:
        if os.environ.get("FP8LAUNCH_TRACEBACK"):
            raise
        say(f"fp8launch: a bug in fp8launch {__version__}: {type(exc).__name__}: {exc}")
        say("Please report it with the output of the same command under FP8LAUNCH_TRACEBACK=1.")
        return 1
