"""What the commands of a launch script would be, by reading it: nothing runs, nothing outside the text is looked at.

Variables, arrays, defaults, functions and decidable tests are followed. Whatever depends on something else becomes a
hole: a mark inside the word, with the line and the reason, so that it can be told instead of guessed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from fp8launch.problems import error
from fp8launch.recipe.shell_expand import MAX_TEXT, Expansion, Value, assigned_name, assigned_value
from fp8launch.recipe.shell_holes import Holes, without_marks
from fp8launch.recipe.shell_lexer import tokens
from fp8launch.recipe.shell_tests import Test, matches
from fp8launch.recipe.shell_tokens import Operator, Redirect, Sum, Token, Word

MAX_DEPTH = 20
_MAX_COMMANDS = 20_000

_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_SHELLS = re.compile(r"(?:.*/)?(?:ba|da|z|k)?sh")
_SHELL_COMMAND_OPTION = re.compile(r"-[a-z]*c")


@dataclass(frozen=True)
class Command:
    """A command with its words expanded. `wrappers` are the words before each `bash -c` around it, outermost first.

    `certain` is False when it stands under a condition that could not be decided.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    line: int
    certain: bool
    wrappers: tuple[tuple[str, ...], ...] = ()


@dataclass
class Reading:
    """All commands of a script in order, its arrays at the end, and the holes that marks refer to."""

    commands: list[Command] = field(default_factory=list)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    holes: Holes = field(default_factory=Holes)
    steps: int = 0


def read_list(text: str, name: str) -> tuple[list[str], Holes]:
    """The words of a plain argument list, on one line or many. Raises UserError for a quote that never closes."""
    words = [token for token in tokens(_checked(text, name), name, shell=False) if isinstance(token, Word)]
    expansion = Expansion(name, {}, Holes())
    return expansion.fields(words), expansion.holes


def read_script(text: str, name: str, known: Mapping[str, str]) -> Reading:
    """The commands of a shell script; `known` are variables that the environment will surely have.

    Raises UserError for text that is no shell script.
    """
    reading = Reading()
    shell = _Shell(reading, name, dict(known))
    shell.read(_checked(text, name))
    reading.arrays = {key: value for key, value in shell.variables.items() if isinstance(value, list)}
    return reading


def _checked(text: str, name: str) -> str:
    if len(text) > MAX_TEXT:
        raise error("file-too-large", f"is larger than {MAX_TEXT >> 20} MiB, so it is no launch script", name)
    return without_marks(text)


class _Mode(IntEnum):
    """Whether commands are reached: never, under a condition that is not known, surely."""

    SKIP = 0
    MAYBE = 1
    RUN = 2


# How a command ends: True and False as far as tests tell; ASSUMED for one that is taken to succeed; None is unknown.
_ASSUMED = "assumed"
_Truth: TypeAlias = "bool | str | None"


