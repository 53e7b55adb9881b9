"""Small helpers of the tests."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fp8launch.diagnostics import Problem, UserError
from fp8launch.logs.open_log import open_log
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.schema import FlagSchema
from fp8launch.report.run_report import RunReport
from fp8launch.report.throughput import read_logs, summarise

TESTS = Path(__file__).resolve().parent
BENCHMARKS = TESTS.parent / "benchmarks"


def refused(call: Callable[..., Any], *arguments: Any, exit_code: int = 2, **named: Any) -> tuple[Problem, ...]:
    """The problems with which a call ends; every one of them says something."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert caught.value.exit_code == exit_code
    assert caught.value.problems
    assert all(p.message and "Traceback" not in p.message for p in caught.value.problems)
    return caught.value.problems


def only(problems: tuple[Problem, ...]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition holds, and fail where it does not in all these seconds. A slow one is asked less often."""
    end = time.monotonic() + seconds
    begin = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < end, f"not so after {seconds:g} s"
        time.sleep(max(0.02, min(4 * (now - begin), 1)))
        begin = time.monotonic()


def sitting(name: str) -> Path:
    """The logs of one session on H200."""
    return unpacked(BENCHMARKS / "h200" / "logs.tar.xz", name)


def real_logs(kind: str) -> Path:
    """Logs of real runs: `runs`, or `h200` for the runs on one H200 in tests/data/h200/README.md."""
    return unpacked(TESTS / "data" / "logs.tar.xz", kind)


@functools.cache
def unpacked(file: Path, name: str) -> Path:
    """One folder of an archive, unpacked into a place that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="logs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(file) as archive:
        members = [member for member in archive if member.name.startswith(f"{name}/")]
        archive.extractall(folder, members, filter="data")
    return folder / name


def log_bytes(path: Path) -> bytes:
    """The content of a log, unpacked where it is compressed."""
    with open_log(path) as stream:
        return stream.read()


def log_text(path: Path) -> str:
    return log_bytes(path).decode("utf-8", "replace")


def as_megatron_parses(values: Mapping[str, FlagValue], schema: FlagSchema) -> dict[str, Any]:
    """What Megatron's parser would end up with: every attribute, defaults included."""
    found: dict[str, Any] = {flag.dest: flag.default for flag in schema.flags()}
    for name, value in values.items():
        flag = schema.find(name)
        assert flag is not None
        found[flag.dest] = value if flag.takes_value or flag.action == "boolean" else flag.const
    return found


SLURM = ("sbatch", "srun", "scontrol", "sinfo", "squeue", "sacct", "sacctmgr", "scancel")


def path_without_slurm(folder: Path) -> str:
    """A PATH with every program of this machine except Slurm's, in a new folder of links."""
    folder.mkdir()
    for place in map(Path, os.environ["PATH"].split(":")):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if program.name not in SLURM and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def parse_paths(paths: Sequence[Path], **options: Any) -> RunReport:
    """Report on a run from its logs, one per attempt, oldest first."""
    return summarise(read_logs(paths), **options)
