"""Speeds of runs that used a GPU at the same time are not compared: real logs of runs that shared one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import sitting

from fp8launch.logs import read_log
from fp8launch.report.shared_gpus import GpuUse, gpu_use, sharers

NAMES = ("bf16_1", "delayed_1")
Say = Callable[..., tuple[int, str, str]]


def logs(folder: Path, gpus: dict[str, str], delay: float = 0) -> list[str]:
    """Write the logs as if they had named their GPUs, the last one as if it had run `delay` seconds later."""
    paths = []
    for name, gpu in gpus.items():
        text = (sitting("2026-11-29-convergence") / f"{name}.log").read_text()
        first = re.search(r"\[(\S+ \S+)\] iteration\s+1/", text)
        assert first is not None
        time = datetime.fromisoformat(first[1]).replace(tzinfo=timezone.utc).timestamp()
        time += delay if name == NAMES[-1] else 0
        text = text.replace('"iteration":1,"asked"', f'"iteration":1,"time":{time},"asked"')
        text = text.replace('"gpu":"NVIDIA H200"}', f'"gpu":"NVIDIA H200","gpu_id":"{gpu}"}}')
        assert text.count('"gpu_id"') == text.count('"time"') == 1
        paths.append(folder / f"{name}.log")
        paths[-1].write_text(text)
    return list(map(str, paths))


def delayed(say: Say, *arguments: str) -> dict[str, Any]:
    """Compare, and return the row of the delayed recipe."""
    code, out, err = say("compare", *arguments, "--json")
    assert code == 0, err
    _, row = json.loads(out)["rows"]
    assert row["variant"] == "delayed"
    return row


def test_runs_that_shared_a_gpu_have_no_speedup_but_keep_their_losses(say: Say, tmp_path: Path) -> None:
    shared = logs(tmp_path, dict.fromkeys(NAMES, "a"))
    row = delayed(say, *shared)
    assert row["speedup"]["value"] is None
    assert row["speedup"]["missing"] == "runs used the same GPU at the same time"
    assert row["validation"]["loss"]["mean"] == 2.261169
    code, out, _ = say("compare", *shared)
    text = " ".join(out.split())
    assert code == 0
    assert "Speeds cannot be compared, because runs used the same GPU at the same time" in text
    assert "bf16: used the same GPU at the same time as delayed_1" in text
    assert "fastest" not in text


def test_force_compares_them(say: Say, tmp_path: Path) -> None:
    row = delayed(say, *logs(tmp_path, dict.fromkeys(NAMES, "a")), "--force")
    assert row["speedup"]["value"] == pytest.approx(0.81, abs=0.01)
    assert "used the same GPU at the same time as bf16_1" in row["notes"]


@pytest.mark.parametrize(
    ("gpus", "delay"),
    [({"bf16_1": "a", "delayed_1": "b"}, 0), (dict.fromkeys(NAMES, "a"), 3600)],
    ids=["other GPUs", "other times"],
)
def test_runs_on_other_gpus_or_at_other_times_are_compared(
    gpus: dict[str, str], delay: float, say: Say, tmp_path: Path
) -> None:
    row = delayed(say, *logs(tmp_path, gpus, delay))
    assert row["speedup"]["value"] == pytest.approx(0.81, abs=0.01)
    assert not [note for note in row["notes"] if "same GPU" in note]


def test_a_copy_of_a_log_is_not_another_run(say: Say, tmp_path: Path) -> None:
    (path,) = logs(tmp_path, {"delayed_1": "a"})
    copy = tmp_path / "copy.log"
    copy.write_bytes(Path(path).read_bytes())
    code, out, err = say("compare", path, str(copy), "--json")
    assert code == 0, err
    assert "same GPU" not in out


@given(
    st.lists(
        st.lists(
            st.builds(
                lambda gpus, began, took: GpuUse(gpus, began, began + took),
                st.frozensets(st.sampled_from("ab"), min_size=1),
                st.integers(1, 60).map(float),
                st.integers(0, 30).map(float),
            ),
            max_size=3,
        ),
        max_size=6,
    )
)
def test_sharers_are_the_pairs_that_overlap(uses: list[list[GpuUse]]) -> None:
    def share(a: GpuUse, b: GpuUse) -> bool:
        both = min(a.ended, b.ended) - max(a.began, b.began)
        shorter = min(a.ended - a.began, b.ended - b.began)
        return bool(a.gpus & b.gpus) and a.began != b.began and both > 0.1 * shorter

    for run, found in enumerate(sharers(uses)):
        others = [other for other in range(len(uses)) if other != run]
        assert found == [other for other in others if any(share(a, b) for a in uses[run] for b in uses[other])]


@pytest.mark.parametrize("time", ["-1", "1e999", f"1{'0' * 400}", "null", '"now"', "[]"])
def test_a_log_with_an_impossible_time_names_no_use(time: str, tmp_path: Path) -> None:
    (path,) = logs(tmp_path, {"delayed_1": "a"})
    log = Path(path)
    log.write_text(re.sub(r'"time":[\d.]+', f'"time":{time}', log.read_text()))
    assert gpu_use(read_log(log)) is None
