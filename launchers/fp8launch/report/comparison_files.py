"""Files that `compare` writes. Each kind has an option: `--csv`, `--md`, and the options of plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fp8launch import plugin_registry
from fp8launch.diagnostics import error
from fp8launch.recipe.yaml_source import is_file
from fp8launch.report.comparison import Comparison
from fp8launch.rundir.atomic_io import as_utf8, write_atomically


@dataclass(frozen=True)
class ComparisonFile:
    """A kind of file. The name under which it is added is the option: `--csv`.

    `write` returns messages for the user. The path is never a folder unless `may_be_folder` is true.
    """

    help: str
    write: Callable[[Comparison, Path], Iterable[str]]
    may_be_folder: bool = False


def comparison_files() -> dict[str, ComparisonFile]:
    """Return the kinds of files of the core and of active plugins, by their options."""
    return dict(plugin_registry.loaded("comparison_files"))


def write_comparison(comparison: Comparison, option: str, path: Path) -> Iterable[str]:
    """Write the file of an option, and return messages for the user. A link is not followed."""
    # In a folder that others can write to, a link could make the report overwrite any of the user's files.
    if path.is_symlink() and path.parent != Path("/dev"):
        message = f"{path} is a link to {path.readlink()}"
        raise error("output-is-a-link", message, f"--{option}", "write the path of the file itself, or of another file")
    return comparison_files()[option].write(comparison, path)


def write_text(path: Path, option: str, text: str) -> str:
    """Write a text, and return a message for the user. `path` may be a pipe or a device."""
    if not path.parent.is_dir():
        raise error("no-such-folder", f"there is no folder {path.parent}", option, "make it first, or name another")
    if path.exists() and not is_file(path):
        path.write_bytes(as_utf8(text))
    else:
        write_atomically(path, text)
    return f"wrote {path}"


def _write_csv(comparison: Comparison, path: Path) -> list[str]:
    from fp8launch.report.export import to_csv

    return [write_text(path, "--csv", to_csv(comparison))]


def _write_markdown(comparison: Comparison, path: Path) -> list[str]:
    from fp8launch.report.export import to_markdown

    return [write_text(path, "--md", to_markdown(comparison))]


CSV = ComparisonFile("Write a CSV file with one line per row.", _write_csv)
MARKDOWN = ComparisonFile("Write a Markdown table to this file.", _write_markdown)
