"""Read YAML into a tree of nodes that know their file and line.

Scalars follow the YAML 1.2 core schema, in which `off`, `no` and `01:00:00` are text. Tags, multiple documents and, in
recipes, merge keys are not allowed. Anchors work, but their expansion is limited so that a small file cannot grow
without bounds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from fp8launch.diagnostics import UserError, error

RECIPE_SUFFIXES = (".yaml", ".yml")
MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_CHARACTERS = 4 << 20
MAX_DEPTH = 40

Scalar: TypeAlias = "str | int | float | bool | None"

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(frozen=True)
class Node:
    """A value and its place. `value` is a scalar, a `list[Node]` or a `dict[str, Node]`.

    `text` is the scalar as written in the file. YAML reads 3.10 as the number 3.1, but an environment variable needs
    the original text.
    """

    value: Scalar | list[Node] | dict[str, Node]
    where: str
    text: str | None = field(default=None, compare=False)

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def entries(self) -> dict[str, Node]:
        """Return the entries of a mapping, or an empty mapping for any other value."""
        if isinstance(self.value, dict):
            return self.value
        return {}

    def at(self, path: tuple[str, ...]) -> Node | None:
        """Return the node at exactly this path of mapping keys, or None."""
        node = self
        for step in path:
            if not isinstance(node.value, dict) or step not in node.value:
                return None
            node = node.value[step]
        return node

    def changed(self, path: tuple[str, ...], change: Callable[[Node], Node]) -> Node:
        """Return the tree with the node at `path` changed, if it exists. `*` matches every key."""
        if not path:
            return change(self)
        step, *rest = path
        if not isinstance(self.value, dict) or not (step == "*" or step in self.value):
            return self
        entries = dict(self.value)
        for key in entries if step == "*" else (step,):
            entries[key] = entries[key].changed(tuple(rest), change)
        return Node(entries, self.where)

    def find(self, path: tuple[str | int, ...]) -> Node:
        """Return the deepest existing node on `path`, as the place to report a wrong or missing value."""
        node = self
        for step in path:
            value = node.value
            if isinstance(value, dict) and step in value:
                node = value[str(step)]
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                node = value[step]
            else:
                break
        return node


def resolve_plain_scalar(text: str) -> Scalar:
    """Return the value of an unquoted scalar in the core schema of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) < 40 and _INT.fullmatch(text):
        if text.startswith(("0x", "0o")):
            return int(text, 0)
        return int(text)  # leading zeros are decimal in YAML 1.2 and refused by int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def is_file(path: Path) -> bool:
    """Return whether a file exists and is visible to this user. Names that are too long count as missing."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Return whether a folder exists and is visible to this user (see `is_file`)."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_there(path: Path) -> bool:
    """Return whether something with this name exists, even if this user cannot access it."""
    try:
        return path.exists()
    except PermissionError:
        return True
    except OSError:
        return False


def numbers_as_written(mapping: Node) -> Node:
    """Return `mapping` with numbers as they were written in the file, for values that are used as text."""
    if not isinstance(mapping.value, dict):
        return mapping
    return Node({key: _as_written(child) for key, child in mapping.value.items()}, mapping.where)


def _as_written(node: Node) -> Node:
    """Return a number, or each number in a list, as written in the file."""
    if isinstance(node.value, list):
        return Node([_as_written(item) for item in node.value], node.where)
    is_number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if is_number and node.text:
        return Node(node.text, node.where, node.text)
    return node


def read_start(path: Path) -> bytes:
    """Return the first bytes of a file, at most one more than a recipe may have. Raises OSError.

    Named pipes are refused, because reading would block without a writer. Pipes that a shell passes as /dev/fd/N work.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISFIFO(os.stat(os.path.realpath(path)).st_mode):  # noqa: PTH116 (raises what open would)
            raise OSError(errno.ESPIPE, "it is a pipe")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def read_yaml(path: Path) -> Node:
    """Return the mapping in a YAML file. Raises UserError if it cannot be read."""
    name = str(path)
    try:
        raw = read_start(path)
    except FileNotFoundError:
        raise error("file-not-found", "no such file", name) from None
    except OSError as exc:
        raise error("unreadable-file", f"cannot be read: {exc.strerror}", name) from None
    if len(raw) > MAX_BYTES:
        raise error("file-too-large", f"is larger than {MAX_BYTES >> 20} MiB, so it cannot be a recipe", name)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise error("not-utf8", "is not UTF-8 text", f"{name}:{line}") from None
    node = parse_yaml(text, name)
    if node.value is None:
        raise error("empty-file", "is empty", name, fix="a recipe is a mapping, e.g. `extends: [models/llama3_8b]`")
    if not isinstance(node.value, dict):
        raise error("not-a-mapping", "must be a mapping of `section: values` at the top", node.where)
    return node


