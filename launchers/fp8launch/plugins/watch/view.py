"""What `watch` shows, as a pure function of its state: rows, the selected run, keys."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8launch.cli.output import GAP, number_text
from fp8launch.diagnostics import printable
from fp8launch.injob.supervisor.log_lines import split_prefix, without_colours
from fp8launch.report.progress import Progress, duration
from fp8launch.report.tables import add_column
from fp8launch.rundir.attempts import LOCAL_JOB, Attempts
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState, JobTimes
from fp8launch.wording import rounded

COLOURS = {"running": "green", "completed": "cyan", "pending": "yellow", "failed": "red", "timeout": "red",
           "node_fail": "red", "out_of_memory": "red", "cancelled": "magenta", "interrupted": "magenta"}  # fmt: skip
LIST_HELP = "up/down select   enter open   C cancel   R resume   q quit (runs continue)"
LOG_HELP = "arrows scroll  f follow  / search  r rank  C cancel  R resume  esc back  q quit"
# Capital letters, so that a slip does not ask.
ACTIONS = {"C": "cancel", "R": "resume"}
# Lines of an opened run above its log, and of the list around its table.
FACT_LINES, FRAME_LINES = 6, 4
# Columns by which the left and right arrows scroll a log.
ASIDE = 40
MORE_LINES = 3
# Width of a cell in the list. The lines below the list show the long cells of the selected run in full.
WIDEST = 60


@dataclass(frozen=True)
class Row:
    """The current state of a run."""

    run: RunFolder
    manifest: dict[str, Any]
    state: JobState
    progress: Progress
    times: JobTimes
    attempts: Attempts
    detail: str = ""

    @property
    def run_id(self) -> str:
        return self.run.run_id


@dataclass(frozen=True)
class View:
    """What the user looks at.

    `above` counts the lines between the window and the end of the log, `aside` the columns to the left of the window.
    `typing` is the open prompt, "/" or "r". `asking` is the action to be confirmed for the selected run,
    and `order` the confirmed one. `message` is the result of the last action.
    """

    selected: str | None = None
    opened: str | None = None
    above: int = 0
    aside: int = 0
    search: str = ""
    rank: str = ""
    typing: str = ""
    asking: str = ""
    order: str = ""
    message: str = ""
    done: bool = False

    def press(self, key: str, runs: Sequence[str], height: int) -> View:
        """Return the view after a key. `runs` are the ids on the screen, `height` its lines."""
        if self.asking:
            order = self.asking if key in ("y", "Y") else ""
            return replace(self, asking="", order=order, done=key == "quit")
        if self.typing:
            return self._typed(key)
        if key in ("q", "quit"):
            return replace(self, done=True)
        if self.message:
            return replace(self, message="").press(key, runs, height)
        if key in ACTIONS and runs:
            # The run is fixed now, because a newer one may appear before the answer.
            selected = self.opened or (self.selected if self.selected in runs else runs[-1])
            return replace(self, selected=selected, asking=ACTIONS[key])
        if self.opened:
            return self._in_log(key, height)
        return self._in_list(key, runs)

    def _typed(self, key: str) -> View:
        if key == "enter":
            return replace(self, typing="", above=0)
        if key == "escape":
            return replace(self._with_text(""), typing="", above=0)
        if key == "backspace":
            return self._with_text(self._text()[:-1])
        if len(key) != 1 or not key.isprintable():
            return self
        if self.typing == "r" and not key.isdigit():
            return self
        return self._with_text(self._text() + key)

    def _text(self) -> str:
        """Return the text in the open prompt."""
        if self.typing == "/":
            return self.search
        return self.rank

    def _with_text(self, text: str) -> View:
        """Return the view with another text in the open prompt."""
        if self.typing == "/":
            return replace(self, search=text)
        return replace(self, rank=text)

    def _in_list(self, key: str, runs: Sequence[str]) -> View:
        if not runs:
            return self
        at = len(runs) - 1
        if self.selected in runs:
            at = runs.index(self.selected)
        if key in ("up", "k"):
            return replace(self, selected=runs[max(at - 1, 0)])
        if key in ("down", "j"):
            return replace(self, selected=runs[min(at + 1, len(runs) - 1)])
        if key == "enter":
            return View(selected=runs[at], opened=runs[at])
        return self

    def _in_log(self, key: str, height: int) -> View:
        page = max(height - FACT_LINES - 1, 1)
        steps = {"up": 1, "k": 1, "down": -1, "j": -1, "page-up": page, "page-down": -page}
        if key in steps:
            return replace(self, above=max(self.above + steps[key], 0))
        if key == "right":
            return replace(self, aside=self.aside + ASIDE)
        if key == "left":
            return replace(self, aside=max(self.aside - ASIDE, 0))
        if key == "escape":
            return View(selected=self.opened)
        if key == "f":
            return replace(self, above=0)
        if key in ("/", "r"):
            return replace(self, typing=key)._with_text("")
        return self


def render(view: View, rows: Sequence[Row], log: Sequence[str], width: int, height: int) -> RenderableType:
    """Return the screen: the opened run with its log, else the list."""
    opened = opened_row(view, rows)
    if opened is not None:
        return _run(view, opened, log, width, height)
    return _list(view, rows, width, height)


def opened_row(view: View, rows: Sequence[Row]) -> Row | None:
    """Return the run that is open; None for the list."""
    for row in rows:
        if row.run_id == view.opened:
            return row
    return None


def _list(view: View, rows: Sequence[Row], width: int, height: int) -> RenderableType:
    counts = Counter(row.state.status for row in rows)
    title = Text("fp8launch  ", style="bold").append(", ".join(f"{n} {status}" for status, n in counts.items()))
    if not rows:
        return Group(title, Text("no runs yet: fp8launch submit RECIPE"), Text(""), _bar(LIST_HELP, width))
    ids = [row.run_id for row in rows]
    # By default the newest run.
    at = len(rows) - 1
    if view.selected in ids:
        at = ids.index(view.selected)
    room = max(height - FRAME_LINES - MORE_LINES, 1)
    first = max(0, min(at - room // 2, len(rows) - room))
    columns = _columns(rows, width)
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name in columns:
        add_column(table, name, name in _NUMBERS, no_wrap=True, overflow="ellipsis")
    for row in rows[first : first + room]:
        cells = _cells(row)
        texts = [Text(printable(cells[name][:WIDEST]), style=_style(name, row)) for name in columns]
        table.add_row(*texts, style="reverse" if row is rows[at] else "")
    return Group(title, table, Text(""), *_more(rows[at], columns, width), _bar(_bottom(view, LIST_HELP), width))


def _more(row: Row, columns: Sequence[str], width: int) -> list[Text]:
    """Return what the table has no room for, for the selected run, in at most `MORE_LINES` lines."""
    cells = _cells(row)
    facts = _facts(cells, without=(*columns, "why", "curve"))
    if cells["curve"] and "curve" not in columns:
        facts.append(f"loss {cells['curve']}")
    if cells["why"] and ("why" not in columns or len(cells["why"]) > WIDEST):
        facts.insert(0, f"{row.state.status}: {cells['why']}")
    return list(map(Text, textwrap.wrap(printable("   ".join(facts)), width)[:MORE_LINES]))


def _facts(cells: Mapping[str, str], without: Sequence[str]) -> list[str]:
    """Return the cells that are not empty, each with its name."""
    return [f"{name} {cell}" for name, cell in cells.items() if cell and name not in without]


_NUMBERS = ("ETA", "loss", "tokens/s/GPU", "TFLOP/s/GPU", "memory")
# Left out on a narrow terminal, in this order.
_DROPPED = ("phase", "memory", "attempts", "TFLOP/s/GPU", "time", "why", "curve", "tokens/s/GPU", "ETA", "loss",
            "iteration")  # fmt: skip


def _columns(rows: Sequence[Row], width: int) -> list[str]:
    cells = list(map(_cells, rows))
    longest: dict[str, int] = {}
    for name in _cell_names():
        texts = [one[name][:WIDEST] for one in cells]
        if name in ("run", "state") or any(texts):
            longest[name] = max(map(len, [name, *texts]))
    for name in _DROPPED:
        if sum(longest.values()) + GAP * (len(longest) - 1) <= width:
            break
        longest.pop(name, None)
    return list(longest)


def _cell_names() -> tuple[str, ...]:
    return ("run", "state", "iteration", "ETA", "loss", "curve", "tokens/s/GPU", "TFLOP/s/GPU", "memory", "time",
            "attempts", "phase", "why")  # fmt: skip


def _cells(row: Row) -> dict[str, str]:
    progress, times = row.progress, row.times
    start, time, attempts = "", times.elapsed, ""
    if row.state.status == "pending" and times.start:
        start = f"start about {times.start}"
    if times.elapsed and times.limit:
        time = f"{times.elapsed}/{times.limit}"
    if row.attempts.used > 1:
        attempts = str(row.attempts.used)
    memory = number_text(progress.peak_memory_mib and progress.peak_memory_mib / 1024, ".1f")
    return {
        "run": row.run_id,
        "state": row.state.status,
        "iteration": progress.position,
        "ETA": duration(progress.eta_s),
        "loss": number_text(progress.loss, ".4f"),
        "curve": sparkline(progress.losses, 12),
        "tokens/s/GPU": number_text(progress.tokens_per_s_per_gpu, ",.0f"),
        "TFLOP/s/GPU": "" if progress.tflops_per_gpu is None else rounded(progress.tflops_per_gpu, 0),
        "memory": memory and f"{memory} GiB",
        "time": time,
        "attempts": attempts,
        "phase": row.attempts.phase or "",
        "why": ", ".join(filter(None, (row.detail, start))),
    }


def _style(name: str, row: Row) -> str:
    if name != "state":
        return ""
    return COLOURS.get(row.state.status, "")


def _run(view: View, row: Row, log: Sequence[str], width: int, height: int) -> RenderableType:
    cells = _cells(row)
    facts = _facts(cells, without=("run", "state", "curve", "time"))
    head = Text(printable(row.run_id), style="bold")
    head.append(f"  {row.state.status}", style=COLOURS.get(row.state.status, ""))
    head.append(f"  {cells['time']}")
    lines = list(map(printable, chosen_lines(log, view.search, view.rank)))
    room = max(height - FACT_LINES - 1, 1)
    above = min(view.above, max(len(lines) - room, 0))
    end = len(lines) - above
    shown = lines[max(end - room, 0) : end]
    body = [_highlighted(line[view.aside :][:width], view.search) for line in shown]
    body += [Text("")] * (room - len(body))
    place = "following"
    if above:
        place = f"{above} lines above the end"
    # Read earlier: the folder may have been removed since.
    submitted = [str(job["id"]) for job in row.manifest.get("jobs", [])]
    jobs = ",".join(dict.fromkeys([*submitted, *(job for job in row.attempts.jobs if job != LOCAL_JOB)]))
    status = f"log of job {jobs}, {place}"
    if view.rank:
        status += f", rank {view.rank}"
    if view.search:
        status += f", with '{view.search}'"
    prompt = {"/": f"search: {view.search}_", "r": f"rank: {view.rank}_"}.get(view.typing, _bottom(view, LOG_HELP))
    top = [
        head,
        Text(printable("   ".join(facts))[:width]),
        _curve("loss  ", row.progress.losses, width),
        _curve("step  ", row.progress.step_times_ms, width),
        Text(""),
        _bar(status, width),
    ]
    return Group(*top, *body, _bar(prompt, width))


def _bottom(view: View, keys: str) -> str:
    """Return the last line: a question, the result of an action, or the keys."""
    if view.asking:
        return f"{view.asking} {view.selected}? y/n"
    return view.message or keys


def _curve(name: str, series: tuple[float, ...], width: int) -> Text:
    """Return a sparkline with the range of its values."""
    finite = list(filter(math.isfinite, series))
    scale = f"  {min(finite):,.4g} to {max(finite):,.4g}" if finite else ""
    return Text(name).append(sparkline(series, max(width - 8 - len(scale), 1)), style="green").append(scale)


def _bar(text: str, width: int) -> Text:
    return Text(printable(text)[:width], style="dim")


def chosen_lines(log: Sequence[str], search: str, rank: str) -> list[str]:
    """Return the lines of a log that contain a text, in upper or lower case, and come from a rank."""
    chosen = []
    for line in log:
        plain = without_colours(line)
        if rank and str(split_prefix(plain)[0]) != rank:
            continue
        if search.lower() in plain.lower():
            chosen.append(plain.replace("\t", "    "))
    return chosen


def _highlighted(line: str, search: str) -> Text:
    text = Text(line, no_wrap=True, overflow="crop")
    if search:
        text.highlight_words([search], "bold yellow", case_sensitive=False)
    return text


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: tuple[float, ...], width: int) -> str:
    """Return the newest course of a series in `width` characters, each the mean of an equal share."""
    finite = list(filter(math.isfinite, values))
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    means = []
    for i in range(count):
        begin, end = len(finite) * i // count, len(finite) * (i + 1) // count
        means.append(statistics.fmean(finite[begin:end]))
    low, high = min(means), max(means)
    if low == high:
        return _BARS[0] * count
    scale = (len(_BARS) - 1) / (high - low)
    bars = ""
    for mean in means:
        bars += _BARS[round((mean - low) * scale)]
    return bars
