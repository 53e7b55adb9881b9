"""Load a recipe file, everything it extends and all overrides into one frozen `LoadedRecipe`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fp8launch import plugin_registry
from fp8launch.diagnostics import Problem, UserError, error, nearest
from fp8launch.hardware.quantization import UNQUANTIZED, precision_names
from fp8launch.injob.ownership import foreign_owner
from fp8launch.recipe.own_paths import with_absolute_programs
from fp8launch.recipe.scaling import on_nodes
from fp8launch.recipe.schema import Recipe, recipe_class
from fp8launch.recipe.yaml_source import (
    RECIPE_SUFFIXES,
    Node,
    is_file,
    is_folder,
    is_there,
    numbers_as_written,
    parse_yaml,
    read_yaml,
)
from fp8launch.resources import pack_folder

MAX_GENERATIONS = 20
# The maximum number of pack parts that a message lists.
_FEW = 12

Complete: TypeAlias = "Callable[[Node], Node]"
# Files read so far, each merged with everything it extends.
Done: TypeAlias = "dict[Path, tuple[Node, list[Path]] | UserError]"


class Override(str):
    """An override `key=value` from an option other than `--set`. Messages show `option` as its origin."""

    option: str

    def __new__(cls, text: str, option: str) -> Override:
        made = super().__new__(cls, text)
        made.option = option
        return made


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and the places of its values. `files` are all files that it was merged from, the recipe itself last.

    `promised` has the folders that other runs will have written when this one starts, each with the manifest entries of
    its run (`arguments`, `megatron`, `phases`).
    """

    recipe: Recipe
    tree: Node
    files: tuple[Path, ...]
    promised: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def where(self, *path: str | int) -> str:
        """Return `file:line` of the deepest part of `path` that the recipe contains."""
        return self.tree.find(path).where


@dataclass(frozen=True)
class RecipeSource:
    """A recipe file merged with everything it extends, before overrides and validation. Reading is the slow part."""

    path: Path
    tree: Node
    files: tuple[Path, ...]


@dataclass(frozen=True)
class NamedRecipes:
    """Recipes that come with an engine. `ENGINE:NAME` is short for `{engine: ENGINE, ENGINE: {recipe: NAME}}`.

    `complete` fills in the rest. It is called on every recipe, after overrides and before validation, and returns
    recipes of other engines unchanged. `file` is where the names come from.
    """

    complete: Complete
    file: Path


def is_of_engine(name: str) -> bool:
    """Return whether a name has the form `ENGINE:NAME` and refers to a recipe that comes with an engine."""
    engine, colon, _ = name.partition(":")
    return bool(colon) and engine in plugin_registry.offered("recipe_sources")


def _names_of(engine: str) -> NamedRecipes:
    found: NamedRecipes = plugin_registry.load(plugin_registry.offered("recipe_sources")[engine])
    return found


