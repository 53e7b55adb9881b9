"""Describe the exception that ended a rehearsal: its message, its location, and the settings read around it."""

from __future__ import annotations

import ast
import errno
import re
import traceback
from pathlib import Path
from typing import Any

# Failures that say nothing about the recipe. The image may have a package that is missing here and has no stand-in.
WITHOUT_VERDICT = ("NotRehearsed", "MachineLacks", "ImportError", "ModuleNotFoundError", "MemoryError")
# torch's message if it cannot allocate memory.
_NO_MEMORY = "can't allocate memory"
# Rehearsals have no network. Libraries wrap socket errors, so their causes are checked, too.
_NO_NETWORK = ("gaierror", "URLError", "ConnectionError", "ConnectError", "MaxRetryError", "LocalEntryNotFoundError")
_PACKAGE = re.compile(r"^.*/(?=(?:megatron|transformer_engine)/)")


class NotRehearsed(Exception):
    """An operation that only a GPU can do, or that has no stand-in yet."""


class FailedElsewhere(Exception):
    """A failure that another process of the rehearsal has already described."""

    def __init__(self, description: dict[str, Any]) -> None:
        super().__init__(description["message"])
        self.description = description


def described(failure: BaseException) -> dict[str, Any]:
    """Describe the exception that ended the rehearsal, with the innermost frame in Megatron or Transformer Engine."""
    if isinstance(failure, FailedElsewhere):
        return failure.description
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if _PACKAGE.match(frame.filename)]
    found = {"at": "", "function": "", "settings": []}
    message = str(failure)
    if "Traceback (most recent call last)" in message:
        # torch puts the tracebacks of all ranks into one message, whose last line is what one of them raised.
        message = message.rstrip().rpartition("\n")[2]
    message = " ".join(message.split())[:2000]
    if isinstance(failure, KeyError) and failure.args and not isinstance(failure.args[0], (str, int)):
        message = f"no entry for a {type(failure.args[0]).__name__}"  # Do not print a tensor's values.
    if frames:
        last = frames[-1]
        line = last.lineno or 0
        found = {
            "at": f"{_PACKAGE.sub('', last.filename)}:{line}",
            "function": last.name,
            "settings": settings_read(Path(last.filename), line),
        }
        message = message or (last.line or "")
    unknown = type(failure).__name__ in WITHOUT_VERDICT
    if isinstance(failure, MemoryError) or _NO_MEMORY in message:
        unknown, message = True, "it needs more memory than a rehearsal may use"
    if _needs_network(failure):
        unknown, message = True, f"it needs a network, which rehearsals do not have: {message}"
    return {
        "ok": False,
        "exception": type(failure).__name__,
        "message": message,
        **found,
        "unknown": unknown,
        "traceback": "".join(traceback.format_exception(failure))[-20000:],
    }


def _needs_network(failure: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, is about an unreachable address."""
    for _ in range(20):
        if failure is None:
            return False
        if type(failure).__name__ in _NO_NETWORK or getattr(failure, "errno", None) == errno.ENETUNREACH:
            return True
        failure = failure.__cause__ or failure.__context__
    return False


def settings_read(file: Path, line: int) -> list[str]:
    """Return the attributes that the statement at `line` and the conditions around it read, innermost first."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    around.sort(key=lambda node: -node.lineno)
    names: list[str] = []
    for node in around:
        names += _attributes(node)
    return list(dict.fromkeys(names))


def _attributes(statement: ast.stmt) -> list[str]:
    """Return the attributes in a simple statement or in a compound statement's condition, in source order."""
    if isinstance(statement, (ast.If, ast.While)):
        read: ast.AST = statement.test
    elif isinstance(statement, (ast.Assert, ast.Raise, ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)):
        read = statement
    else:
        return []
    found = [node for node in ast.walk(read) if isinstance(node, ast.Attribute)]
    return [node.attr for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))]
