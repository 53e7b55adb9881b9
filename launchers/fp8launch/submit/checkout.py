"""Read the git checkout that contains a file: its commit, branch and uncommitted changes.

Git runs programs named in a checkout's configuration (filters, file system monitors, ssh to fetch missing objects), and
the checkout may come from someone else. Therefore git runs with a temporary git folder that has no configuration, only
the checkout's objects and a copy of its index, and with limits on memory and time. Checkouts owned by other users are
not read, and submodules are not entered.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import open_regular, read_regular
from fp8launch.secrets import holds_credentials

_MEMORY_BYTES = 3 << 30
_OUTPUT_BYTES = 64 << 20
_SECONDS = 60
_INDEX_BYTES = 512 << 20
# Larger files are listed as changed, but their diff is left out.
_SHOWN_BYTES = 1 << 20
# The maximum size of the recorded diff.
MAX_DIFF = 5 << 20
# Git LFS pointers are smaller than this.
_POINTER_BYTES = 1024
_REFERENCE = re.compile(r"refs/[\w./+@-]{1,250}")
_OBJECT_ID = re.compile(r"[0-9a-f]{40}")
_LARGE_FILE_POINTER = b"version https://git-lfs.github.com/spec/v1\n"


@dataclass(frozen=True)
class Checkout:
    """The state of a checkout. `changes` are the tracked paths that differ from the commit, in git's order.

    `others` is true if git lists more, such as untracked files. Both are None if the changes could not be read, and
    `note` says why.
    """

    commit: str
    branch: str
    changes: tuple[str, ...] | None = None
    others: bool | None = None
    diff: str = ""
    note: str | None = None


def checkout_of(file: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the manifest entry for the git checkout that contains a file, and the uncommitted diff."""
    found = read_checkout(file)
    if found is None:
        return None, ""
    dirty = None if found.changes is None else bool(found.changes or found.others)
    state: dict[str, Any] = {"commit": found.commit, "branch": found.branch, "dirty": dirty}
    if len(found.diff) > MAX_DIFF:
        state["diff_cut_at_bytes"] = MAX_DIFF
    if found.note:
        state["note"] = f"uncommitted changes are not recorded: {found.note}"
    return state, found.diff[:MAX_DIFF]


def read_checkout(file: Path) -> Checkout | None:
    """Read the checkout that contains `file`; None if there is none, another user owns it, or it has no commit.

    A damaged or hostile checkout never stops a submission. In that case, only the commit is recorded.
    """
    found = _find(file.resolve().parent)
    if found is None:
        return None
    top, git_folder, common = found
    try:
        commit, branch = _head(git_folder, common)
    except (OSError, ValueError):
        return None
    if commit is None:
        return None
    # A relative PATH entry could run a program from the checkout.
    path = os.pathsep.join(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))
    program = shutil.which("git", path=path)
    if program is None:
        return Checkout(commit, branch, note="git is not installed")
    try:
        _refuse_pipes(common)
        with tempfile.TemporaryDirectory() as scratch:
            own = _own_git_folder(Path(scratch), commit, git_folder, common)
            return _Git(program, path, own, top, common).read(commit, branch)
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        return Checkout(commit, branch, note=f"the changes cannot be read: {exc}")


def _head(git_folder: Path, common: Path) -> tuple[str | None, str]:
    """Return commit and branch. The commit is None if the branch has no commits."""
    text = read_regular(git_folder / "HEAD", 4096).decode().strip()
    if not text.startswith("ref:"):
        return (text if _OBJECT_ID.fullmatch(text) else None), "HEAD"
    reference = text.removeprefix("ref:").strip()
    if not _REFERENCE.fullmatch(reference) or ".." in reference:
        return None, ""
    branch = reference.removeprefix("refs/heads/")
    for place in (git_folder, common):
        if os.path.lexists(place / reference):
            commit = read_regular(place / reference, 4096).decode().strip()
            return (commit if _OBJECT_ID.fullmatch(commit) else None), branch
    packed = common / "packed-refs"
    if packed.exists():
        for line in read_regular(packed, 64 << 20).decode(errors="replace").splitlines():
            commit, _, name = line.partition(" ")
            if name == reference and _OBJECT_ID.fullmatch(commit):
                return commit, branch
    return None, branch


