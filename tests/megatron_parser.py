"""Megatron's own parser: a fixture for tests that need the plugin validators."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Parser:
    """Megatron's parser in a separate process, without torch: takes an argument list, returns the parsed values."""

    def __init__(self, site: Path) -> None:
        from fp8launch.plugins.validators import verdicts

        command = [sys.executable, "-I", str(verdicts._WORKER), str(site)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline().strip() == verdicts.READY

    def __call__(self, argv: list[str]) -> dict[str, Any]:
        request = {
            "argv": argv, "world_size": 1, "compute_capability": [9, 0], "te_version": None, "env": {},
            "last_stage": "parse_args", "with_args": True,
        }  # fmt: skip
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="session")
def real_parser(site: Path) -> Iterator[Callable[[list[str]], dict[str, Any]]]:
    parser = Parser(site)
    yield parser
    assert parser.process.stdin
    parser.process.stdin.close()
    assert parser.process.wait(timeout=30) == 0
