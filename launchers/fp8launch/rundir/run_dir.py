"""A run folder: what ran, how, and what it wrote.

manifest.json   what was asked for and submitted (written atomically)
recipe.yaml     the resolved recipe
job.sbatch      the script that ran (job.sh for the local backend)
code/           the in-job part
git.diff        uncommitted changes of the checkout that held the recipe
logs/           slurm-<job>.out, and <job>-<restart>.log and .exit for each attempt

A job that plain `sbatch` started makes its own folder, with a manifest and logs only (`injob.supervisor.portable_run`).
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch import plugin_registry
from fp8launch.diagnostics import error
from fp8launch.injob.ownership import take_write_permission, why_not_own
from fp8launch.injob.regular_files import read_regular
from fp8launch.injob.supervisor.run_records import MANIFEST, STARTED_BY
from fp8launch.resources import in_job_folder
from fp8launch.rundir.atomic_io import (
    is_own_file,
    make_folders,
    read_json,
    sync_folder,
    write_atomically,
)
from fp8launch.rundir.trust import why_not_own_run

__all__ = ["MANIFEST", "STUDY", "Attempt", "RunFolder", "create_run_folder", "run_folders", "write_atomically"]

STUDY = "study.json"  # marks a folder whose run folders are the points of one grid

# A folder that is being made has this before its name and a word of its own behind: renamed when it is whole.
_MAKING = re.compile(r"\.making-(.+)\.[0-9a-f]{8}")
_MAKING_SECONDS = 3600
_EXIT_FILE_BYTES = 64
# What only the user who submits may read.
_PRIVATE_FILES = ("git.diff",)
# What programs rely on, for manifests that others or a broken disk have written.
_SHAPES: dict[str, type] = {
    "jobs": list, "command": list, "recipe": dict, "megatron": dict, "layout": dict, "environment": dict,
    "study": dict, "submission": dict, "git": dict, "versions": dict, "image": dict, "phases": list, "name": str,
    "engine": dict, "arguments": dict, "started_by": str,
}  # fmt: skip
_WORDS: dict[type, str] = {dict: "mapping", list: "list", str: "text"}
_PARTS: dict[str, dict[str, type]] = {
    "study": {"name": str, "point": dict, "repeat": int}, "layout": {"world": int}, "megatron": {"argv": list},
}  # fmt: skip
_MAY_BE_NULL = ("study", "submission", "git", "image")
# A job of Slurm, a task of an array, or a process of this machine with its start time: never an option of scancel.
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18}|:[0-9]{0,18})?")


@dataclass(frozen=True)
class Attempt:
    """One start of a job: its log, and its exit status once the batch script has ended."""

    job_id: str
    restart: int
    log: Path
    exit_status: int | None


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def script(self) -> Path:
        for name in ("job.sbatch", "job.sh"):
            if (self.path / name).is_file():
                return self.path / name
        return self.path / "job.sbatch"

    def manifest(self) -> dict[str, Any]:
        """The manifest. Raises UserError when it is missing or damaged."""
        file = self.path / MANIFEST
        try:
            manifest = read_json(file)
        except FileNotFoundError:
            raise error("no-manifest", "is not a run folder: it has no manifest.json", str(self.path)) from None
        except (OSError, ValueError) as exc:
            raise error("bad-manifest", f"cannot be read: {exc}", str(file)) from None
        if wrong := _wrong_in(manifest):
            raise error("bad-manifest", f"is not a manifest: {wrong}", str(file))
        found: dict[str, Any] = manifest
        return found

    @property
    def is_plain_job(self) -> bool:
        """Whether plain `sbatch` started the run: the launcher has neither its recipe nor a plan to continue it."""
        return bool(self.manifest().get("started_by") == STARTED_BY)

    @property
    def is_mine(self) -> bool:
        """This user made it, and nobody else can change it: only then its script may run and its jobs may be ended."""
        return why_not_own_run(self.path) is None

    def update(self, **entries: Any) -> None:
        """Set entries of the manifest, all or none of them."""
        write_atomically(self.path / MANIFEST, json.dumps({**self.manifest(), **entries}, indent=2) + "\n")

    def attempts(self) -> list[Attempt]:
        """The attempts in the order in which they started."""
        found = []
        for log in (self.path / "logs").glob("*-*.log"):
            match = re.fullmatch(r"(\w+)-(\d+)", log.stem)
            if match and is_own_file(log):
                found.append(Attempt(match[1], int(match[2]), log, _exit_status(log.with_suffix(".exit"))))
        return sorted(found, key=lambda a: (len(a.job_id), a.job_id, a.restart))

    def logs(self) -> list[Path]:
        """The logs of the attempts, oldest first."""
        return [attempt.log for attempt in self.attempts()]

    def batch_output(self) -> list[Path]:
        """The file with the batch script's own output: its errors before and after the training step."""
        return sorted(filter(is_own_file, (self.path / "logs").glob("slurm-*.out")))


