"""Runs commands as another user than the owner of some folders, and reports what was done with files in there.

Reads a request as JSON from stdin: the folder `theirs`, the `commands`, and whether to `preload` the code of all
commands, which saves time and hides their imports. Writes a JSON list with an answer for each command.
Python's audit events show what is executed, imported, unpickled and opened; limits show what is read without an end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import click

from fp8launch.cli import cli, run

SECONDS, PROCESSOR_SECONDS = 200, 60
MEMORY = 4 << 30
# Modules whose functions open files with a limit, or read streams of any length a block at a time.
READERS = {"fp8launch.injob.regular_files", "fp8launch.recipe.yaml_source", "fp8launch.plugins.importer.cli"}
# A library that gets a tokenizer only after its checksum was taken, with a limit to its size.
READERS |= {"gigatoken._load.hf"}
LIBRARIES = ("pathlib", "gzip", "tempfile", "codecs", "io", "contextlib", "shutil", "os", "posixpath", "genericpath")
STARTS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn"}
INTERPRETERS = ("python", "bash", "sh", "perl", "env")
PRELOADED = (
    "pydantic", "numpy", "fp8launch.job.prepared", "fp8launch.check.checker", "fp8launch.check.rules",
    "fp8launch.report.read_run", "fp8launch.report.comparison", "fp8launch.submit.submit", "fp8launch.schedulers.local",
    "fp8launch.plugins.data.build", "fp8launch.plugins.plan.cli", "fp8launch.plugins.convert.conversion",
)  # fmt: skip
PICKLED = ("os", "posix", "builtins", "subprocess", "sys", "shutil")


class Watch:
    """Audit events that touch files below `theirs`."""

    def __init__(self, theirs: str) -> None:
        self.theirs = theirs
        self.seen: list[str] = []
        self.watching = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        self.watching = False  # what happens in here is not a command's
        try:
            self.look(event, arguments)
        finally:
            self.watching = True

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            self.started(event, arguments)
        elif event == "import" and self.is_theirs(arguments[1]):
            self.seen.append(f"imported {arguments[1]}")
        elif event == "exec" and self.is_theirs(getattr(arguments[0], "co_filename", None)):
            self.seen.append(f"executed {arguments[0].co_filename}")
        elif event == "pickle.find_class" and arguments[0] in PICKLED:
            self.seen.append(f"unpickled {arguments}")
        elif event == "open" and self.is_theirs(arguments[0]):
            self.opened(str(arguments[0]), sys._getframe(2))

    def started(self, event: str, arguments: tuple[Any, ...]) -> None:
        words = [os.fsdecode(arguments[0])] if arguments and arguments[0] else []
        if len(arguments) > 1 and isinstance(arguments[1], (list, tuple)):
            words += [os.fsdecode(word) for word in arguments[1] if isinstance(word, (str, bytes, Path))]
        program = Path(words[0]).name if words else ""
        # A name without a slash is looked for in PATH, which has no folder of theirs.
        if any("/" in word and self.is_theirs(word) for word in words[:2]):
            self.seen.append(f"started {words[:3]}")
        elif program.startswith(INTERPRETERS):
            scripts = [word for word in words if word.startswith("/") and self.is_theirs(word)]
            if scripts:
                self.seen.append(f"{event}: {program} with {scripts}")

    def opened(self, path: str, frame: FrameType | None) -> None:
        while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in (*LIBRARIES, "__main__"):
            frame = frame.f_back
        module = "" if frame is None else frame.f_globals.get("__name__", "")
        if module in READERS or not os.path.lexists(path) or Path(path).is_dir():
            return
        name = "" if frame is None else frame.f_code.co_name
        self.seen.append(f"{module}.{name} opened {path}")

    def is_theirs(self, path: object) -> bool:
        if not isinstance(path, (str, bytes)) or not path:
            return False
        text = os.fsdecode(path)
        if text.startswith("<"):
            return False  # code that comes from no file
        # A link would be resolved by Path.resolve, and what it leads to may be elsewhere.
        return os.path.abspath(text).startswith(f"{self.theirs}/")  # noqa: PTH100


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def in_child(words: list[str], watch: Watch, answer: int) -> None:
    """Run a command with limits, and write what happened to the file `answer`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
    signal.alarm(SECONDS)  # not to be caught: a pipe that nobody writes to
    said = tempfile.TemporaryFile()  # noqa: SIM115 (the process ends with the command)
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    before = bytes_read()
    watch.watching = True
    status = run(words)
    watch.watching = False
    sys.stdout.flush()
    sys.stderr.flush()
    said.seek(0)
    result = {
        "status": status,
        "said": said.read(1 << 20).decode("utf-8", "replace"),
        "seen": watch.seen,
        "read": bytes_read() - before,
        "memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    os.write(answer, json.dumps(result).encode())


def answer_of(words: list[str], watch: Watch) -> dict[str, Any]:
    with tempfile.TemporaryFile() as answer:
        pid = os.fork()
        if not pid:
            try:
                os.setpgid(0, 0)
                in_child(words, watch, answer.fileno())
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        answer.seek(0)
        text = answer.read()
    if not text:
        return {"words": words, "died": os.waitstatus_to_exitcode(status)}
    return {"words": words, **json.loads(text)}


def preload() -> None:
    """Import what most commands import, so that their processes, which are forked, need not."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    pending: list[click.Command] = [cli]
    while pending:
        command = pending.pop()
        if isinstance(command, click.Group):
            context = click.Context(command)
            pending += [one for name in command.list_commands(context) if (one := command.get_command(context, name))]


def main() -> None:
    request = json.load(sys.stdin)
    if request["preload"]:
        preload()
    watch = Watch(request["theirs"])
    sys.addaudithook(watch)
    answers = [answer_of(words, watch) for words in request["commands"]]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
