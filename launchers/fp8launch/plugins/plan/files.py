"""Layouts of a plan as recipes: single files, or a study of all layouts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fp8launch.cli.output import eprint
from fp8launch.diagnostics import error
from fp8launch.plugins.plan.plans import Planned
from fp8launch.plugins.plan.predicted import speed_range
from fp8launch.recipe.load import is_of_engine
from fp8launch.recipe.schema import Recipe
from fp8launch.rundir.study import need_study_name

# Lengths of a recipe's name, and of the prefix that it takes from the planned recipe.
LONGEST_NAME, LONGEST_BASE = 80, 40
# Keys that layouts do not inherit: the recipe's grid, and the figure published for it.
NOT_OF_A_LAYOUT = ("axes", "nodes", "reference")


@dataclass(frozen=True)
class PlanFiles:
    """The files that --write and --study request, for at most `top` layouts.

    `write` is a file for the best layout or, with {} in its name, a file for each layout. `study` is the name of a
    study; its recipes are written into a new folder, and `submit` makes the study. The folder has another name than the
    study, because `compare NAME` would read a folder NAME instead of the study.
    """

    write: Path | None
    study: str | None
    top: int

    def refuse_existing(self) -> None:
        """Raise UserError if a file or the study's folder exists, or if the study's name is invalid."""
        if self.study is not None:
            need_study_name(self.study)
            if self.folder.exists():
                raise error("file-exists", f"{self.folder} exists", "--study", "choose another name")
        for file in self._numbered():
            if file.exists():
                raise error("file-exists", f"{file} exists", "--write", "name a new file")

    def write_layouts(self, parents: Sequence[str], planned: Sequence[Planned], recipe: Recipe) -> None:
        """Write the layouts as recipes that extend `parents`. Raises UserError if that fails."""
        cleared = [name for name in NOT_OF_A_LAYOUT if getattr(recipe, name)]
        try:
            for file, one in zip(self._numbered(), planned, strict=False):
                file.write_text(recipe_text(parents, one, None, cleared), encoding="utf-8")
                eprint(f"wrote {file}")
            if self.study is None:
                return
            self.folder.mkdir()
            for name, one in zip(_names(recipe.name, planned), planned, strict=True):
                text = recipe_text(parents, one, name, cleared)
                (self.folder / f"{name}.yaml").write_text(text, encoding="utf-8")
            eprint(f"wrote {len(planned)} recipes in {self.folder}")
        except OSError as exc:
            raise error("cannot-write", f"cannot be written: {exc.strerror}", str(exc.filename), None, 3) from None

    def print_next_step(self, cluster: str | None) -> None:
        """Print the command that submits the study."""
        if self.study is not None:
            chosen = f" --cluster {shlex.quote(cluster)}" if cluster else ""
            eprint(
                f"Nothing was submitted. To submit: fp8launch submit {self.folder}/*.yaml --study {self.study}{chosen}"
            )

    @property
    def folder(self) -> Path:
        """The folder of the study's recipes."""
        return Path(f"{self.study}-layouts")

    def _numbered(self) -> list[Path]:
        if self.write is None:
            return []
        if "{}" not in self.write.name:
            return [self.write]
        names = [self.write.name.replace("{}", str(number)) for number in range(1, self.top + 1)]
        return list(map(self.write.with_name, names))


def _names(base: str, planned: Sequence[Planned]) -> Iterator[str]:
    """Yield a name for each layout's recipe: the planned recipe, the layout's rank, and its sizes."""
    digits = len(str(len(planned)))
    for number, one in enumerate(planned, 1):
        sizes = one.layout.short.replace("micro batch", "mbs").lower()
        yield f"{base[:LONGEST_BASE]}_{number:0{digits}}_{_slug(sizes)}"[:LONGEST_NAME].rstrip("_")


def _slug(text: str) -> str:
    joined = re.sub(r"\b([a-z]+) (?=\d)", r"\1", text)
    return re.sub(r"[^a-z0-9]+", "_", joined)


def recipe_text(parents: Sequence[str], layout: Planned, name: str | None, cleared: Sequence[str] = ()) -> str:
    """Return a recipe that adds the overrides of a layout to `parents` and removes their keys `cleared`.

    A recipe that comes with an engine, such as `bridge:NAME`, must be the only parent.
    """
    values: dict[str, Any] = {"extends": list(parents)}
    if is_of_engine(parents[0]):
        engine, _, own = parents[0].partition(":")
        values = {"engine": engine, engine: {"recipe": own}}
    if name:
        values["name"] = name
    values |= dict.fromkeys(cleared)
    for word in layout.overrides:
        key, _, text = word.partition("=")
        *sections, last = key.split(".")
        into = values
        for section in sections:
            into = into.setdefault(section, {})
        into[last] = yaml.safe_load(text)
    step = layout.step
    head = (
        f"# {layout.layout.short}.\n# Predicted by fp8launch plan: {step.ms:,.0f} ms a step, "
        f"{step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU ({speed_range(step)}).\n"
    )
    return head + yaml.safe_dump(values, sort_keys=False)
