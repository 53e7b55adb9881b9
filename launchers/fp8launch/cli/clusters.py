"""`fp8launch clusters`: list cluster profiles and examples."""

from __future__ import annotations

from pathlib import Path

import click

from fp8launch.cli.output import eprint, json_option, show_json, show_table
from fp8launch.cluster.profile import cluster_files, config_folder, load_cluster
from fp8launch.diagnostics import UserError
from fp8launch.resources import pack_folder


@click.command()
@json_option
def clusters(as_json: bool) -> None:
    """List your cluster profiles and the examples to start from."""
    examples = {path.stem: path for path in sorted(pack_folder("clusters").glob("*.yaml"))}
    rows = [*_profiles(cluster_files(), "yours"), *_profiles(examples, "example")]
    if as_json:
        show_json([dict(zip(("name", "kind", "file", "description"), row, strict=True)) for row in rows])
    else:
        columns = ["cluster", "kind", "file", "description"]
        show_table(columns, rows, unbroken=("cluster", "file"), drop=("kind", "description"))
        if not cluster_files():
            eprint(f"To add a profile, copy an example to {config_folder()} and edit it.")
            eprint("Commands use the profile default.yaml unless --cluster names another.")


def _profiles(files: dict[str, Path], kind: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, path in files.items():
        try:
            description = load_cluster(str(path)).description
        except UserError as exc:
            description = f"does not load: {exc}"
        rows.append((name, kind, str(path), description))
    return rows