def read_recipe(name: str) -> RecipeSource:
    """Read a recipe, given by path or name, and everything it extends. Raises UserError.

    `ENGINE:NAME` is a recipe that comes with an engine (see `NamedRecipes`).
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
    """Load a recipe with `key.path=value` overrides, then scale it to another number of nodes if given.

    A grid reads its recipe once with `read_recipe` and loads it for each point. Raises UserError with all problems.
    """
    source = recipe
    if isinstance(source, str):
        source = read_recipe(source)
    tree = source.tree
    for key in plugin_registry.offered("recipe_kinds").keys() & tree.entries().keys():
        message = f"{source.path.name} has `{key}`: it describes several runs, which only `submit` and `check` take"
        raise error("several-runs", message, tree.entries()[key].where, "name the recipe of one of them")
    for text in overrides:
        tree = _apply(tree, text)
    for _, named in plugin_registry.loaded("recipe_sources"):
        tree = named.complete(tree)
    if nodes is not None:
        tree = on_nodes(tree, nodes)
    entries = dict(tree.entries())
    entries.pop("extends", None)
    entries.setdefault("name", Node(source.path.stem, str(source.path)))
    tree = Node(entries, tree.where)
    for section in ("env", "megatron_extra"):
        tree = tree.changed((section,), numbers_as_written)
        tree = tree.changed(("phases", "*", section), numbers_as_written)
    return LoadedRecipe(recipe_class().from_node(tree), tree, source.files)


def find_recipe(name: str) -> Path:
    """Find the file for a path, or for a name in the pack with or without `recipes/` and `.yaml`.

    A name that exists in the pack always refers to the pack. For a file of the same name in the working folder, which
    anyone may have put there, the user must write a path such as `./llama8b_fp8.yaml`.
    """
    if is_of_engine(name):
        return _names_of(name.partition(":")[0]).file
    here = [Path(name), Path(f"{name}.yaml")]
    pack = _in_pack(name)
    written_as_path = name.startswith((".", "/", "~")) or name.endswith(RECIPE_SUFFIXES)
    candidates = [*pack, *here]
    if written_as_path:
        candidates = [*here, *pack]
    for candidate in candidates:
        if is_file(candidate):
            if candidate in here and not written_as_path:
                _refuse_foreign(candidate, None, name, f"write ./{candidate} to use this file")
            return candidate
    folder = "/" not in name and is_folder(Path(name))
    if is_there(Path(name)) and not folder:
        return Path(name)
    engine, colon, _ = name.partition(":")
    if colon and (absent := plugin_registry.absent_error("recipe_sources", engine, f"the recipe {name}", name)):
        raise absent
    known = pack_names()
    with contextlib.suppress(OSError, ValueError):
        known += map(str, Path(name).parent.glob("*.yaml"))
    fix = "`fp8launch recipes` lists the recipes that come with fp8launch"
    near = nearest(name.removeprefix("recipes/").removesuffix(".yaml"), known) or nearest(name, known)
    if near:
        fix = f"did you mean {near}? {fix}"
    message = "no such recipe"
    if folder:
        message = "is a folder, not a recipe"
    else:
        with contextlib.suppress(OSError, ValueError):
            message = f"is a symbolic link to {Path(name).readlink()}, which does not exist"
            fix = "correct the link"
    raise error("recipe-not-found", message, name, fix)


def pack_names(*folders: str) -> list[str]:
    """Return the names of the pack's recipes and parts, all or only those in `folders`. `""` is the top folder."""
    top = pack_folder("recipes")
    files: list[Path] = []
    for folder in folders:
        files += (top / folder).glob("*.yaml")
    if not folders:
        files += top.rglob("*.yaml")
    return list(map(pack_name, files))


def pack_name(file: Path) -> str:
    """Return the name of a recipe or part of the pack."""
    return str(file.relative_to(pack_folder("recipes")).with_suffix(""))


def _in_pack(name: str) -> list[Path]:
    inside = name.removeprefix("recipes/")
    if Path(inside).is_absolute() or ".." in Path(inside).parts:
        return []
    return [pack_folder("recipes") / f"{inside}.yaml", pack_folder("recipes") / inside]


def _refuse_foreign(file: Path, child: Path | None, where: str, fix: str) -> None:
    if owner := foreign_owner(file, child):
        message = f"{file} belongs to {owner}, so it is used only if you write its path"
        raise error("foreign-recipe", message, where, fix)


