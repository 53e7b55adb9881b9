"""A container image for Charliecloud that needs no download: its own /etc and root, the machine's /usr mounted in."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .packages import SEARCH

NAME = "fp8launch test image"  # in the image's /etc/os-release, and nowhere else
# What ch-run itself mounts on must be there: it refuses an image without /dev, /proc, /sys.
FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp")
# ch-run puts its own over these, but only where the image has them.
FILES = ("etc/hosts", "etc/resolv.conf", "etc/passwd", "etc/group")


@dataclass(frozen=True)
class Image:
    """``mounts``: host paths that a job must mount at the same place, or there is no shell and no Python inside."""

    folder: Path
    mounts: tuple[Path, ...]

    @classmethod
    def build(cls, folder: Path, visible: Sequence[Path]) -> Image:
        """``visible``: what else shall be reachable; the image is read-only, so each needs a mount point in it.

        Paths below /tmp need none: ch-run mounts the node's /tmp.
        """
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).touch()
        (folder / "etc/os-release").write_text(f'NAME="{NAME}"\n')
        for name in ("bin", "sbin", "lib", "lib64"):
            (folder / name).symlink_to(f"usr/{name}")
        # Debian's awk, nc, ... are links that pass through here.
        (folder / "etc/alternatives").mkdir()
        for link in filter(Path.is_symlink, Path("/etc/alternatives").glob("*")):
            (folder / "etc/alternatives" / link.name).symlink_to(link.readlink())
        mounts = [Path("/usr")]
        for path in sorted(set(visible)):
            if not any(path.is_relative_to(other) for other in [*mounts, Path("/tmp")]):
                (folder / path.relative_to("/")).mkdir(parents=True, exist_ok=True)
                mounts.append(path)
        return cls(folder, tuple(mounts))

    @property
    def binds(self) -> list[str]:
        """The mounts as ch-run's arguments."""
        return [f"--bind={path}:{path}" for path in self.mounts]

    def squash(self) -> Path:
        """The same image as one .sqsh file beside the folder, which ch-run mounts by itself."""
        file = self.folder.with_suffix(".sqsh")
        argv = ["mksquashfs", str(self.folder), str(file), "-noappend", "-quiet", "-no-progress"]
        subprocess.run(argv, check=True, capture_output=True, env={"PATH": SEARCH})
        return file
