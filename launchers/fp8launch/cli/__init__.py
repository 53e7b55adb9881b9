"""The `fp8launch` command. Each subcommand lives in its own module, imported only when it is called."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from fp8launch import __version__, plugin_registry
from fp8launch.diagnostics import ANSWER_IS_NO, CLOSED_PIPE, INTERRUPTED, MACHINE_LACKS, Problem, UserError, error
from fp8launch.plugin_registry import Command


def commands() -> dict[str, Command]:
    """Return all commands, the core's before those of plugins."""
    return {name: offer.value for name, offer in plugin_registry.offered("commands").items()}


class Interrupted(BaseException):
    """Replaces KeyboardInterrupt, because click prints an empty line when it catches one."""


class Verbs(click.Group):
    """A command group that imports a command's module only when the command is called."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None

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
                message = plugin_registry.needs(f"'{args[0]}'", plugin)
                raise click.UsageError(f"{message}: {plugin_registry.how_to_activate(plugin)}", ctx)
            near = nearest(args[0], commands())
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"no command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[str]] = {}
        for verb, command in commands().items():
            group = groups.setdefault(command.group, [])
            group.insert(group.index(command.before) if command.before in group else len(group), verb)
        # Pad all names to the widest one so that the columns line up across groups.
        widest = max(map(len, commands()))
        for title, verbs in groups.items():
            with formatter.section(title):
                formatter.write_dl([(f"{verb:<{widest}}", commands()[verb].help) for verb in verbs])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fp8launch")
@click.option("--remote", metavar="CLUSTER", expose_value=False, help="Run on this profile's login node, by ssh.")
@click.option("--at", metavar="CLUSTER", expose_value=False, hidden=True)
def cli() -> None:
    """Launch FP8 pre-training with Megatron-Core on Slurm, and measure it. A recipe is a short YAML file;
    `fp8launch submit recipes/llama8b_fp8.yaml` turns it into a Slurm job.
    """


# Replacements for table and chart characters in encodings that lack them.
_IN_ASCII = {"±": "+-", "×": "x", "█": "#", "▶": ">", "–": "-", "…": "...", "·": "-"}
_IN_ASCII |= dict(zip("▁▂▃▄▅▆▇", "_.-:=+*", strict=True))


def _as_ascii(failed: UnicodeError) -> tuple[str, int]:
    """Replace characters that the terminal's encoding lacks, in our own output as well as in quoted names."""
    assert isinstance(failed, UnicodeEncodeError)
    text = failed.object[failed.start : failed.end]
    return "".join(_IN_ASCII.get(sign) or ascii(sign)[1:-1] for sign in text), failed.end


codecs.register_error("fp8launch", _as_ascii)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. With `--json`, an error is also a JSON object on stdout."""
    # Other users must not be able to write to run folders or to job output. sbatch passes the umask on to the job.
    os.umask(os.umask(0o022) | 0o022)
    stdout = sys.stdout
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
    except (BrokenPipeError, SystemExit) as exc:
        # If the reader (head, less) has exited, rich and click exit with 1, "the answer is no". Click wraps stdout.
        closed = isinstance(exc.__context__, BrokenPipeError) or sys.stdout is not stdout
        if isinstance(exc, SystemExit) and not closed:
            raise
        # Otherwise, Python would report the closed pipe again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError:
        return MACHINE_LACKS  # stdout is not writable; stderr already has the message


def _full_output(exc: OSError) -> str:
    """Return the file that stdout is redirected to if `exc` can only come from it: a full disk or quota.

    Errors about other files carry the file's name.
    """
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and not sys.stdout.isatty():
        with contextlib.suppress(OSError):
            place = Path("/proc/self/fd", str(sys.stdout.fileno())).readlink()
            return str(place) if place.is_absolute() else ""  # a pipe is never full
    return ""


def _wants_json(arguments: list[str]) -> bool:
    """Return whether the user requested JSON, even if the other arguments cannot be parsed."""
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    return "--json" in arguments


def _refusal(arguments: list[str]) -> int | UserError:
    """Run one command and return its exit code. If it fails, print the message and return the error."""
    from fp8launch.cli.output import eprint, print_problems

    try:
        return _run_here_or_remotely(arguments)
    except UserError as exc:
        print_problems(exc.problems)
        return exc
    except click.ClickException as exc:
        # The message may quote names of other users' files that a shell glob matched, so eprint escapes it.
        words = io.StringIO()
        exc.show(words)
        eprint(words.getvalue().rstrip("\n"))
        command = "fp8launch"
        if isinstance(exc, click.UsageError) and exc.ctx is not None:
            command = exc.ctx.command_path
        return error("usage", exc.format_message(), command, f"read `{command} --help`")
    except (KeyboardInterrupt, Interrupted, click.Abort) as exc:
        # A terminal echoes ^C without a newline. Before an Abort, click has already printed one.
        newline = "\n" if sys.stderr.isatty() and not isinstance(exc, click.Abort) else ""
        eprint(f"{newline}interrupted")
        return error("interrupted", "interrupted", exit_code=INTERRUPTED)
    except BrokenPipeError:
        raise
    except OSError as exc:
        message = exc.strerror or str(exc)
        if place := exc.filename or _full_output(exc):
            message = f"{place}: {message}"
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
        option = arguments[0].removeprefix("--")
        if absent := plugin_registry.absent_error("relays", option, arguments[0], None):
            raise absent
        relay = plugin_registry.load(plugin_registry.offered("relays")[option])
        return int(relay(arguments[1], arguments[2:]))
    status = cli.main(arguments, prog_name="fp8launch", standalone_mode=False)
    if isinstance(status, int):
        return status
    return 0
