"""The functions that rules name as their source exist in every release of Megatron-Core that is supported."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_sites import megatron_site

from fp8launch.check.rule import all_rules
from fp8launch.check.rules.value_ranges import RANGES
from fp8launch.megatron.schema import supported_versions

# `experts:TEGroupedMLP.forward`, a module by the end of its name; then the releases, if it is not in all of them.
SYMBOL = re.compile(r"(?<![\w./])([a-z_][\w.]*):([A-Za-z_]\w*(?:\.\w+)*)(?: \(since (\d\.\d+)\)|( of \d))?")


def symbols() -> Iterator[tuple[str, str, str, str | None]]:
    """The source of each rule that names one: whose, module, name, and the first release that has it."""
    sources = {code: rule.source for code, rule in all_rules().items()}
    sources |= {each.dest: each.source for each in RANGES}
    for code, source in sources.items():
        for module, name, since, of_old_releases in SYMBOL.findall(source):
            if not module.startswith("transformer_engine") and not of_old_releases:
                yield code, module, name, since or None


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def defines(module: ast.Module, name: str) -> bool:
    """Whether a module defines a function or class, or a class a method."""
    body: list[ast.stmt] = module.body
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        every = [node for statement in body for node in ast.walk(statement)]
        found = [node for node in every if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


def files_of(module: str, version: str) -> list[Path]:
    """The files that a module's short name may mean."""
    end = module.replace(".", "/")
    root = megatron_site(version) / "megatron"
    return [*root.rglob(f"{end}.py"), *root.rglob(f"{end}/__init__.py")]


@pytest.mark.parametrize("version", supported_versions())
def test_the_source_of_a_rule_exists(version: str) -> None:
    found = list(symbols())
    assert len(found) > 80
    missing = []
    for code, module, name, since in found:
        if since is not None and tuple(map(int, version.split("."))) < tuple(map(int, since.split("."))):
            continue
        if not any(defines(tree(file), name) for file in files_of(module, version)):
            missing.append(f"{code}: {module}:{name}")
    assert missing == []