class _Shell(Expansion):
    def __init__(
        self, reading: Reading, name: str, variables: dict[str, Value], wrappers: tuple[tuple[str, ...], ...] = ()
    ) -> None:
        super().__init__(name, variables, reading.holes)
        self._reading = reading
        self._export = dict.fromkeys(variables)
        self._functions: dict[str, tuple[list[Token], int]] = {}
        self._wrappers = wrappers
        self._tokens: list[Token] = []
        self._at = 0
        self._depth = len(wrappers)

    # --- structure

    def read(self, text: str, line: int = 1) -> None:
        """Follow the commands of `text` with the variables so far."""
        kept = self._tokens, self._at
        self._tokens, self._at = tokens(text, self.name, line), 0
        try:
            while self._at < len(self._tokens):
                self._list((), _Mode.RUN)
                self._at += 1
        except RecursionError:
            raise error("shell-too-deep", "nests commands too deeply to be read", self.name) from None
        self._tokens, self._at = kept

    def _peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _is(self, *texts: str) -> bool:
        """The next token is one of these operators or keywords."""
        token = self._peek()
        return (isinstance(token, Operator) and token.text in texts) or (
            isinstance(token, Word) and token.bare in texts
        )

    def _past(self, *texts: str) -> None:
        if self._is(*texts):
            self._at += 1

    def _list(self, stops: Sequence[str], mode: _Mode) -> _Truth:
        """Commands up to one of `stops` or a bracket that closes; how the last one ended."""
        truth: _Truth = _ASSUMED
        while (token := self._peek()) is not None and not self._is(*stops):
            if isinstance(token, Operator) and token.text in (";", "\n", "&"):
                self._at += 1
                continue
            before = self._at
            truth = self._and_or(mode)
            if self._at == before:
                self._at += 1
        return truth

    def _and_or(self, mode: _Mode) -> _Truth:
        truth = self._pipeline(mode)
        while self._is("&&", "||"):
            both = self._is("&&")
            self._at += 1
            while self._is("\n"):
                self._at += 1
            decided = truth in (True, _ASSUMED) if both else truth is False
            impossible = truth is False if both else truth is True
            reached = mode if decided else _Mode.SKIP if impossible else min(mode, _Mode.MAYBE)
            following = self._pipeline(reached)
            if decided:
                truth = following
            elif not impossible:
                truth = None
        return truth

    def _pipeline(self, mode: _Mode) -> _Truth:
        negated = self._is("!")
        self._past("!")
        truth = self._command(mode)
        while self._is("|", "|&"):
            self._at += 1
            while self._is("\n"):
                self._at += 1
            self._command(mode)
            truth = _ASSUMED
        if negated:
            return not truth if isinstance(truth, bool) else None
        return truth

    def _command(self, mode: _Mode) -> _Truth:
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
            return _ASSUMED
        readers: Mapping[str, Callable[[_Mode], _Truth]] = {
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

    def _if(self, mode: _Mode) -> _Truth:
        self._at += 1
        left = mode
        while True:
            truth = self._list(("then", "fi"), left)
            self._past("then")
            known = isinstance(truth, bool)
            reached = left if truth is True else _Mode.SKIP if known else min(left, _Mode.MAYBE)
            self._list(("elif", "else", "fi"), reached)
            left = _Mode.SKIP if truth is True else left if known else min(left, _Mode.MAYBE)
            if not self._is("elif"):
                break
            self._at += 1
        if self._is("else"):
            self._at += 1
            self._list(("fi",), left)
        self._past("fi")
        return _ASSUMED

    def _for(self, mode: _Mode) -> _Truth:
        self._at += 1
        token = self._peek()
        if isinstance(token, Word) and token.bare:
            self._forget(token.bare, token.line, mode)
        while self._peek() is not None and not self._is("do"):
            self._at += 1
        return self._body(mode)

    def _loop(self, mode: _Mode) -> _Truth:
        self._at += 1
        self._list(("do",), min(mode, _Mode.MAYBE))
        return self._body(mode)

    def _body(self, mode: _Mode) -> _Truth:
        self._past("do")
        self._list(("done",), min(mode, _Mode.MAYBE))
        self._past("done")
        return _ASSUMED

    def _group(self, mode: _Mode) -> _Truth:
        self._at += 1
        truth = self._list(("}",), mode)
        self._past("}")
        return truth

    def _case(self, mode: _Mode) -> _Truth:
        self._at += 1
        token = self._peek()
        subject = self.joined(token) if isinstance(token, Word) and mode else ""
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
            reached = left if matched else _Mode.SKIP if matched is False else min(left, _Mode.MAYBE)
            self._list((";;", ";&", ";;&", "esac"), reached)
            left = _Mode.SKIP if matched else left if matched is False else min(left, _Mode.MAYBE)
            self._past(";;", ";&", ";;&")
        self._past("esac")
        return _ASSUMED

    def _function(self, mode: _Mode) -> _Truth:
        self._past("function")
        token = self._peek()
        name = token.bare if isinstance(token, Word) else None
        self._at += 1
        while self._is("(", ")", "\n"):
            self._at += 1
        if name and mode:
            self._functions[name] = (self._tokens, self._at)
        self._command(_Mode.SKIP)
        return _ASSUMED

    def _call(self, name: str, mode: _Mode) -> None:
        if self._depth >= MAX_DEPTH:
            return
        kept = self._tokens, self._at
        self._tokens, self._at = self._functions[name]
        self._depth += 1
        self._command(mode)
        self._depth -= 1
        self._tokens, self._at = kept

    # --- tests

    def _test(self, mode: _Mode) -> _Truth:
        opening = self._peek()
        assert isinstance(opening, Word)
        closing = {"[[": "]]", "[": "]"}.get(opening.bare or "")
        self._at += 1
        items: list[str] = []
        known = True
        while (token := self._peek()) is not None and not self._is(closing or "\n"):
            if isinstance(token, Word):
                items.append(self.joined(token) if mode else "")
            elif isinstance(token, Operator) and (opening.bare == "[[" or token.text in ("(", ")")):
                items.append(token.text)
            elif isinstance(token, Operator):
                break
            else:
                known = False
            self._at += 1
        if closing:
            self._past(closing)
        return Test(items).truth() if known and mode else None

    # --- simple commands

    def _simple(self, mode: _Mode) -> _Truth:
        words: list[Word] = []
        while isinstance(token := self._peek(), (Word, Redirect)):
            if isinstance(token, Word):
                words.append(token)
            self._at += 1
        if words and isinstance(token, Operator) and token.text == "(":
            # Read on, the rest of the arguments would be lost as another command's.
            fix = "put quotes around the word"
            raise error("shell-syntax", "has '(' after a word, which a shell refuses", f"{self.name}:{token.line}", fix)
        self._reading.steps += 1
        if self._reading.steps > _MAX_COMMANDS:
            raise error("shell-too-large", f"takes more than {_MAX_COMMANDS} commands", self.name)
        if mode is _Mode.SKIP or not words:
            return None if mode is _Mode.SKIP else _ASSUMED
        prefix = list(itertools.takewhile(assigned_name, words))
        rest = words[len(prefix) :]
        if not rest:
            for word in prefix:
                self.assign(word, mode is _Mode.RUN)
            return True
        if rest[0].bare in _DECLARING:
            return self._declare(rest, mode)
        expanded = self.fields(rest)
        return self._run(prefix, expanded, rest[0].line, mode) if expanded else _ASSUMED

    def _run(self, prefix: Sequence[Word], words: list[str], line: int, mode: _Mode) -> _Truth:
        """What a command means to the reading: it is noted, and followed where its words are shell text themselves."""
        name = words[0]
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name in self._functions:
            self._call(name, mode)
            return _ASSUMED
        if name in ("unset", "read", "mapfile", "readarray", "getopts"):
            for variable in words[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", variable):
                    self.variables.pop(variable, None)
            return None if name in ("read", "getopts") else _ASSUMED
        if name == "eval" and mode is _Mode.RUN and self._depth < MAX_DEPTH:
            self._depth += 1
            self.read(" ".join(words[1:]), line)
            self._depth -= 1
            return _ASSUMED
        env = self.exported(self._export)
        env |= {str(assigned_name(word)): self.joined(assigned_value(word)) for word in prefix}
        inner = _shell_text(words)
        if inner is not None and self._depth < MAX_DEPTH:
            wrapper, text = inner
            child = _Shell(self._reading, self.name, dict(env), (*self._wrappers, tuple(wrapper)))
            before = len(self._reading.commands)
            child.read(text, line)
            if mode is _Mode.MAYBE:
                found = self._reading.commands[before:]
                self._reading.commands[before:] = [Command(c.words, c.env, c.line, False, c.wrappers) for c in found]
            return _ASSUMED
        self._reading.commands.append(Command(tuple(words), env, line, mode is _Mode.RUN, self._wrappers))
        return _ASSUMED

    def _declare(self, words: Sequence[Word], mode: _Mode) -> _Truth:
        options = [word.bare for word in words[1:] if word.bare and word.bare.startswith("-")]
        exports = words[0].bare == "export" or any("x" in option for option in options)
        for word in words[1:]:
            name = assigned_name(word)
            if name:
                self.assign(word, mode is _Mode.RUN)
            for variable in [name] if name else self.fields([word]):
                if exports and "-n" in options:
                    self._export.pop(variable, None)
                elif exports and re.fullmatch(r"[A-Za-z_]\w*", variable):
                    self._export[variable] = None
        return _ASSUMED

    def _forget(self, name: str, line: int, mode: _Mode) -> None:
        if mode:
            self.forget(name, line)


def _shell_text(words: Sequence[str]) -> tuple[Sequence[str], str] | None:
    """The words before `bash -c TEXT`, and TEXT."""
    for at, word in enumerate(words[:-2]):
        if _SHELLS.fullmatch(word):
            options = list(itertools.takewhile(lambda w: w.startswith("-"), words[at + 1 :]))
            last = at + len(options)
            if options and _SHELL_COMMAND_OPTION.fullmatch(options[-1]) and last + 1 < len(words):
                return words[:at], words[last + 1]
            return None
    return None
