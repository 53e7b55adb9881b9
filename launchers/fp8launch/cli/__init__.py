"""The `fp8launch` command. Each verb is a module of its own, imported when it is used: `--help` imports none."""

from __future__ import annotations

import codecs
import gc
import importlib
import io
import os
import sys
from typing import Any

# Imports make a hundred thousand objects that stay. Python would search them for garbage again and again.
gc.set_threshold(200_000, 10, 10)

import click

from fp8launch import __version__
from fp8launch.diagnostics import ANSWER_IS_NO, MACHINE_LACKS, Problem, UserError, error

# Verb, module in this package, and what it does, in the groups of `--help`.
GROUPS = {
    "Prepare": {
        "init": ("init", "write a first cluster profile or recipe"),
        "recipes": ("recipes", "list the recipes of the pack, or explain one"),
        "import": ("import_", "turn an argument list or launch script into a recipe"),
        "data": ("data", "build datasets from text; inspect, split and blend them"),
        "convert": ("convert", "convert weights from and to Hugging Face"),
        "check": ("check", "find what would stop or spoil a run, before it is submitted"),
        "estimate": ("estimate", "estimate parameters, memory per GPU, time of a step, GPU-hours"),
        "plan": ("plan", "predict the fastest layouts that fit a number of GPUs"),
        "render": ("render", "print what would run: arguments, batch script, resolved recipe"),
        "diff": ("diff", "show what differs between two recipes, and what it affects"),
    },
    "Run": {
        "submit": ("submit", "check, then submit a run or a study"),
        "runs": ("runs", "list your runs and their state"),
        "watch": ("watch", "watch runs and their logs on the full screen"),
        "logs": ("logs", "print the log of a run; -f follows it"),
        "cancel": ("cancel", "end runs"),
        "resume": ("resume", "continue a run that has stopped"),
        "tune": ("tune", "find the fastest settings of a recipe by short runs"),
    },
    "Read": {
        "parse": ("parse", "report the throughput of a run or a log"),
        "verify": ("verify", "report whether FP8 ran, with the evidence"),
        "compare": ("compare", "compare variants and node counts side by side"),
        "archive": ("archive", "write a run to one file for a bug report, without secrets"),
        "export": ("export", "export runs to W&B, MLflow or TensorBoard"),
    },
    "Site": {
        "clusters": ("clusters", "list your cluster profiles"),
        "images": ("images", "list container images, or import one as a file"),
        "doctor": ("doctor", "report what this machine and cluster provide and lack"),
        "completion": ("completion", "print the completion script of your shell"),
    },
}
VERBS: dict[str, tuple[str, str]] = {}
for _group in GROUPS.values():
    VERBS |= _group


_WIDEST = max(map(len, VERBS))


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
            from fp8launch.diagnostics import nearest

            near = nearest(args[0], VERBS)
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"no command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                # Columns of the same width in every group.
                formatter.write_dl([(f"{verb:<{_WIDEST}}", text) for verb, (_, text) in verbs.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fp8launch")
@click.option("--remote", metavar="CLUSTER", expose_value=False, help="Run on this profile's login node, by ssh.")
@click.option("--at", metavar="CLUSTER", expose_value=False, hidden=True)
def cli() -> None:
    """Launch FP8 pre-training with Megatron-Core on Slurm, and measure it.

    A recipe is a short YAML file; `fp8launch submit recipes/llama8b_fp8.yaml` makes it a Slurm job.
    """


def main() -> None:
    """Entry point: every way to end is an exit code from 0 to 3 and a message, never a traceback."""
    status = run(sys.argv[1:])
    # Python would search everything for garbage once more before it exits.
    gc.freeze()
    sys.exit(status)


# Replacements for the signs of tables and charts in encodings that lack them.
_IN_ASCII = {"±": "+-", "×": "x", "█": "#", "▶": ">", "–": "-", "…": "...", "·": "-"}
_IN_ASCII |= dict(zip("▁▂▃▄▅▆▇", "_.-:=+*", strict=True))


def _as_ascii(failed: UnicodeError) -> tuple[str, int]:
    """Spell out what the terminal's encoding, or any, does not have: our own signs, and characters of names."""
    assert isinstance(failed, UnicodeEncodeError)
    text = failed.object[failed.start : failed.end]
    return "".join(_IN_ASCII.get(sign) or ascii(sign)[1:-1] for sign in text), failed.end


codecs.register_error("fp8launch", _as_ascii)


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code. With `--json` a refusal is a JSON object on stdout too."""
    # Neither run folders nor what their jobs write may be changed by everyone: a job inherits this from sbatch.
    os.umask(os.umask(0o022) | 0o002)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fp8launch")
    try:
        refusal = _refusal(arguments)
        if isinstance(refusal, int):
            return refusal
        if _wants_json(arguments):
            from fp8launch.cli.output import show_json

            show_json({"ok": False, "problems": list(map(Problem.as_json, refusal.problems))})
        return refusal.exit_code
    except BrokenPipeError:
        # The reader (head, less) went away; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError:
        return MACHINE_LACKS  # stdout takes nothing, as the message on stderr said


def _wants_json(arguments: list[str]) -> bool:
    """Whether a command was asked for JSON, even one whose other arguments cannot be parsed."""
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    return "--json" in arguments


def _refusal(arguments: list[str]) -> int | UserError:
    """Run one command; return its exit code, or the error that ended it, whose message has been printed."""
    from fp8launch.cli.output import eprint, print_problems

    try:
        return _run_here_or_remotely(arguments)
    except UserError as exc:
        print_problems(exc.problems)
        return exc
    except click.ClickException as exc:
        exc.show()
        command = "fp8launch"
        if isinstance(exc, click.UsageError) and exc.ctx is not None:
            command = exc.ctx.command_path
        return error("usage", exc.format_message(), command, f"read `{command} --help`")
    except (KeyboardInterrupt, click.Abort):
        eprint("interrupted")
        return error("interrupted", "interrupted", exit_code=ANSWER_IS_NO)
    except BrokenPipeError:
        raise
    except OSError as exc:
        message = f"{exc.filename or ''}: {exc.strerror or exc}"
        eprint(f"fp8launch: {message}")
        return error("machine", message, exit_code=MACHINE_LACKS)
    except Exception as exc:
        if os.environ.get("FP8LAUNCH_TRACEBACK"):
            raise
        message = f"a bug in fp8launch {__version__}: {type(exc).__name__}: {exc}"
        fix = "Please report it with the output of the same command under FP8LAUNCH_TRACEBACK=1."
        eprint(f"fp8launch: {message}\n{fix}")
        return error("bug", message, fix=fix, exit_code=ANSWER_IS_NO)


def _run_here_or_remotely(arguments: list[str]) -> int:
    if len(arguments) > 1 and arguments[0] in ("--remote", "--at"):
        from fp8launch.cli.remote import run_remote

        return run_remote(arguments[1], arguments[2:])
    status = cli.main(arguments, prog_name="fp8launch", standalone_mode=False)
    if isinstance(status, int):
        return status
    return 0
