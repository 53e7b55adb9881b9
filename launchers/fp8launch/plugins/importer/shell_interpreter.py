"""Find the commands of a launch script by reading it. Nothing is executed, and no other file is read.

Variables, arrays, defaults, functions and decidable tests are followed. Whatever depends on anything else becomes a
hole: a mark inside the word, with the line and the reason, so that it can be reported instead of guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from fp8launch.diagnostics import error
from fp8launch.plugins.importer.shell_commands import MAX_DEPTH, SimpleCommands, Wrappers
from fp8launch.plugins.importer.shell_expand import MAX_TEXT, Value, WordExpander
from fp8launch.plugins.importer.shell_holes import Holes, is_known, without_marks
from fp8launch.plugins.importer.shell_lexer import tokens
from fp8launch.plugins.importer.shell_reading import ASSUMED, Mode, Reading, Truth
from fp8launch.plugins.importer.shell_tests import Test, matches
from fp8launch.plugins.importer.shell_tokens import Operator, Redirect, Sum, Token, Word


def read_list(text: str, name: str) -> tuple[list[str], Holes]:
    """Return the words of a plain argument list. Raises UserError for a quote that never closes."""
    words = [token for token in tokens(_checked(text, name), name, shell=False) if isinstance(token, Word)]
    expander = WordExpander(name, {}, Holes())
    return expander.fields(words), expander.holes


def read_script(text: str, name: str, known: Mapping[str, str], arguments: Sequence[str] | None = None) -> Reading:
    """Return the commands of a shell script. `known` are variables that the environment always has.

    `arguments` are the script's own arguments, or None if they are unknown.

    Raises UserError for text that is not a shell script.
    """
    reading = Reading()
    shell = _Script(reading, name, dict(known))
    shell.set_arguments(arguments)
    shell.read(_with_placeholders(_checked(text, name), reading.holes))
    shell.set_arguments(None)
    for key, value in shell.variables.items():
        if isinstance(value, list):
            reading.arrays[key] = value
        elif value.lstrip().startswith("--"):
            reading.texts[key] = value.split()
    return reading


def _reached(mode: Mode, certain: bool, impossible: bool) -> Mode:
    """Return how certainly a branch is reached, if its condition is reached in `mode`."""
    if certain:
        return mode
    if impossible:
        return Mode.SKIP
    return min(mode, Mode.MAYBE)


def _checked(text: str, name: str) -> str:
    if len(text) > MAX_TEXT:
        raise error("file-too-large", f"is larger than {MAX_TEXT >> 20} MiB, so it cannot be a launch script", name)
    return without_marks(text)


# Loops of more iterations are followed once.
_MOST_ITERATIONS = 64
# A redirection has a space before its `>`, or a number.
_PLACEHOLDER = re.compile(r"(?<![<\w$])<[A-Za-z][\w.,/()'-]*(?: [\w.,/()'-]+){0,9} [A-Za-z][\w.,/()'-]*>")


def _with_placeholders(text: str, holes: Holes) -> str:
    """Replace `<several words>`, which a user is meant to fill in, by holes."""

    def hole(match: re.Match[str]) -> str:
        return holes.mark(match[0], text.count("\n", 0, match.start()) + 1, "is a placeholder")

    return _PLACEHOLDER.sub(hole, text)


class _Script(SimpleCommands):
    """Follows lists, conditions, loops and functions, and tracks which commands are certainly or possibly reached."""

    def __init__(self, reading: Reading, name: str, variables: dict[str, Value], wrappers: Wrappers = ()) -> None:
        super().__init__(reading, name, variables, wrappers)
        self._functions: dict[str, tuple[list[Token], int]] = {}
        self._tokens: list[Token] = []
        self._at = 0

    # --- structure

    def read(self, text: str, line: int = 1) -> None:
        """Follow the commands of `text` with the variables so far."""
        kept = self._tokens, self._at
        self._tokens, self._at = tokens(text, self.name, line), 0
        try:
            while self._at < len(self._tokens):
                self._list((), Mode.RUN)
                self._at += 1
        except RecursionError:
            raise error("shell-too-deep", "nests commands too deeply to be read", self.name) from None
        self._tokens, self._at = kept

    def _peek(self) -> Token | None:
        if self._at >= len(self._tokens):
            return None
        return self._tokens[self._at]

    def _is(self, *texts: str) -> bool:
        """Return whether the next token is one of these operators or keywords."""
        token = self._peek()
        return (isinstance(token, Operator) and token.text in texts) or (
            isinstance(token, Word) and token.bare in texts
        )

    def _past(self, *texts: str) -> None:
        if self._is(*texts):
            self._at += 1

    def _list(self, stops: Sequence[str], mode: Mode) -> Truth:
        """Follow commands up to one of `stops` or a closing bracket, and return how the last one ended."""
        truth: Truth = ASSUMED
        while (token := self._peek()) is not None and not self._is(*stops):
            if isinstance(token, Operator) and token.text in (";", "\n", "&"):
                self._at += 1
                continue
            before = self._at
            truth = self._and_or(mode)
            if self._at == before:
                self._at += 1
        return truth

    def _and_or(self, mode: Mode) -> Truth:
        truth = self._pipeline(mode)
        while self._is("&&", "||"):
            both = self._is("&&")
            self._at += 1
            while self._is("\n"):
                self._at += 1
            if both:
                needed, impossible = truth in (True, ASSUMED), truth is False
            else:
                needed, impossible = truth is False, truth is True
            following = self._pipeline(_reached(mode, needed, impossible))
            if needed:
                truth = following
            elif not impossible:
                truth = None
        return truth

    def _pipeline(self, mode: Mode) -> Truth:
        negated = self._is("!")
        self._past("!")
        truth = self._command(mode)
        while self._is("|", "|&"):
            self._at += 1
            while self._is("\n"):
                self._at += 1
            self._command(mode)
            truth = ASSUMED
        if not negated:
            return truth
        if isinstance(truth, bool):
            return not truth
        return None

    def _command(self, mode: Mode) -> Truth:
        token = self._peek()
        if isinstance(token, Sum):
            self._at += 1
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", token.text):
                self._forget(name, token.line, mode)
            return None
        if self._is("("):
            self._at += 1
            kept = dict(self.variables)
            truth = self._list((")",), mode)
            self.variables = kept
            self._past(")")
            return truth
        if not isinstance(token, Word):
            if isinstance(token, Redirect):
                self._at += 1
            return ASSUMED
        readers: Mapping[str, Callable[[Mode], Truth]] = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._loop,
            "until": self._loop,
            "case": self._case,
            "{": self._group,
            "[[": self._test,
            "[": self._test,
            "test": self._test,
            "function": self._function,
        }
        if token.bare in readers:
            return readers[str(token.bare)](mode)
        following = self._tokens[self._at + 1 : self._at + 3]
        if token.bare and [t.text for t in following if isinstance(t, Operator)] == ["(", ")"]:
            return self._function(mode)
        return self._simple(mode)

    def _if(self, mode: Mode) -> Truth:
        self._at += 1
        left = mode
        while True:
            truth = self._list(("then", "fi"), left)
            self._past("then")
            self._list(("elif", "else", "fi"), _reached(left, truth is True, truth is False))
            left = _reached(left, truth is False, truth is True)
            if not self._is("elif"):
                break
            self._at += 1
        if self._is("else"):
            self._at += 1
            self._list(("fi",), left)
        self._past("fi")
        return ASSUMED

    def _for(self, mode: Mode) -> Truth:
        """Follow the body once for each value if all are known; else once, as if it might not be reached."""
        select = self._is("select")
        self._at += 1
        token = self._peek()
        name = token.bare if isinstance(token, Word) else None
        words: list[Word] = []
        while (after := self._peek()) is not None and not self._is("do"):
            if isinstance(after, Word):
                words.append(after)
            self._at += 1
        values = self.fields(words[2:]) if mode and [word.bare for word in words[1:2]] == ["in"] else []
        begin = self._at
        if mode is not Mode.RUN or name is None or select or not values or not is_known(*values):
            values = []
        elif len(values) <= _MOST_ITERATIONS and not self._leaves_loop():
            for value in values:
                self.count_step(self._at - begin)
                self._at = begin
                self.variables[name] = value
                self._past("do")
                self._list(("done",), mode)
            self._past("done")
            return ASSUMED
        if name and isinstance(token, Word):
            self._forget(name, token.line, mode)
        return self._body(mode)

    def _leaves_loop(self) -> bool:
        """Return whether the loop whose body begins here contains `break` or a similar command."""
        depth = 0
        for token in self._tokens[self._at :]:
            text = token.bare if isinstance(token, Word) else None
            depth += (text == "do") - (text == "done")
            if text in ("break", "continue", "exit", "return"):
                return True
            if depth == 0:
                break
        return False

    def _loop(self, mode: Mode) -> Truth:
        """Follow a loop until its condition ends it; if that is not known, once, as if it might not be reached."""
        ends = self._is("until")
        self._at += 1
        begin, kept, count = self._at, dict(self.variables), len(self._reading.commands)
        for _ in range(_MOST_ITERATIONS if mode is Mode.RUN else 0):
            self.count_step(self._at - begin)
            self._at = begin
            truth = self._list(("do",), mode)
            if not isinstance(truth, bool) or self._leaves_loop():
                break
            self._past("do")
            self._list(("done",), Mode.SKIP if truth is ends else mode)
            if truth is ends:
                self._past("done")
                return ASSUMED
        self._at, self.variables = begin, kept
        del self._reading.commands[count:]
        self._list(("do",), min(mode, Mode.MAYBE))
        return self._body(mode)

    def _body(self, mode: Mode) -> Truth:
        self._past("do")
        self._list(("done",), min(mode, Mode.MAYBE))
        self._past("done")
        return ASSUMED

    def _group(self, mode: Mode) -> Truth:
        self._at += 1
        truth = self._list(("}",), mode)
        self._past("}")
        return truth

    def _case(self, mode: Mode) -> Truth:
        self._at += 1
        token = self._peek()
        subject = ""
        if mode and isinstance(token, Word):
            subject = self.joined(token)
        while self._peek() is not None and not self._is("in"):
            self._at += 1
        self._past("in")
        left = mode
        while self._peek() is not None and not self._is("esac"):
            if self._is("\n", "(", ";;"):
                self._at += 1
                continue
            patterns: list[str] = []
            while self._peek() is not None and not self._is(")"):
                if isinstance(token := self._peek(), Word):
                    patterns.append(self.joined(token) if left else "")
                self._at += 1
            self._past(")")
            matched = matches(subject, patterns)
            self._list((";;", ";&", ";;&", "esac"), _reached(left, matched is True, matched is False))
            left = _reached(left, matched is False, matched is True)
            self._past(";;", ";&", ";;&")
        self._past("esac")
        return ASSUMED

    def _function(self, mode: Mode) -> Truth:
        self._past("function")
        token = self._peek()
        self._at += 1
        while self._is("(", ")", "\n"):
            self._at += 1
        if mode and isinstance(token, Word) and token.bare:
            self._functions[token.bare] = (self._tokens, self._at)
        self._command(Mode.SKIP)
        return ASSUMED

    def is_function(self, name: str) -> bool:
        return name in self._functions

    def child(self, variables: dict[str, Value], wrappers: Wrappers) -> _Script:
        return _Script(self._reading, self.name, variables, wrappers)

    def call(self, name: str, arguments: Sequence[str], mode: Mode) -> None:
        if self._depth >= MAX_DEPTH:
            return
        kept, before = (self._tokens, self._at), self.arguments()
        self.set_arguments(arguments)
        self._tokens, self._at = self._functions[name]
        begin = self._at
        self._depth += 1
        self._command(mode)
        self._depth -= 1
        self.count_step(self._at - begin)
        self.set_arguments(before)
        self._tokens, self._at = kept

    # --- tests

    def _test(self, mode: Mode) -> Truth:
        opening = self._peek()
        assert isinstance(opening, Word)
        closing = {"[[": "]]", "[": "]"}.get(opening.bare or "")
        self._at += 1
        items: list[str] = []
        known = True
        while (token := self._peek()) is not None and not self._is(closing or "\n"):
            if isinstance(token, Word):
                item = self.joined(token) if mode else ""
                items.append(self.or_unset(item, items))
            elif isinstance(token, Operator) and (opening.bare == "[[" or token.text in ("(", ")")):
                items.append(token.text)
            elif isinstance(token, Operator):
                break
            else:
                known = False
            self._at += 1
        if closing:
            self._past(closing)
        if not known or not mode:
            return None
        return Test(items).truth()

    # --- simple commands

    def _simple(self, mode: Mode) -> Truth:
        words: list[Word] = []
        while isinstance(token := self._peek(), (Word, Redirect)):
            if isinstance(token, Word):
                words.append(token)
            self._at += 1
        if words and isinstance(token, Operator) and token.text == "(":
            # Reading on would lose the remaining arguments to another command.
            fix = "put quotes around the word"
            raise error(
                "shell-syntax", "has '(' after a word, which is a syntax error", f"{self.name}:{token.line}", fix
            )
        return self.simple(words, mode)

    def _forget(self, name: str, line: int, mode: Mode) -> None:
        if mode:
            self.forget(name, line)
