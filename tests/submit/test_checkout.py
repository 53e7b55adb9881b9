"""The checkout of a recipe: what git itself says of honest ones; nothing run and nothing copied of hostile ones."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8launch.rundir.registry import find_run
from fp8launch.submit.checkout import Checkout, checkout_of, read_checkout

NOBODY = 65534


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit and no changes."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    folder = tmp_path / "checkout"
    (folder / "sub").mkdir(parents=True)
    for name in ("r.yaml", "sub/a.txt", "sub/ü b.txt", "script.sh", "ends"):
        (folder / name).write_text("one\ntwo\nthree\n")
    (folder / "link").symlink_to("r.yaml")
    (folder / ".gitignore").write_text("*.log\nbuild/\n")
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def read(folder: Path) -> Checkout:
    found = read_checkout(folder / "r.yaml")
    assert found is not None
    return found


CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda f: None,
    "a line": lambda f: (f / "r.yaml").write_text("one\n2\nthree\n"),
    "the same, written again": lambda f: (f / "r.yaml").write_text("one\ntwo\nthree\n"),
    "no line end": lambda f: (f / "ends").write_text("one\ntwo\nthree"),
    "other line ends inside": lambda f: (f / "ends").write_text("one\ntwo\u2028and\x0cso\nthree\n"),
    "deleted": lambda f: (f / "sub/a.txt").unlink(),
    "executable": lambda f: (f / "script.sh").chmod(0o755),
    "staged": lambda f: ((f / "new").write_text("x\n"), git(f, "add", "new")),
    "staged and deleted": lambda f: ((f / "new").write_text("x\n"), git(f, "add", "new"), (f / "new").unlink()),
    "staged deletion": lambda f: git(f, "rm", "-q", "sub/a.txt"),
    "a name in UTF-8": lambda f: (f / "sub/ü b.txt").write_text("other\n"),
    "another link": lambda f: ((f / "link").unlink(), (f / "link").symlink_to("sub/a.txt")),
    "a folder becomes a link": lambda f: ((f / "sub").rename(f / "build"), (f / "sub").symlink_to("build")),
    "untracked": lambda f: (f / "new").write_text("x\n"),
    "ignored": lambda f: ((f / "x.log").write_text("x\n"), (f / "build").mkdir(), (f / "build/y").write_text("y\n")),
    "packed": lambda f: (git(f, "gc", "-q"), (f / "r.yaml").write_text("2\n")),
    "detached": lambda f: git(f, "checkout", "-q", "--detach"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_honest_checkout_is_seen_as_git_sees_it(checkout: Path, change: str) -> None:
    CHANGES[change](checkout)
    found = read(checkout)
    assert found.commit == git(checkout, "rev-parse", "HEAD").strip()
    assert found.branch == git(checkout, "rev-parse", "--abbrev-ref", "HEAD").strip()
    assert bool(found.changes or found.others) == bool(git(checkout, "status", "--porcelain"))
    listed = git(checkout, "diff", "HEAD", "--name-only", "-z").split("\0")[:-1]
    assert list(found.changes) == sorted(listed)


@pytest.mark.parametrize("change", ["a line", "no line end", "other line ends inside", "deleted", "staged"])
def test_the_diff_brings_the_changes_back(checkout: Path, change: str) -> None:
    CHANGES[change](checkout)
    wanted = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file() and ".git" not in path.parts}
    diff = read(checkout).diff
    git(checkout, "reset", "-q", "--hard")
    (checkout / "patch.log").write_text(diff)
    git(checkout, "apply", "patch.log")
    (checkout / "patch.log").unlink()
    assert wanted == {path: path.read_bytes() for path in wanted}
    assert not (checkout / "sub/a.txt").exists() or change != "deleted"


def test_a_further_worktree_and_a_submodule_are_checkouts(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "worktree", "add", "-q", str(tmp_path / "second"), "-b", "other")
    (tmp_path / "second/r.yaml").write_text("changed\n")
    found = read(tmp_path / "second")
    assert (found.branch, found.changes) == ("other", ("r.yaml",))
    git(checkout, "submodule", "--quiet", "add", str(checkout), "module")
    git(checkout, "commit", "-qm", "second")
    assert (read(checkout).changes, read(checkout).others) == ((), False)
    (checkout / "module/r.yaml").write_text("changed\n")
    assert read(checkout / "module").changes == ("r.yaml",)


def test_line_ends_of_another_system_and_large_files_are_no_changes(checkout: Path) -> None:
    """A filter would make the commit's content of the file's; none is run, the result is known."""
    content = b"weights" * 1000
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{hashlib.sha256(content).hexdigest()}\nsize 7000\n"
    )
    (checkout / "large.bin").write_text(pointer)
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "second")
    (checkout / "large.bin").write_bytes(content)
    (checkout / "r.yaml").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    assert read(checkout).changes == ()
    (checkout / "large.bin").write_bytes(content + b"x")
    assert read(checkout).changes == ("large.bin",)


@pytest.mark.parametrize("versions", [("one\n", "x" * 2_000_000), ("x" * 2_000_000, "one\n")], ids=["now", "before"])
def test_a_large_version_of_a_file_is_not_copied(checkout: Path, versions: tuple[str, str]) -> None:
    (checkout / "r.yaml").write_text(versions[0])
    git(checkout, "commit", "-qam", "second")
    (checkout / "r.yaml").write_text(versions[1])
    found = read(checkout)
    assert found.changes == ("r.yaml",)
    assert found.diff == "diff --git a/r.yaml b/r.yaml\n(left out by fp8launch: the file is large)\n"


def test_without_git_the_commit_is_recorded_and_the_rest_is_stated(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(checkout, "rev-parse", "HEAD").strip()
    monkeypatch.setenv("PATH", "/nonexistent")
    note = "uncommitted changes are not recorded: git is not installed"
    state = {"commit": commit, "branch": "trunk", "dirty": None, "note": note}
    assert checkout_of(checkout / "r.yaml") == (state, "")


def test_files_of_credentials_are_named_and_never_copied(checkout: Path) -> None:
    for name in (".env", ".env.local", "id_rsa", "secrets/token.txt"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("c4n4ry\n")
        git(checkout, "add", "-f", name)
    diff = read(checkout).diff
    assert "c4n4ry" not in diff
    assert diff.count("left out by fp8launch") == 4 and "b/.env.local" in diff


# --- hostile ones -----------------------------------------------------------------------------------------------------


def program(folder: Path) -> str:
    file = folder.parent / "evil.sh"
    file.write_text(f"#!/bin/sh\ntouch {folder.parent}/canary\ncat\n")
    file.chmod(0o755)
    return str(file)


def config(folder: Path, *settings: tuple[str, str]) -> None:
    for name, value in settings:
        git(folder, "config", name, value)


def included(folder: Path, evil: str) -> None:
    (folder / ".gitattributes").write_text("* filter=x diff=x\n")
    text = (
        f'[filter "x"]\n clean={evil}\n process={evil}\n required=true\n[diff "x"]\n command={evil}\n textconv={evil}\n'
    )
    (folder / "evil.cfg").write_text(f"{text}[core]\n fsmonitor={evil}\n pager={evil}\n")
    config(folder, ("include.path", "../evil.cfg"))


def of_the_worktree(folder: Path, evil: str) -> None:
    (folder / ".gitattributes").write_text("* filter=a=b\n")
    config(folder, ("core.repositoryformatversion", "1"), ("extensions.worktreeConfig", "true"))
    (folder / ".git/config.worktree").write_text(f'[filter "a=b"]\n clean = {evil}\n')


def of_a_submodule(folder: Path, evil: str) -> None:
    module = folder / "m"
    module.mkdir()
    (module / "a").write_text("1\n")
    git(module, "init", "-q")
    git(module, "add", ".")
    git(module, "commit", "-qm", "1")
    git(folder, "add", "m")
    git(folder, "commit", "-qm", "2")
    (module / "a").write_text("x\n")
    (module / ".gitattributes").write_text("* filter=x\n")
    config(module, ("filter.x.clean", evil), ("core.fsmonitor", evil))


def missing_object(folder: Path, evil: str, *settings: tuple[str, str]) -> None:
    (folder / "r.yaml").write_text("unlike all others\n")
    git(folder, "commit", "-qam", "second")
    name = git(folder, "rev-parse", "HEAD:r.yaml").strip()
    (folder / "r.yaml").write_text("changed\n")
    config(
        folder, ("core.repositoryformatversion", "1"), ("extensions.partialClone", "origin"),
        ("remote.origin.promisor", "true"), *settings,
    )  # fmt: skip
    (folder / ".git/objects" / name[:2] / name[2:]).unlink()


HOSTILE: dict[str, Callable[[Path, str], object]] = {
    "include": included,
    "worktree": of_the_worktree,
    "submodule": of_a_submodule,
    "upload-pack": lambda f, e: missing_object(f, e, ("remote.origin.url", str(f)), ("remote.origin.uploadpack", e)),
    "ext": lambda f, e: missing_object(f, e, ("remote.origin.url", f"ext::{e}"), ("protocol.ext.allow", "always")),
    "ssh": lambda f, e: missing_object(f, e, ("remote.origin.url", "ssh://h/x"), ("core.sshCommand", e)),
    "monitor": lambda f, e: config(f, ("core.fsmonitor", e), ("core.hooksPath", str(f.parent)), ("diff.external", e)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_of_a_hostile_checkout_is_run(checkout: Path, kind: str) -> None:
    HOSTILE[kind](checkout, program(checkout))
    (checkout / "ends").write_text("changed\n")
    state, diff = checkout_of(checkout / "r.yaml")
    assert state is not None and state["dirty"]
    assert "+changed" in diff
    assert not (checkout.parent / "canary").exists()


@pytest.mark.parametrize("place", ["checkout", "."])
def test_a_program_in_the_checkout_is_not_taken_for_git(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """With `.` in PATH, the folder in which git is started decides which program that is."""
    Path(program(checkout)).rename(checkout / "git")
    monkeypatch.chdir(checkout.parent / place)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    assert read(checkout).others
    assert not (checkout.parent / "canary").exists()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Another folder of this user, with a file of the same name as one in the checkout."""
    folder = tmp_path / "private"
    (folder / "sub").mkdir(parents=True)
    for name in ("r.yaml", "sub/a.txt"):
        (folder / name).write_text("private\n")
    return folder


