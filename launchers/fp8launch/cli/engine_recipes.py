"""`fp8launch recipes --engine NAME`: the recipes that an engine's own project publishes."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from fp8launch.cli.output import echo, eprint, show_json, show_table
from fp8launch.diagnostics import UserError, did_you_mean, error
from fp8launch.engines.recipe_catalog import CatalogRecipe, RecipeCatalog

# `gpu`, `model` and `precision`, None where any is meant.
Filters = Mapping[str, str | None]


def show(catalog: RecipeCatalog, name: str | None, release: str | None, filters: Filters, as_json: bool) -> None:
    """List the recipes of a release that fit the filters, or explain one. Raises UserError for unknown names."""
    if name is not None:
        _explain(catalog, catalog.find(name, release), as_json)
        return
    shown = release or catalog.releases()[-1]
    found = catalog.select(shown, **filters)
    if not found:
        raise _nothing(catalog, shown, filters)
    if as_json:
        show_json([one.record for one in found])
        return
    others = ", ".join(catalog.releases()[:-1])
    eprint(f"{len(found)} recipes of {catalog.project} {shown}; other releases: {others}")
    show_table(
        ["recipe", "layout", "batch", "published (tokens/s/GPU)"],
        map(attrgetter("name", "layout", "batch", "throughput"), found),
        unbroken=("recipe",),
        drop=("layout", "batch"),
    )


def show_published(catalog: RecipeCatalog, release: str | None, filters: Filters, as_json: bool) -> None:
    """List the figures that the project publishes, each with its recipe or why it has none. Raises UserError."""
    if release is not None and release not in catalog.releases():
        fix = f"use one of {', '.join(catalog.releases())}"
        raise error("no-such-release", f"the catalog has no {catalog.project} {release}", None, fix)
    found = catalog.published(release, **filters)
    if as_json:
        show_json([one.record for one in found])
        return
    without = 0
    rows = []
    for one in found:
        recipe = one.recipe or f"none: {one.why_none}"
        rows.append((one.where, one.run, one.batch, one.throughput, recipe))
        without += one.recipe is None
    eprint(f"{len(found)} published figures: {len(found) - without} of a recipe, {without} of none")
    if rows:
        columns = ["NeMo", "run", "batch", "tokens/s/GPU", "recipe, or why there is none"]
        show_table(columns, rows, drop=("batch",))


def _explain(catalog: RecipeCatalog, recipe: CatalogRecipe, as_json: bool) -> None:
    if as_json:
        show_json(recipe.record)
        return
    eprint(f"{catalog.project} {recipe.source}")
    for label, value in recipe.facts.items():
        echo(f"{label + ':':<22}{value}")
    for section, values in recipe.sections.items():
        echo(f"{section}:")
        for key, value in sorted(values.items()):
            echo(f"  {key}: {value}")


def _nothing(catalog: RecipeCatalog, release: str, filters: Filters) -> UserError:
    """The error of filters that no recipe fits: an unknown value if there is one, else their combination."""
    what = lacks = f"{catalog.project} {release} has no recipe with"
    for field, value in filters.items():
        if value is None:
            continue
        what += f" --{field} {value}"
        if not catalog.select(release, **{field: value}):
            known = catalog.values_of(field, release)
            fix = did_you_mean(value.lower(), known, f"use one of {', '.join(known)}")
            return error("no-such-recipe", f"{lacks} --{field} {value}", None, fix)
    return error("no-such-recipe", f"{what} together", None, "leave out one of the filters")
