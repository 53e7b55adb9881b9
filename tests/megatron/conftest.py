"""Real Megatron-Core of every supported version, without torch: the site folders, and one parser process each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron_sites import megatron_site

from fp8launch.megatron import validators
from fp8launch.megatron.schema import supported_versions


@pytest.fixture(params=supported_versions(), scope="session")
def minor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def site(minor: str) -> Path:
    return megatron_site(minor)


class Parser:
    """Megatron's own parser in a process of its own: an argument list in, what it made of it out."""

    def __init__(self, site: Path) -> None:
        command = [sys.executable, "-I", str(validators._WORKER), str(site)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline().strip() == validators.READY

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
