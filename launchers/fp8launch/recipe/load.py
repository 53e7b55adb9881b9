"""Load a recipe file with everything it extends and all overrides as one frozen `LoadedRecipe`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fp8launch import plugin_registry
from fp8launch.diagnostics import Problem, UserError, error, nearest
from fp8launch.hardware.quantization import PRECISIONS, UNQUANTIZED
from fp8launch.injob.ownership import foreign_owner
from fp8launch.recipe.own_paths import with_absolute_programs
from fp8launch.recipe.scaling import on_nodes
from fp8launch.recipe.schema import Recipe, recipe_class
from fp8launch.recipe.yaml_source import Node, is_file, is_there, numbers_as_written, parse_yaml, read_yaml
from fp8launch.resources import pack_folder

MAX_GENERATIONS = 20
# A message lists no more parts of the pack than these.
_FEW = 12

Complete: TypeAlias = "Callable[[Node], Node]"
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


@dataclass(frozen=True)
class RecipeSource:
    """A recipe file laid on all that it extends, before overrides and validation. Reading it is the slow part."""

    path: Path
    tree: Node
    files: tuple[Path, ...]


@dataclass(frozen=True)
class NamedRecipes:
    """Recipes that come with an engine: `ENGINE:NAME` means `{engine: ENGINE, ENGINE: {recipe: NAME}}`.

    `complete` fills in the rest. It sees every recipe after its overrides and before validation, and returns those of
    other engines as they are. `file` is where the names come from.
    """

    complete: Complete
    file: Path


def is_of_engine(name: str) -> bool:
    """Return whether a name is that of a recipe that comes with an engine, `ENGINE:NAME`."""
    engine, colon, _ = name.partition(":")
    return bool(colon) and engine in plugin_registry.offered("recipe_sources")


def _names_of(engine: str) -> NamedRecipes:
    found: NamedRecipes = plugin_registry.load(plugin_registry.offered("recipe_sources")[engine])
    return found


def read_recipe(name: str) -> RecipeSource:
    """Read a recipe by path, or by its name in the pack, and all that it extends. Raises UserError.

    `ENGINE:NAME` is a recipe that comes with an engine (`NamedRecipes`).
    """
    engine, _, own = name.partition(":")
    if is_of_engine(name):
        entries = {"engine": Node(engine, name), engine: Node({"recipe": Node(own, name)}, name)}
        file = _names_of(engine).file
        return RecipeSource(file, Node(dict(entries), name), (file,))
    path = find_recipe(name)
    tree, files = _with_parents(path, (), {})
    return RecipeSource(path, tree, tuple(files))


def load_recipe(recipe: str | RecipeSource, overrides: Sequence[str] = (), nodes: int | None = None) -> LoadedRecipe:
    """Load a recipe with `key.path=value` overrides, then for another number of nodes if given.

    A grid reads its recipe once, by `read_recipe`, and loads it for each point. Raises UserError holding every problem
    found.
    """
    source = recipe
    if isinstance(source, str):
        source = read_recipe(source)
    tree = source.tree
    for text in overrides:
        tree = _apply(tree, text)
    for _, named in plugin_registry.loaded("recipe_sources"):
        tree = named.complete(tree)
    if nodes is not None:
        tree = on_nodes(tree, nodes)
    entries = dict(_entries(tree))
    entries.pop("extends", None)
    entries.setdefault("name", Node(source.path.stem, str(source.path)))
    tree = _variables_as_written(Node(entries, tree.where))
    phases = entries.get("phases")
    if phases is not None and isinstance(phases.value, dict):
        written = {name: _variables_as_written(phase) for name, phase in phases.value.items()}
        tree = Node({**_entries(tree), "phases": Node(written, phases.where)}, tree.where)
    return LoadedRecipe(recipe_class().from_node(tree), tree, source.files)


def _variables_as_written(tree: Node) -> Node:
    """A recipe's tree, or a phase's, with the environment as text."""
    if not isinstance(tree.value, dict) or "env" not in tree.value:
        return tree
    return Node({**tree.value, "env": numbers_as_written(tree.value["env"])}, tree.where)


def find_recipe(name: str) -> Path:
    """Return the file that a user means: a path, or a name in the pack with or without `recipes/` and `.yaml`.

    The pack's names are the pack's: a file of that name in the working folder is meant only where a path is written,
    such as `./llama8b_fp8.yaml`. Anybody may have put it there.
    """
    if is_of_engine(name):
        return _names_of(name.partition(":")[0]).file
    here = [Path(name), Path(f"{name}.yaml")]
    pack = _in_pack(name)
    written_as_path = _is_written_as_path(name)
    candidates = [*pack, *here]
    if written_as_path:
        candidates = [*here, *pack]
    for candidate in candidates:
        if is_file(candidate):
            if candidate in here and not written_as_path:
                _refuse_foreign(candidate, None, name, f"write ./{candidate} to use this file")
            return candidate
    if is_there(Path(name)):
        return Path(name)
    known = pack_names()
    with contextlib.suppress(OSError, ValueError):
        known += map(str, Path(name).parent.glob("*.yaml"))
    fix = "`fp8launch recipes` lists the recipes that come with fp8launch"
    near = nearest(name.removeprefix("recipes/").removesuffix(".yaml"), known) or nearest(name, known)
    if near:
        fix = f"did you mean {near}? {fix}"
    raise error("recipe-not-found", "no such recipe", name, fix)


def pack_names(*folders: str) -> list[str]:
    """Return the names of the pack's recipes and parts: all, or those in the given folders, `""` being its top."""
    top = pack_folder("recipes")
    files: list[Path] = []
    for folder in folders:
        files += (top / folder).glob("*.yaml")
    if not folders:
        files += top.rglob("*.yaml")
    return [str(file.relative_to(top).with_suffix("")) for file in files]