def through_a_link(folder: Path, private: Path) -> None:
    (folder / "sub").rename(folder / "build")
    (folder / "sub").symlink_to(private / "sub")


def through_a_file_that_is_a_link(folder: Path, private: Path) -> None:
    (folder / "r.yaml").unlink()
    (folder / "r.yaml").symlink_to(private / "r.yaml")


def through_a_git_file(folder: Path, private: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        git(private, *words)
    (folder / ".git").rename(folder.parent / "away")
    (folder / ".git").write_text(f"gitdir: {private}/.git\n")


def through_a_common_folder(folder: Path, private: Path) -> None:
    through_a_git_file(folder, private)
    (folder / ".git").unlink()
    (folder.parent / "away").rename(folder / ".git")
    (folder / ".git/commondir").write_text(f"{private}/.git\n")


@pytest.mark.parametrize(
    "lead",
    [
        lambda folder, private: config(folder, ("core.worktree", str(private))),
        through_a_link,
        through_a_file_that_is_a_link,
        through_a_git_file,
        through_a_common_folder,
    ],
)
def test_no_file_of_another_folder_is_copied(
    checkout: Path, private: Path, lead: Callable[[Path, Path], object]
) -> None:
    lead(checkout, private)
    found = read_checkout(checkout / "script.sh")
    assert found is None or "private\n" not in found.diff.replace(str(private), "")


@pytest.mark.parametrize("name", ["HEAD", "index", "packed-refs", "objects/info/alternates", "refs/heads/trunk"])
def test_a_pipe_in_a_checkout_holds_nobody_up(checkout: Path, name: str) -> None:
    file = checkout / ".git" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    words = (
        f"from pathlib import Path; from fp8launch.submit.checkout import *; read_checkout(Path('{checkout}/r.yaml'))"
    )
    subprocess.run([sys.executable, "-c", words], timeout=30, check=True)


def test_a_pipe_among_the_packs_holds_nobody_up(checkout: Path) -> None:
    git(checkout, "gc", "-q")
    [index] = (checkout / ".git/objects/pack").glob("*.idx")
    index.unlink()
    os.mkfifo(index)
    assert "is not a file" in str(read(checkout).note)


@pytest.mark.parametrize("attributes", ["", "* diff\n"])
def test_an_object_that_unpacks_to_too_much_is_not_read(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, attributes: str
) -> None:
    """A loose object of a megabyte that holds a gigabyte of zeros, as the committed version of a changed file.

    With the attribute git takes it for text, whatever its size.
    """
    (checkout / ".gitattributes").write_text(attributes)
    monkeypatch.setattr("fp8launch.submit.checkout._MEMORY_BYTES", 512 << 20)
    assert read_checkout(checkout / "r.yaml") is not None
    name = git(checkout, "rev-parse", "HEAD:r.yaml").strip()
    packer = zlib.compressobj(1)
    file = checkout / ".git/objects" / name[:2] / name[2:]
    file.chmod(0o644)
    with file.open("wb") as out:
        out.write(packer.compress(b"blob %d\0" % (1 << 30)))
        for _ in range(1024):
            out.write(packer.compress(bytes(1 << 20)))
        out.write(packer.flush())
    (checkout / "r.yaml").write_text("changed\n")
    assert file.stat().st_size < 8 << 20
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    found = read(checkout)
    assert (found.changes, found.diff) == (None, "") and found.note
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 800 << 10)


