"""Values that break things, and trees and texts in which some of what was there is replaced by them."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

AMOUNT = int(os.environ.get("FP8LAUNCH_FUZZ", "300"))
CANARY = "CANARY"  # becomes the path of a file that must never appear

COMMANDS = (
    f"$(touch {CANARY})", f"`touch {CANARY}`", f"; touch {CANARY};", f"\ntouch {CANARY}\n", f"'; touch {CANARY}; '",
    f'"; touch {CANARY}; "', f"a[$(touch {CANARY})]", f"| touch {CANARY}", f"&& touch {CANARY}",
    f"${{x:=$(touch {CANARY})}}",
)  # fmt: skip
TEXTS = (
    "", " ", "--help", "-rf", "--", "-", "~", "~root", "~nobody-here/x", "..", "../../../etc/passwd", "/etc/passwd",
    "/dev/zero", "/proc/self/mem", "x" * 5000, "a\nb", "\r\n", "\t", "\x1b]0;title\x07", "\x1b[2J", "\x9b2J", "\u202e",
    "\x00", "\ud800", "é", "日本", "🙂", "%n%s%d", "{0}", "{{7*7}}", "<script>alert(1)</script>",
    "\"><img src=x onerror=a>",
    "=1+1", "| a |", "`x`", "[red]x[/red]", "[/]", "null", "true", "off", "no", "0o17", "0x10", "010", "1_000",
    "12:30:45",
    "1e5", "1e400", ".inf", ".nan", "-0", "1.", "&a b", "*a", "<<", "!!python/object/apply:os.system [id]", "? x",
    "# x",
    "%YAML 9", "---", "'", '"', "\\", "a: b", "[", "{", "9" * 400, "9" * 5000, "٣", "²", "None", "nan", "2026-11-21",
    "local", "latest", "h100", "mock", "bf16", "tensorwise", "nemo-26.04", "x.sqsh", "docker://a/b:1", "/a:/b:ro",
    "1,2",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 7, 8, 64, 1000, 10**6, 2**31, 2**63, 2**64, 10**30, 0.0, -0.0, 0.5, 1e-300, 1e300)

texts = st.sampled_from(COMMANDS) | st.sampled_from(TEXTS) | st.text(max_size=12)
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers() | st.floats(width=64) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5
)


def share(part: float) -> Any:
    """Settings for a test that gets this part of all cases. What CI runs is the same every time."""
    few = "FP8LAUNCH_FUZZ" not in os.environ
    return settings(
        max_examples=max(5, int(AMOUNT * part)),
        deadline=None,
        derandomize=few,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


Path_ = tuple[Any, ...]


def paths(tree: Any, path: Path_ = ()) -> list[Path_]:
    """The ways to every value in a tree."""
    found: list[Path_] = [path]
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        found += paths(value, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, trees: Sequence[Any], keys: Sequence[str] = ()) -> Any:
    """One of the trees with a few of its values replaced, removed, renamed or joined by others."""
    tree = copy.deepcopy(draw(st.sampled_from(trees)))
    for _ in range(draw(st.integers(1, 4))):
        ways = paths(tree)[1:]
        if not ways:
            return tree
        *above, last = draw(st.sampled_from(ways))
        parent = tree
        for step in above:
            parent = parent[step]
        deed = draw(st.integers(0, 9))
        if deed < 5:
            parent[last] = draw(values)
        elif deed < 6:
            del parent[last]
        elif isinstance(parent, dict):
            name = draw(st.sampled_from(keys) | texts) if keys else draw(texts)
            parent[name] = parent.pop(last) if deed < 8 else draw(values)
        else:
            parent.append(draw(values))
    return tree


@st.composite
def damaged(draw: st.DrawFn, originals: Sequence[bytes], pieces: Sequence[bytes] = ()) -> bytes:
    """One of the texts with lines dropped, doubled, swapped, cut, and with numbers and pieces put in."""
    lines = draw(st.sampled_from(originals)).splitlines(keepends=True)
    begin = draw(st.integers(0, max(0, len(lines) - 10)))
    lines = lines[begin : begin + draw(st.integers(1, 80))]
    for _ in range(draw(st.integers(1, 6))):
        if not lines:
            break
        at = draw(st.integers(0, len(lines) - 1))
        deed = draw(st.integers(0, 8))
        if deed == 0:
            del lines[at]
        elif deed == 1:
            lines.insert(at, lines[draw(st.integers(0, len(lines) - 1))])
        elif deed == 2:
            cut = draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:cut] + draw(st.sampled_from((b"", b"\n")))
        elif deed in (3, 4):
            number = draw(
                st.sampled_from((b"nan", b"inf", b"-1", b"0", b"1e999", b"9" * 400, b"", b"--", b"0.0", b"2"))
            )
            spots = list(re.finditer(rb"[0-9]+(\.[0-9]+)?(E[+-][0-9]+)?", lines[at]))
            if spots:
                spot = draw(st.sampled_from(spots))
                lines[at] = lines[at][: spot.start()] + number + lines[at][spot.end() :]
        elif deed == 5:
            lines[at] = draw(st.binary(max_size=30)) + lines[at]
        elif deed == 6:
            lines.insert(at, draw(texts).encode("utf-8", "surrogatepass") + b"\n")
        elif pieces:
            spot_at = draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:spot_at] + draw(st.sampled_from(pieces)) + lines[at][spot_at:]
    return b"".join(lines)


def filled(value: Any, canary: object) -> Any:
    """The value with the canary's real path in it."""
    if isinstance(value, str):
        return value.replace(CANARY, str(canary))
    if isinstance(value, list):
        return [filled(one, canary) for one in value]
    if isinstance(value, dict):
        return {filled(k, canary): filled(v, canary) for k, v in value.items()}
    return value


def as_yaml(tree: Any) -> str:
    """JSON is YAML; half a character stays what a file cannot hold."""
    return json.dumps(tree, ensure_ascii=True)


Run = Callable[..., tuple[int, str, str]]
