"""Recipes made ready for the checks of files, machine and cluster, from the tiny recipe of the pack."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8launch.check import files
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.job.prepared import Prepared, prepare


def recipe(folder: Path, text: str = "", base: str = "tiny_cpu") -> str:
    """A recipe file that extends one of the pack; its first line is the `extends`."""
    file = folder / "recipe.yaml"
    file.write_text(f"extends: [{base}]\n{text}")
    return str(file)


def ready(folder: Path, text: str = "", *overrides: str) -> Prepared:
    return prepare(recipe(folder, text), overrides)


def indexed(blend: list[Any], **more: Any) -> str:
    """The `data:` section of a recipe as one line of YAML."""
    section = {"kind": "indexed", "blend": blend, "tokenizer": {"type": "NullTokenizer"}, "split": "1,0,0", **more}
    return "data: " + json.dumps(section, ensure_ascii=False) + "\n"


def data_problems(
    prepared: Prepared, cluster: Cluster | None = None, environment: Mapping[str, str] | None = None
) -> list[Problem]:
    """What `check` says of the files of a run."""
    where = os.environ if environment is None else environment
    return list(files.problems(prepared, cluster or Cluster(), where))


def codes(problems: list[Problem]) -> list[str]:
    return [p.code for p in problems]
