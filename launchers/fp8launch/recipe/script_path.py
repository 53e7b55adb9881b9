"""A relative `launch.script`, made absolute where it is read.

The recipe is loaded by `check`, by `submit` and again from the run folder, each time from another working folder. A
path that depends on it could mean a file that somebody else put there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8launch.recipe.yaml_source import Node

_KEY = ("launch", "script")


def with_absolute_script(tree: Node, folder: Path) -> Node:
    """Return a recipe's tree with its training script, or the scripts of its axis, below `folder` if relative."""

    def absolute(script: Node) -> Node:
        if isinstance(script.value, list):
            return Node([absolute(one) for one in script.value], script.where)
        if not isinstance(script.value, str) or not script.value or script.value.startswith(("/", "~", "$")):
            return script
        return Node(str(folder / script.value), script.where)

    tree = _changed(tree, _KEY, absolute)
    return _changed(tree, ("axes", ".".join(_KEY)), absolute)


def _changed(tree: Node, path: tuple[str, ...], change: Callable[[Node], Node]) -> Node:
    """The tree with a changed node at `path`; the same tree where it has none."""
    if not path:
        return change(tree)
    entries = tree.entries()
    if path[0] not in entries:
        return tree
    return Node({**entries, path[0]: _changed(entries[path[0]], path[1:], change)}, tree.where)
