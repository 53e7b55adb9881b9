"""The `fp8launch` command. Each verb is a module of its own, imported when it is used: `--help` imports none."""

from __future__ import annotations

import codecs
import gc
import io
import os
import sys
from typing import Any

# Imports make a hundred thousand objects that stay. Python would search them for garbage again and again.
gc.set_threshold(200_000, 10, 10)

import click

from fp8launch import __version__, plugin_registry
from fp8launch.diagnostics import ANSWER_IS_NO, INTERRUPTED, MACHINE_LACKS, Problem, UserError, error
from fp8launch.plugin_registry import Command


def commands() -> dict[str, Command]:
    """Return the verbs, the core's first."""
    return {name: offer.value for name, offer in plugin_registry.offered("commands").items()}


class Verbs(click.Group):
    """Loads a verb's module only when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        offer = plugin_registry.offered("commands").get(cmd_name)
        if offer is None:
            return None
        command: click.Command = plugin_registry.load(offer)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in commands():
            from fp8launch.diagnostics import nearest

            if plugin := plugin_registry.absent_plugin("commands", args[0]):
                hint = f"add it to {plugin_registry.SELECTION}, or unset that variable"
                raise click.UsageError(f"'{args[0]}' needs the plugin {plugin}, which is not active: {hint}", ctx)
            near = nearest(args[0], commands())
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"no command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, dict[str, str]] = {}
        for verb, command in commands().items():
            groups.setdefault(command.group, {})[verb] = command.help
        widest = max(map(len, commands()))
        for title, texts in groups.items():
            with formatter.section(title):
                # Columns of the same width in every group.
                formatter.write_dl([(f"{verb:<{widest}}", text) for verb, text in texts.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fp8launch")
@click.option("--remote", metavar="CLUSTER", expose_value=False, help="Run on this profile's login node, by ssh.")
@click.option("--at", metavar="CLUSTER", expose_value=False, hidden=True)
def cli() -> None:
    """Launch FP8 pre-training with Megatron-Core on Slurm, and measure it.

    A recipe is a short YAML file; `fp8launch submit recipes/llama8b_fp8.yaml` makes it a Slurm job.
    """


def main() -> None:
    """Entry point: every way to end is an exit code and a message, never a traceback."""
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
    # Neither run folders nor what their jobs write may be changed by others: a job inherits this from sbatch.
    os.umask(os.umask(0o022) | 0o022)
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
        # The arguments that it quotes may be names of others' files, from a pattern of the shell.
        words = io.StringIO()
        exc.show(words)
        eprint(words.getvalue().rstrip("\n"))
        command = "fp8launch"
        if isinstance(exc, click.UsageError) and exc.ctx is not None:
            command = exc.ctx.command_path
        return error("usage", exc.format_message(), command, f"read `{command} --help`")
    except (KeyboardInterrupt, click.Abort):
        eprint("interrupted")
        return error("interrupted", "interrupted", exit_code=INTERRUPTED)
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
