"""Complete a recipe for Bridge from the index entry of the Bridge recipe that it names: GPUs, environment, image.

Bridge's own sections (`ddp: {...}`, `--set model.num_layers=4`) become `bridge.overrides`, and fields with an
equivalent recipe key become that key, so batch, layout and checkpoints are in one place under either name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8launch.plugins.bridge.fields import OWN_KEYS, SECTIONS
from fp8launch.plugins.bridge.index import BridgeRecipe, find
from fp8launch.plugins.bridge.published import PublishedRow, rows_of
from fp8launch.recipe.load import merge
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.sections import Checkpoint, Optimizer, Train
from fp8launch.recipe.yaml_source import Node

# Release to the catalogue image that contains it (docs/releases/software-versions.md of Bridge 0.6.0, and its release
# notes). No document names an image with 0.6.2.
IMAGES = {"0.4.0": "nemo-26.04", "0.5.0": "nemo-26.06", "0.6.0": "nemo-26.08"}
# GPUs of a node, as the pack's hardware parts have them.
_PER_NODE = {"gb200": 4, "gb300": 4, "vr200": 4}
_DEFAULT_PER_NODE = 8
# Keys that change the run, so that NVIDIA's published throughput no longer applies.
_OF_ANOTHER_RUN = (("reference",), ("resources", "gpu"), ("parallel",), ("batch",), ("bridge", "model"))
# Sections of the same name in both formats: these keys are the recipe's own.
_SHARED = {
    "train": frozenset(Train.model_fields),
    "optimizer": frozenset(Optimizer.model_fields),
    "checkpoint": frozenset(Checkpoint.model_fields),
}


def complete(tree: Node) -> Node:
    """Merge a recipe for Bridge with its Bridge recipe. Raises UserError for an unknown name or release."""
    own = _in_own_keys(_overrides_in_place(tree))
    name = _text(own, "bridge", "recipe")
    if name is None:
        return own
    where = own.find(("bridge", "recipe")).where
    known = merge(base(find(name, _text(own, "bridge", "release"), where)), own)
    if any(own.at(path) is not None for path in _OF_ANOTHER_RUN):
        assert isinstance(known.value, dict)
        children = dict(known.value)
        children.pop("reference", None)
        return Node(children, known.where)
    return known


def base(recipe: BridgeRecipe) -> Node:
    """Return the recipe of a name such as `bridge:NAME`, as far as it does not depend on the user's settings."""
    per_node = min(recipe.gpus, _PER_NODE.get(recipe.gpu, _DEFAULT_PER_NODE))
    resources = {"gpu": recipe.gpu, "gpus_per_node": per_node, "nodes": max(1, recipe.gpus // per_node)}
    stated = {
        "name": recipe.name,
        "description": f"Megatron-Bridge {recipe.release}: {recipe.gpus} x {recipe.gpu}, {recipe.precision}",
        "engine": "bridge",
        "bridge": {"recipe": recipe.name, "release": recipe.release},
        "resources": resources,
        "env": dict(recipe.environment),
    }
    if figures := rows_of(recipe):
        stated["reference"] = _reference(figures[0])
    if recipe.release in IMAGES:
        stated["container"] = {"image": IMAGES[recipe.release]}
    return _node(stated, f"Megatron-Bridge {recipe.release}, {recipe.name}")


def _reference(row: PublishedRow) -> dict[str, object]:
    source = f"Megatron-Bridge docs/performance-summary.md, {row.container}, {row.model} DGX-{row.gpu.upper()}"
    return {
        "tokens_per_s_per_gpu": float(row.tokens_per_s_per_gpu),
        "tflops_per_gpu": row.tflops_per_gpu and float(row.tflops_per_gpu),
        "gpus": row.gpus,
        "source": source,
    }


def _node(value: object, where: str) -> Node:
    if isinstance(value, Mapping):
        return Node({key: _node(child, where) for key, child in value.items()}, where)
    assert value is None or isinstance(value, str | int | float | bool)
    return Node(value, where, str(value))


def _overrides_in_place(tree: Node) -> Node:
    """Move the fields in Bridge's sections to `bridge.overrides`."""
    assert isinstance(tree.value, dict)
    kept: dict[str, Node] = {}
    moved: dict[str, Node] = {}
    for section, node in tree.value.items():
        if section not in SECTIONS or (section in Recipe.model_fields and not isinstance(node.value, dict)):
            kept[section] = node
            continue
        if not isinstance(node.value, dict):
            moved[section] = node
            continue
        assert section in _SHARED or section == "model" or section not in Recipe.model_fields
        own, theirs = {}, {}
        for key, child in node.value.items():
            if key in _SHARED.get(section, ()):
                own[key] = child
            else:
                theirs[key] = child
        if own or not theirs:
            kept[section] = Node(own, node.where)
        if theirs:
            moved[section] = Node(theirs, node.where)
    if not moved:
        return tree
    overrides = Node({"bridge": Node({"overrides": Node(dict(moved), tree.where)}, tree.where)}, tree.where)
    return merge(Node(kept, tree.where), overrides)


def _in_own_keys(tree: Node) -> Node:
    """Move overrides of fields that have a recipe key to that key, unless the recipe states the key itself."""
    overrides = tree.at(("bridge", "overrides"))
    if overrides is None or not isinstance(overrides.value, dict):
        return tree
    moved: dict[tuple[str, ...], Node] = {}
    left = _without(overrides, dict(_movable(tree, overrides, "", moved)))
    bridge = tree.find(("bridge",))
    assert isinstance(tree.value, dict) and isinstance(bridge.value, dict)
    entries = {**tree.value, "bridge": Node({**bridge.value, "overrides": left}, bridge.where)}
    result = Node(entries, tree.where)
    for (section, key), node in moved.items():
        result = merge(result, Node({section: Node({key: node}, node.where)}, node.where))
    return result


def _movable(
    tree: Node, overrides: Node, prefix: str, moved: dict[tuple[str, ...], Node]
) -> Iterator[tuple[str, Node]]:
    """Yield the fields of `overrides` that have a recipe key, and put their values into `moved`."""
    assert isinstance(overrides.value, dict)
    for key, node in overrides.value.items():
        field = f"{prefix}{key}"
        if isinstance(node.value, dict):
            yield from _movable(tree, node, f"{field}.", moved)
            continue
        key_of_its_own = OWN_KEYS.get(field)
        if key_of_its_own is None or tree.at(key_of_its_own) is not None:
            continue
        # Two fields of one key, such as the sequence lengths of model and data, must agree to move both.
        if moved.setdefault(key_of_its_own, node).value == node.value:
            yield field, node


def _without(overrides: Node, fields: Mapping[str, Node], prefix: str = "") -> Node:
    assert isinstance(overrides.value, dict)
    left: dict[str, Node] = {}
    for key, node in overrides.value.items():
        field = f"{prefix}{key}"
        if isinstance(node.value, dict):
            rest = _without(node, fields, f"{field}.")
            if rest.value or not node.value:
                left[key] = rest
        elif field not in fields:
            left[key] = node
    return Node(left, overrides.where)


def _text(tree: Node, *path: str) -> str | None:
    found = tree.at(path)
    if found is None or not isinstance(found.value, str):
        return None
    return found.value
