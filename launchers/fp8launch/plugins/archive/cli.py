"""`fp8launch archive`: one file for a bug report."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint
from fp8launch.diagnostics import error
from fp8launch.plugins.archive.run_archive import archive_bytes
from fp8launch.rundir.atomic_io import write_atomically
from fp8launch.rundir.names import run_named


@click.command()
@click.argument("name", metavar="RUN|RECIPE", shell_complete=complete.runs)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="F",
    help="Output file (default: RUN.tar.gz).",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def archive(name: str, out: Path | None, force: bool) -> None:
    """Write a run's manifest, recipe, script and logs to one file, without secrets or the path of your home folder.

    Long logs are cut in the middle. Look at the file before you pass it on: secrets are recognized by name and form
    only.
    """
    run = run_named(name, eprint)
    target = out or Path(f"{run.run_id}.tar.gz")
    if os.path.lexists(target) and not force:
        raise error("file-exists", "already exists", str(target), "pass --out, or --force to replace it")
    write_atomically(target, archive_bytes(run, os.environ), 0o600)
    eprint(f"{target.stat().st_size / 1024:,.0f} KiB; look at it before you pass it on: tar tzf {target}")
    echo(target)
