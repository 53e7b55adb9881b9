"""Read the flags of a Megatron source tree from its text: `add_argument` calls, and fields of dataclasses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fp8launch.injob.regular_files import read_regular
from fp8launch.plugins.forks.source_tree import MAX_BYTES, Module, SourceTree, Unreadable

# Where Megatron-Core and older releases of Megatron-LM define their parser, and the functions that build it.
_ENTRIES = (
    ("megatron.training.arguments", "add_megatron_arguments"),
    ("megatron.training.arguments", "parse_args"),
    ("megatron.arguments", "parse_args"),
)
_PLAIN = ("int", "float", "str", "bool")
_ACTIONS = {"store": "store", "store_true": "store_true", "store_false": "store_false", "append": "store"}

Entry = dict[str, Any]


class SourceFlags(NamedTuple):
    """`flags` as in a flag schema, by first option; `unread` are places with computed flags."""

    flags: dict[str, Entry]
    unread: list[str]


def read_flags(root: Path) -> SourceFlags | None:
    """Return the flags of the tree's parser; None if the tree has no parser of Megatron's."""
    tree = SourceTree(root)
    for name, function in _ENTRIES:
        module = tree.module(name)
        if module is not None and isinstance(module.defined.get(function), ast.FunctionDef):
            reader = _Reader(tree)
            reader.function(module, function)
            return SourceFlags(reader.flags, reader.unread)
    return None


def version_in(root: Path) -> str | None:
    """Return the version of Megatron-Core that a source tree states."""
    file = root / "megatron" / "core" / "package_info.py"
    try:
        text = read_regular(file, MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.MULTILINE))
    if len(parts) != 3:
        return None
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"


class _Reader:
    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.flags: dict[str, Entry] = {}
        self.unread: list[str] = []
        self._seen: set[tuple[str, str]] = set()

    def function(self, module: Module, name: str) -> None:
        """Read the flags that a function adds, and those of the functions that it gives a parser to."""
        found = self.tree.find(module, name)
        if found is None or not isinstance(found[1], ast.FunctionDef) or (found[0].name, name) in self._seen:
            return
        module, function = found
        self._seen.add((module.name, name))
        local = dict(module.defined)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                local[node.targets[0].id] = node.value
        calls = sorted(
            (node for node in ast.walk(function) if isinstance(node, ast.Call)),
            key=lambda call: (call.lineno, call.col_offset),
        )
        for call in calls:
            try:
                self._call(module, call, local)
            except (Unreadable, LookupError, SyntaxError, TypeError, ValueError, AttributeError, RecursionError):
                self.unread.append(f"{module.name}:{call.lineno}")

    def _call(self, module: Module, call: ast.Call, local: Mapping[str, ast.stmt | ast.expr]) -> None:
        match call.func:
            case ast.Attribute(attr="add_argument"):
                self._add(module, call)
            case ast.Name(id="ArgumentGroupFactory"):
                self._dataclass(module, call, local)
            case ast.Name(id=callee) if any(isinstance(word, ast.Name) for word in call.args):
                if re.match(r"_?add_\w+", callee):
                    self.function(module, callee)

    def _add(self, module: Module, call: ast.Call) -> None:
        try:
            options = [self.tree.value(module, argument) for argument in call.args]
        except Unreadable:
            options = []
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if options and all(isinstance(option, str) and option.startswith("-") for option in options):
            self._keep(module, options, keywords)
        else:
            self.unread.append(f"{module.name}:{call.lineno}")

    def _keep(self, module: Module, options: list[str], keywords: Mapping[str, ast.expr]) -> None:
        entry: Entry = {"flags": options}
        for key in ("dest", "nargs", "default", "required", "choices"):
            if key in keywords:
                try:
                    entry[key] = self.tree.value(module, keywords[key])
                except Unreadable:
                    entry.setdefault("unread", []).append(key)
        action = keywords.get("action")
        if isinstance(action, ast.Constant):
            entry["action"] = _ACTIONS.get(str(action.value), "store_true")
        elif action is not None and "BooleanOptionalAction" in ast.unparse(action):
            entry["action"] = "boolean"
            entry["flags"] = [*options, *(f"--no-{option[2:]}" for option in options)]
        if entry.get("action", "store") == "store":
            entry["type"] = self._type(module, keywords.get("type"))
        if entry.get("nargs") == "?":
            del entry["nargs"]
        self.flags.setdefault(options[0], entry)

    def _type(self, module: Module, node: ast.expr | None) -> str:
        """Return the type of a conversion function; unknown ones take any text."""
        if not isinstance(node, ast.Name):
            return "str"
        if node.id in _PLAIN:
            return node.id
        if node.id.endswith("freq_type"):
            return "pattern"
        return {"tuple_type": "ints"}.get(node.id, "str")

    def _dataclass(self, module: Module, call: ast.Call, local: Mapping[str, ast.stmt | ast.expr]) -> None:
        """Read the flags that Megatron's ArgumentGroupFactory makes of a dataclass."""
        excluded: list[str] = []
        for given in [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "exclude")]:
            stated = local.get(given.id) if isinstance(given, ast.Name) else given
            if isinstance(stated, ast.expr):
                excluded = self.tree.value(module, stated)
        fields = self._fields(module, call.args[0])
        if not fields:
            self.unread.append(f"{module.name}:{call.lineno}")
        for where, field in fields.values():
            assert isinstance(field.target, ast.Name)
            if field.target.id not in excluded:
                self._field(where, field, field.target.id)

    def _fields(self, module: Module, node: ast.expr, depth: int = 0) -> dict[str, tuple[Module, ast.AnnAssign]]:
        """Return the fields of a dataclass and of its bases by name."""
        found = self.tree.find(module, node.id) if isinstance(node, ast.Name) else None
        if found is None or not isinstance(found[1], ast.ClassDef) or depth > 20:
            return {}
        where, definition = found[0], found[1]
        fields: dict[str, tuple[Module, ast.AnnAssign]] = {}
        for base in definition.bases:
            fields.update(self._fields(where, base, depth + 1))
        for line in definition.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                fields[line.target.id] = where, line
        return fields

    def _field(self, module: Module, field: ast.AnnAssign, name: str) -> None:
        stated = dict(_field_arguments(field))
        if isinstance(stated.get("init"), ast.Constant) or "ClassVar" in ast.unparse(field.annotation):
            return
        meta = dict(_metadata(stated.get("metadata")))
        options = [f"--{name.replace('_', '-')}"]
        keywords = {"dest": ast.Constant(name), **self._of_annotation(module, field.annotation)}
        if "default" in stated:
            keywords["default"] = stated["default"]
        if isinstance(keywords.get("type"), ast.Name) and ast.unparse(keywords["type"]) == "bool":
            del keywords["type"]
            off = isinstance(stated.get("default"), ast.Constant) and ast.unparse(stated["default"]) != "False"
            keywords["action"] = ast.Constant("store_false" if off else "store_true")
            if off:
                dashed = name.replace("_", "-")
                options = [f"--no-{dashed}", f"--disable-{dashed}"]
        names = meta.pop("arg_names", None)
        if names is not None:
            options = self.tree.value(module, names)
        self._keep(module, options, {**keywords, **meta})

    def _of_annotation(self, module: Module, node: ast.expr) -> dict[str, ast.expr]:
        """Return `type`, `nargs` and `choices` as ArgumentGroupFactory derives them from an annotation."""
        match node:
            case ast.Constant(value=str() as text):
                return self._of_annotation(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(op=ast.BitOr(), left=inner):
                return self._of_annotation(module, inner)
            case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional"), slice=inner):
                return self._of_annotation(module, inner)
            case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=[inner, *_])):
                return self._of_annotation(module, inner)
            case ast.Subscript(value=ast.Name(id="list" | "List"), slice=inner):
                return {**self._of_annotation(module, inner), "nargs": ast.Constant("+")}
            case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
                choices = inner if isinstance(inner, ast.Tuple) else ast.Tuple([inner])
                kind = type(self.tree.value(module, choices.elts[0])).__name__
                return {"type": ast.Name(kind), "choices": choices}
            case ast.Name() if self.tree.members(module, node):
                return {"choices": ast.Call(ast.Name("list"), [node], [])}
        return {"type": node}


def _field_arguments(field: ast.AnnAssign) -> Iterator[tuple[str, ast.expr]]:
    """Yield the default of a dataclass's field, and what it gives to `field()`."""
    value = field.value
    if not isinstance(value, ast.Call) or "field" not in ast.unparse(value.func):
        if value is not None:
            yield "default", value
        return
    for keyword in value.keywords:
        if keyword.arg == "default_factory":
            made = keyword.value.body if isinstance(keyword.value, ast.Lambda) else ast.List([])
            yield "default", made
        elif keyword.arg:
            yield keyword.arg, keyword.value


def _metadata(node: ast.expr | None) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a field's metadata states under `argparse_meta`."""
    if not isinstance(node, ast.Dict):
        return
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant):
            continue
        if key.value == "argparse_meta":
            yield from _metadata_items(value)


def _metadata_items(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield str(key.value), value
