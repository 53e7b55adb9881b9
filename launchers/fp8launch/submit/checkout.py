"""The git checkout that holds a file: its commit, its branch and its uncommitted changes.

Git itself runs programs that a checkout's own configuration names (filters, file system monitors, ssh, upload-pack for
objects that are missing), and the checkout may be somebody else's archive. So nothing is run here and no configuration
is read: dulwich reads objects and the index, the comparison is ours. As with git, a checkout of another owner is left
alone, files behind links are not followed, and a submodule counts as one entry.

A few kilobytes of compressed objects may unpack to terabytes, and a pipe in place of a pack has no end. So the reading
is done by a process of its own, with limits to its memory and its time.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8launch.rundir.atomic_io import read_regular
from fp8launch.secrets import holds_credentials

if TYPE_CHECKING:
    from dulwich.object_store import DiskObjectStore

# Larger files are named as changed, without their changes.
_SHOWN_BYTES = 1 << 20
_SHOWN_LINES = 10_000
_COMPARED_BYTES = 256 << 20
_MOST_VISITED = 100_000
# Large checkouts need less of both, and packs that are mapped into memory do not count.
_MEMORY_BYTES = 3 << 30
_CPU_SECONDS = 60
_SECONDS = 120
_REFERENCE = re.compile(r"refs/[\w./+@-]{1,250}")
_OBJECT_ID = re.compile(r"[0-9a-f]{40}")
_LARGE_FILE_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_SUBMODULE = 0o160000


@dataclass(frozen=True)
class Checkout:
    """A checkout's state. `changes` are the tracked paths that differ from the commit, in order, as `diff` shows them.

    `others` says that there are untracked files, or staged ones that are gone again.
    """

    commit: str
    branch: str
    changes: tuple[str, ...]
    others: bool
    diff: str


@dataclass(frozen=True)
class _Version:
    """A tracked file in the commit or in the folder. `content` is None for what is too large to be shown."""

    mode: int
    content: bytes | None


def read_checkout(file: Path) -> Checkout | None:
    """Read the checkout that holds `file`; None for no checkout, one of another owner, or one that cannot be read."""
    found = _find(file.resolve().parent)
    if found is None:
        return None
    # -I: neither the working folder nor the environment add modules. The ones of this process are found by its paths.
    paths = [path for path in sys.path if path]
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fp8launch.submit import checkout; "
    words = [json.dumps(paths), *map(str, (*found, _MEMORY_BYTES))]
    command = [sys.executable, "-I", "-c", f"{code}checkout.answer(*sys.argv[2:])", *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        # No exception that a damaged or hostile checkout raises in the reader may stop a submission.
        return None
    return Checkout(**{**answer, "changes": tuple(answer["changes"])}) if answer else None


def answer(folder: str, git_folder: str, common: str, memory: str) -> None:
    """Print the checkout of these folders as JSON, within the limits: what `read_checkout` starts."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = _Reader(Path(folder), Path(git_folder), Path(common)).read()
    print(json.dumps(found and asdict(found)))


def _find(folder: Path) -> tuple[Path, Path, Path] | None:
    """The checkout's top, its git folder, and the git folder that holds its objects."""
    for top in (folder, *folder.parents):
        entry = top / ".git"
        if not os.path.lexists(entry):
            continue
        if not _is_mine(entry) or not _is_mine(top):
            return None
        if entry.is_dir() and not entry.is_symlink():
            linked = os.path.lexists(entry / "commondir")
            return None if linked else (top, entry, entry)
        return _find_linked(top, entry)
    return None


def _find_linked(top: Path, entry: Path) -> tuple[Path, Path, Path] | None:
    """A further worktree or a submodule, whose `.git` is a file. It must belong to the git folder that it names."""
    try:
        words = read_regular(entry, 4096, follow=False).decode()
        git_folder = (top / words.removeprefix("gitdir:").strip()).resolve()
        if not words.startswith("gitdir:") or not _is_mine(git_folder):
            return None
        if (git_folder / "commondir").is_file():
            back = read_regular(git_folder / "gitdir", 4096).decode().strip()
            common = (git_folder / read_regular(git_folder / "commondir", 4096).decode().strip()).resolve()
            return (top, git_folder, common) if (git_folder / back).resolve() == entry.resolve() else None
    except (OSError, ValueError):
        return None
    inside = any(git_folder.is_relative_to(parent / ".git" / "modules") for parent in top.parents)
    return (top, git_folder, git_folder) if inside else None


def _is_mine(path: Path) -> bool:
    return path.lstat().st_uid == os.geteuid()


