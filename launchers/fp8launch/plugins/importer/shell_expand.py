"""Expand words with the variables that the script sets itself. Everything else becomes holes."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from fp8launch.diagnostics import error
from fp8launch.plugins.importer.shell_braces import TooManyWords, expand_braces
from fp8launch.plugins.importer.shell_holes import Holes, is_known
from fp8launch.plugins.importer.shell_tests import whole_number
from fp8launch.plugins.importer.shell_tokens import Arithmetic, Opaque, Part, Text, Variable, Word
from fp8launch.secrets import names_a_secret

MAX_TEXT = 1 << 20

UNSET = "is not set in the script"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")

Value: TypeAlias = "str | list[str]"


class WordExpander:
    """The variables of a shell, and the expansion of words with them."""

    def __init__(self, name: str, variables: dict[str, Value], holes: Holes) -> None:
        self.name = name
        self.variables = variables
        self.holes = holes

    def fields(self, words: Iterable[Word]) -> list[str]:
        """Expand words: split unquoted values at white space, and multiply words with braces and arrays."""
        expanded = itertools.chain.from_iterable(map(self._braces, words))
        return list(itertools.chain.from_iterable(map(self._split, expanded)))

    def _braces(self, word: Word) -> list[Word]:
        try:
            return expand_braces(word)
        except (TooManyWords, RecursionError):
            message = "has braces that expand to too many words"
            raise error("shell-too-large", message, f"{self.name}:{word.line}") from None

    def _split(self, word: Word) -> Iterator[str]:
        current: str | None = None
        for text, divides in itertools.chain.from_iterable(map(self._pieces, word.parts)):
            if divides is None:
                yield current or ""
                current = None
            elif not divides:
                current = (current or "") + text
            else:
                for number, piece in enumerate(re.split(r"[ \t\n]+", text)):
                    if number and current is not None:
                        yield current
                        current = None
                    if piece:
                        current = (current or "") + piece
        if current is not None:
            yield self._bounded(current)

    def _pieces(self, part: Part) -> Iterator[tuple[str, bool | None]]:
        """Yield texts, each with whether white space in it separates words; None is a separator."""
        if not isinstance(part, Variable):
            yield self._text(part), False
            return
        value = self._value(part)
        if isinstance(value, Word):
            for inner in value.parts:
                if isinstance(inner, Text):
                    yield inner.text, not part.quoted and not inner.quoted
                else:
                    yield from self._pieces(inner)
        elif isinstance(value, list) and part.quoted and part.index == "@":
            for number, element in enumerate(value):
                if number:
                    yield "", None
                yield element, False
        else:
            yield self._bounded(" ".join(_elements(value))), not part.quoted

    def joined(self, word: Word) -> str:
        """Return the expansion of a word as one text, as in an assignment."""
        return self._bounded("".join(map(self._text, word.parts)))

    def _bounded(self, text: str) -> str:
        if len(text) > MAX_TEXT:
            raise error("shell-too-large", "has a variable whose value becomes too long", self.name)
        return text

    def _text(self, part: Part) -> str:
        if isinstance(part, Text):
            return part.text
        if isinstance(part, Opaque):
            return self.holes.mark(part.raw, part.line, part.why)
        if isinstance(part, Arithmetic):
            return self._arithmetic(part)
        value = self._value(part)
        if isinstance(value, Word):
            return self.joined(value)
        return self._bounded(" ".join(_elements(value)))

    def _value(self, part: Variable) -> Value | Word:
        """Return the text of a variable: its value, a hole, or its fallback."""
        value = self.variables.get(part.name)
        if names_a_secret(part.name) and value != "":
            return self.holes.mark(part.raw, part.line, "looks like a secret, which is never copied")
        if isinstance(value, list) and re.fullmatch("[0-9]{0,9}", part.index):
            # Without an index, an array expands to its first element.
            at = int(part.index or 0)
            value = next(iter(value[at : at + 1]), None)
        if part.fallback is not None:
            return self._by_rule(part, value)
        if value is not None:
            return value
        if part.name.isdigit() and "#" in self.variables:
            return ""
        return self.holes.mark(part.raw, part.line, unset_reason(part.name))

    def set_arguments(self, words: Sequence[str] | None) -> None:
        """Set the positional parameters; None if they are unknown."""
        for name in [name for name in self.variables if unset_reason(name) != UNSET]:
            del self.variables[name]
        if words is not None:
            self.variables |= {str(number): word for number, word in enumerate(words, 1)}
            self.variables |= {"@": list(words), "*": list(words), "#": str(len(words))}

    def arguments(self) -> list[str] | None:
        """Return the positional parameters, or None if they are unknown."""
        words = self.variables.get("@")
        return words if isinstance(words, list) else None

    def _by_rule(self, part: Variable, value: Value | None) -> Value | Word:
        assert part.fallback is not None
        present = value is not None and (value not in ("", []) or ":" not in part.rule)
        if value is not None and not is_known(*_elements(value)):
            return value
        if part.rule[-1] == "+" and present:
            return part.fallback
        if part.rule[-1] == "+":
            return ""
        if present and value is not None:
            return value
        if value is None and (_set_by_jobs(part.name) or part.rule[-1] == "?"):
            return self.holes.mark(part.raw, part.line, unset_reason(part.name))
        if part.rule[-1] == "=":
            self.variables[part.name] = self.joined(part.fallback)
            return self.variables[part.name]
        return part.fallback

    def or_unset(self, item: str, before: Sequence[str]) -> str:
        """Return an item of a test after the items `before`.

        In `[ -z $NAME ]`, which scripts write to set a default, a variable that only users may set counts as unset, as
        in `${NAME:-default}`.
        """
        holes = self.holes.of(item)
        if before[-1:] != ["-z"] or before[-2:-1] == ["!"] or len(holes) != 1 or self.holes.shown(item) != holes[0].raw:
            return item
        name = holes[0].raw.strip("${}")
        if holes[0].why != UNSET or _set_by_jobs(name):
            return item
        return ""

    def _arithmetic(self, part: Arithmetic) -> str:
        text = self.joined(part.inner)
        line = part.inner.line
        if not is_known(text):
            return self.holes.mark(part.raw, line, f"needs {self.holes.of(text)[0]}")

        def number(match: re.Match[str]) -> str:
            value = self.variables.get(match[0])
            if not isinstance(value, str):
                return match[0]
            return f"({value})"

        text = re.sub(r"[A-Za-z_]\w*", number, text).strip()
        try:
            # Python reads 1_000 as a number, and a shell as an error.
            if re.search(r"\b\d+_", text):
                raise ValueError("not a number of the shell")
            return str(whole_number(ast.parse(text, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self.holes.mark(part.raw, line, "is arithmetic that is not known here")

    # --- assignments

    def exported(self, names: Iterable[str]) -> dict[str, str]:
        """Return the values of these names, as far as they are set; an array exports its first element."""
        found = {}
        for name in names:
            if name in self.variables:
                found[name] = "".join(_elements(self.variables[name])[:1])
        return found

    def assign(self, word: Word, certain: bool) -> None:
        """Follow `NAME=value`, `NAME+=value` or an array. If it may not be executed, the variable becomes unknown."""
        name = assigned_name(word)
        assert name is not None
        appends = _appends(word)
        value = self._assigned(word)
        current = self.variables.get(name)
        if appends:
            value = self._appended(name, current, value, word.line)
        if size_of(value) > MAX_TEXT:
            raise error("shell-too-large", "has a variable whose value becomes too long", f"{self.name}:{word.line}")
        if certain or value == current:
            self.variables[name] = value
        else:
            self._perhaps(name, word, current, value, appends)

    def _assigned(self, word: Word) -> Value:
        """Return the value after the equals sign."""
        if word.array is not None:
            return self.fields(word.array)
        return self.joined(assigned_value(word))

    def _appended(self, name: str, current: Value | None, value: Value, line: int) -> Value:
        if current is None and isinstance(value, list):
            return value
        if current is None:
            current = self.holes.mark(f"${name}", line, unset_reason(name))
        if isinstance(current, str) and isinstance(value, str):
            return current + value
        return [*_elements(current), *_elements(value)]

    def _perhaps(self, name: str, word: Word, current: Value | None, value: Value, appends: bool) -> None:
        """Assign under an undecided condition: each branch's value or appended part becomes a hole."""
        raw = f"{name}=..."
        if word.array is not None:
            flags = [text for text in self.fields(word.array) if text.startswith("--")]
            sign = "+=" if appends else "="
            raw = f"{name}{sign}({' '.join(flags)} ...)"
        elif isinstance(value, str):
            raw = " ".join([raw, *_flags_of(value)])
        hole = self.holes.mark(raw, word.line, "depends on a condition that is not known here")
        if appends and isinstance(current, list):
            self.variables[name] = [*current, hole]
        elif isinstance(current, str) and isinstance(value, str) and (appends or _names(word, name)):
            raw = " ".join([f"{name}=...", *_flags_of(value.replace(current, " "))])
            hole = self.holes.mark(raw, word.line, "depends on a condition that is not known here")
            self.variables[name] = _extended(current, value, hole)
        elif isinstance(current, str) and not is_known(current):
            self.variables[name] = current + hole
        else:
            self.variables[name] = hole

    def forget(self, name: str, line: int) -> None:
        """Mark a variable as unknown: its new value is known only when the script runs."""
        self.variables[name] = self.holes.mark(f"${name}", line, "changes while the script runs")


