"""`fp8launch archive`: one file for a bug report."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from fp8launch.cli import complete
from fp8launch.cli.names import run_named
from fp8launch.cli.output import echo, eprint
from fp8launch.diagnostics import error
from fp8launch.rundir.run_archive import archive_bytes


@click.command()
@click.argument("name", metavar="RUN|RECIPE", shell_complete=complete.runs)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="F", help="Default: RUN.tar.gz here.")
@click.option("--force", is_flag=True, help="Replace the file.")
def archive(name: str, out: Path | None, force: bool) -> None:
    """Write a run's manifest, recipe, script and logs to one file, without secrets and paths of your home folder.

    Long logs are cut in the middle. Look at the file before you pass it on: secrets are known by their names and forms.
    """
    run = run_named(name)
    target = out or Path(f"{run.run_id}.tar.gz")
    if os.path.lexists(target) and not force:
        raise error("file-exists", "already exists", str(target), "pass --out, or --force to replace it")
    _write_own(target, archive_bytes(run, os.environ))
    eprint(f"{target.stat().st_size / 1024:,.0f} KiB; look at it before you pass it on: tar tzf {target}")
    echo(target)


def _write_own(target: Path, data: bytes) -> None:
    """Replace the file by one that only this user can read. Links are not followed."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