def create_run_folder(
    root: Path,
    run_id: str,
    files: Mapping[str, str],
    manifest: Mapping[str, Any],
    replace: bool = False,
    links: Mapping[str, Path] | None = None,
) -> RunFolder:
    """Make `root/run_id` with the in-job part, `files`, links and the manifest, whole or not at all. Exit code 3 when
    the disk refuses, or when there is one already; with `replace`, for a run of which nothing was submitted, that one
    goes.
    """
    path = root / run_id
    making = root / f".making-{run_id}.{secrets.token_hex(4)}"
    try:
        make_folders(root)
        try:
            making.mkdir(mode=0o755)
            (making / "logs").mkdir(mode=0o755)
            package = making / "code" / "fp8launch"
            make_folders(package)
            shutil.copytree(in_job_folder(), package / "injob", ignore=shutil.ignore_patterns("__pycache__"))
            (package / "__init__.py").touch(mode=0o644)
            for name, folder in plugin_registry.in_job_packages().items():
                _copy_package(folder, making / "code", name)
            # A checkout may be writable for a group; the copy that jobs run is not.
            take_write_permission(making / "code")
            _make_bytecode_folders(making / "code")
            for name, text in files.items():
                write_atomically(making / name, text, 0o600 if name in _PRIVATE_FILES else 0o644)
            for name, target in (links or {}).items():
                (making / name).symlink_to(target)
            write_atomically(making / MANIFEST, json.dumps(dict(manifest), indent=2) + "\n")
            sync_folder(making)
            if replace and path.exists():
                path.rename(root / f".making-{run_id}.{secrets.token_hex(4)}")
            making.rename(path)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        sync_folder(root)
        _sweep(root, run_id)
    except shutil.Error as exc:
        # Of the first file that could not be copied, as text: "[Errno 28] No space left on device: 'a' -> 'b'".
        words = str(exc.args[0][0][2])
        raise _refusal(path, re.sub(r"^\[Errno \d+\] ([^:]+):.*$", r"\1", words, flags=re.DOTALL)) from None
    except OSError as exc:
        raise _refusal(path, exc.strerror or str(exc)) from None
    return RunFolder(path)


def _copy_package(source: Path, code: Path, name: str) -> None:
    """Copy a package under its full name, with nothing of the packages around it but an empty `__init__.py`."""
    *outer, inner = name.split(".")
    folder = code
    for part in outer:
        folder /= part
        make_folders(folder)
        (folder / "__init__.py").touch(mode=0o644)
    shutil.copytree(source, folder / inner, ignore=shutil.ignore_patterns("__pycache__"))


def _make_bytecode_folders(package: Path) -> None:
    """Python would make them in the job under the user's umask, and what others could put into one would be run."""
    for folder in {file.parent for file in package.rglob("*.py")}:
        (folder / "__pycache__").mkdir(mode=0o755)


def _refusal(path: Path, words: str) -> Exception:
    return error("run-root", f"cannot write the run folder: {words}", str(path), "choose another --run-root", 3)


def half_made(root: Path) -> list[Path]:
    """Folders that a launcher was making when it was killed: nothing was submitted from them."""
    found = []
    for folder in root.glob(".making-*"):
        if _MAKING.fullmatch(folder.name) and folder.is_dir() and why_not_own(folder) is None:
            found.append(folder)
    return sorted(found)


def _sweep(root: Path, run_id: str) -> None:
    """Remove what was left half made: of this run, and of others when nobody can be at work on it any more."""
    for folder in half_made(root):
        match = _MAKING.fullmatch(folder.name)
        old = time.time() - folder.stat().st_mtime > _MAKING_SECONDS
        if old or (match and match[1] == run_id):
            shutil.rmtree(folder, ignore_errors=True)


def _wrong_in(manifest: object) -> str | None:
    if not isinstance(manifest, dict):
        return "it is not a mapping"
    for name, shape in _SHAPES.items():
        value = manifest.get(name, shape())
        if not isinstance(value, shape) and not (value is None and name in _MAY_BE_NULL):
            return f"'{name}' is not a {_WORDS[shape]}"
    for name, parts in _PARTS.items():
        for part, shape in parts.items():
            if not isinstance((manifest.get(name) or {}).get(part), (shape, type(None))):
                return f"'{name}.{part}' is not a {shape.__name__}"
    return _wrong_entry(manifest)


def _wrong_entry(manifest: dict[str, Any]) -> str | None:
    """What is wrong with an entry of the manifest's lists."""
    for job in manifest.get("jobs", []):
        if not isinstance(job, dict) or not _JOB_ID.fullmatch(str(job.get("id"))):
            return f"{str(job)[:80]!r} is not a job"
    for phase in manifest.get("phases", []):
        if not _is_phase(phase):
            return f"{str(phase)[:80]!r} is not a phase"
    return None


def _is_phase(phase: object) -> bool:
    if not isinstance(phase, dict):
        return False
    # Not isinstance: a bool is no iteration.
    return type(phase.get("name")) is str and type(phase.get("begin")) is int and type(phase.get("end")) is int


def run_folders(root: Path) -> Iterator[RunFolder]:
    """The run folders below a run root, those of its studies included."""
    for folder in (root, *sorted(file.parent for file in marked(root, STUDY))):
        for manifest in sorted(marked(folder, MANIFEST)):
            yield RunFolder(manifest.parent)


def marked(folder: Path, name: str) -> Iterator[Path]:
    """The files of that name one level below a folder, but not in what is half made."""
    return (file for file in folder.glob(f"*/{name}") if not file.parent.name.startswith("."))


def _exit_status(file: Path) -> int | None:
    try:
        return int(read_regular(file, _EXIT_FILE_BYTES, follow=False))
    except (OSError, ValueError):
        return None
