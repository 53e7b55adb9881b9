"""A recipe file, what it extends and what the command line overrides, to one frozen `LoadedRecipe`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fp8launch.pack import pack_folder
from fp8launch.problems import Problem, UserError, error
from fp8launch.recipe.schema import PRECISION_RECIPES, Recipe
from fp8launch.recipe.source import Node, is_file, is_there, numbers_as_written, parse_yaml, read_yaml
from fp8launch.recipe.validate import validate

MAX_GENERATIONS = 20

# What each file came to, with all that it extends.
Done: TypeAlias = "dict[Path, tuple[Node, list[Path]] | UserError]"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with the places of its values. `files` are all that went into it, the recipe itself last."""

    recipe: Recipe
    tree: Node
    files: tuple[Path, ...]

    def where(self, *path: str | int) -> str:
        """`file:line` of the deepest part of `path` that the recipe states."""
        return self.tree.find(path).where


def load_recipe(name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe by path, or by its name in the pack, with `key.path=value` overrides applied last.

    Raises UserError holding every problem found.
    """
    path = find_recipe(name)
    tree, files = _with_parents(path, (), {})
    for text in overrides:
        tree = _apply(tree, text)
    entries = dict(_entries(tree))
    entries.pop("extends", None)
    entries.setdefault("name", Node(path.stem, str(path)))
    tree = _variables_as_written(Node(entries, tree.where))
    phases = entries.get("phases")
    if phases is not None and isinstance(phases.value, dict):
        written = {name: _variables_as_written(phase) for name, phase in phases.value.items()}
        tree = Node({**_entries(tree), "phases": Node(written, phases.where)}, tree.where)
    return LoadedRecipe(validate(Recipe, tree), tree, tuple(files))


def _variables_as_written(tree: Node) -> Node:
    """A recipe's tree, or a phase's, with the environment as text."""
    if not isinstance(tree.value, dict) or "env" not in tree.value:
        return tree
    return Node({**tree.value, "env": numbers_as_written(tree.value["env"])}, tree.where)


def find_recipe(name: str) -> Path:
    """The file that a user means: a path, or a name in the recipe pack with or without `recipes/` and `.yaml`."""
    for candidate in (Path(name), Path(f"{name}.yaml")):
        if is_file(candidate):
            return candidate
    inside = name.removeprefix("recipes/")
    if not Path(inside).is_absolute() and ".." not in Path(inside).parts:
        for candidate in (pack_folder("recipes") / inside, pack_folder("recipes") / f"{inside}.yaml"):
            if is_file(candidate):
                return candidate
    if is_there(Path(name)):
        return Path(name)
    raise error("recipe-not-found", "no such recipe", name, "`fp8launch recipes` lists those that come with fp8launch")


def merge(base: Node, over: Node) -> Node:
    """`over` laid on `base`: mappings merge key by key, anything else replaces."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.where)


def _with_parents(path: Path, seen: tuple[Path, ...], done: Done) -> tuple[Node, list[Path]]:
    """A file laid on all that it extends, and their files. `seen` are its children, the recipe first."""
    real = path.resolve()
    if real in seen:
        chain = " -> ".join(p.name for p in (*seen[seen.index(real) :], real))
        raise error("extends-cycle", f"extends itself: {chain}", str(path), "remove one of these `extends`")
    if len(seen) > MAX_GENERATIONS:
        raise error("extends-too-deep", f"is more than {MAX_GENERATIONS} `extends` away from the recipe", str(path))
    # A file that is reached on many ways is loaded once, so common parents cost no more than a chain.
    if real not in done:
        try:
            done[real] = _laid_on_parents(path, (*seen, real), done)
        except UserError as exc:
            done[real] = exc
    found = done[real]
    if isinstance(found, UserError):
        raise found
    return found


def _laid_on_parents(path: Path, seen: tuple[Path, ...], done: Done) -> tuple[Node, list[Path]]:
    own = read_yaml(path)
    tree, files = Node({}, own.where), dict[Path, None]()
    problems: list[Problem] = []
    for parent in _parents(own):
        try:
            below, more = _with_parents(_find_parent(parent, path), seen, done)
        except UserError as exc:
            problems += exc.problems
            continue
        tree = merge(tree, below)
        files |= dict.fromkeys(more)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return merge(tree, own), [*files, path]


def _parents(own: Node) -> Iterable[Node]:
    node = _entries(own).get("extends")
    if node is None or node.value is None:
        return []
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str):
            raise error("bad-value", "'extends' must be a name or a list of names", item.where)
    return items


def _find_parent(parent: Node, child: Path) -> Path:
    name = str(parent.value)
    tried = []
    # Beside the child first, then up to the folder that holds the pack's parts, then the pack itself.
    for folder in (*child.resolve().parents[:3], pack_folder("recipes")):
        for candidate in (folder / f"{name}.yaml", folder / name):
            if is_file(candidate):
                return candidate
        tried.append(str(folder))
    raise error(
        "missing-parent",
        f"extends '{name}', which is in none of {', '.join(dict.fromkeys(tried))}",
        parent.where,
        "name a file relative to this one, or a part of the pack such as models/llama3_8b",
    )


def _apply(tree: Node, override: str) -> Node:
    """One `a.b=value`. Another precision recipe brings its whole part, for format and amax settings belong to it;
    parameter gather stays."""
    key, sign, text = override.partition("=")
    steps = key.strip().split(".")
    if not sign or not all(steps):
        raise error("bad-override", "must look like section.key=value", f"--set {override}")
    place = f"--set {override}"
    node = parse_yaml(text, place, numbered=False)
    if steps == ["precision", "recipe"]:
        return switch_precision(tree, node)
    if steps[:1] == ["phases"] and steps[2:] == ["precision", "recipe"]:
        # Its part comes when the phase is laid on the recipe; format and amax settings of another would spoil it.
        own = tree.find(("phases", steps[1])).value
        if isinstance(own, dict) and "precision" in own:
            tree = _replace(tree, ("phases", steps[1], "precision"), _gather_of(own["precision"], node))
    for step in reversed(steps):
        node = Node({step: node}, place)
    return merge(tree, node)


def switch_precision(tree: Node, choice: Node) -> Node:
    """The tree with another precision recipe, whose part of the pack comes with it; parameter gather stays."""
    current = tree.find(("precision",))
    part = pack_folder("recipes") / "precision" / f"{choice.value}.yaml"
    known = choice.value in PRECISION_RECIPES and is_file(part)
    if not known or tree.find(("precision", "recipe")).value == choice.value:
        return merge(tree, Node({"precision": Node({"recipe": choice}, choice.where)}, choice.where))
    rest = {key: child for key, child in _entries(tree).items() if key != "precision"}
    tree = merge(Node(rest, tree.where), read_yaml(part))
    return merge(tree, Node({"precision": _gather_of(current, choice)}, choice.where))


def _gather_of(precision: Node, choice: Node) -> Node:
    """What stays of a precision section when `choice` becomes its recipe."""
    kept = {"recipe": choice}
    if choice.value != "bf16" and isinstance(precision.value, dict) and "param_gather" in precision.value:
        kept["param_gather"] = precision.value["param_gather"]
    return Node(dict(kept), choice.where)


def _replace(tree: Node, path: tuple[str, ...], node: Node) -> Node:
    """The tree with `node` in place of what `path` leads to."""
    step, *rest = path
    entries = _entries(tree)
    return Node({**entries, step: _replace(entries[step], tuple(rest), node) if rest else node}, tree.where)


def _entries(tree: Node) -> dict[str, Node]:
    assert isinstance(tree.value, dict)
    return tree.value
