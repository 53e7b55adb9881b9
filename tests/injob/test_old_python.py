"""The supervisor runs on whatever Python a compute node has: 3.7 or newer, and the standard library only."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8launch.injob.supervisor import checkpoints
from fp8launch.rundir.run_dir import RunFolder

FOLDER = Path(checkpoints.__file__).parent
# Shared with the login node; they run on the batch host as well.
SHARED = [FOLDER.parent / name for name in ("ownership.py", "regular_files.py", "local_job.py")]
SLURM = FOLDER.parent / "slurm"
FILES = [*sorted(FOLDER.glob("*.py")), *sorted(SLURM.glob("*.py")), *SHARED]
OLDEST = (3, 7)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_syntax_is_that_of_the_oldest_python(file: Path) -> None:
    ast.parse(file.read_text(), feature_version=OLDEST)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_but_the_standard_library_and_itself_is_imported(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            own = name.startswith(
                (
                    "fp8launch.injob.supervisor",
                    "fp8launch.injob.slurm",
                    *(f"fp8launch.injob.{file.stem}" for file in SHARED),
                )
            )
            assert own or name.split(".")[0] in sys.stdlib_module_names, f"{file.name} imports {name}"


def old_pythons() -> list[str]:
    """The Pythons of this machine that are older than the login node's oldest, as far as they are found."""
    found = [str(path) for path in Path("~/.pyenv/versions").expanduser().glob("3.[789].*/bin/python3")]
    for name in ("python3.7", "python3.8", "python3.9"):
        path = shutil.which(name)
        # pyenv leaves names behind that only say that they are not chosen.
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            found.append(path)
    return sorted(found)


LOG = """0: [rank0]: Traceback (most recent call last):
0: [rank0]:   File "/x/train.py", line 1, in step
0: [rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
"""


@pytest.mark.parametrize("python", old_pythons() or [None])
def test_an_attempt_begins_and_ends_on_an_old_python(python: str | None, tmp_path: Path) -> None:
    if python is None:
        pytest.skip("this machine has no Python older than 3.10")
    package = tmp_path / "code" / "fp8launch"
    shutil.copytree(FOLDER, package / "injob" / "supervisor", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SLURM, package / "injob" / "slurm", ignore=shutil.ignore_patterns("__pycache__"))
    for file in SHARED:
        shutil.copy(file, package / "injob")
    (package / "__init__.py").touch()
    (package / "injob" / "__init__.py").touch()
    (tmp_path / "logs").mkdir()
    plan = {
        "checkpoint": "ckpt", "iterations": 10, "phases": [], "attempts": 3, "stuck": 2, "stop_before": 60,
        "limit": 600, "hang": None, "keep": None, "continue_by": "requeue",
        "scheduler": "fp8launch.injob.slurm.job:SlurmJob",
        "owner": {"run": "old", "recipe": "0" * 64, "created": "2026-11-24T00:00:00+00:00"},
        "rules": {"out-of-memory": "stop", "unknown": "stop"},
    }  # fmt: skip
    (tmp_path / "survive.json").write_text(json.dumps(plan))
    (tmp_path / "logs" / "5-0.log").write_text(LOG)
    for what, more in (("begin", []), ("end", ["1"])):
        supervisor = package / "injob" / "supervisor" / "supervisor.py"
        command = [python, str(supervisor), what, str(tmp_path), str(tmp_path / "logs" / "5-0"), *more]
        # No Slurm here: what it would say is not known, and the run ends in good order all the same.
        env = {"PATH": str(tmp_path), "SLURM_JOB_START_TIME": "0", "SLURM_JOB_END_TIME": "600"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert "Traceback" not in done.stderr
    [attempt] = json.loads((tmp_path / "attempts.json").read_text())["attempts"]
    assert attempt["cause"] == "out-of-memory", done.stderr


@pytest.mark.parametrize("python", old_pythons() or [None])
def test_a_portable_run_is_recorded_and_explained_on_an_old_python(python: str | None, tmp_path: Path) -> None:
    if python is None:
        pytest.skip("this machine has no Python older than 3.10")
    logs = tmp_path / "tiny-5" / "logs"
    logs.mkdir(parents=True)
    (logs / "5-0.log").write_text(LOG)
    for what, more in (("record", ["--name=tiny", "--env=A=b=c", "--", "--lr", "1"]), ("explain", ["1"])):
        command = [python, str(SLURM / "portable_run.py"), what, str(logs.parent), str(logs / "5-0"), *more]
        env = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert RunFolder(logs.parent).manifest()["environment"] == {"A": "b=c"}
    assert "failed with exit status 1: out-of-memory" in done.stderr