def _set_by_jobs(name: str) -> bool:
    """Return whether Slurm or torchrun set a variable in every job, so that a script's default for it is not used."""
    return name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def _names(word: Word, name: str) -> bool:
    """Return whether an assignment uses the variable that it sets: `OPTIONS="$OPTIONS --bf16"`."""
    return any(isinstance(part, Variable) and part.name == name for part in word.parts)


def _flags_of(text: str) -> list[str]:
    """Return the flags in the value of a variable, without their values."""
    words = (word.partition("=")[0] for word in text.split())
    return [word for word in dict.fromkeys(words) if word.startswith("--") and is_known(word)]


def _extended(current: str, value: str, hole: str) -> str:
    """Return a text that may be extended to `value`: the appended part becomes a separate hole."""
    if not current.strip() or current not in value:
        return hole
    before, _, after = value.partition(current)
    text = current
    if before:
        space = " " if before[-1].isspace() else ""
        text = hole + space + text
    if after:
        space = " " if after[0].isspace() else ""
        text = text + space + hole
    return text


def _elements(value: Value) -> list[str]:
    """Return the elements of an array; a text is one element."""
    if isinstance(value, str):
        return [value]
    return value


def size_of(value: Value) -> int:
    """Return the size of a value in characters, plus one for each array element, so that empty ones count."""
    if isinstance(value, str):
        return len(value)
    return sum(len(text) + 1 for text in value)


def _head(word: Word) -> re.Match[str] | None:
    if not word.parts:
        return None
    first = word.parts[0]
    if not isinstance(first, Text) or first.quoted:
        return None
    return _ASSIGNMENT.match(first.text)


def assigned_name(word: Word) -> str | None:
    """Return NAME for the words NAME=..., NAME+=... and NAME=(...)."""
    head = _head(word)
    if head is None:
        return None
    return head[1]


def _appends(word: Word) -> bool:
    head = _head(word)
    return bool(head and head[2])


def assigned_value(word: Word) -> Word:
    """Return the text after the = of an assignment."""
    head, first = _head(word), word.parts[0]
    assert head is not None and isinstance(first, Text)
    return Word((Text(first.text[head.end() :], False), *word.parts[1:]), word.line)


def unset_reason(name: str) -> str:
    if name.isdigit() or name in "@*#":
        return "is an argument of the script"
    return UNSET
