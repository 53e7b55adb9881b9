"""Make relative paths of the programs that a recipe names absolute when the recipe is read.

`check`, `submit` and the job load a recipe in different working folders, where a relative path could name another
user's file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8launch.recipe.yaml_source import Node


def is_image_file(image: str) -> bool:
    """Return whether the name of a container image is a path, and not a name in the catalogue or a registry."""
    return image.endswith((".sqsh", ".sqfs", ".sif")) or image.startswith(("/", "./", "../", "~"))


# The keys whose values may be paths. A Python without a slash is looked up in PATH.
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

        tree = tree.changed(key, absolute).changed(("axes", ".".join(key)), absolute)
    return tree
