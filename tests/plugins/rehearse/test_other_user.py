"""Rehearsals by a user who is not root: they work, and are contained, without any privilege."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_containment import DAEMON, RECIPE, alive

USER = 54321  # has no account on this machine, and needs none
pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux"),
    pytest.mark.slow,
]

# Arguments: an empty folder, a folder that the user cannot enter and that has Python in it, Python's folder, a command.
# The mounts end with the command.
OPEN = """
set -e
aside=$1 closed=$2 python=$3
shift 3
if [ "$closed" != none ]; then
    mount --bind "$python" "$aside"
    mount -t tmpfs -o mode=755 none "$closed"
    mkdir -p "$python"
    mount --bind "$aside" "$python"
fi
exec setpriv --reuid=USER --regid=USER --clear-groups --inh-caps=-all -- "$@"
""".replace("USER", str(USER))

REHEARSE = """
import sys
from fp8launch.check.checker import check_all
from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import prepare
from fp8launch.plugins.rehearse.layer import LAYER, with_rehearsal
from fp8launch.plugins.rehearse.workers import Limits
run = prepare(sys.argv[1])
limits = Limits(memory_gib=float(sys.argv[2]))
print(with_rehearsal([run], check_all([run], layers=("schema",)), Cluster(), limits=limits)[0].layers[LAYER])
"""


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder of the user; folders of pytest are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="fp8launch-other-"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8launch"
    for name in ("megatron", "transformer_engine"):
        if (cache / name).exists():
            shutil.copytree(cache / name, folder / ".cache/fp8launch" / name)
    (folder / "code").mkdir()
    (folder / "r.yaml").write_text(RECIPE)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_user(theirs: Path, tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run Python as the user."""
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    python = Path(sys.base_prefix)
    closed = next((str(path) for path in reversed(python.parents) if not path.stat().st_mode & 0o001), "none")
    aside = tmp_path / "python"
    aside.mkdir(exist_ok=True)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", OPEN, "sh", aside, closed, python, sys.executable, *map(str, words)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(theirs), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=theirs,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_recipe_of_the_pack_is_rehearsed(theirs: Path, tmp_path: Path) -> None:
    done = as_user(theirs, tmp_path, "-m", "fp8launch", "check", "llama8b_bf16", "--rehearse", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"]) == (0, True), done.stdout + done.stderr
    assert answer["layers"]["rehearsal"] == "ran"


def test_a_daemon_does_not_outlive_the_rehearsal(theirs: Path, tmp_path: Path) -> None:
    (theirs / "code/train.py").write_text(DAEMON.format(place=str(theirs / "daemon"), end=""))
    done = as_user(theirs, tmp_path, "-c", REHEARSE, theirs / "r.yaml", 8)
    assert done.stdout.strip() == "ran", done.stdout + done.stderr
    assert not alive(int((theirs / "daemon").read_text()))
    assert (theirs / "daemon").stat().st_uid == USER


def test_memory_is_limited(theirs: Path, tmp_path: Path) -> None:
    hungry = "data = []\nfor _ in range(600): data.append(b'x' * (10 << 20))\nopen('got-it', 'w').close()\n"
    (theirs / "code/train.py").write_text(hungry)
    done = as_user(theirs, tmp_path, "-c", REHEARSE, theirs / "r.yaml", 1)
    assert "no verdict" in done.stdout and "memory" in done.stdout, done.stdout + done.stderr
