"""`fp8launch data split`: divide a dataset by documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from fp8launch.cli.output import console, echo, json_option, show_json
from fp8launch.datasets.manifest import dataset_file
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.plugins.data.lengths import open_index, prefix_of
from fp8launch.plugins.data.split import Part, split_dataset


@click.command()
@click.argument("prefix")
@click.option(
    "--part",
    "parts",
    multiple=True,
    required=True,
    metavar="NAME=SHARE",
    help="Write this share of the documents to PREFIX_NAME.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the random choice (default: 0).")
@click.option("--in-order", is_flag=True, help="Keep the order: the first documents go to the first part.")
@click.option("--overwrite", is_flag=True, help="Replace parts that exist.")
@json_option
def split(prefix: str, parts: tuple[str, ...], seed: int, in_order: bool, overwrite: bool, as_json: bool) -> None:
    """Divide a dataset by documents, such as --part train=98 --part valid=2. Shares are relative.

    Every document goes to one part. The same seed gives the same parts.
    """
    path = prefix_of(prefix)
    index = open_index(path)
    wanted = [_part(path, text) for text in parts]
    names = [part.prefix for part in wanted]
    if len(set(names)) < len(names):
        raise error("data-split", "two parts have the same name", "--part", "give each its own")
    there = []
    for name in names:
        if dataset_file(name, "bin").exists() or dataset_file(name, "idx").exists():
            there.append(str(name))
    if there and not overwrite:
        message = f"{' and '.join(there)} already exist"
        raise error("data-exists", message, "--part", "choose other names, or add --overwrite", ANSWER_IS_NO)
    with _bar(index.sequences) as progress:
        made = split_dataset(path, index, wanted, None if in_order else seed, progress)
    if as_json:
        show_json([{"prefix": str(name), **record} for name, record in zip(names, made, strict=True)])
        return
    for name, record in zip(names, made, strict=True):
        echo(f"{name}: {record['documents']:,} documents, {record['tokens']:,} tokens")


@contextmanager
def _bar(documents: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import Progress

    terminal = console(err=True)
    with Progress(console=terminal, disable=not terminal.is_terminal, transient=True) as shown:
        task = shown.add_task("", total=documents)
        yield lambda done: shown.update(task, completed=done)


def _part(prefix: Path, text: str) -> Part:
    match = re.fullmatch(r"([A-Za-z0-9._-]+)=([0-9]*\.?[0-9]+)", text)
    if match is None or float(match[2]) <= 0:
        raise error("data-split", f"'{text}' is not NAME=SHARE", "--part", "such as --part train=98 --part valid=2")
    return Part(prefix.with_name(f"{prefix.name}_{match[1]}"), float(match[2]))