def _refuse_pipes(common: Path) -> None:
    """Raise ValueError if a file that git reads first is a pipe, on which git would block."""
    objects = common / "objects"
    for file in (objects / "info/alternates", objects / "info/commit-graph", *(objects / "pack").glob("*")):
        if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
            raise ValueError(f"{file} is not a file")


def _own_git_folder(scratch: Path, commit: str, git_folder: Path, common: Path) -> Path:
    """Create a git folder with a checkout's commit, index and exclude rules, but no configuration."""
    (scratch / "refs").mkdir()
    (scratch / "info").mkdir()
    (scratch / "HEAD").write_text(f"{commit}\n")
    index = git_folder / "index"
    if os.path.lexists(index):
        (scratch / "index").write_bytes(read_regular(index, _INDEX_BYTES))
        # Git rereads files that are as new as the index, so the copy must keep its time.
        written = index.stat()
        os.utime(scratch / "index", ns=(written.st_atime_ns, written.st_mtime_ns))
    rules = [_text(file) for file in (common / "info/exclude", Path("~/.config/git/ignore").expanduser())]
    (scratch / "info/exclude").write_bytes(b"\n".join(rules))
    return scratch


def _text(file: Path) -> bytes:
    try:
        return read_regular(file, 1 << 20)
    except (OSError, ValueError):
        return b""


@dataclass(frozen=True)
class _Git:
    """Runs git on the files in `top`, with the git folder `own` and the objects in `common`."""

    program: str
    path: str
    own: Path
    top: Path
    common: Path

    def read(self, commit: str, branch: str) -> Checkout:
        """Compare the files with the commit. Raises SubprocessError if git cannot."""
        # Compare by size and checksum first, because a partial clone may lack the contents. Then compare contents.
        self._run("update-index", "-q", "--refresh", ends=(0, 1))
        committed = self._committed_versions()
        sizes = self._sizes(filter(None, committed.values()))
        missing = [name for name, version in committed.items() if version and version not in sizes]
        differing = {*missing, *self._names("diff", "--name-only", "HEAD", "--", ":(top)", *map(_without, missing))}
        large_files = self._large_files(committed, sizes)
        changed = [name for name in committed if name in differing and name not in large_files]
        reasons = dict.fromkeys(missing, "the version of the commit is not here")
        for name in changed:
            if reason := self._why_left_out(name, sizes.get(committed[name], 0)):
                reasons[name] = reason
        unshown = [*reasons, *(name for name in committed if name not in changed)]
        diff = self._run("diff", "--no-renames", "HEAD", "--", ":(top)", *map(_without, unshown))
        for name, reason in reasons.items():
            diff += f"diff --git a/{name} b/{name}\n(left out by fp8launch: {reason})\n"
        listed = {entry[3:] for entry in self._names("status", "--porcelain", "--no-renames")}
        return Checkout(commit, branch, tuple(changed), bool(listed - set(committed)), diff)

    def _committed_versions(self) -> dict[str, str]:
        """Return the files that may differ from the commit, each with its object there, or "" if it is new."""
        words = self._names("diff-index", "--raw", "--no-abbrev", "HEAD")
        versions: dict[str, str] = {}
        for entry, name in zip(words[::2], words[1::2], strict=False):
            version = entry.split(" ")[2]
            if version.strip("0") or name not in versions:
                versions[name] = version if version.strip("0") else ""
        return versions

    def _sizes(self, versions: Iterable[str]) -> dict[str, int]:
        """Return the sizes of objects in bytes, without objects that a partial clone has not fetched."""
        lines = self._run("cat-file", "--batch-check", given="".join(f"{version}\n" for version in versions))
        found = (line.split(" ") for line in lines.splitlines())
        return {words[0]: int(words[2]) for words in found if len(words) == 3}

    def _why_left_out(self, name: str, committed_bytes: int) -> str | None:
        if holds_credentials(name):
            return "a file with this name contains credentials"
        try:
            size = (self.top / name).lstat().st_size
        except OSError:
            size = 0
        return "the file is large" if max(size, committed_bytes) > _SHOWN_BYTES else None

    def _large_files(self, committed: Mapping[str, str], sizes: Mapping[str, int]) -> set[str]:
        """Return the files whose content is the target of a Git LFS pointer in the commit."""
        return {
            name
            for name, version in committed.items()
            if sizes.get(version, _POINTER_BYTES) < _POINTER_BYTES and self._is_large_file(name, version)
        }

    def _is_large_file(self, name: str, version: str) -> bool:
        place = self.top / name
        if place.is_symlink() or not place.is_file():
            return False
        pointer = self._run("cat-file", "blob", version).encode()
        if not pointer.startswith(_LARGE_FILE_POINTER):
            return False
        digest = hashlib.sha256()
        with open_regular(place, follow=False) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        return f"oid sha256:{digest.hexdigest()}".encode() in pointer

    def _names(self, command: str, *words: str) -> list[str]:
        return self._run(command, "-z", *words).split("\0")[:-1]

    def _run(self, command: str, *words: str, ends: tuple[int, ...] = (0,), given: str = "") -> str:
        """Run a git command with `given` as input, and return at most `_OUTPUT_BYTES` of output.

        Raises SubprocessError if its exit code is not in `ends`.
        """
        if command in ("diff", "diff-index", "status"):
            words = ("--ignore-submodules=all", *words)
        if command == "diff":
            words = ("--no-ext-diff", "--no-textconv", *words)
        settings = ("core.autocrlf=input", "core.safecrlf=false", "core.quotePath=false")
        options = [word for setting in settings for word in ("-c", setting)]
        environment = {
            "PATH": self.path,
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.own),
            "GIT_DIR": str(self.own),
            "GIT_WORK_TREE": str(self.top),
            "GIT_OBJECT_DIRECTORY": str(self.common / "objects"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
        }
        with tempfile.TemporaryFile(dir=self.own) as output:
            done = subprocess.run(
                [self.program, *options, command, *words],
                cwd=self.own,
                env=environment,
                input=given.encode(),
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                preexec_fn=_limit,
                check=False,
            )
            # If the output is longer, the size limit kills git, and we use the part that was written.
            if done.returncode not in (*ends, -signal.SIGXFSZ):
                raise subprocess.SubprocessError(f"git {command} exited with {done.returncode}")
            output.seek(0)
            return output.read().decode("utf-8", "replace")


