"""Remove and report arguments whose values only running the script would give."""

from __future__ import annotations

from collections.abc import Sequence

from fp8launch.diagnostics import Problem
from fp8launch.megatron.schema import Flag, FlagSchema
from fp8launch.plugins.importer.shell_holes import Hole, Holes, is_known


def without_holes(words: Sequence[str], holes: Holes, schema: FlagSchema, name: str) -> tuple[list[str], list[Problem]]:
    """Return the arguments without unknown ones, and a problem for each of these."""
    kept: list[str] = []
    problems: list[Problem] = []
    at = 0
    while at < len(words):
        flag = None
        if words[at].startswith("--"):
            flag = schema.find(words[at].partition("=")[0])
        end = _end_of_argument(words, at, flag)
        group = words[at:end]
        unknown = _holes_of(group, holes)
        if unknown:
            where = f"{name}:{unknown[0].line}"
            fix = "add its value to the recipe"
            if flag:
                fix = "add it to the recipe with its value"
            problems.append(Problem("warning", "import-unresolved", _omitted(group, unknown, holes), where, fix))
        else:
            kept += group
        at = end
    return kept, problems


def _end_of_argument(words: Sequence[str], at: int, flag: Flag | None) -> int:
    """Return where the argument at `at` ends: a flag with its values, or a single word."""
    end = at + 1
    if flag and flag.takes_value and "=" not in words[at]:
        limit = len(words)
        if flag.nargs not in ("+", "*"):
            limit = int(flag.nargs or 1)
        while end < len(words) and end - at <= limit and not words[end].startswith("--"):
            end += 1
    elif flag is None and words[at].startswith("--") and not is_known(words[at].partition("=")[0]):
        # Without this flag, its values would belong to the flag before it.
        while end < len(words) and not words[end].startswith("--"):
            end += 1
    elif flag is None and _may_take_a_value(words[at]) and not is_known(*words[end : end + 1]):
        # Without its value, a flag that no schema knows would take the next word.
        end += 1
    return end


def _omitted(group: Sequence[str], unknown: Sequence[Hole], holes: Holes) -> str:
    text = " ".join(map(holes.shown, group))
    if len(group) > 1 or not holes.fill(group[0]):
        return f"`{text}` is omitted: {'; '.join(dict.fromkeys(map(str, unknown)))}"
    # The word consists of holes alone, so that naming them once is enough.
    names = "` or `".join(holes.texts(group[0]))
    return f"`{names}` is omitted: it {'; it '.join(dict.fromkeys(hole.why for hole in unknown))}"


def _may_take_a_value(word: str) -> bool:
    return word.startswith("--") and "=" not in word and is_known(word)


def _holes_of(words: Sequence[str], holes: Holes) -> list[Hole]:
    """Return the holes in these words, and only the first of a variable that several branches assign."""
    found: dict[str, Hole] = {}
    for word in words:
        for hole in holes.of(word):
            found.setdefault(hole.raw, hole)
    return list(found.values())
