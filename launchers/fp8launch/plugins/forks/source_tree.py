"""Look up names and constants in the Python files of a source tree. No code of the tree is run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import read_regular

MAX_BYTES = 4 << 20
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda one, other: one * other if _small(one) and _small(other) else None,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: lambda base, exponent: base**exponent if _small(base) and abs(exponent) <= 64 else None,
}


def _small(value: Any) -> bool:
    """Return whether arithmetic with a value takes no time and no memory to speak of."""
    return isinstance(value, int | float) and abs(value) < 1 << 64


class Unreadable(Exception):
    """An expression whose value only running the code would show."""


class Module:
    """A parsed file, with the names that it defines or imports."""

    def __init__(self, name: str, is_package: bool, tree: ast.Module) -> None:
        self.name = name
        self.package = name if is_package else name.rpartition(".")[0]
        self.defined: dict[str, ast.stmt | ast.expr] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        self.starred: list[str] = []
        for line in _statements(tree.body):
            node: ast.AST = line
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.defined[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.defined[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.defined[node.target.id] = node.value
        # Functions that add arguments import their dataclasses themselves.
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                if node.names[0].name == "*":
                    self.starred.append(source)
                self.imported.update({one.asname or one.name: (source, one.name) for one in node.names})

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, with those below `try` and `if`."""
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            yield from _statements([*node.body, *(one for handler in node.handlers for one in handler.body)])
        elif isinstance(node, ast.If):
            yield from _statements([*node.orelse, *node.body])


class SourceTree:
    """The modules below a folder, parsed when they are first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return a module, or None if the tree does not have it or it cannot be parsed."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        place = self.root.joinpath(*name.split("."))
        for file, is_package in ((place.with_suffix(".py"), False), (place / "__init__.py", True)):
            # A link may lead out of the tree.
            if not file.is_file() or not file.resolve().is_relative_to(self.root.resolve()):
                continue
            try:
                return Module(name, is_package, ast.parse(read_regular(file, MAX_BYTES)))
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                return None
        return None

    def find(self, module: Module, name: str, depth: int = 0) -> tuple[Module, ast.stmt | ast.expr] | None:
        """Return what a name of a module stands for, and the module that defines it."""
        if name in module.defined:
            return module, module.defined[name]
        sources = [(source, name) for source in module.starred]
        if name in module.imported:
            sources = [module.imported[name]]
        for source, there in sources if depth < 8 else ():
            other = self.module(source)
            found = other and self.find(other, there, depth + 1)
            if found:
                return found
        return None

    def members(self, module: Module, node: ast.expr) -> list[tuple[str, Any]] | None:
        """Return the names and values of an enum's members, or None for anything else."""
        found = self.find(module, node.id) if isinstance(node, ast.Name) else None
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        where, definition = found[0], found[1]
        if not any("Enum" in ast.unparse(base) for base in definition.bases):
            return None
        members = []
        for line in definition.body:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                try:
                    value = self.value(where, line.value)
                except Unreadable:
                    value = None
                members.append((line.targets[0].id, value))
        return members

    def value(self, module: Module, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of a constant expression; a member of an enum is its name. Raises Unreadable."""
        if depth > 30:
            raise Unreadable
        match node:
            case ast.Constant(value=str() | int() | float() | None):
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(module, item, depth + 1) for item in node.elts]
            case ast.UnaryOp(op=ast.USub()):
                return -self._number(module, node.operand, depth)
            case ast.BinOp(op=ast.Add()) if isinstance(node.left, (ast.List, ast.Constant)):
                left, right = (self.value(module, side, depth + 1) for side in (node.left, node.right))
                if type(left) is type(right) or not isinstance(left, (list, str)):
                    return left + right
            case ast.BinOp() if type(node.op) in _OPERATORS:
                left, right = (self._number(module, side, depth) for side in (node.left, node.right))
                try:
                    return _OPERATORS[type(node.op)](left, right)
                except (ArithmeticError, TypeError):
                    raise Unreadable from None
            case ast.Name():
                found = self.find(module, node.id)
                if found is not None and isinstance(found[1], ast.expr):
                    return self.value(found[0], found[1], depth + 1)
            case ast.Attribute(attr="value", value=ast.Attribute() as member):
                members = dict(self.members(module, member.value) or ())
                if member.attr in members:
                    return members[member.attr]
            case ast.Attribute():
                if node.attr in dict(self.members(module, node.value) or ()):
                    return node.attr
            case ast.Call(func=ast.Name(id="list" | "tuple"), args=[argument]):
                members_of = self.members(module, argument)
                return [name for name, _ in members_of] if members_of else self.value(module, argument, depth + 1)
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str())]):
                return None  # infinity, which JSON cannot hold
            case ast.ListComp(generators=[ast.comprehension(iter=source)], elt=ast.Attribute(attr=kind)):
                members_of = self.members(module, source)
                if members_of:
                    return [value if kind == "value" else name for name, value in members_of]
        raise Unreadable

    def _number(self, module: Module, node: ast.expr, depth: int) -> Any:
        value = self.value(module, node, depth + 1)
        if not isinstance(value, (int, float)) or abs(value) > 1e30:
            raise Unreadable
        return value
