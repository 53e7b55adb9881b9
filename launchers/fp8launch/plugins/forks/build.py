"""Build the flag schema of a fork from its source, and find a schema by what a user calls the fork."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fp8launch.cluster.profile import fork_schema_file
from fp8launch.diagnostics import error
from fp8launch.megatron.schema import supported_versions
from fp8launch.plugins.forks.source_flags import SourceFlags, read_flags, version_in
from fp8launch.plugins.forks.store import base_of, label, nearest_version, write


class Built(NamedTuple):
    """A schema: the version that recipes name, the version in the source or None, the flags, the folder, the file."""

    version: str
    in_source: str | None
    found: SourceFlags
    root: Path
    file: Path


def build_schema(path: Path, name: str | None) -> Built:
    """Read the flags of a checkout and keep them under `name`, by default the folder's. Raises UserError."""
    root = path.expanduser().resolve()
    found = read_flags(root)
    if found is None or not found.flags:
        fix = "name the folder that contains the fork's `megatron` package"
        raise error(
            "no-megatron-parser", "has no megatron/training/arguments.py or megatron/arguments.py", str(path), fix
        )
    short = label(name or root.name)
    if not short:
        raise error("fork-name", f"{name or root.name!r} has no letter or digit", "--name", "write --name NAME")
    in_source = version_in(root)
    base = nearest_version(in_source)
    version = f"{base}+{short}"
    return Built(version, in_source, found, root, write(version, root, in_source or base, found.flags))


def version_of(text: str) -> str:
    """Return the Megatron version for a recipe: a release, a built schema such as 0.19+name, or a checkout's folder.

    A folder is read as by `schema build`. Raises UserError for anything else.
    """
    if text in supported_versions():
        return text
    if "/" in text or (text.startswith(".") and Path(text).is_dir()):
        return build_schema(Path(text), None).version
    name = text.rpartition("+")[2]
    base = base_of(name)
    if base is not None and text in (name, f"{base}+{name}"):
        return f"{base}+{name}"
    folder = fork_schema_file("+any").parent
    known = [f"{base_of(file.stem)}+{file.stem}" for file in sorted(folder.glob("*.json")) if base_of(file.stem)]
    message = f"Megatron {text!r} is not known; known are {', '.join([*supported_versions(), *known])}"
    fix = "write one of them, or the path of a checkout with a slash, such as ./Megatron-LM"
    raise error("megatron-version", message, "--megatron", fix)
