"""`fp8launch images import`: once, whole, by digest, told when stale, never with a secret on the screen.

With a real enroot on PATH the image comes from a real registry protocol on this machine; the other tests use stand-ins
of enroot and Apptainer that hold them to their command lines, for neither the timing of two importers nor a failing
registry can be had from the real ones on call.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from registry import Registry

from fp8launch.job.image_store import pinned, without_secrets

ROOT = Path(__file__).parents[2]
D1, D2 = (f"sha256:{letter * 64}" for letter in "ab")
# Each call is a line in calls; `tag` holds the registry's digest of the tag; a file `fails` makes imports fail.
ENROOT = """#!/bin/bash
here=$(dirname "$0")
echo "$*" >> "$here/calls"
case $1 in
digest) cat "$here/tag" ;;
import) [ "$2" = --output ] || exit 64
        [ ! -e "$here/fails" ] || { printf 'part' > "$3"; cat "$here/fails" >&2; exit 1; }
        sleep "$(cat "$here/takes" 2>/dev/null || echo 0)"
        printf 'squashed %s' "$4" > "$3" ;;
esac
"""
APPTAINER = """#!/bin/bash
echo "$*" >> "$(dirname "$0")/calls"
[ "$1" = pull ] && printf 'sif %s' "$3" > "$2"
"""
SKOPEO = """#!/bin/bash
echo "skopeo $*" >> "$(dirname "$0")/calls"
cat "$(dirname "$0")/tag"
"""


class Machine:
    """Where a user imports: programs of a folder first on PATH, a home, a folder for images."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.images = folder / "bin", folder / "images"
        self.bin.mkdir()
        (folder / "home").mkdir()
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder / "home"),
            "FP8LAUNCH_IMAGES": str(self.images),
            "PYTHONPATH": str(ROOT / "launchers"),
        }

    def has(self, tag: str | None = None, **programs: str) -> Machine:
        for name, text in programs.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        if tag:
            (self.bin / "tag").write_text(tag + "\n")
        return self

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "fp8launch", "images", "import", *arguments]

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*arguments),
            env={**self.env, **env}, cwd=self.bin, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done

    @property
    def calls(self) -> list[str]:
        file = self.bin / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def record(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.images / f"{name}.json").read_text())
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_a_real_enroot_imports_once_by_digest_and_tells_a_tag_that_moved(machine: Machine) -> None:
    found = shutil.which("enroot")
    if found is None:
        pytest.skip("no enroot on PATH")
    machine.env |= {"PATH": os.environ["PATH"], "ENROOT_ALLOW_HTTP": "y"}  # the tests' registry has no certificate
    with Registry() as registry:
        first = registry.push({"bin/hello": "#!/bin/sh\necho hello\n"})
        file = machine.images / "tiny-1.sqsh"
        done = machine.run(registry.uri)
        assert (done.returncode, done.stdout) == (0, f"{file}\n"), done.stderr
        assert machine.record("tiny-1.sqsh")["digest"] == first
        assert f"/v2/library/tiny/manifests/{first}" in registry.asked
        subprocess.run(["sha256sum", "--check", f"{file}.sha256"], cwd=machine.images, check=True, capture_output=True)
        listed = subprocess.run(["unsquashfs", "-cat", str(file), "bin/hello"], capture_output=True, check=True)
        assert b"echo hello" in listed.stdout

        before = file.stat().st_mtime_ns
        assert machine.run(registry.uri).returncode == 0
        second = registry.push({"bin/hello": "#!/bin/sh\necho again\n"})
        stale = machine.run(registry.uri)
        assert (stale.returncode, "[image-stale]" in stale.stderr, second in stale.stderr) == (1, True, True)
        assert file.stat().st_mtime_ns == before
        assert machine.run(registry.uri, "--update").returncode == 0
        assert machine.record("tiny-1.sqsh")["digest"] == second


def test_enroot_is_asked_for_the_digest_and_imports_it(machine: Machine) -> None:
    done = machine.has(D1, enroot=ENROOT).run("nemo-26.04", "--json")
    answer = json.loads(done.stdout)
    file = machine.images / "nemo-26.04.sqsh"
    assert machine.calls[0] == "digest docker://nvcr.io#nvidia/nemo:26.04"
    assert machine.calls[1].split()[::3] == ["import", f"docker://nvcr.io#nvidia/nemo@{D1}"]
    assert answer["file"] == str(file)
    assert answer["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (machine.images / "nemo-26.04.sqsh.sha256").read_text() == f"{answer['sha256']}  nemo-26.04.sqsh\n"


def test_apptainer_pulls_by_tag_or_by_skopeos_digest(machine: Machine) -> None:
    done = machine.has(apptainer=APPTAINER).run("nvcr.io/nvidia/pytorch:26.02-py3")
    assert done.returncode == 0, done.stderr
    assert machine.calls[0].split()[::2] == ["pull", "docker://nvcr.io/nvidia/pytorch:26.02-py3"]
    assert machine.record("pytorch-26.02-py3.sif")["digest"] is None
    again = machine.run("nvcr.io/nvidia/pytorch:26.02-py3")
    assert "whether it is stale cannot be told" in again.stderr and len(machine.calls) == 1

    machine.has(D2, skopeo=SKOPEO).run("nemo-26.04")
    assert machine.calls[-2] == "skopeo inspect --format {{.Digest}} docker://nvcr.io/nvidia/nemo:26.04"
    assert machine.calls[-1].endswith(f"docker://nvcr.io/nvidia/nemo@{D2}")


def test_a_fresh_file_is_left_alone_and_a_stale_one_is_told(machine: Machine) -> None:
    machine.has(D1, enroot=ENROOT).run("nemo-26.04")
    fresh = machine.run("nemo-26.04")
    file = machine.images / "nemo-26.04.sqsh"
    assert (fresh.returncode, fresh.stdout) == (0, f"{file}\n")
    assert f"images: {{nemo-26.04: {file}}}" in fresh.stderr
    assert [call.split()[0] for call in machine.calls] == ["digest", "import", "digest"]
    machine.has(D2)
    stale = machine.run("nemo-26.04")
    assert (stale.returncode, stale.stdout) == (1, "")
    assert D1 in stale.stderr and D2 in stale.stderr and "--update" in stale.stderr
    assert machine.run("nemo-26.04", "--update").returncode == 0
    assert machine.record("nemo-26.04.sqsh")["digest"] == D2
    assert D2 in (machine.images / "nemo-26.04.sqsh").read_text()


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda f: f.write_text("cut"), "image-damaged"),
        (lambda f: f.with_name(f.name + ".json").unlink(), "image-unrecorded"),
        (lambda f: f.with_name(f.name + ".json").write_text("{"), "image-unrecorded"),
        (
            lambda f: f.with_name(f.name + ".json").write_text(
                f.with_name(f.name + ".json").read_text().replace("nvidia/", "other/")
            ),
            "image-other",
        ),
    ],
)
def test_a_file_that_is_not_what_was_imported_is_told(machine: Machine, spoil: Any, code: str) -> None:
    machine.has(D1, enroot=ENROOT).run("nemo-26.04")
    spoil(machine.images / "nemo-26.04.sqsh")
    done = machine.run("nemo-26.04")
    assert (done.returncode, f"[{code}]" in done.stderr) == (1, True)
    assert machine.run("nemo-26.04", "--update").returncode == 0
    assert machine.run("nemo-26.04").returncode == 0