class _Reader:
    def __init__(self, folder: Path, git_folder: Path, common: Path) -> None:
        self._folder = folder
        self._git_folder = git_folder
        self._common = common
        for name in ("objects/info/alternates", "objects/info/commit-graph"):
            if os.path.lexists(common / name) and not stat.S_ISREG((common / name).lstat().st_mode):
                raise ValueError(f"{name} is not a file")
        for pack in (common / "objects/pack").glob("*"):
            if not _is_regular(pack):
                raise ValueError(f"{pack} is not a file")
        self._links: dict[Path, bool] = {}

    def read(self) -> Checkout | None:
        # Heavy for a command that does not need it.
        from dulwich.index import ConflictedIndexEntry, Index
        from dulwich.object_store import DiskObjectStore
        from dulwich.objects import Commit

        commit, branch = self._head()
        if commit is None:
            return None
        store = DiskObjectStore(str(self._common / "objects"))
        try:
            head = self._object(store, commit)
            if not isinstance(head, Commit):
                return None
            before = dict(self._tree(store, head.tree, b"", 0))
            index_file = self._git_folder / "index"
            index = Index(str(index_file)) if stat.S_ISREG(index_file.lstat().st_mode) else None
            entries = dict(index.items()) if index is not None else {}
            changed: list[str] = []
            shown: list[str] = []
            others = False
            for path in sorted(before.keys() | entries.keys()):
                old, entry = before.get(path), entries.get(path)
                if isinstance(entry, ConflictedIndexEntry):
                    entry = None
                if old is not None and entry is not None and self._is_untouched(path, old, entry, index_file):
                    continue
                text = self._difference(store, path, old, tracked=path in entries)
                if text is None:
                    others = others or (old is None and entry is not None)
                else:
                    changed.append(_name(path))
                    shown.append(text)
        finally:
            store.close()
        return Checkout(commit, branch, tuple(changed), others or self._has_untracked(set(entries)), "".join(shown))

    def _has_untracked(self, tracked: set[bytes]) -> bool:
        """Whether there is a file that is neither tracked nor ignored, among the first that a walk comes to."""
        from dulwich.ignore import IgnoreFilter, IgnoreFilterManager

        shared = [self._common / "info/exclude", Path("~/.config/git/ignore").expanduser()]
        filters = [IgnoreFilter.from_path(str(path)) for path in shared if _is_regular(path)]
        ignored = IgnoreFilterManager(str(self._folder), filters, False)
        folders = {path[:end] for path in tracked for end, byte in enumerate(path) if byte == ord("/")}
        visited = 0
        for parent, below, files in os.walk(self._folder):
            above = os.path.relpath(parent, self._folder)
            prefix = "" if above == "." else f"{above}/"
            rules = Path(parent) / ".gitignore"
            if os.path.lexists(rules) and not _is_regular(rules):
                below.clear()
                continue
            visited += len(files) + len(below)
            if visited > _MOST_VISITED:
                return False
            for name in files:
                path = os.fsencode(prefix + name)
                if path not in tracked and not ignored.is_ignored(prefix + name):
                    return True
            # A folder that is a checkout of its own, such as a submodule, is not looked into.
            below[:] = [
                name
                for name in below
                if name != ".git"
                and not os.path.lexists(Path(parent, name, ".git"))
                and (os.fsencode(prefix + name) in folders or not ignored.is_ignored(f"{prefix}{name}/"))
            ]
        return False

    def _head(self) -> tuple[str | None, str]:
        text = read_regular(self._git_folder / "HEAD", 4096).decode().strip()
        if not text.startswith("ref:"):
            return (text if _OBJECT_ID.fullmatch(text) else None), "HEAD"
        reference = text.removeprefix("ref:").strip()
        if not _REFERENCE.fullmatch(reference) or ".." in reference:
            return None, ""
        branch = reference.removeprefix("refs/heads/")
        for place in (self._git_folder, self._common):
            if os.path.lexists(place / reference):
                commit = read_regular(place / reference, 4096).decode().strip()
                return (commit if _OBJECT_ID.fullmatch(commit) else None), branch
        packed = self._common / "packed-refs"
        for line in read_regular(packed, 64 << 20).decode(errors="replace").splitlines() if packed.exists() else ():
            commit, _, name = line.partition(" ")
            if name == reference and _OBJECT_ID.fullmatch(commit):
                return commit, branch
        return None, branch

    def _object(self, store: DiskObjectStore, name: str) -> Any:
        loose = self._common / "objects" / name[:2] / name[2:]
        if os.path.lexists(loose) and not stat.S_ISREG(loose.lstat().st_mode):
            raise ValueError(f"{loose} is not a file")
        return store[name.encode()]  # type: ignore[index]

    def _tree(self, store: DiskObjectStore, name: bytes, above: bytes, depth: int) -> Iterator[tuple[bytes, Any]]:
        """Path to (mode, object) of every file of a tree."""
        if depth > 100:
            raise ValueError("a tree of the commit is too deep")
        for entry in self._object(store, name.decode()).items():
            path = above + entry.path
            if stat.S_ISDIR(entry.mode):
                yield from self._tree(store, entry.sha, path + b"/", depth + 1)
            else:
                yield path, (entry.mode, entry.sha)

    def _is_untouched(self, path: bytes, old: tuple[int, bytes], entry: Any, index_file: Path) -> bool:
        """As git sees it: the index has the commit's file, and the file is the one that the index was made of."""
        if (entry.mode, entry.sha) != old:
            return False
        if entry.mode == _SUBMODULE:
            return True
        place = self._place(path)
        if place is None or _mode(place) != entry.mode:
            return False
        found = place.lstat()
        seconds, nanoseconds = entry.mtime if isinstance(entry.mtime, tuple) else (int(entry.mtime), 0)
        same = (int(found.st_mtime), found.st_size & 0xFFFFFFFF) == (seconds, entry.size)
        exact = not nanoseconds or found.st_mtime_ns % 1_000_000_000 == nanoseconds
        # A file that was written in the second of the index may have changed since without showing.
        return same and exact and found.st_mtime < int(index_file.stat().st_mtime)

    def _place(self, path: bytes) -> Path | None:
        """The path of a tracked file; None if it does not exist, is behind a link or outside the checkout."""
        parts = path.split(b"/")
        if any(part in (b"", b".", b"..") or part.lower() == b".git" for part in parts):
            return None
        place = self._folder
        for part in parts[:-1]:
            place = place / os.fsdecode(part)
            if place not in self._links:
                self._links[place] = place.is_symlink() or not place.is_dir()
            if self._links[place]:
                return None
        place = place / os.fsdecode(parts[-1])
        return place if os.path.lexists(place) else None

    def _difference(
        self, store: DiskObjectStore, path: bytes, old: tuple[int, bytes] | None, tracked: bool
    ) -> str | None:
        """The difference of a file as text; None where there is none."""
        if old is not None and old[0] == _SUBMODULE:
            return None
        place = self._place(path) if tracked else None
        if place is not None and old is not None and _mode(place) == old[0] and _has_id(place, old[1]):
            return None
        before = None
        if old is not None:
            try:
                before = _Version(old[0], self._object(store, old[1].decode()).data)
            except KeyError:  # of a partial clone, say: nothing is fetched
                before = _Version(old[0], None)
        if place is not None and before is not None and before.content is not None and _is_large_file(place, before):
            return None
        after = _version(place) if place is not None else None
        if before is None and after is None:
            return None
        return _as_diff(_name(path), before, after)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _name(path: bytes) -> str:
    return path.decode("utf-8", "replace")


