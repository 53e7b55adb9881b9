"""The files that `compare` can write. Each kind has an option: `--csv`, `--md`, and those of plugins."""

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
    """A kind of file. Its name in the registry becomes the option, such as `--csv`.

    `write` returns messages for the user. The path is never a folder unless `may_be_folder` is true.
    """

    help: str
    write: Callable[[Comparison, Path], Iterable[str]]
    may_be_folder: bool = False


def comparison_files() -> dict[str, ComparisonFile]:
    """Return the file kinds of the core and of active plugins by option name."""
    return dict(plugin_registry.loaded("comparison_files"))


def write_comparison(comparison: Comparison, option: str, path: Path) -> Iterable[str]:
    """Write the file for an option and return messages for the user. Symbolic links are refused."""
    # In a folder that others can write to, someone could place a link that makes us overwrite the user's files.
    if path.is_symlink() and path.parent != Path("/dev"):
        message = f"{path} is a link to {path.readlink()}"
        raise error("output-is-a-link", message, f"--{option}", "pass the path of the file itself, or another path")
    return comparison_files()[option].write(comparison, path)


def write_text(path: Path, option: str, text: str) -> str:
    """Write text to `path`, which may be a pipe or a device. Return a message for the user."""
    if not path.parent.is_dir():
        raise error("no-such-folder", f"folder {path.parent} does not exist", option, "create it, or choose another")
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