def _without(name: str) -> str:
    """Return the pathspec that excludes a file."""
    return f":(exclude,top,literal){name}"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_OUTPUT_BYTES, _OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _find(folder: Path) -> tuple[Path, Path, Path] | None:
    """Return the top of the checkout, its git folder, and the git folder with its objects."""
    for top in (folder, *folder.parents):
        entry = top / ".git"
        if not os.path.lexists(entry):
            continue
        if not _is_mine(entry) or not _is_mine(top):
            return None
        if entry.is_dir() and not entry.is_symlink():
            if os.path.lexists(entry / "commondir"):
                return None
            return top, entry, entry
        return _find_linked(top, entry)
    return None


def _find_linked(top: Path, entry: Path) -> tuple[Path, Path, Path] | None:
    """Return the same three folders for a worktree or submodule, where `.git` is a file that names the git folder."""
    try:
        words = read_regular(entry, 4096, follow=False).decode()
        git_folder = (top / words.removeprefix("gitdir:").strip()).resolve()
        if not words.startswith("gitdir:") or not _is_mine(git_folder):
            return None
        if (git_folder / "commondir").is_file():
            back = read_regular(git_folder / "gitdir", 4096).decode().strip()
            common = (git_folder / read_regular(git_folder / "commondir", 4096).decode().strip()).resolve()
            if (git_folder / back).resolve() != entry.resolve():
                return None
            return top, git_folder, common
    except (OSError, ValueError):
        return None
    if not any(git_folder.is_relative_to(parent / ".git" / "modules") for parent in top.parents):
        return None
    return top, git_folder, git_folder


def _is_mine(path: Path) -> bool:
    return path.lstat().st_uid == os.geteuid()
