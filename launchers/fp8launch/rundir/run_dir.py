"""A run folder: the record of a run, its program and its logs.

manifest.json   the request and its submissions (written atomically)
recipe.yaml     the resolved recipe
job.*           the script that ran, under the scheduler's name for it
code/           the programs that run inside the job
git.diff        uncommitted changes of the checkout that held the recipe
logs/           <job>-<restart>.log and .exit for each attempt, and the script's output, <scheduler>-<job>.out

A portable script makes its own run folder when it runs, with a manifest and logs only.
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
from fp8launch.injob.supervisor.run_records import MANIFEST, read_json
from fp8launch.resources import in_job_folder
from fp8launch.rundir.atomic_io import (
    is_own_file,
    make_folders,
    sync_folder,
    write_atomically,
)
from fp8launch.rundir.trust import why_not_own_run

__all__ = ["MANIFEST", "STUDY", "Attempt", "RunFolder", "create_run_folder", "run_folders", "write_atomically"]

STUDY = "study.json"  # marks a folder whose run folders are the points of one grid

# The name of an unfinished run folder, which is renamed once it is complete.
_MAKING = re.compile(r"\.making-(.+)\.[0-9a-f]{8}")
_MAKING_SECONDS = 3600
_EXIT_FILE_BYTES = 64
# Files that only the submitting user may read.
_PRIVATE_FILES = ("git.diff",)
# The types that programs rely on. Others, or a broken disk, may have written the manifest.
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
# Schedulers choose their own job ids: `123`, `123_4`, `123.pbs01`, `123[4].pbs01`. An id becomes a part of file names
# and a word of the scheduler's commands, so it can be neither an option nor a path.
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@\[\]-]{0,127}")
_LOG_NAME = re.compile(rf"({_JOB_ID.pattern})-([0-9]{{1,9}})")


@dataclass(frozen=True)
class Attempt:
    """One start of a job: its log, and its exit status once the script has ended."""

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
        """The script of the run's jobs; a nonexistent path if there is none."""
        return next((file for file in sorted(self.path.glob("job.*")) if file.is_file()), self.path / "job.sh")

    def manifest(self) -> dict[str, Any]:
        """Read the manifest. Raises UserError if it is missing or damaged."""
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
        """Return whether a portable script made the run: there is no recipe, and no plan to continue it."""
        return bool(self.manifest().get("started_by"))

    @property
    def is_mine(self) -> bool:
        """Return whether the run is safely this user's own, so that fp8launch may start and end its jobs."""
        return why_not_own_run(self.path) is None

    def update(self, **entries: Any) -> None:
        """Set entries of the manifest, all or none of them."""
        write_atomically(self.path / MANIFEST, json.dumps({**self.manifest(), **entries}, indent=2) + "\n")

    def attempts(self) -> list[Attempt]:
        """Return the attempts in the order in which they started."""
        found = []
        for log in (self.path / "logs").glob("*-*.log"):
            match = _LOG_NAME.fullmatch(log.stem)
            if match and is_own_file(log):
                found.append(Attempt(match[1], int(match[2]), log, _exit_status(log.with_suffix(".exit"))))
        return sorted(found, key=lambda attempt: (natural_order(attempt.job_id), attempt.restart))

    def logs(self) -> list[Path]:
        """Return the logs of the attempts, oldest first."""
        return [attempt.log for attempt in self.attempts()]

    def batch_output(self) -> list[Path]:
        """Return the files with the script's own output, oldest job first: its errors around the training step."""
        files = [file for file in (self.path / "logs").glob("*-*.out") if is_own_file(file)]
        return sorted(files, key=lambda file: natural_order(file.stem))


def is_job_id(value: object) -> bool:
    return isinstance(value, str) and _JOB_ID.fullmatch(value) is not None


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts job ids and host names by the numbers in them: `9.pbs01` comes before `10.pbs01`."""
    parts = filter(None, re.split(r"([0-9]{1,18})", name))
    return [(int(part) if re.fullmatch("[0-9]+", part) else -1, part) for part in parts]


def create_run_folder(
    root: Path,
    run_id: str,
    files: Mapping[str, str],
    manifest: Mapping[str, Any],
    replace: bool = False,
    links: Mapping[str, Path] | None = None,
) -> RunFolder:
    """Make `root/run_id` with the in-job part, `files`, links and the manifest, whole or not at all.

    Raises UserError (exit code 3) if the disk refuses, or if there is one already. With `replace`, for a run of which
    nothing was submitted, the new folder takes its place.
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
            # Python would make these folders under the user's umask, and would run files that others put there.
            for folder in {file.parent for file in (making / "code").rglob("*.py")}:
                (folder / "__pycache__").mkdir(mode=0o755)
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
        # The error of the first file that could not be copied: "[Errno 28] No space left on device: 'a' -> 'b'".
        words = str(exc.args[0][0][2])
        raise _refusal(path, re.sub(r"^\[Errno \d+\] ([^:]+):.*$", r"\1", words, flags=re.DOTALL)) from None
    except OSError as exc:
        raise _refusal(path, exc.strerror or str(exc)) from None
    return RunFolder(path)


def _copy_package(source: Path, code: Path, name: str) -> None:
    """Copy a package under its full name, with only an empty `__init__.py` for each package around it."""
    *outer, inner = name.split(".")
    folder = code
    for part in outer:
        folder /= part
        make_folders(folder)
        (folder / "__init__.py").touch(mode=0o644)
    shutil.copytree(source, folder / inner, ignore=shutil.ignore_patterns("__pycache__"))


def _refusal(path: Path, words: str) -> Exception:
    return error("run-root", f"cannot write the run folder: {words}", str(path), "choose another --run-root", 3)


def half_made(root: Path) -> list[Path]:
    """Return folders that a launcher was making when it was killed; nothing was submitted from them."""
    folders = [folder for folder in root.glob(".making-*") if _MAKING.fullmatch(folder.name) and folder.is_dir()]
    return sorted(folder for folder in folders if why_not_own(folder) is None)


def _sweep(root: Path, run_id: str) -> None:
    """Remove half-made folders of this run, and of others that nobody can still be working on."""
    for folder in half_made(root):
        match = _MAKING.fullmatch(folder.name)
        old = time.time() - folder.stat().st_mtime > _MAKING_SECONDS
        if old or (match and match[1] == run_id):
            shutil.rmtree(folder, ignore_errors=True)


def _wrong_in(manifest: object) -> str | None:
    """Return the fault of a manifest; None if programs can rely on its shape."""
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
    for job in manifest.get("jobs", []):
        if not isinstance(job, dict) or not is_job_id(job.get("id")):
            return f"{str(job)[:80]!r} is not a job"
    for phase in manifest.get("phases", []):
        # Not isinstance: a bool is no iteration.
        types = [type(phase.get(key)) for key in ("name", "begin", "end")] if isinstance(phase, dict) else []
        if types != [str, int, int]:
            return f"{str(phase)[:80]!r} is not a phase"
    return None


def run_folders(root: Path) -> Iterator[RunFolder]:
    """Yield the run folders below a run root, including the runs of studies."""
    for folder in (root, *sorted(file.parent for file in marked(root, STUDY))):
        for manifest in sorted(marked(folder, MANIFEST)):
            yield RunFolder(manifest.parent)


def marked(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of that name one level below a folder, except in folders that are half made."""
    return (file for file in folder.glob(f"*/{name}") if not file.parent.name.startswith("."))


def _exit_status(file: Path) -> int | None:
    try:
        return int(read_regular(file, _EXIT_FILE_BYTES, follow=False))
    except (OSError, ValueError):
        return None