def _is_written_as_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((".yaml", ".yml"))


def _in_pack(name: str) -> list[Path]:
    inside = name.removeprefix("recipes/")
    if Path(inside).is_absolute() or ".." in Path(inside).parts:
        return []
    return [pack_folder("recipes") / f"{inside}.yaml", pack_folder("recipes") / inside]


def _refuse_foreign(file: Path, child: Path | None, where: str, fix: str) -> None:
    if owner := foreign_owner(file, child):
        message = f"{file} belongs to {owner}, so it is not used unless you write its path"
        raise error("foreign-recipe", message, where, fix)


def merge(base: Node, over: Node) -> Node:
    """Merge `over` into `base`: mappings merge key by key, other values replace."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        if key in merged:
            child = merge(merged[key], child)
        merged[key] = child
    return Node(merged, over.where)


def _with_parents(path: Path, seen: tuple[Path, ...], done: Done) -> tuple[Node, list[Path]]:
    """A file laid on all that it extends, and their files. `seen` are its children, the recipe first."""
    real = path.resolve()
    if real in seen:
        chain = " -> ".join(p.name for p in (*seen[seen.index(real) :], real))
        raise error("extends-cycle", f"extends itself: {chain}", str(path), "remove one of these `extends`")
    if len(seen) > MAX_GENERATIONS:
        raise error(
            "extends-too-deep", f"is more than {MAX_GENERATIONS} levels of `extends` below the recipe", str(path)
        )
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
    own = with_absolute_programs(read_yaml(path), _folder_of(path))
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


def _folder_of(file: Path) -> Path:
    """The folder that holds a file, by the name that the user knows unless the file itself is a link."""
    if file.is_symlink():
        file = file.resolve()
    return file.absolute().parent


def _parents(own: Node) -> Iterable[Node]:
    node = _entries(own).get("extends")
    if node is None or node.value is None:
        return []
    items = [node]
    if isinstance(node.value, list):
        items = node.value
    for item in items:
        if not isinstance(item.value, str):
            raise error("bad-value", "'extends' must be a name or a list of names", item.where)
    return items


def _find_parent(parent: Node, child: Path) -> Path:
    """Return the file that an entry of `extends` means: a part of the pack, or a file beside the child or above it.

    The pack's names are the pack's. A path that begins with `./`, `../` or `/` is relative to the child, and no other.
    """
    name = str(parent.value)
    beside = child.resolve().parents[:3]
    written_as_path = name.startswith((".", "/"))
    folders = [pack_folder("recipes"), *beside]
    if written_as_path:
        folders = [beside[0]]
    for folder in folders:
        for candidate in (folder / f"{name}.yaml", folder / name):
            if is_file(candidate):
                if folder in beside and not written_as_path:
                    fix = f"write its path, such as {os.path.relpath(candidate, beside[0])}, to use this file"
                    _refuse_foreign(candidate, child, parent.where, fix)
                return candidate
    fix = "write a path relative to this file, or a part of the pack such as models/llama3_8b"
    parts = pack_names()
    section = name.rpartition("/")[0]
    there = sorted(part for part in parts if section and part.rpartition("/")[0] == section)
    if near := nearest(name, there or parts):
        fix = f"did you mean {near}? Otherwise {fix}"
    if 1 < len(there) <= _FEW:
        fix = f"parts there: {', '.join(there)}"
    if is_of_engine(name):
        engine, _, own = name.partition(":")
        message = f"extends '{name}', but only files can be extended"
        fix = f"write `engine: {engine}` and `{engine}: {{recipe: {own}}}` instead; other keys change what it sets"
        raise error("missing-parent", message, parent.where, fix)
    message = f"extends '{name}', which was not found in {', '.join(dict.fromkeys(map(str, folders)))}"
    raise error("missing-parent", message, parent.where, fix)


def _apply(tree: Node, override: str) -> Node:
    """One `a.b=value`. Another precision recipe brings its whole part, for format and amax settings belong to it;
    parameter gather stays."""
    key, sign, text = override.partition("=")
    steps = key.strip().split(".")
    if not sign or not all(steps):
        raise error(
            "bad-override",
            "must look like section.key=value",
            f"--set {override}",
            "write for example --set precision.recipe=bf16",
        )
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
        if step == "software":
            node = numbers_as_written(node)  # A shell takes the quotes that would make a version text.
        node = Node({step: node}, place)
    if steps[0] in ("launch", "container", "axes"):
        node = with_absolute_programs(node, Path.cwd())
    return merge(tree, node)


def switch_precision(tree: Node, choice: Node) -> Node:
    """The tree with another precision recipe, whose part of the pack comes with it; parameter gather stays."""
    current = tree.find(("precision",))
    part = pack_folder("recipes") / "precision" / f"{choice.value}.yaml"
    known = choice.value in PRECISIONS and is_file(part)
    if not known or tree.find(("precision", "recipe")).value == choice.value:
        return merge(tree, Node({"precision": Node({"recipe": choice}, choice.where)}, choice.where))
    rest = {key: child for key, child in _entries(tree).items() if key != "precision"}
    tree = merge(Node(rest, tree.where), read_yaml(part))
    return merge(tree, Node({"precision": _gather_of(current, choice)}, choice.where))


def _gather_of(precision: Node, choice: Node) -> Node:
    """What stays of a precision section when `choice` becomes its recipe."""
    kept = {"recipe": choice}
    if choice.value not in UNQUANTIZED and isinstance(precision.value, dict) and "param_gather" in precision.value:
        kept["param_gather"] = precision.value["param_gather"]
    return Node(dict(kept), choice.where)


def _replace(tree: Node, path: tuple[str, ...], node: Node) -> Node:
    """The tree with `node` in place of what `path` leads to."""
    if not path:
        return node
    step, *rest = path
    entries = _entries(tree)
    return Node({**entries, step: _replace(entries[step], tuple(rest), node)}, tree.where)


def _entries(tree: Node) -> dict[str, Node]:
    assert isinstance(tree.value, dict)
    return tree.value
