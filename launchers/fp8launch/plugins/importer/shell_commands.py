"""Simple commands of a launch script: assignments, declarations, and commands with their words."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fp8launch.diagnostics import error
from fp8launch.plugins.importer.shell_expand import Value, WordExpander, assigned_name, assigned_value, size_of
from fp8launch.plugins.importer.shell_reading import ASSUMED, Command, Mode, Reading, Truth
from fp8launch.plugins.importer.shell_tokens import Word

MAX_DEPTH = 20
_MAX_COMMANDS = 20_000
# The most characters in all words and variables. Each variable in a command's environment counts as several.
_MAX_SIZE = 64 << 20
_SIZE_OF_VARIABLE = 16
# A token that is read again, in a loop or a function.
_SIZE_OF_TOKEN = 32

_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_SHELLS = re.compile(r"(?:.*/)?(?:ba|da|z|k)?sh")
_SHELL_COMMAND_OPTION = re.compile(r"-[a-z]*c")
_NAME = re.compile(r"[A-Za-z_]\w*")
# Commands that change or unset variables.
_CHANGING = ("unset", "read", "mapfile", "readarray", "getopts")

Wrappers = tuple[tuple[str, ...], ...]


class SimpleCommands(WordExpander, ABC):
    """The variables of a shell, and the effects of simple commands on them."""

    def __init__(self, reading: Reading, name: str, variables: dict[str, Value], wrappers: Wrappers = ()) -> None:
        super().__init__(name, variables, reading.holes)
        self._reading = reading
        self._export = dict.fromkeys(variables)
        self._wrappers = wrappers
        self._depth = len(wrappers)

    @abstractmethod
    def read(self, text: str, line: int = 1) -> None:
        """Follow the commands of `text` with the variables so far."""

    @abstractmethod
    def is_function(self, name: str) -> bool:
        """Return whether the script has defined a function of this name."""

    @abstractmethod
    def call(self, name: str, arguments: Sequence[str], mode: Mode) -> None:
        """Follow the body of a function."""

    @abstractmethod
    def child(self, variables: dict[str, Value], wrappers: Wrappers) -> SimpleCommands:
        """Return a child shell, which has only the exported variables."""

    def simple(self, words: Sequence[Word], mode: Mode) -> Truth:
        """Follow one simple command, and return how it ends, as far as that is known."""
        self.count_step()
        if mode is Mode.SKIP:
            return None
        prefix = list(itertools.takewhile(assigned_name, words))
        rest = words[len(prefix) :]
        if not rest:
            for word in prefix:
                self.assign(word, mode is Mode.RUN)
            return True if prefix else ASSUMED
        if rest[0].bare in _DECLARING:
            return self._declare(rest, mode)
        expanded = self.fields(rest)
        self._grow(size_of(expanded))
        if not expanded:
            return ASSUMED
        return self._run(prefix, expanded, rest[0].line, mode)

    def count_step(self, tokens: int = 0) -> None:
        """Limit how many commands, iterations and calls are followed, and the tokens of the latter."""
        self._grow(tokens * _SIZE_OF_TOKEN)
        self._reading.steps += 1
        if self._reading.steps > _MAX_COMMANDS:
            raise error("shell-too-large", f"takes more than {_MAX_COMMANDS} commands", self.name)

    def assign(self, word: Word, certain: bool) -> None:
        name = str(assigned_name(word))
        before = size_of(self.variables.get(name, ""))
        super().assign(word, certain)
        self._grow(size_of(self.variables.get(name, "")) - before)

    def _grow(self, size: int) -> None:
        self._reading.size += size
        if self._reading.size > _MAX_SIZE:
            raise error("shell-too-large", f"expands to more than {_MAX_SIZE >> 20} MiB of words", self.name)

    def _run(self, prefix: Sequence[Word], words: list[str], line: int, mode: Mode) -> Truth:
        """Record a command, or follow it if it changes variables or its words are shell text."""
        name = words[0]
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if self.is_function(name):
            self.call(name, words[1:], mode)
            return ASSUMED
        if name == "shift" or words[:2] == ["set", "--"]:
            self._change_arguments(words, mode)
            return ASSUMED
        if name in _CHANGING:
            self._change_variables(words[1:])
            if name in ("read", "getopts"):
                return None
            return ASSUMED
        if name == "eval" and mode is Mode.RUN and self._depth < MAX_DEPTH:
            self._depth += 1
            self.read(" ".join(words[1:]), line)
            self._depth -= 1
            return ASSUMED
        env = self.exported(self._export)
        own = {str(assigned_name(word)): self.joined(assigned_value(word)) for word in prefix}
        env |= own
        self._grow(len(env) * _SIZE_OF_VARIABLE + sum(map(len, own.values())))
        inner = _shell_text(words)
        if inner is not None and self._depth < MAX_DEPTH:
            wrapper, text = inner
            self._read_in_child(text, line, env, tuple(wrapper), mode)
            return ASSUMED
        self._reading.commands.append(Command(tuple(words), env, line, mode is Mode.RUN, self._wrappers))
        return ASSUMED

    def _change_arguments(self, words: Sequence[str], mode: Mode) -> None:
        """Follow `shift` and `set --`. If they may not be executed, the arguments become unknown."""
        current = self.arguments()
        count = "".join(words[1:]) or "1"
        if mode is not Mode.RUN:
            self.set_arguments(None)
        elif words[0] == "set":
            self.set_arguments(words[2:])
        elif current is None or not count.isdecimal():
            self.set_arguments(None)
        elif int(count) <= len(current):
            self.set_arguments(current[int(count) :])

    def _change_variables(self, names: Sequence[str]) -> None:
        """Follow `unset`, `read` and similar commands: the variables lose the values that the script set."""
        for name in names:
            if _NAME.fullmatch(name):
                self.variables.pop(name, None)

    def _read_in_child(
        self, text: str, line: int, env: Mapping[str, str], wrapper: tuple[str, ...], mode: Mode
    ) -> None:
        """Follow the text of a `bash -c`. If the `bash -c` may not run, its commands are uncertain."""
        before = len(self._reading.commands)
        self.child(dict(env), (*self._wrappers, wrapper)).read(text, line)
        if mode is Mode.MAYBE:
            found = self._reading.commands[before:]
            self._reading.commands[before:] = [replace(command, certain=False) for command in found]

    def _declare(self, words: Sequence[Word], mode: Mode) -> Truth:
        options = [word.bare for word in words[1:] if word.bare and word.bare.startswith("-")]
        exports = words[0].bare == "export" or any("x" in option for option in options)
        for word in words[1:]:
            name = assigned_name(word)
            if name:
                self.assign(word, mode is Mode.RUN)
            if exports and name:
                self._export_names([name], withdraw="-n" in options)
            elif exports:
                self._export_names(self.fields([word]), withdraw="-n" in options)
        return ASSUMED

    def _export_names(self, names: Sequence[str], withdraw: bool) -> None:
        for name in names:
            if withdraw:
                self._export.pop(name, None)
            elif _NAME.fullmatch(name):
                self._export[name] = None


def _shell_text(words: Sequence[str]) -> tuple[Sequence[str], str] | None:
    """Return the words before `bash -c TEXT`, and TEXT."""
    for at, word in enumerate(words[:-2]):
        if _SHELLS.fullmatch(word):
            options = list(itertools.takewhile(lambda w: w.startswith("-"), words[at + 1 :]))
            last = at + len(options)
            if options and _SHELL_COMMAND_OPTION.fullmatch(options[-1]) and last + 1 < len(words):
                return words[:at], words[last + 1]
            return None
    return None
