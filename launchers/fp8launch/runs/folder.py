"""A run folder: what ran, how, and what it wrote.

manifest.json   what was asked for and submitted (written atomically)
recipe.yaml     the resolved recipe
job.sbatch      the script that ran (job.sh for the local backend)
code/           the in-job part
git.diff        uncommitted changes of the checkout that held the recipe
logs/           slurm-<job>.out, and <job>-<restart>.log and .exit for each attempt
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.pack import in_job_folder
from fp8launch.problems import error

MANIFEST = "manifest.json"
STUDY = "study.json"  # marks a folder whose run folders are the points of one grid


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
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise error("no-manifest", "is not a run folder: it has no manifest.json", str(self.path)) from None
        except (OSError, ValueError) as exc:
            raise error("bad-manifest", f"cannot be read: {exc}", str(file)) from None
        if not isinstance(manifest, dict):
            raise error("bad-manifest", "does not hold a manifest", str(file))
        return manifest

    def update(self, **entries: Any) -> None:
        """Set entries of the manifest, all or none of them."""
        write_atomically(self.path / MANIFEST, json.dumps({**self.manifest(), **entries}, indent=2) + "\n")

    def attempts(self) -> list[Attempt]:
        """The attempts in the order in which they started."""
        found = []
        for log in (self.path / "logs").glob("*-*.log"):
            match = re.fullmatch(r"(\w+)-(\d+)", log.stem)
            if match:
                found.append(Attempt(match[1], int(match[2]), log, _exit_status(log.with_suffix(".exit"))))
        return sorted(found, key=lambda a: (len(a.job_id), a.job_id, a.restart))

    def batch_output(self) -> list[Path]:
        """What Slurm kept of the batch script's own words: its errors before and after the training step."""
        return sorted((self.path / "logs").glob("slurm-*.out"))


def create_run_folder(root: Path, run_id: str, files: Mapping[str, str], manifest: Mapping[str, Any]) -> RunFolder:
    """Make `root/run_id` with the in-job part, `files` and the manifest. Exit code 3 when the disk refuses."""
    path = root / run_id
    try:
        root.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o755)
        (path / "logs").mkdir(mode=0o755)
        shutil.copytree(in_job_folder(), path / "code", ignore=shutil.ignore_patterns("__pycache__", "__init__.py"))
        for name, text in files.items():
            write_atomically(path / name, text)
        write_atomically(path / MANIFEST, json.dumps(dict(manifest), indent=2) + "\n")
    except OSError as exc:
        raise error(
            "run-root", f"cannot write the run folder: {exc.strerror}", str(path), "choose another --run-root", 3
        ) from None
    return RunFolder(path)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`; a reader, or a crash, sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def run_folders(root: Path) -> Iterator[RunFolder]:
    """The run folders below a run root, those of its studies included."""
    studies = [file.parent for file in root.glob(f"*/{STUDY}")]
    for folder in (root, *sorted(studies)):
        for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
            yield RunFolder(manifest.parent)


def _exit_status(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