def _mode(place: Path) -> int:
    found = place.lstat()
    if stat.S_ISLNK(found.st_mode):
        return 0o120000
    return 0o100755 if found.st_mode & stat.S_IXUSR else 0o100644


def _version(place: Path) -> _Version | None:
    found = place.lstat()
    if stat.S_ISLNK(found.st_mode):
        return _Version(0o120000, os.fsencode(place.readlink()))
    if not stat.S_ISREG(found.st_mode):
        return None
    content = read_regular(place, _SHOWN_BYTES, follow=False) if found.st_size <= _SHOWN_BYTES else None
    return _Version(_mode(place), content)


def _has_id(place: Path, name: bytes) -> bool:
    """The file is the commit's, be it with the line ends of another system."""
    if place.is_symlink():
        return _blob_id(os.fsencode(place.readlink())) == name
    if not _is_regular(place) or place.lstat().st_size > _COMPARED_BYTES:
        return False
    content = read_regular(place, _COMPARED_BYTES, follow=False)
    return name in (_blob_id(content), _blob_id(content.replace(b"\r\n", b"\n")))


def _blob_id(content: bytes) -> bytes:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest().encode()


def _is_large_file(place: Path, before: _Version) -> bool:
    """The commit has a pointer of Git LFS, and the file is what it points to."""
    if not (before.content or b"").startswith(_LARGE_FILE_POINTER) or not _is_regular(place):
        return False
    with place.open("rb") as stream:
        return _sha256(stream).encode() in (before.content or b"")


def _sha256(stream: Any) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _as_diff(name: str, before: _Version | None, after: _Version | None) -> str:
    head = f"diff --git a/{name} b/{name}\n"
    if before is None and after is not None:
        head += f"new file mode {after.mode:06o}\n"
    elif after is None and before is not None:
        head += f"deleted file mode {before.mode:06o}\n"
    elif before is not None and after is not None and before.mode != after.mode:
        head += f"old mode {before.mode:06o}\nnew mode {after.mode:06o}\n"
    if holds_credentials(name):
        return head + "(left out by fp8launch: a file of this name holds credentials)\n"
    contents = [b"" if version is None else version.content for version in (before, after)]
    old, new = contents
    if old is None or new is None or max(len(old), len(new)) > _SHOWN_BYTES:
        return head + "(not shown: it is large, or the version of the commit is not here)\n"
    if b"\0" in old or b"\0" in new:
        return head + f"Binary files a/{name} and b/{name} differ\n"
    old_lines, new_lines = _lines(old), _lines(new)
    if max(len(old_lines), len(new_lines)) > _SHOWN_LINES:
        return head + "(not shown: it is large, or the version of the commit is not here)\n"
    from_name = "/dev/null" if before is None else f"a/{name}"
    to_name = "/dev/null" if after is None else f"b/{name}"
    body = difflib.unified_diff(old_lines, new_lines, from_name, to_name)
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in body)


def _lines(content: bytes) -> list[str]:
    """Lines that end where git ends them: at a line feed, and nowhere else."""
    return re.findall(r"[^\n]*\n|[^\n]+", content.decode("utf-8", "replace"))
