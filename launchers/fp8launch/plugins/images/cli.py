"""`fp8launch images`: list the images that recipes can name, or import one as a file."""

from __future__ import annotations

import os
import re
from dataclasses import asdict

import click

from fp8launch.cli.output import echo, eprint, json_option, show_json, show_table
from fp8launch.cluster.images import catalogue, image_for, local_path, software_in
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import error
from fp8launch.plugins.images.image_store import Kind, import_image, tool_for


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def images(context: click.Context, as_json: bool) -> None:
    """List the image names that recipes can use, or import one as a file."""
    if context.invoked_subcommand is not None:
        return
    known = catalogue()
    if as_json:
        show_json(known)
    else:
        columns = ("image", "URI", "versions", "source")
        rows = [(name, entry["uri"], _versions(name), entry.get("source", "")) for name, entry in known.items()]
        show_table(columns, rows, unbroken=columns, drop=("source",))


def _versions(name: str) -> str:
    known = software_in(name)
    if not known:
        return "not published"
    return f"Megatron-Core {known['megatron']}, TE {known['transformer_engine']}, CUDA {known['cuda']}"


@images.command("import", short_help="import an image as a file that jobs share")
@click.argument("name")
@click.option(
    "--to",
    "folder",
    metavar="DIR",
    help="Folder on a file system shared by all nodes (default: $FP8LAUNCH_IMAGES or ~/fp8launch-images).",
)
@click.option("--as", "kind", type=click.Choice(["sqsh", "sif"]), help="File format: sqsh (enroot) or sif (Apptainer).")
@click.option("--update", is_flag=True, help="Replace an existing file that is stale or damaged.")
@json_option
def import_(name: str, folder: str | None, kind: Kind | None, update: bool, as_json: bool) -> None:
    """Import the image NAME (a known name or a URI) once so that no job has to, and print the path of the file.

    If several processes import the same image, one does it and the others wait. An up-to-date file is kept. If its tag
    now points to another image, the exit code is 1.
    """
    place = local_path(folder or os.environ.get("FP8LAUNCH_IMAGES") or "~/fp8launch-images", "--to")
    kind, tool = tool_for(kind)
    if kind == "sqsh":
        uri = f"docker://{image_for(name, 'pyxis', Cluster(), 'NAME').removeprefix('docker://')}"
    else:
        uri = image_for(name, "apptainer", Cluster(), "NAME")
    if not uri.startswith("docker://") or uri.startswith("docker:///"):
        raise error(
            "not-in-registry",
            f"'{name}' is a file, not an image in a registry",
            "NAME",
            "use the path of the file",
        )
    file = place / f"{_file_name(name, uri)}.{kind}"
    record = import_image(uri, file, tool, update=update, say=eprint)
    if as_json:
        show_json({"file": str(file), **asdict(record)})
        return
    eprint(f"To use it, add this to your cluster profile:  images: {{{name}: {file}}}")
    echo(file)


def _file_name(name: str, uri: str) -> str:
    """Return the name if the catalogue has it, else the last part of the URI with its tag."""
    if name in catalogue():
        return name
    return re.sub(r"[^\w.-]+", "-", re.split(r"[/#]", uri)[-1])
