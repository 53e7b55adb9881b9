"""Runs a rendered script with real bash. The programs that it calls record how they were called, byte for byte.

This tests the text of scripts, and is no stand-in for Slurm: a real one runs them in tests/slurm.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_RECORDER = """#!/bin/bash
here={here}
shopt -s nullglob
earlier=("$here"/*.argv)
call=$here/${{#earlier[@]}}
cat "/proc/$$/environ" > "$call.environ"
printf '%s' "$PWD" > "$call.folder"
printf '%s\\0' "${{0##*/}}" "$@" > "$call.argv"
exit {status}
"""
JOB = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node-[a-b]"}


@dataclass(frozen=True)
class Call:
    argv: list[str]
    environment: dict[str, str]
    folder: str


@dataclass(frozen=True)
class Outcome:
    status: int
    stderr: str
    calls: list[Call]


class Harness:
    """A folder with the recorders `srun`, `apptainer`, `ch-run` and `a python`, and a place to run in."""

    def __init__(self, root: Path, status: int = 0) -> None:
        self.work = root / "work folder"
        self.home = root / "home"
        self.bin = root / "bin"
        self._calls = root / "calls"
        for folder in (self.work, self.home, self.bin, self._calls):
            folder.mkdir(parents=True)
        for name in ("srun", "apptainer", "ch-run", "a python"):
            (self.bin / name).write_text(_RECORDER.format(here=self._calls, status=status))
            (self.bin / name).chmod(0o755)
        (self.bin / "scontrol").write_text(
            "#!/bin/bash\nif [[ $* == 'show hostnames node-[a-b]' ]]; then echo node-a && echo node-b; fi\n"
        )
        (self.bin / "scontrol").chmod(0o755)

    @property
    def python(self) -> str:
        return str(self.bin / "a python")

    def run(self, script: str, **environment: str) -> Outcome:
        """The script as sbatch would run it: a copy elsewhere, started by bash in the folder of the submission."""
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
            file.write(script)
            file.flush()
            done = subprocess.run(
                ["bash", file.name],
                cwd=self.work,
                env={
                    "PATH": f"{self.bin}:/usr/bin:/bin",
                    "HOME": str(self.home),
                    "SLURM_SUBMIT_DIR": str(self.work),
                    **JOB,
                    **environment,
                },
                capture_output=True,
                timeout=30,
                check=False,
            )
        calls = [_read(call) for call in sorted(self._calls.glob("*.argv"), key=lambda f: int(f.stem))]
        return Outcome(done.returncode, done.stderr.decode("utf-8", "replace"), calls)


def _read(call: Path) -> Call:
    argv = [os.fsdecode(word) for word in call.read_bytes().split(b"\0")[:-1]]
    entries = call.with_suffix(".environ").read_bytes().split(b"\0")[:-1]
    pairs = [os.fsdecode(entry).partition("=") for entry in entries]
    return Call(argv, {name: value for name, _, value in pairs}, call.with_suffix(".folder").read_text())
