"""Make relative paths of a recipe's programs absolute when the recipe is read.

`check`, `submit` and the job load a recipe from different working folders. There, a relative path could refer to
another user's file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8launch.recipe.yaml_source import Node


def is_image_file(image: str) -> bool:
    """Return whether a container image is given as a path, not as a name in the catalogue or a registry."""
    return image.endswith((".sqsh", ".sqfs", ".sif")) or image.startswith(("/", "./", "../", "~"))


# The keys whose values may be paths. A Python without a slash is looked up in PATH.
_KEYS: dict[tuple[str, str], Callable[[str], bool]] = {
    ("launch", "script"): bool,
    ("launch", "python"): lambda python: "/" in python,
    ("container", "image"): lambda image: is_image_file(image) and "://" not in image,
}


def with_absolute_programs(tree: Node, folder: Path) -> Node:
    """Resolve script, Python and image of a recipe, and the values of axes that vary them, against `folder`."""
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
