"""How pictures show rows: the colour is the precision, dash and marker are a size, panels are everything else.

Where rows of one precision differ in something else than their size, such as a layout or a kernel, and some panel would
not hold two precisions of it, the colour is the variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from fp8launch.report.entry import Entry
from fp8launch.report.plot_style import COLOURS, DASHES, MARKERS, MOST_LINES, Key, plain
from fp8launch.untyped import as_int
from fp8launch.wording import counted

# The usual precisions have the same colour in every report.
_USUAL = {"bf16": 0, "tensorwise": 1, "blockwise": 2, "delayed": 3, "mxfp8": 4, "nvfp4": 5}


@dataclass(frozen=True)
class Encoding:
    """By row name: the word that the colour stands for, and the panel. `colours` is by word."""

    words: Mapping[str, str]
    panels: Mapping[str, str]
    colours: Mapping[str, str]

    def word(self, entry: Entry) -> str:
        return self.words[entry.row.name]

    def panel(self, entry: Entry) -> str:
        return self.panels[entry.row.name]

    def colour(self, entry: Entry) -> str:
        return self.colours[self.word(entry)]

    def keys(self, entries: Iterable[Entry], shape: str = "bar") -> tuple[Key, ...]:
        """The meaning of each colour in a picture of these rows."""
        words = dict.fromkeys(map(self.word, entries))
        return tuple(Key(plain(word), self.colours[word], shape=shape) for word in words)


def encode(entries: Sequence[Entry]) -> Encoding:
    """Choose the meaning of colours and panels for these rows."""
    words, panels = _by_row(entries, _precision), _by_row(entries, _rest)
    if _tells_apart(entries, words, panels):
        return Encoding(words, panels, _precision_colours(list(dict.fromkeys(words.values()))))
    words = _by_row(entries, _without_length)
    # In bf16 first: it has the same colour in every report.
    order = sorted(dict.fromkeys(words.values()), key=lambda word: not word.startswith("bf16"))
    pages = dict.fromkeys(order, "")
    count = -(-len(order) // MOST_LINES)
    if count > 1:
        for i, word in enumerate(order):
            pages[word] = f"{i // MOST_LINES + 1} of {count}"
    panels = {name: pages[word] for name, word in words.items()}
    return Encoding(words, panels, dict(zip(order, cycle(COLOURS), strict=False)))


def _by_row(entries: Sequence[Entry], word: Callable[[Entry], str]) -> dict[str, str]:
    return {entry.row.name: word(entry) for entry in entries}


def _tells_apart(entries: Sequence[Entry], words: Mapping[str, str], panels: Mapping[str, str]) -> bool:
    """Whether panels of one line for each precision and size hold every row, and most have something to compare."""
    lines = set()
    inside: dict[str, set[str]] = {}
    for entry in entries:
        panel, word = panels[entry.row.name], words[entry.row.name]
        lines.add((panel, word, world(entry), length(entry)))
        inside.setdefault(panel, set()).add(word)
    if len(lines) < len(entries) or len(set(words.values())) < 2:
        return False
    counts = list(map(len, inside.values()))
    return min(counts) > 1 and max(counts) <= MOST_LINES


def _parts(entry: Entry) -> list[str]:
    return entry.row.label.split(", ")


def _precision(entry: Entry) -> str:
    """The precision as the label has it, else as the facts have it."""
    known = str(entry.row.facts.get("precision", ""))
    names = {known}
    study = entry.row.runs[0].study
    if study:
        names |= {str(study.point.get("precision.recipe")), str(study.point.get("precision"))}
    for part in _parts(entry):
        if part in names:
            return part
    return known


def _without_length(entry: Entry) -> str:
    return _label_without(entry, _length_part(entry)) or _precision(entry)


def _rest(entry: Entry) -> str:
    """The label without precision and sequence length."""
    return _label_without(entry, _precision(entry), _length_part(entry))


def _length_part(entry: Entry) -> str:
    return f"seq {length(entry)}"


def _label_without(entry: Entry, *left_out: str) -> str:
    return ", ".join(part for part in _parts(entry) if part not in left_out)


def _precision_colours(words: Sequence[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    taken: set[int] = set()
    for word in sorted(words, key=len):
        usual = _USUAL.get(word.split(" ")[0])
        if usual is not None and usual not in taken and " then " not in word:
            chosen[word] = COLOURS[usual]
            taken.add(usual)
    for word in words:
        if word not in chosen:
            free = set(range(len(COLOURS))) - taken
            last = max(free, default=len(chosen) % len(COLOURS))
            chosen[word] = COLOURS[last]
            taken.add(last)
    return chosen


# --- Sizes ----------------------------------------------------------------------------------------------------------


def length(entry: Entry) -> int | None:
    return as_int(entry.row.facts.get("seq_length"))


def world(entry: Entry) -> int | None:
    return entry.row.world


def gpus(number: int | None) -> str:
    if number is None:
        return "GPUs not known"
    return counted(number, "GPU")


def tokens(number: int | None) -> str:
    if number is None:
        return "length not known"
    return f"{number:,} tokens"


Size = Callable[[Entry], int | None]


@dataclass(frozen=True)
class Lines:
    """Dash and marker of each value of a size; one value needs neither."""

    size: Size
    name: Callable[[int | None], str]
    values: tuple[int | None, ...]

    def style(self, entry: Entry) -> tuple[str, str]:
        i = self.values.index(self.size(entry))
        return DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]

    def keys(self, colour: str) -> tuple[Key, ...]:
        if len(self.values) < 2:
            return ()
        found = []
        for i, value in enumerate(self.values):
            found.append(Key(self.name(value), colour, DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]))
        return tuple(found)

    def text(self, entry: Entry) -> str:
        if len(self.values) < 2:
            return ""
        return self.name(self.size(entry))


def lines_of(entries: Sequence[Entry], size: Size) -> Lines:
    values = tuple(sorted(set(map(size, entries)), key=lambda value: value or 0))
    if size is world:
        return Lines(size, gpus, values)
    return Lines(size, tokens, values)


def row_names(entries: Iterable[Entry]) -> list[str]:
    """Return the names of the rows."""
    return [entry.row.name for entry in entries]


def grouped(entries: Sequence[Entry], panel: Callable[[Entry], str]) -> dict[str, list[Entry]]:
    """Distribute rows over panels, in their order."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(panel(entry), []).append(entry)
    return found


def curve_panels(entries: Sequence[Entry], encoding: Encoding) -> list[tuple[str, list[Entry], Lines]]:
    """Distribute curves over iterations: a panel for each number of GPUs, a dash for each sequence length.

    Where a panel would hold one curve only, the numbers of GPUs are dashes of one panel.
    """
    panel, size = encoding.panel, length
    if len(set(map(world, entries)) - {None}) > 1:
        alone = {encoding.word(entry) + repr(length(entry)) for entry in entries}
        if len(alone) == 1:
            size = world
        else:
            panel = partial(_panel_and_gpus, encoding)
    panels = []
    for title, same in grouped(entries, panel).items():
        panels.append((title, same, lines_of(same, size)))
    return panels


def _panel_and_gpus(encoding: Encoding, entry: Entry) -> str:
    return ", ".join(filter(None, (encoding.panel(entry), gpus(world(entry)))))
