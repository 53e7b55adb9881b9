"""Split shell text into words and operators. Nothing is expanded or executed.

It covers the part of bash that launch scripts use: quotes, parameters, arrays, substitutions, redirections and
here-documents. Whatever only a shell could expand is kept as `Opaque`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fp8launch.diagnostics import UserError, error
from fp8launch.plugins.importer.shell_tokens import (
    Arithmetic,
    Opaque,
    Operator,
    Part,
    Redirect,
    Sum,
    Text,
    Token,
    Variable,
    Word,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_ARRAY_START = re.compile(r"[A-Za-z_]\w*\+?=")
# Longest first, because the first match wins.
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|;|&(?!>)|\||\(|\)")
_REDIRECT = re.compile(r"&>>|&>|<<<|<<-|<<|>>|<&|>&|>\||<>|<|>")
# Escapes of $'...', in the order in which bash tries them (lib/sh/strtrans.c).
_ANSI_C = {
    "n": b"\n", "t": b"\t", "r": b"\r", "a": b"\a", "b": b"\b", "e": b"\x1b", "E": b"\x1b", "f": b"\f", "v": b"\v",
    **{sign: sign.encode() for sign in "\\'\"?"},
}  # fmt: skip
_ANSI_C_BYTE = re.compile(r"([0-7]{1,3})|x([0-9a-fA-F]{1,2})|x\{([0-9a-fA-F]*)\}?")
_ANSI_C_CHARACTER = re.compile(r"u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})")
_ANSI_C_CONTROL = re.compile(r"c(\\\\|[ -~])")


def tokens(text: str, name: str, line: int = 1, shell: bool = True) -> list[Token]:
    """Yield the tokens of shell text. Without `shell`, lines are joined and operators are ordinary text.

    Raises UserError with `name` and the line if a quote or bracket never closes.
    """
    reader = _Reader(text.replace("\r\n", "\n"), name, line, shell)
    try:
        return reader.all()
    except RecursionError:
        raise error("shell-too-deep", "nests quotes and expansions too deeply to be read", name) from None


class _Reader:
    def __init__(self, text: str, name: str, line: int, shell: bool) -> None:
        self._text = text
        self._name = name
        self._first = line
        self._shell = shell
        self._at = 0
        self._here: list[tuple[str, bool]] = []
        self._counted = (0, line)

    # --- position

    @property
    def _line(self) -> int:
        at, line = self._counted
        line += self._text.count("\n", at, self._at)
        self._counted = (self._at, line)
        return line

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _starts(self, prefix: str) -> bool:
        return self._text.startswith(prefix, self._at)

    def _unfinished(self, what: str, line: int) -> UserError:
        return error("shell-unfinished", f"{what} never closes", f"{self._name}:{line}", "close it, or cut it out")

    # --- tokens

    def all(self) -> list[Token]:
        found: list[Token] = []
        while self._blank() and self._next():
            token = self._token()
            if token is not None:
                found.append(token)
        return found

    def _blank(self) -> bool:
        """Skip spaces, continued lines and comments."""
        while True:
            if self._next() in (" ", "\t"):
                self._at += 1
            elif self._starts("\\\n"):
                self._at += 2
            elif self._next() == "#":
                self._at = self._end_of_line()
            else:
                return True

    def _token(self) -> Token | None:
        line = self._line
        if self._next() == "\n":
            self._at += 1
            self._skip_here_documents()
            if not self._shell:
                return None
            return Operator("\n", line)
        if self._shell:
            if self._starts("(("):
                return Sum(self._enclosed("((", "))"), line)
            if not self._starts("<(") and not self._starts(">("):
                redirect = self._redirect(line)
                if redirect:
                    return redirect
            operator = _OPERATOR.match(self._text, self._at)
            if operator:
                self._at = operator.end()
                return Operator(operator[0], line)
        word = self._word()
        if self._shell and (word.bare or "").isdigit() and self._next() in ("<", ">"):
            return self._redirect(line)
        return word

    def _redirect(self, line: int) -> Redirect | None:
        found = _REDIRECT.match(self._text, self._at)
        if found is None:
            return None
        operator, self._at = found[0], found.end()
        self._blank()
        start = self._at
        if self._next() not in ("", "\n"):
            self._word()
        if operator in ("<<", "<<-"):
            self._here.append((re.sub(r"[\"'\\]", "", self._text[start : self._at]), operator == "<<-"))
        return Redirect(operator, line)

    def _skip_here_documents(self) -> None:
        for delimiter, indented in self._here:
            while self._at < len(self._text):
                end = self._end_of_line()
                row = self._text[self._at : end]
                if indented:
                    row = row.lstrip("\t")
                self._at = min(end + 1, len(self._text))
                if row == delimiter:
                    break
        self._here.clear()

    def _end_of_line(self) -> int:
        """Return the index of the end of this line."""
        end = self._text.find("\n", self._at)
        if end < 0:
            return len(self._text)
        return end

    # --- words

    def _word(self) -> Word:
        line = self._line
        parts: list[Part] = []
        ends = " \t\n"
        if self._shell:
            ends += ";&|()<>"
        while self._next() and self._next() not in ends:
            parts += self._part(ends)
            if self._shell and self._next() == "(" and _begins_array(parts):
                self._at += 1
                return Word(tuple(parts), line, tuple(self._elements(line)))
        if not parts and self._next():
            # A process substitution, or a stray bracket.
            if self._shell and (self._starts("<(") or self._starts(">(")):
                raw = self._next() + "("
                self._at += 1
                self._enclosed("(", ")")
                parts.append(Opaque(f"{raw}...)", line, "is a process substitution"))
            else:
                parts.append(Text(self._next(), False))
                self._at += 1
        return Word(tuple(parts), line)

    def _elements(self, line: int) -> list[Word]:
        elements: list[Word] = []
        while True:
            while self._blank() and self._next() == "\n":
                self._at += 1
            if not self._next():
                raise self._unfinished("the array that starts with '('", line)
            if self._next() == ")":
                self._at += 1
                return elements
            elements.append(self._word())

    def _part(self, ends: str) -> list[Part]:
        char, line = self._next(), self._line
        if char == "'":
            end = self._text.find("'", self._at + 1)
            if end < 0:
                raise self._unfinished("the quote '", line)
            text = self._text[self._at + 1 : end]
            self._at = end + 1
            return [Text(text, True)]
        if char == '"':
            self._at += 1
            return self._double_quoted(line)
        if char == "\\":
            text = self._text[self._at + 1 : self._at + 2]
            self._at += 2
            if text == "\n":
                return []
            return [Text(text or "\\", True)]
        if char in "$`":
            return self._dollar(False)
        start = self._at
        while self._next() and self._next() not in ends and self._next() not in "'\"\\$`":
            self._at += 1
        return [Text(self._text[start : self._at], False)]

    def _double_quoted(self, line: int) -> list[Part]:
        # An empty pair of quotes is still a word.
        parts: list[Part] = [Text("", True)]
        while (char := self._next()) != '"':
            if not char:
                raise self._unfinished('the quote "', line)
            if char == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                self._at += 2
                if following and following in '$`"\\':
                    parts.append(Text(following, True))
                elif following != "\n":
                    parts.append(Text("\\" + following, True))
            elif char in "$`":
                parts += self._dollar(True)
            else:
                start = self._at
                while self._next() and self._next() not in '"\\$`':
                    self._at += 1
                parts.append(Text(self._text[start : self._at], True))
        self._at += 1
        return parts

    def _dollar(self, quoted: bool) -> list[Part]:
        line = self._line
        if self._next() == "`":
            end = self._text.find("`", self._at + 1)
            if end < 0:
                raise self._unfinished("the command between backquotes", line)
            inner = self._text[self._at + 1 : end]
            self._at = end + 1
            return [Opaque(f"`{_first_word(inner)} ...`", line, "is the output of a command")]
        if self._starts("$(("):
            self._at += 1
            inner = self._enclosed("((", "))")
            return [Arithmetic(_as_quoted(inner, self._name, line), f"$(({inner.strip()}))")]
        if self._starts("$("):
            self._at += 1
            inner = self._enclosed("(", ")")
            return [Opaque(f"$({_first_word(inner)} ...)", line, "is the output of a command")]
        if self._starts("${"):
            return [self._braced(quoted, line)]
        if self._starts("$'") and not quoted:
            return [self._ansi_c(line)]
        self._at += 1
        if self._next() == '"' and not quoted:
            return []
        match = _PARAMETER.match(self._text, self._at)
        if match is None:
            return [Text("$", quoted)]
        name = match[0]
        if name.isdigit():
            # Without braces a positional parameter is a single digit.
            name = name[0]
        self._at += len(name)
        return [Variable(name, f"${name}", quoted, line, _own_index(name))]

    def _braced(self, quoted: bool, line: int) -> Part:
        start = self._at
        self._at += 2
        match = _PARAMETER.match(self._text, self._at)
        name = ""
        if match:
            name = match[0]
        self._at += len(name)
        index = ""
        if found := re.compile(r"\[(@|\*|\d+)\]").match(self._text, self._at):
            index = found[1]
            self._at = found.end()
        if name and self._next() == "}":
            self._at += 1
            return Variable(name, self._text[start : self._at], quoted, line, index or _own_index(name))
        rule = re.compile(r":?[-=+?]").match(self._text, self._at)
        if rule and name and (name.isdigit() or _NAME.match(name)):
            self._at = rule.end()
            fallback = self._until_brace(quoted, line)
            raw = self._text[start : self._at]
            return Variable(name, raw, quoted, line, index, rule[0], fallback)
        self._at, self._counted = start + 1, (start, line)
        self._enclosed("{", "}")
        return Opaque(self._text[start : self._at], line, "is a kind of expansion that is not read here")

    def _until_brace(self, quoted: bool, line: int) -> Word:
        parts: list[Part] = []
        while self._next() != "}":
            if not self._next():
                raise self._unfinished("the bracket ${", line)
            if quoted and self._next() == "'":
                self._at += 1
                parts.append(Text("'", True))
            elif quoted and self._next() not in '"$`\\':
                parts.append(Text(self._next(), True))
                self._at += 1
            elif self._next() in " \t\n":
                parts.append(Text(" ", quoted))
                self._at += 1
            else:
                parts += self._part(" \t\n}")
        self._at += 1
        return Word(tuple(parts), line)

    def _ansi_c(self, line: int) -> Part:
        """Read `$'...'`. Its escapes stand for bytes, which together are UTF-8."""
        start = self._at
        self._at += 2
        found = b""
        while (char := self._next()) != "'":
            if not char:
                raise self._unfinished("the quote $'", line)
            self._at += 1
            if char == "\\" and self._next():
                found += self._escape()
            else:
                found += char.encode("utf-8", "surrogatepass")
        self._at += 1
        # A NUL byte ends the text, as in C.
        try:
            return Text(found.partition(b"\0")[0].decode("utf-8"), True)
        except UnicodeDecodeError:
            return Opaque(self._text[start : self._at], line, "means bytes that are not UTF-8 text")

    def _escape(self) -> bytes:
        """Read the escape after a backslash and return its bytes, or the backslash itself if it is not an escape."""
        if match := _ANSI_C_BYTE.match(self._text, self._at):
            self._at = match.end()
            if match[1]:
                return bytes([int(match[1], 8) & 0xFF])
            return bytes([int(match[2] or match[3] or "0", 16) & 0xFF])
        match = _ANSI_C_CHARACTER.match(self._text, self._at)
        if match and (number := int(match[1] or match[2], 16)) < 0x110000:
            self._at = match.end()
            return chr(number).encode("utf-8", "surrogatepass")
        if match := _ANSI_C_CONTROL.match(self._text, self._at):
            self._at = match.end()
            if match[1] == "?":
                return b"\x7f"
            return bytes([ord(match[1][0].upper()) & 0x1F])
        following = self._next()
        self._at += 1
        return _ANSI_C.get(following) or b"\\" + following.encode("utf-8", "surrogatepass")

    def _enclosed(self, opening: str, closing: str) -> str:
        """Read the text between nested brackets. Quotes inside are respected."""
        line, depth = self._line, 0
        self._at += len(opening)
        start = self._at
        while True:
            char = self._next()
            if not char:
                raise self._unfinished(f"the bracket {opening}", line)
            if depth == 0 and self._starts(closing):
                text = self._text[start : self._at]
                self._at += len(closing)
                return text
            if char in "'\"\\`$":
                self._part("")
                continue
            depth += (char == opening[0]) - (char == closing[0])
            self._at += 1


def _as_quoted(text: str, name: str, line: int) -> Word:
    """Read text as if it were between double quotes."""
    reader = _Reader(text.replace('"', "") + '"', name, line, True)
    return Word(tuple(reader._double_quoted(line)), line)


def _first_word(command: str) -> str:
    """Return the first word of a command, without its arguments, which may hold a secret."""
    found = re.match(r"\s*([\w./-]{1,30})(?=\s|$)", command)
    return found[1] if found else ""


def _begins_array(parts: Sequence[Part]) -> bool:
    """Return whether the parts of a word so far are `NAME=` or `NAME+=`."""
    if len(parts) != 1:
        return False
    first = parts[0]
    return isinstance(first, Text) and not first.quoted and _ARRAY_START.fullmatch(first.text) is not None


def _own_index(name: str) -> str:
    """Return the index that `$@` and `$*` imply, or "" for any other parameter."""
    if name in ("@", "*"):
        return name
    return ""