def merge(base: Node, over: Node) -> Node:
    """Merge `over` into `base`. Mappings are merged key by key; other values are replaced."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        if key in merged:
            child = merge(merged[key], child)
        merged[key] = child
    return Node(merged, over.where)


def _with_parents(path: Path, seen: tuple[Path, ...], done: Done) -> tuple[Node, list[Path]]:
    """Return a file merged with everything it extends, and all files read. `seen` are its children, recipe first."""
    real = path.resolve()
    if real in seen:
        chain = " -> ".join(p.name for p in (*seen[seen.index(real) :], real))
        raise error("extends-cycle", f"extends itself: {chain}", str(path), "remove one of these `extends`")
    if len(seen) > MAX_GENERATIONS:
        raise error(
            "extends-too-deep", f"is more than {MAX_GENERATIONS} levels of `extends` below the recipe", str(path)
        )
    # Load each file only once, however many files extend it.
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
    """Return the folder of a file as the user wrote it, unless the file itself is a link."""
    if file.is_symlink():
        file = file.resolve()
    return file.absolute().parent


def _parents(own: Node) -> Iterable[Node]:
    node = own.entries().get("extends")
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
    """Find the file for an entry of `extends`: a part of the pack, or a file next to the child or above it.

    A name that exists in the pack always refers to the pack. Only paths that start with `./`, `../` or `/` are
    resolved against the child.
    """
    name = str(parent.value)
    nearby = child.resolve().parents[:3]
    written_as_path = name.startswith((".", "/"))
    folders = [pack_folder("recipes"), *nearby]
    if written_as_path:
        folders = [nearby[0]]
    for folder in folders:
        for candidate in (folder / f"{name}.yaml", folder / name):
            if is_file(candidate):
                if folder in nearby and not written_as_path:
                    fix = f"write its path, such as {os.path.relpath(candidate, nearby[0])}, to use this file"
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
    """Apply one `a.b=value` override.

    A new precision recipe replaces the whole section with its part of the pack, because format and amax settings
    belong to the recipe. Only parameter gather is kept.
    """
    place = override.option if isinstance(override, Override) else f"--set {override}"
    key, sign, text = override.partition("=")
    steps = key.strip().split(".")
    if not sign or not all(steps):
        fix = "write for example --set precision.recipe=bf16"
        raise error("bad-override", "must look like section.key=value", place, fix)
    if steps == ["extends"]:
        # The files are merged before the overrides.
        raise error("bad-override", "'extends' cannot be overridden", place, "write a recipe that extends this one")
    node = parse_yaml(text, place, numbered=False)
    if steps == ["precision", "recipe"]:
        return switch_precision(tree, node)
    if steps[:1] == ["phases"] and steps[2:] == ["precision", "recipe"]:
        # Merging the phase adds the pack's part. Format and amax settings of the previous precision would be wrong.
        tree = tree.changed(("phases", steps[1], "precision"), lambda own: _gather_of(own, node))
    for step in reversed(steps):
        if step == "software":
            node = numbers_as_written(node)  # A shell removes the quotes that would make a version text.
        node = Node({step: node}, place)
    if steps[0] in ("launch", "container", "axes"):
        node = with_absolute_programs(node, Path.cwd())
    return merge(tree, node)


def switch_precision(tree: Node, choice: Node) -> Node:
    """Switch to another precision recipe and its part of the pack. Parameter gather is kept."""
    current = tree.find(("precision",))
    part = pack_folder("recipes") / "precision" / f"{choice.value}.yaml"
    known = choice.value in precision_names() and is_file(part)
    if not known or tree.find(("precision", "recipe")).value == choice.value:
        return merge(tree, Node({"precision": Node({"recipe": choice}, choice.where)}, choice.where))
    rest = {key: child for key, child in tree.entries().items() if key != "precision"}
    tree = merge(Node(rest, tree.where), read_yaml(part))
    return merge(tree, Node({"precision": _gather_of(current, choice)}, choice.where))


def _gather_of(precision: Node, choice: Node) -> Node:
    """Return the precision section after a change of recipe: the new recipe, and parameter gather if it was set."""
    kept = {"recipe": choice}
    if choice.value not in UNQUANTIZED and isinstance(precision.value, dict) and "param_gather" in precision.value:
        kept["param_gather"] = precision.value["param_gather"]
    return Node(dict(kept), choice.where)