def parse_yaml(text: str, name: str, numbered: bool = True, unique: bool = True) -> Node:
    """Parse YAML text to nodes. Their places are `name:line`, or only `name` if the text is not from a file.

    With `unique`, duplicate keys and merge keys (`<<`) are errors, as in recipes. Without it, for files written for
    other programs, the last value of a duplicate key wins and merge keys are resolved.
    """
    _refuse_unwritable(text, name)
    return _Builder(text, name, numbered, unique).document()


def _refuse_unwritable(text: str, where: str) -> None:
    """Refuse NUL and lone surrogates, to which Python decodes arguments that are not UTF-8."""
    try:
        if b"\0" not in text.encode():
            return
    except UnicodeEncodeError:
        pass
    raise error("not-text", "contains a NUL character or bytes that are not UTF-8 text", where)


class _Builder:
    def __init__(self, text: str, name: str, numbered: bool, unique: bool) -> None:
        self._name = name
        self._numbered = numbered
        self._unique = unique
        self._anchors: dict[str, tuple[Node, int, int]] = {}
        self._count = 0
        self._characters = 0
        self._events = self._guarded(text)

    def _where(self, mark: Any) -> str:
        if not self._numbered or mark is None:
            return self._name
        return f"{self._name}:{mark.line + 1}"

    def _guarded(self, text: str) -> Iterator[Any]:
        """Yield the events of the text, using libyaml if available. Raises UserError for invalid YAML."""
        try:
            yield from yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as exc:
            mark = getattr(exc, "problem_mark", None) or getattr(exc, "context_mark", None)
            what = getattr(exc, "problem", None) or getattr(exc, "reason", None) or "unexpected text"
            fix = "check the indentation, colons and quotes on this line and the line above"
            raise error("not-yaml", f"is not valid YAML: {what}", self._where(mark), fix) from None

    def _fail(self, code: str, message: str, mark: Any, fix: str | None = None) -> UserError:
        return error(code, message, self._where(mark), fix)

    def document(self) -> Node:
        node = Node(None, self._name)
        seen = False
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if seen:
                    raise self._fail("several-documents", "contains more than one YAML document", event.start_mark)
                seen = True
                node = self._node(next(self._events), 0)
        return node

    def _node(self, event: Any, depth: int, where: str | None = None) -> Node:
        mark = event.start_mark
        self._count += 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._fail("unknown-alias", f"alias *{event.anchor} refers to no earlier anchor", mark)
            target, size, characters = self._anchors[event.anchor]
            self._count += size
            self._characters += characters
            self._check_size(mark, depth)
            return Node(target.value, where or self._where(mark), target.text)
        self._check_size(mark, depth)
        if event.tag is not None:
            raise self._fail("yaml-tag", f"tag {event.tag} is not allowed", mark, "write the plain value")
        before, characters_before = self._count, self._characters
        where = where or self._where(mark)
        if isinstance(event, yaml.ScalarEvent):
            _refuse_unwritable(event.value, where)
            self._characters += len(event.value)
            value: Scalar = event.value
            if event.implicit[0]:
                value = resolve_plain_scalar(event.value)
            node = Node(value, where, event.value)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Node(self._sequence(depth), where)
        else:
            node = Node(self._mapping(depth), where)
        if event.anchor:
            self._anchors[event.anchor] = (node, self._count - before, self._characters - characters_before)
        return node

    def _check_size(self, mark: Any, depth: int) -> None:
        if self._count > MAX_NODES:
            limit = f"{MAX_NODES} values"
        elif depth > MAX_DEPTH:
            limit = f"{MAX_DEPTH} levels"
        elif self._characters > MAX_CHARACTERS:
            limit = f"{MAX_CHARACTERS >> 20} MiB of text"
        else:
            return
        raise self._fail("yaml-too-large", f"expands to more than {limit}, so it is not a recipe", mark)

    def _sequence(self, depth: int) -> list[Node]:
        items = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: list[Node] = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            mark = event.start_mark
            if not isinstance(event, yaml.ScalarEvent):
                raise self._fail("bad-key", "a key must be a plain name", mark)
            key = event.value
            self._characters += len(key)
            _refuse_unwritable(key, self._where(mark))
            if key == "<<" and event.implicit[0]:
                if not self._unique:
                    merged.append(self._node(next(self._events), depth + 1))
                    continue
                raise self._fail("merge-key", "merge keys (<<) are not supported", mark, "use `extends:`")
            if key in entries and self._unique:
                raise self._fail(
                    "duplicate-key",
                    f"'{key}' is given twice, first at {entries[key].where}",
                    mark,
                    "remove one of them",
                )
            # Entries are located at the line of their key, where users look for them.
            entries[key] = self._node(next(self._events), depth + 1, self._where(mark))
        for node in merged:
            # A list merges several mappings. Earlier ones win, and entries of the mapping itself win over all of them.
            for source in node.value if isinstance(node.value, list) else (node,):
                entries = {**source.entries(), **entries}
        return entries
