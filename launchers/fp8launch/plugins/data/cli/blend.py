"""`fp8launch data blend`: weights of datasets, and how often a run sees each of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from fp8launch.cli.output import FiniteRange, echo, eprint, json_option, show_json, show_table
from fp8launch.datasets.manifest import Manifest, read_manifest
from fp8launch.diagnostics import error
from fp8launch.plugins.data.blend import Share, recipe_lines, shares_of
from fp8launch.plugins.data.lengths import open_index, prefix_of


@click.command()
@click.argument("datasets", nargs=-1, required=True, metavar="PREFIX[=WEIGHT]...")
@click.option(
    "--temperature", type=FiniteRange(min=0.01), default=1.0, help="Temperature of default weights (default: 1)."
)
@click.option("--recipe", metavar="RECIPE", help="The run: its iterations, batch, sequence and split.")
@click.option("--tokens", type=FiniteRange(min=1), metavar="N", help="Tokens of the run, such as 3e11.")
@json_option
def blend(
    datasets: tuple[str, ...], temperature: float, recipe: str | None, tokens: float | None, as_json: bool
) -> None:
    """Print the `blend:` lines of a recipe, and how often a run sees each dataset.

    Weights follow each PREFIX; by default, they are the datasets' tokens to the power of 1/temperature.
    """
    if recipe and tokens:
        raise error("data-blend", "--recipe and --tokens both say how long the run is", "--tokens", "leave one out")
    wanted = list(map(_dataset, datasets))
    given = [weight is not None for _, weight in wanted]
    if any(given) and not all(given):
        raise error("data-blend", "some datasets have a weight and others none", "PREFIX", "write =WEIGHT after each")
    counted = []
    for name, weight in wanted:
        prefix = prefix_of(name)
        counted.append((str(prefix), open_index(prefix).tokens, weight))
    asked, share = None, 1.0
    if tokens:
        asked = int(tokens)
    if recipe:
        asked, share = _of_recipe(recipe)
    shares = shares_of(counted, temperature, asked, share)
    if as_json:
        show_json({"tokens": asked, "train_share": share, "datasets": list(map(asdict, shares))})
        return
    _show(shares, asked)


def _dataset(text: str) -> tuple[str, float | None]:
    prefix, equals, weight = text.rpartition("=")
    if not equals:
        return text, None
    try:
        number = float(weight)
    except ValueError:
        return text, None  # a path with = in it
    if not 0 < number < float("inf"):
        raise error("data-blend", f"the weight of {prefix} is {weight}", "PREFIX=WEIGHT", "use a positive number")
    return prefix, number


def _of_recipe(recipe: str) -> tuple[int, float]:
    """Return the tokens that a recipe's run needs, and the training share of its data split."""
    from fp8launch.check.data import asked_tokens, train_fraction
    from fp8launch.job.prepared import prepare
    from fp8launch.rundir.names import recipe_named

    prepared = prepare(recipe_named(recipe, say=eprint))
    asked = asked_tokens(prepared.parts[-1])  # all phases but the last one exit before the end
    if not asked:
        raise error("data-blend", f"{recipe} does not say how long it trains", "--recipe", "use --tokens")
    return asked, train_fraction(prepared)


def _show(shares: list[Share], asked: int | None) -> None:
    rows = []
    for share in shares:
        epochs = "" if share.epochs is None else f"{share.epochs:.3g}"
        rows.append((share.prefix, f"{share.tokens:,}", f"{100 * share.weight:.2f} %", epochs))
    columns = ["dataset", "tokens (n)", "share (%)", "epochs (n)"]
    show_table(columns, rows, err=True)
    if asked is not None:
        eprint(f"a run of {asked:,} tokens")
    echo(recipe_lines(shares, [_manifest(Path(share.prefix)) for share in shares]))


def _manifest(prefix: Path) -> Manifest | None:
    """Return the manifest of a dataset; None if there is none or it cannot be read, which `check` reports."""
    try:
        return read_manifest(prefix)
    except (OSError, ValueError):
        return None
