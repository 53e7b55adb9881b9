"""What this image offers a job: `python3 inside.py [--import] PACKAGE...`

One line for each package with its version, then the line `software: {...}` for a recipe. Exit status 1 when one is
missing. Packages are found, not imported, because a build has no GPU driver, without which some refuse; `--import`
imports them as a job would. Needs nothing but Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

# Import name to the distributions that bring it.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "megatron.core": ("megatron-core",),
}
SOFTWARE = {"megatron.core": "megatron", "transformer_engine": "transformer_engine"}


def folder_of(package: str) -> Path | None:
    """Where the package lies; None when it is not there. Parents such as `megatron` are plain folders."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) if places else None


def version_of(package: str, folder: Path) -> str:
    """What its distribution says, else what its own files say (a Megatron-LM checkout has no distribution)."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    own = folder / "package_info.py"
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", own.read_text(), re.M)) if own.is_file() else {}
    return ".".join(parts.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH")) if parts else "unknown version"


def cuda_of(torch: Path) -> str | None:
    """The CUDA that torch was built with, from its own file."""
    match = re.search(r"^cuda\b.*?= '([\d.]+)'", (torch / "version.py").read_text(), re.M)
    return match[1] if match else None


def main(arguments: list[str]) -> int:
    packages = [argument for argument in arguments if argument != "--import"]
    software, missing = {}, 0
    for package in packages:
        folder = folder_of(package)
        if folder is None:
            print(f"{package}: missing")
            missing += 1
            continue
        if "--import" in arguments:
            importlib.import_module(package)
        version = version_of(package, folder)
        print(f"{package}: {version} in {folder}")
        if package in SOFTWARE:
            software[SOFTWARE[package]] = version.partition("+")[0]
        if package == "torch" and (cuda := cuda_of(folder)):
            software["cuda"] = cuda
    print("software: {" + ", ".join(f'{name}: "{version}"' for name, version in software.items()) + "}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
