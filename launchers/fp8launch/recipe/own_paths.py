"""Relative paths of the programs that a recipe chooses, made absolute where they are read.

The recipe is loaded by `check`, by `submit` and again from the run folder, each time from another working folder. A
path that depends on it could mean a file that somebody else put there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8launch.recipe.yaml_source import Node


def is_image_file(image: str) -> bool:
    """Return whether the name of a container image is a path, and not a name in the catalogue or a registry."""
    return image.endswith((".sqsh", ".sqfs", ".sif")) or image.startswith(("/", "./", "../", "~"))


# Which values of these keys are paths. A Python without a slash is looked up in PATH.
_KEYS: dict[tuple[str, str], Callable[[str], bool]] = {
    ("launch", "script"): bool,
    ("launch", "python"): lambda python: "/" in python,
    ("container", "image"): lambda image: is_image_file(image) and "://" not in image,
}


def with_absolute_programs(tree: Node, folder: Path) -> Node:
    """Return a recipe's tree with its script, Python and image, and the values of their axes, below `folder`."""
    for key, is_path in _KEYS.items():

        def absolute(node: Node, is_path: Callable[[str], bool] = is_path) -> Node:
            if isinstance(node.value, list):
                return Node([absolute(one) for one in node.value], node.where)
            text = node.value
            if not isinstance(text, str) or text.startswith(("/", "~", "$")) or not is_path(text):
                return node
            return Node(str(folder / text), node.where)

        tree = _changed(tree, key, absolute)
        tree = _changed(tree, ("axes", ".".join(key)), absolute)
    return tree


def _changed(tree: Node, path: tuple[str, ...], change: Callable[[Node], Node]) -> Node:
    """The tree with a changed node at `path`; the same tree where it has none."""
    if not path:
        return change(tree)
    entries = tree.entries()
    if path[0] not in entries:
        return tree
    return Node({**entries, path[0]: _changed(entries[path[0]], path[1:], change)}, tree.where)
