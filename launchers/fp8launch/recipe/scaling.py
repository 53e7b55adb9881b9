"""Scale a recipe to another number of nodes."""

from __future__ import annotations

from fp8launch.diagnostics import error
from fp8launch.megatron.schema import normalize
from fp8launch.recipe.sections import Batch, Resources
from fp8launch.recipe.yaml_source import Node


def on_nodes(tree: Node, nodes: int) -> Node:
    """Return a recipe's tree for `nodes` nodes. With weak scaling, the global batch grows with the number of nodes.

    Values of the wrong type are left for validation to refuse. Raises UserError if the batch does not scale to a whole
    number.
    """
    place = f"--nodes {nodes}"
    own = _whole_number(tree, ("resources", "nodes"))
    if own is None:
        own = Resources().nodes
    scaled = _with(tree, ("resources", "nodes"), Node(nodes, place))
    scaling = tree.at(("batch", "scaling")) or Node(Batch().scaling, place)
    if scaling.value != "weak" or own < 1:
        return scaled
    for path in _batches(tree):
        batch = _whole_number(tree, path)
        if batch is None:
            continue
        if batch * nodes % own:
            raise error(
                "batch-size",
                f"global batch {batch} on {own} nodes does not scale to a whole number on {nodes}",
                tree.find(path).where,
                "set batch.global, or batch.scaling: strong",
            )
        scaled = _with(scaled, path, Node(batch * nodes // own, place))
    return scaled


def _batches(tree: Node) -> list[tuple[str, str]]:
    """Return the paths of the global batch in a recipe: the field, and the Megatron flag in any notation."""
    paths = [("batch", "global")]
    flags = tree.at(("megatron",))
    if flags is not None:
        paths += [("megatron", flag) for flag in flags.entries() if normalize(flag) == "global_batch_size"]
    return paths


def _whole_number(tree: Node, path: tuple[str, ...]) -> int | None:
    node = tree.at(path)
    if node is None or type(node.value) is not int:
        return None
    return node.value


def _with(tree: Node, path: tuple[str, ...], node: Node) -> Node:
    """Return the tree with `node` at `path`. A section that is not a mapping is left for validation to refuse."""
    if not path:
        return node
    if not isinstance(tree.value, dict):
        return tree
    step, *rest = path
    below = tree.value.get(step, Node({}, node.where))
    return Node({**tree.value, step: _with(below, tuple(rest), node)}, tree.where)
