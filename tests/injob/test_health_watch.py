"""The job's own look at the health of a training: the same codes as `parse`, while the log grows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import real_logs

from fp8launch.injob.supervisor.health_rules import ACTION_CODES, LIMITS, Event
from fp8launch.injob.supervisor.health_watch import CAUSE, Actions, HealthWatch, event_of, record_of

sys.path.append(str(Path(__file__).parents[1] / "report"))
from test_training_health import BROKEN, HEALTHY

STOP = Actions(dict.fromkeys(ACTION_CODES, "stop"), LIMITS)
# Broken at the end, for good.
LASTING = (
    "zero", "zero from 150", "zero in a short log", "jump", "divergence", "jump in noise", "infinite gradients",
)  # fmt: skip


def watched(folder: Path, log: bytes, piece: int, actions: Actions = STOP) -> Event | None:
    """The first event that a job sees if its log grows by so many bytes at a time."""
    file = folder / "5-0.log"
    file.write_bytes(b"")
    watch = HealthWatch(actions)
    with file.open("ab", buffering=0) as stream:
        for start in range(0, len(log), piece):
            stream.write(log[start : start + piece])
            event = watch.look(file)
            if event is not None:
                return event
    return None


@pytest.mark.parametrize("piece", [997, 1 << 20])
@pytest.mark.parametrize("name", LASTING)
def test_a_job_sees_what_parse_reports(tmp_path: Path, name: str, piece: int) -> None:
    log, code, _, first = BROKEN[name]
    event = watched(tmp_path, log.encode(), piece)
    assert event is not None and event.code == code
    # As soon as it shows, a rise may still be within the usual.
    assert (event.good or 0) + 1 in range(first.start - 2, first.stop + 1)
    assert (event.good or 0) < event.until <= first.stop + 5


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_continues(tmp_path: Path, name: str) -> None:
    assert watched(tmp_path, HEALTHY[name].encode(), 4001) is None


@pytest.mark.parametrize("name", ["one NaN step", "skipped", "constant", "slower"])
def test_a_finding_without_action_does_not_stop_training(tmp_path: Path, name: str) -> None:
    assert watched(tmp_path, BROKEN[name][0].encode(), 997) is None


def test_only_codes_with_an_action_count(tmp_path: Path) -> None:
    log = BROKEN["zero"][0].encode()
    assert watched(tmp_path, log, 997, Actions({"nan": "stop"}, LIMITS)) is None
    assert watched(tmp_path, log, 997, Actions({}, LIMITS)) is None


def test_a_loss_that_megatron_leaves_out_is_nan(tmp_path: Path) -> None:
    """Megatron prints no loss that is NaN, and counts it."""
    lines = [
        f" iteration {i:8d}/     100 |{'' if i > 20 else f' lm loss: {3 - i / 100:.6E} |'} grad norm: {norm} | "
        f"number of skipped iterations:   0 | number of nan iterations: {int(i > 20):3d} |"
        for i, norm in ((i, "nan" if i > 20 else "0.5") for i in range(1, 30))
    ]
    event = watched(tmp_path, "\n".join(lines).encode(), 333)
    assert event is not None
    assert (event.code, event.good, event.until) == ("nan", 20, 21)


def test_the_record_in_the_log_is_read_again() -> None:
    for event in (Event("nan", "words: with a colon", 12, 14), Event("loss-jump", "words", None, 3)):
        assert event_of(CAUSE, record_of(event), "", STOP) == event
    assert event_of("exception", record_of(event), "", STOP) is None
    assert event_of(CAUSE, "fp8launch: unhealthy: of an earlier version", "", STOP) is None


def test_no_real_log_is_stopped(tmp_path: Path) -> None:
    logs = [log for kind in ("runs", "h200") for log in sorted(real_logs(kind).glob("*.log"))]
    assert len(logs) > 5
    stopped = [log.name for log in logs if watched(tmp_path, log.read_bytes(), 1 << 12)]
    assert stopped == [], "none is broken for two lines in a row"
