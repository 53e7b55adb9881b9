"""The git checkout that holds a file: its commit, its branch and its uncommitted changes.

Git itself runs programs that a checkout's own configuration names (filters, file system monitors, ssh, upload-pack for
objects that are missing), and the checkout may be somebody else's archive. So nothing is run here and no configuration
is read: dulwich reads objects and the index, the comparison is ours. As with git, a checkout of another owner is left
alone, files behind links are not followed, and a submodule counts as one entry.

A few kilobytes of compressed objects may unpack to terabytes, and a pipe in place of a pack has no end. So the reading
is done by a process of its own, with limits to its memory and its time.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from fp8launch.injob.regular_files import read_regular
from fp8launch.submit.checkout_reader import Checkout, CheckoutReader

# Large checkouts need less of both, and packs that are mapped into memory do not count.
_MEMORY_BYTES = 3 << 30
_CPU_SECONDS = 60
_SECONDS = 120


def read_checkout(file: Path) -> Checkout | None:
    """Read the checkout that holds `file`; None for no checkout, one of another owner, or one that cannot be read."""
    found = _find(file.resolve().parent)
    if found is None:
        return None
    # -I: neither the working folder nor the environment add modules. The ones of this process are found by its paths.
    paths = list(filter(None, sys.path))
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fp8launch.submit import checkout; "
    words = [json.dumps(paths), *map(str, (*found, _MEMORY_BYTES))]
    command = [sys.executable, "-I", "-c", f"{code}checkout.answer(*sys.argv[2:])", *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        # No exception that a damaged or hostile checkout raises in the reader may stop a submission.
        return None
    if not answer:
        return None
    return Checkout(**{**answer, "changes": tuple(answer["changes"])})


def answer(folder: str, git_folder: str, common: str, memory: str) -> None:
    """Print the checkout of these folders as JSON, within the limits: what `read_checkout` starts."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = CheckoutReader(Path(folder), Path(git_folder), Path(common)).read()
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
            if os.path.lexists(entry / "commondir"):
                return None
            return top, entry, entry
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
