"""Ctrl-C at any time, also during imports, ends with one line and exit code 130."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Presses Ctrl-C when a module is imported, in code that a library runs with exec(), as dataclasses and pydantic do.
START = """
import importlib.abc, os, signal, sys
class Press(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            exec("os.kill(os.getpid(), signal.SIGINT)")
sys.meta_path.insert(0, Press())
sys.argv[1:] = {arguments!r}
from fp8launch.__main__ import main
main()
"""


def interrupted(module: str, *arguments: str) -> tuple[str, str]:
    """Run a command that Ctrl-C ends at the import of a module; return its output and messages."""
    start = START.format(module=module, arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "module",
    ["click", "fp8launch.cli", "fp8launch.plugin_registry", "fp8launch.cli.output", "fp8launch.cli.check",
     "pydantic", "yaml", "fp8launch.check.checker", "rich.table"],
)  # fmt: skip
def test_during_an_import(home: Path, module: str) -> None:
    command = ("recipes",) if module == "rich.table" else ("check", "tiny_cpu")
    assert interrupted(module, *command) == ("", "interrupted\n")


@pytest.mark.parametrize("module", ["click", "pydantic"])
def test_with_json(home: Path, module: str) -> None:
    shown, _ = interrupted(module, "check", "tiny_cpu", "--json")
    found = json.loads(shown)
    assert (found["ok"], found["problems"][0]["code"]) == (False, "interrupted")
