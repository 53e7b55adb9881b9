"""The interface of a catalog: the recipes and figures that an engine's own project publishes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class CatalogRecipe:
    """A recipe that an engine's own project publishes, as `fp8launch recipes` shows it.

    `throughput` is the published figure in tokens/s/GPU, empty without one. `source` is its release and its place
    there. `facts` are labelled lines, `sections` what it sets, `record` is its JSON.
    """

    name: str
    layout: str
    batch: str
    throughput: str
    source: str
    facts: Mapping[str, str]
    sections: Mapping[str, Mapping[str, Any]]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class PublishedFigure:
    """A throughput that an engine's own project publishes.

    `where` is the table that it is from. `recipe` is the recipe of the catalog that ran, with its release; where there
    is none, `why_none` says why. `record` is its JSON.
    """

    where: str
    run: str
    batch: str
    throughput: str
    recipe: str | None
    why_none: str | None
    record: Mapping[str, Any]


class RecipeCatalog(ABC):
    """The recipes that an engine's own project publishes; `project` is its name. ENGINE:NAME is such a recipe."""

    project: ClassVar[str]

    @abstractmethod
    def releases(self) -> tuple[str, ...]:
        """The releases of the project in the catalog, the oldest first."""

    @abstractmethod
    def select(self, release: str, **filters: str | None) -> list[CatalogRecipe]:
        """The recipes of a release that fit the filters `gpu`, `model` and `precision`, sorted."""

    @abstractmethod
    def values_of(self, field: str, release: str) -> list[str]:
        """The distinct values of the filter `field` in a release, sorted."""

    @abstractmethod
    def find(self, name: str, release: str | None) -> CatalogRecipe:
        """The recipe of that name, of the newest release that has it unless one is stated. Raises UserError."""

    @abstractmethod
    def published(self, release: str | None, **filters: str | None) -> list[PublishedFigure]:
        """All figures that fit the filters of `select`, the newest first; without a release, those of any."""
