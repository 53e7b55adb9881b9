"""The objects, the index and the files of a checkout, read without git and without its configuration."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8launch.injob.regular_files import read_regular
from fp8launch.submit.file_versions import (
    FileVersion,
    as_diff,
    current_version,
    has_id,
    is_large_file,
    is_regular,
    mode_of,
)

if TYPE_CHECKING:
    from dulwich.object_store import DiskObjectStore

_MOST_VISITED = 100_000
_REFERENCE = re.compile(r"refs/[\w./+@-]{1,250}")
_OBJECT_ID = re.compile(r"[0-9a-f]{40}")
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


class CheckoutReader:
    """Reads the checkout of `folder`, whose objects are in `common`. Raises ValueError for one that is damaged."""

    def __init__(self, folder: Path, git_folder: Path, common: Path) -> None:
        self._folder = folder
        self._git_folder = git_folder
        self._common = common
        for name in ("objects/info/alternates", "objects/info/commit-graph"):
            if os.path.lexists(common / name) and not stat.S_ISREG((common / name).lstat().st_mode):
                raise ValueError(f"{name} is not a file")
        for pack in (common / "objects/pack").glob("*"):
            if not is_regular(pack):
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
            entries: dict[bytes, Any] = {}
            if stat.S_ISREG(index_file.lstat().st_mode):
                entries = dict(Index(str(index_file)).items())
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
        filters = [IgnoreFilter.from_path(str(path)) for path in shared if is_regular(path)]
        ignored = IgnoreFilterManager(str(self._folder), filters, False)
        folders: set[bytes] = set()
        for path in tracked:
            folders.update(path[: slash.start()] for slash in re.finditer(rb"/", path))
        visited = 0
        for parent, below, files in os.walk(self._folder):
            above = os.path.relpath(parent, self._folder)
            prefix = f"{above}/"
            if above == ".":
                prefix = ""
            rules = Path(parent) / ".gitignore"
            if os.path.lexists(rules) and not is_regular(rules):
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
            for name in list(below):
                own_checkout = name == ".git" or os.path.lexists(Path(parent, name, ".git"))
                is_tracked = os.fsencode(prefix + name) in folders
                if own_checkout or (not is_tracked and ignored.is_ignored(f"{prefix}{name}/")):
                    below.remove(name)
        return False

    def _head(self) -> tuple[str | None, str]:
        text = read_regular(self._git_folder / "HEAD", 4096).decode().strip()
        if not text.startswith("ref:"):
            return _object_id(text), "HEAD"
        reference = text.removeprefix("ref:").strip()
        if not _REFERENCE.fullmatch(reference) or ".." in reference:
            return None, ""
        branch = reference.removeprefix("refs/heads/")
        for place in (self._git_folder, self._common):
            if os.path.lexists(place / reference):
                return _object_id(read_regular(place / reference, 4096).decode().strip()), branch
        packed = self._common / "packed-refs"
        if not packed.exists():
            return None, branch
        for line in read_regular(packed, 64 << 20).decode(errors="replace").splitlines():
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
        if place is None or mode_of(place) != entry.mode:
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
        if not os.path.lexists(place):
            return None
        return place

    def _difference(
        self, store: DiskObjectStore, path: bytes, old: tuple[int, bytes] | None, tracked: bool
    ) -> str | None:
        """The difference of a file as text; None where there is none."""
        if old is not None and old[0] == _SUBMODULE:
            return None
        place = self._place(path) if tracked else None
        if place is not None and old is not None and mode_of(place) == old[0] and has_id(place, old[1]):
            return None
        before = None
        if old is not None:
            try:
                before = FileVersion(old[0], self._object(store, old[1].decode()).data)
            except KeyError:  # of a partial clone, say: nothing is fetched
                before = FileVersion(old[0], None)
        if place is not None and before is not None and before.content is not None and is_large_file(place, before):
            return None
        after = current_version(place) if place is not None else None
        if before is None and after is None:
            return None
        return as_diff(_name(path), before, after)


def _name(path: bytes) -> str:
    return path.decode("utf-8", "replace")


def _object_id(text: str) -> str | None:
    """The id of an object as it is; None for any other text."""
    if not _OBJECT_ID.fullmatch(text):
        return None
    return text