def test_two_importers_import_once(machine: Machine) -> None:
    machine.has(D1, enroot=ENROOT)
    (machine.bin / "takes").write_text("2")
    both = [
        subprocess.Popen(machine.argv("nemo-26.04"), env=machine.env, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(call.startswith("import") for call in machine.calls) == 1
    assert any("waiting for it" in text for text in said)


def test_a_killed_import_leaves_no_file_and_the_next_one_cleans_up(machine: Machine) -> None:
    machine.has(D1, enroot=ENROOT.replace("sleep", 'printf half > "$3"; sleep'))
    (machine.bin / "takes").write_text("30")
    process = subprocess.Popen(machine.argv("nemo-26.04"), env=machine.env, start_new_session=True, stderr=-3)
    deadline = time.monotonic() + 30
    while not list(machine.images.glob(".*.partial")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, 9)
    process.wait()
    assert not (machine.images / "nemo-26.04.sqsh").exists()
    (machine.bin / "takes").write_text("0")
    assert machine.run("nemo-26.04").returncode == 0
    assert not list(machine.images.glob(".*.partial"))


def test_a_failed_import_is_told_without_secrets(machine: Machine) -> None:
    machine.has(D1, enroot=ENROOT)
    config = machine.bin.parent / "home/.config/enroot"
    config.mkdir(parents=True)
    (config / ".credentials").write_text("machine nvcr.io login $oauthtoken password hush-file\n")
    (machine.bin / "fails").write_text("401 for $oauthtoken:hush-file hush-env\nAuthorization: Basic aHVzaA==\n")
    done = machine.run("nemo-26.04", APPTAINER_DOCKER_PASSWORD="hush-env")
    assert done.returncode == 3
    assert "[import-failed]" in done.stderr and "401 for" in done.stderr
    assert "hush" not in done.stderr and "aHVzaA" not in done.stderr
    assert [path.name for path in machine.images.iterdir()] == [".nemo-26.04.sqsh.lock"]


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["nemo-26.4"], 2, "unknown-image"),
        (["user:hush@nvcr.io/nvidia/nemo:26.04"], 2, "password-in-uri"),
        (["nemo-26.04", "--to", "/proc/none"], 3, "image-folder"),
        (["nemo-26.04", "--as", "sif"], 3, "no-import-tool"),
        (["/images/mine.sqsh"], 3, "image-missing"),
    ],
)
def test_what_cannot_work_is_refused(machine: Machine, arguments: list[str], status: int, code: str) -> None:
    done = machine.has(D1, enroot=ENROOT).run(*arguments)
    assert (done.returncode, f"[{code}]" in done.stderr) == (status, True), done.stderr
    assert machine.calls == []


def test_without_a_tool_the_way_out_is_told(machine: Machine) -> None:
    machine.env["PATH"] = str(machine.bin)
    done = machine.run("nemo-26.04")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no enroot or apptainer" in done.stderr and "srun" in done.stderr


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("docker://nvcr.io#nvidia/nemo:26.04", f"docker://nvcr.io#nvidia/nemo@{D1}"),
        ("docker://localhost:5000#tiny:1", f"docker://localhost:5000#tiny@{D1}"),
        ("docker://localhost:5000/a/tiny", f"docker://localhost:5000/a/tiny@{D1}"),
        (f"docker://a/b@{D2}", f"docker://a/b@{D2}"),
    ],
)
def test_a_digest_takes_the_place_of_the_tag(uri: str, expected: str) -> None:
    assert pinned(uri, D1) == expected
    assert pinned(uri, None) == uri


def test_text_without_secrets_still_tells_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGC_API_KEY", "nvapi-hush")
    text = "GET https://me:hush@nvcr.io/x?token=hush with nvapi-hush: 403 Forbidden"
    assert "hush" not in without_secrets(text)
    assert "403 Forbidden" in without_secrets(text) and "nvcr.io" in without_secrets(text)
