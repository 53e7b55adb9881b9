"""Select runs by state, tag, age and recipe, as `runs` lists them and other commands act on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8launch.rundir.run_dir import RunFolder
from fp8launch.untyped import as_time


def tags_of(manifest: Mapping[str, Any]) -> list[str]:
    """Return the tags that the user gave to a run."""
    tags = manifest.get("tags")
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


@dataclass(frozen=True)
class Selection:
    """Conditions on manifests. Empty collections and None select every run."""

    tags: Collection[str] = ()
    recipes: Collection[str] = ()
    since: float | None = None
    before: float | None = None

    def of(self, runs: Iterable[RunFolder]) -> list[RunFolder]:
        """Return the runs that meet all conditions. One of several tags or recipes is enough."""
        return [run for run in runs if self._has(run.manifest())]

    def _has(self, manifest: Mapping[str, Any]) -> bool:
        if self.tags and not set(self.tags) & set(tags_of(manifest)):
            return False
        if self.recipes and manifest.get("name") not in self.recipes:
            return False
        created = as_time(manifest.get("created")) or 0.0
        return (self.since is None or created >= self.since) and (self.before is None or created < self.before)
