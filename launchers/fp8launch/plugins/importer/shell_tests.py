"""Evaluate tests and integer arithmetic on known words."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

from fp8launch.plugins.importer.shell_holes import is_known


class Test:
    """The condition between `[` and `]`: True, False, or None if unknown. Its items are expanded words."""

    def __init__(self, items: Sequence[str]) -> None:
        self._items = list(items)
        self._at = 0

    def truth(self) -> bool | None:
        answer = self._or()
        if self._at != len(self._items):
            return None
        return answer

    def _next(self) -> str | None:
        if self._at >= len(self._items):
            return None
        return self._items[self._at]

    def _or(self) -> bool | None:
        answer = self._and()
        while self._next() in ("||", "-o"):
            self._at += 1
            other = self._and()
            answer = _either(answer, other)
        return answer

    def _and(self) -> bool | None:
        answer = self._not()
        while self._next() in ("&&", "-a"):
            self._at += 1
            other = self._not()
            answer = _both(answer, other)
        return answer

    def _not(self) -> bool | None:
        if self._next() == "!":
            self._at += 1
            return _opposite(self._not())
        if self._next() == "(":
            self._at += 1
            answer = self._or()
            if self._next() != ")":
                self._at = -1
            self._at += 1
            return answer
        return self._primary()

    def _primary(self) -> bool | None:
        begin = self._at
        while self._at < len(self._items) and self._items[self._at] not in ("&&", "||", "-a", "-o", ")"):
            self._at += 1
        rest = self._items[begin : self._at]
        if not is_known(*rest):
            return None
        if len(rest) == 1:
            return rest[0] != ""
        if len(rest) == 2 and rest[0] in ("-z", "-n"):
            return (rest[1] == "") is (rest[0] == "-z")
        if len(rest) != 3:
            return None
        left, operator, right = rest
        if operator in ("=", "=="):
            return matches(left, [right])
        if operator == "!=":
            return _opposite(matches(left, [right]))
        try:
            return _COMPARE[operator](int(left), int(right))
        except (KeyError, ValueError):
            return None


def _opposite(answer: bool | None) -> bool | None:
    """Return the negation of a truth value that may be unknown."""
    if answer is None:
        return None
    return not answer


def _either(one: bool | None, other: bool | None) -> bool | None:
    """Return the disjunction of truth values that may be unknown."""
    if one or other:
        return True
    if one is None or other is None:
        return None
    return False


def _both(one: bool | None, other: bool | None) -> bool | None:
    """Return the conjunction of truth values that may be unknown."""
    if one is False or other is False:
        return False
    if one is None or other is None:
        return None
    return True


_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


def matches(subject: str, patterns: Sequence[str]) -> bool | None:
    """Return whether a text is one of these words, or None if a pattern or a hole would decide."""
    if not is_known(subject, *patterns):
        return None
    if subject in patterns or "*" in patterns:
        return True
    if any(set("*?[\\") & set(pattern) for pattern in patterns):
        return None
    return False


def whole_number(node: ast.expr) -> int:
    """Evaluate integer arithmetic with division towards zero, as a shell does. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = whole_number(node.operand)
        if isinstance(node.op, ast.USub):
            return -value
        return value
    if isinstance(node, ast.BinOp):
        left, right = whole_number(node.left), whole_number(node.right)
        if max(abs(left), abs(right)) < 1 << 63:
            if isinstance(node.op, ast.Div):
                return _quotient(left, right)
            if isinstance(node.op, ast.Mod):
                return left - right * _quotient(left, right)
            if isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
                return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]
    raise ValueError("not whole-number arithmetic")


def _quotient(left: int, right: int) -> int:
    """Divide towards zero."""
    quotient = abs(left) // abs(right)
    if (left < 0) != (right < 0):
        return -quotient
    return quotient