@pytest.mark.parametrize("name", ["HEAD", "index", "refs/heads/trunk", "objects"])
@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"ref: ../../x", b"DIRC\0\0\0\2\xff\xff\xff\xff", b"a" * 40])
def test_a_damaged_checkout_stops_nothing(checkout: Path, name: str, content: bytes) -> None:
    files = [checkout / ".git" / name] if name != "objects" else list((checkout / ".git/objects").glob("??/*"))
    for file in files:
        file.chmod(0o644)
        file.write_bytes(content)
    state, diff = checkout_of(checkout / "r.yaml")
    assert state is None or isinstance(diff, str)


def test_a_submission_states_that_changes_are_not_recorded(checkout: Path, in_memory: Any) -> None:
    (checkout / "r.yaml").write_text("extends: tiny_cpu\nname: r\n")
    whole = in_memory.submit(recipe=str(checkout / "r.yaml"))
    assert "git:" not in whole.err
    (checkout / ".git/index").write_bytes(b"x")
    damaged = in_memory.submit(recipe=str(checkout / "r.yaml"))
    assert "git: uncommitted changes are not recorded: the changes cannot be read" in damaged.err
    assert find_run(damaged.out.strip()).manifest()["git"]["dirty"] is None


def test_a_checkout_of_another_user_is_left_alone(checkout: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(checkout / ".git", NOBODY, NOBODY)
    assert checkout_of(checkout / "r.yaml") == (None, "")
