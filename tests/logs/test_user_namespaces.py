"""A node without user namespaces: Charliecloud's message is reported by its cause, not as a full disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fp8launch.cli import run as command


def test_what_charliecloud_says_without_user_namespaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = shutil.which("ch-run")
    if program is None:
        pytest.skip("needs Charliecloud's ch-run: apt-get install charliecloud-runtime")
    for name in ("bin", "dev", "etc", "home", "proc", "root", "sys", "tmp", "usr"):
        (tmp_path / "image" / name).mkdir(parents=True)
    # A namespace of our own, in which no further one may be made.
    words = f"echo 0 > /proc/sys/user/max_user_namespaces && exec {program} {tmp_path}/image -- true"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", words],
        env={**os.environ, "USER": "somebody"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare:" in done.stderr or "cannot create" in done.stderr:
        pytest.skip(f"this machine allows no user namespaces at all: {done.stderr.strip()}")
    assert done.returncode
    (tmp_path / "a.log").write_text(done.stderr)
    assert command(["parse", str(tmp_path / "a.log")]) == 1
    out, err = capsys.readouterr()
    assert "user-namespaces" in out + err and "user.max_user_namespaces" in out + err
