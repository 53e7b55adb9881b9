"""Problems as data: one `Problem` for each finding, and the exception that carries them to the user.

Exit codes of every command: 0 done; 1 the answer is no; 2 wrong usage or a recipe that does not parse;
3 the machine lacks something (no Slurm, no image, no permission).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

Severity = Literal["error", "warning"]

ANSWER_IS_NO = 1
BAD_INPUT = 2
MACHINE_LACKS = 3
INTERRUPTED = 130
CLOSED_PIPE = 141  # as a shell reports a program that SIGPIPE ended


def exit_code(yes: bool) -> int:
    """Return the exit code of a command that answers a question."""
    return 0 if yes else ANSWER_IS_NO


@dataclass(frozen=True)
class Problem:
    """One finding.

    `code` is stable and kebab-case; `where` is `file:line` or a name; `fix` says what to change.
    A known bug of the software has the kind `advisory`, and the URL of its report as `source`.
    """

    severity: Severity
    code: str
    message: str
    where: str | None = None
    fix: str | None = None
    kind: Literal["advisory"] | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        # Problems quote files and arguments, which may contain terminal escapes or broken characters.
        for name in ("message", "where", "fix"):
            text = getattr(self, name)
            if text is not None and not text.isprintable():
                object.__setattr__(self, name, printable(text))

    def as_json(self) -> dict[str, str | None]:
        """Return the fields by name; `kind` and `source` only for a problem that has them."""
        found = asdict(self)
        for name in ("kind", "source"):
            if found[name] is None:
                del found[name]
        return found

    def __str__(self) -> str:
        text = f"{self.severity}: {self.message} [{self.code}]"
        if self.where:
            text = f"{self.where}: {text}"
        if self.fix:
            text += f"\n    fix: {self.fix}"
        if self.source:
            text += f"\n    source: {self.source}"
        return text


class HasProblems(Protocol):
    """The result of a check, or an error."""

    @property
    def problems(self) -> Sequence[Problem]: ...


def problems_of(results: Iterable[HasProblems]) -> list[Problem]:
    """Return the problems of several results in order, each once."""
    found: dict[Problem, None] = {}
    for result in results:
        found |= dict.fromkeys(result.problems)
    return list(found)


def errors_in(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that are errors."""
    return [problem for problem in problems if problem.severity == "error"]


def printable(text: str) -> str:
    """Return a text with control characters escaped, so that a terminal shows them instead of obeying them."""
    if text.isprintable():
        return text
    return "".join(map(_printable_character, text))


def _printable_character(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return character.encode("unicode_escape").decode()


class UserError(Exception):
    """Ends a command: prints the problems without a traceback, and exits with `exit_code`."""

    def __init__(self, problems: Iterable[Problem], exit_code: int = BAD_INPUT) -> None:
        self.problems = tuple(problems)
        self.exit_code = exit_code
        super().__init__("; ".join(p.message for p in self.problems))


def error(
    code: str, message: str, where: str | None = None, fix: str | None = None, exit_code: int = BAD_INPUT
) -> UserError:
    """Return a `UserError` with a single problem."""
    return UserError([Problem("error", code, message, where, fix)], exit_code)


def advice_on(refusal: str, advice: Mapping[str, str], otherwise: str | None = None) -> str | None:
    """Return the advice whose key, in lower case, is the first that a message of another program contains."""
    words = refusal.lower()
    for phrase, fix in advice.items():
        if phrase in words:
            return fix
    return otherwise


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to a misspelled one, or None. Dashes and underscores count as the same."""
    import difflib

    by_form = {k.replace("-", "_"): k for k in known}
    found = difflib.get_close_matches(name.replace("-", "_"), by_form, n=1, cutoff=0.6)
    if not found:
        return None
    return by_form[found[0]]


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the fix for an unknown name: the closest known name, or `otherwise` if none is close."""
    near = nearest(name, known)
    if near is None:
        return otherwise
    return f"did you mean '{near}'?"
