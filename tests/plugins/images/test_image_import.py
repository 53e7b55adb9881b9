"""`fp8launch images import`: once, completely, by digest, stale files reported, secrets never printed.

With a real enroot on PATH the image comes from a real registry protocol on this machine; the other tests use stand-ins
of enroot and Apptainer that hold them to their command lines, for neither the timing of two importers nor a failing
registry can be had from the real ones on call.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from registry import Registry
from support import wait_for

from fp8launch.cluster.images import pinned
from fp8launch.plugins.images.image_store import without_secrets

ROOT = Path(__file__).parents[3]
D1, D2 = (f"sha256:{letter * 64}" for letter in "ab")
# Each call is a line in calls; `tag` holds the registry's digest of the tag; a file `fails` makes imports fail,
# a file `held` holds them until it is gone.
ENROOT = """#!/bin/bash
here=$(dirname "$0")
echo "$*" >> "$here/calls"
case $1 in
digest) cat "$here/tag" ;;
import) [ "$2" = --output ] || exit 64
        [ ! -e "$here/fails" ] || { printf 'part' > "$3"; cat "$here/fails" >&2; exit 1; }
        while [ -e "$here/held" ]; do sleep 0.05; done
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
        (folder / "tools").mkdir()
        # No skopeo and enroot except the test's.
        for tool in ("bash", "cat", "dirname", "sleep", "sh"):
            (folder / "tools" / tool).symlink_to(str(shutil.which(tool)))
        (folder / "home").mkdir()
        self.env = {
            "PATH": f"{self.bin}:{folder / 'tools'}",
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
    assert "whether it is stale cannot be determined" in again.stderr and len(machine.calls) == 1

    machine.has(D2, skopeo=SKOPEO).run("nemo-26.04")
    assert machine.calls[-2] == "skopeo inspect --format {{.Digest}} docker://nvcr.io/nvidia/nemo:26.04"
    assert machine.calls[-1].endswith(f"docker://nvcr.io/nvidia/nemo@{D2}")


def test_a_fresh_file_is_kept_and_a_stale_one_is_reported(machine: Machine) -> None:
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
def test_a_changed_file_is_reported(machine: Machine, spoil: Any, code: str) -> None:
    machine.has(D1, enroot=ENROOT).run("nemo-26.04")
    spoil(machine.images / "nemo-26.04.sqsh")
    done = machine.run("nemo-26.04")
    assert (done.returncode, f"[{code}]" in done.stderr) == (1, True)
    assert machine.run("nemo-26.04", "--update").returncode == 0
    assert machine.run("nemo-26.04").returncode == 0


def test_another_file_of_the_same_size_is_not_taken_for_the_image(machine: Machine) -> None:
    file = machine.images / "nemo-26.04.sqsh"
    machine.has(D1, enroot=ENROOT).run("nemo-26.04")
    times, good = file.stat(), file.read_bytes()
    file.write_bytes(b"x" * len(good))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    done = machine.run("nemo-26.04")
    assert done.returncode == 1 and "[image-damaged]" in done.stderr and "since it was imported" in done.stderr
    # Touched, copied back, chmod: the same content is the same image, and is read once.
    file.write_bytes(good)
    assert "checking the content" in machine.run("nemo-26.04").stderr
    assert "checking the content" not in machine.run("nemo-26.04").stderr


@pytest.mark.parametrize("name", [".nemo-26.04.sqsh.lock", "nemo-26.04.sqsh", "nemo-26.04.sqsh.json"])
def test_links_that_somebody_else_put_there_are_not_followed(machine: Machine, name: str) -> None:
    """The folder may be shared: a link in it must not cost the importer a file elsewhere."""
    precious = machine.bin.parent / "precious"
    precious.write_text("mine")
    machine.images.mkdir()
    (machine.images / name).symlink_to(precious)
    machine.has(D1, enroot=ENROOT)
    done = machine.run("nemo-26.04", "--update")
    assert precious.read_text() == "mine"
    refused = name.endswith(".lock")
    assert (done.returncode, "[image-folder]" in done.stderr) == ((3, True) if refused else (0, False)), done.stderr
    assert (machine.images / name).is_symlink() == refused


def test_two_importers_import_once(machine: Machine) -> None:
    machine.has(D1, enroot=ENROOT)
    (machine.bin / "held").touch()
    said = [machine.bin / f"said{number}" for number in range(2)]
    both = []
    for file in said:
        with file.open("w") as stream:
            both.append(subprocess.Popen(machine.argv("nemo-26.04"), env=machine.env, stderr=stream))
    wait_for(lambda: any("waiting for it" in file.read_text() for file in said))
    (machine.bin / "held").unlink()
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert sum(call.startswith("import") for call in machine.calls) == 1


def test_a_killed_import_leaves_no_file_and_the_next_one_cleans_up(machine: Machine) -> None:
    machine.has(D1, enroot=ENROOT.replace("while", 'printf half > "$3"; while'))
    (machine.bin / "held").touch()
    process = subprocess.Popen(machine.argv("nemo-26.04"), env=machine.env, start_new_session=True, stderr=-3)
    wait_for(lambda: list(machine.images.glob(".*.partial")))
    os.killpg(process.pid, 9)
    process.wait()
    assert not (machine.images / "nemo-26.04.sqsh").exists()
    (machine.bin / "held").unlink()
    assert machine.run("nemo-26.04").returncode == 0
    assert not list(machine.images.glob(".*.partial"))


def test_a_failed_import_is_reported_without_secrets(machine: Machine) -> None:
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
        (["docker://user:hu/sh@nvcr.io/nvidia/nemo:26.04"], 2, "password-in-uri"),
        (["user:hu/sh@nvcr.io/nvidia/nemo:26.04"], 2, "password-in-uri"),
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
    assert "needs enroot, apptainer or singularity" in done.stderr and "srun" in done.stderr


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


def test_a_real_registry_is_asked_for_the_digest(machine: Machine, tmp_path: Path) -> None:
    """Debian's docker-registry and skopeo: a tag that moves, by the registry's own digests."""
    programs = {name: shutil.which(name) for name in ("docker-registry", "skopeo")}
    if missing := [name for name, path in programs.items() if path is None]:
        pytest.skip(f"needs {' and '.join(missing)}: apt-get install {' '.join(missing)}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "registry.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/store}}}}\nhttp: {{addr: '{host}'}}\n"
    )
    containers = Path(machine.env["HOME"]) / ".config" / "containers"
    containers.mkdir(parents=True)
    (containers / "registries.conf").write_text(f'[[registry]]\nlocation = "{host}"\ninsecure = true\n')
    (containers / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    (machine.bin / "skopeo").symlink_to(str(programs["skopeo"]))

    def push(text: str) -> str:
        """Put an image with this text to the tag `1`; its digest."""
        write_oci_layout(tmp_path / text, text)
        digest = tmp_path / f"{text}.digest"
        command = [
            "skopeo",
            "copy",
            "--quiet",
            "--digestfile",
            str(digest),
            f"oci:{tmp_path / text}:1",
            f"docker://{host}/team/tiny:1",
        ]
        done = subprocess.run(command, env=machine.env, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return digest.read_text().strip()

    registry = subprocess.Popen(
        ["docker-registry", "serve", str(tmp_path / "registry.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: answers(host), 60)
        machine.has(apptainer=APPTAINER)
        first = push("one")
        done = machine.run(f"docker://{host}/team/tiny:1")
        assert done.returncode == 0, done.stderr
        assert machine.record("tiny-1.sif")["digest"] == first
        assert f"docker://{host}/team/tiny@{first}" in machine.calls[-1]
        second = push("two")
        assert second != first
        stale = machine.run(f"docker://{host}/team/tiny:1")
        assert (stale.returncode, len(machine.calls)) == (1, 1)
        assert second in stale.stderr
        missing = machine.run(f"docker://{host}/team/none:1")
        assert "skopeo did not report the digest" in missing.stderr
    finally:
        registry.terminate()
        registry.wait()


def answers(host: str) -> bool:
    name, port = host.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((name, int(port))) == 0


def write_oci_layout(folder: Path, text: str) -> None:
    """Write an image of one empty layer, with this text, as an OCI layout."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    layer = bytes(10240)
    diff = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": "amd64", "os": "linux", "config": {"Labels": {"text": text}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]},
    }  # fmt: skip
    oci = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2, "mediaType": f"{oci}.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), f"{oci}.config.v1+json"),
        "layers": [blob(layer, f"{oci}.layer.v1.tar")],
    }  # fmt: skip
    entry = blob(json.dumps(manifest).encode(), f"{oci}.manifest.v1+json")
    named = {**entry, "annotations": {"org.opencontainers.image.ref.name": "1"}}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
