"""Which checkpoint a start may read: real ones of Megatron, broken in the ways in which a power cut breaks them."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fp8launch.injob.supervisor import checkpoints

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 2, 4 and 6 of the tiny recipe, written by Megatron."""
    root = tmp_path_factory.mktemp("real")
    checkpoint = [f"checkpoint.dir={root}/ckpt", "checkpoint.interval=2", "train.iterations=6"]
    sets = [word for one in checkpoint for word in ("--set", one)]
    command = [sys.executable, "-m", "fp8launch", "submit", "tiny_cpu", "--backend", "local", "--wait", *sets]
    env = {**os.environ, "HOME": str(root), "FP8LAUNCH_RUNS": str(root / "runs")}
    subprocess.run(command, env=env, check=True, timeout=120, capture_output=True)
    return root / "ckpt"


@pytest.fixture
def folder(real: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(real, tmp_path / "ckpt"))


def test_whole_checkpoints_are_left_alone(folder: Path) -> None:
    assert checkpoints.iterations(folder) == [2, 4, 6]
    assert [checkpoints.torn(checkpoints.place(folder, i)) for i in (2, 4, 6)] == [None, None, None]
    assert checkpoints.repair(folder) == []
    assert checkpoints.latest(folder) == 6


@pytest.mark.parametrize("victim", [".metadata", "metadata.json", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short"])
def test_a_torn_checkpoint_is_never_the_one_to_start_from(folder: Path, victim: str, damage: str) -> None:
    file = checkpoints.place(folder, 6) / victim
    if damage == "missing":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    told = checkpoints.repair(folder)
    assert checkpoints.latest(folder) == 4, told
    assert "checkpoint 6 is torn" in told[0]
    assert "continuing from 4" in told[1]


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_job_that_is_killed_while_bridge_writes_its_last_file(folder: Path, damage: str) -> None:
    """Bridge 0.6.2 writes run_config.yaml after its tracker, and fails at each resume if the file is empty."""
    for iteration in (4, 6):
        (checkpoints.place(folder, iteration) / "train_state.pt").write_bytes(b"state")
        (checkpoints.place(folder, iteration) / "run_config.yaml").write_text("model: {}\n")
    assert checkpoints.repair(folder) == []
    config = checkpoints.place(folder, 6) / "run_config.yaml"
    config.write_text("")
    if damage == "missing":
        config.unlink()
    assert "run_config.yaml" in checkpoints.repair(folder)[0]
    assert checkpoints.latest(folder) == 4


@pytest.mark.parametrize("name", [7, None, b"a", "a" * 300])
def test_metadata_that_names_no_file_is_damage(tmp_path: Path, name: object) -> None:
    piece = types.SimpleNamespace(relative_path=name, offset=0, length=1)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(types.SimpleNamespace(storage_data={"x": piece})))
    (tmp_path / "metadata.json").write_text("{}")
    said = checkpoints.torn(tmp_path) or ""
    assert "has metadata that cannot be read" in said or said == f"{name!s} is missing"


def test_a_lack_of_memory_does_not_make_the_training_start_over(folder: Path) -> None:
    """Metadata with an array of 2^60 bytes is a MemoryError on every machine."""
    metadata = checkpoints.place(folder, 6) / ".metadata"
    metadata.write_bytes(b"\x80\x05\x96" + (1 << 60).to_bytes(8, "little") + b".")
    assert "out of memory" in str(checkpoints.torn(checkpoints.place(folder, 6)))
    assert checkpoints.repair(folder)[0].endswith("the checkpoints are left as they are")
    with pytest.raises(OSError, match="out of memory"):
        checkpoints.prune(folder, 1)
    assert checkpoints.latest(folder) == 6


def test_a_file_with_the_words_of_a_lack_of_memory_in_its_name_is_missed(folder: Path) -> None:
    piece = types.SimpleNamespace(relative_path="out of memory.distcp", offset=0, length=1)
    metadata = pickle.dumps(types.SimpleNamespace(storage_data={"weight": piece}))
    (checkpoints.place(folder, 6) / ".metadata").write_bytes(metadata)
    assert "out of memory.distcp is missing" in checkpoints.repair(folder)[0]
    assert checkpoints.latest(folder) == 4


def test_a_tracker_that_is_garbage_is_set_right(folder: Path) -> None:
    (folder / checkpoints.TRACKER).write_text("")
    checkpoints.repair(folder)
    assert checkpoints.latest(folder) == 6


def test_a_tracker_that_is_missing_is_written_again(folder: Path) -> None:
    (folder / checkpoints.TRACKER).unlink()
    for part in checkpoints.place(folder, 6).glob("*.distcp"):
        part.write_bytes(b"")
    told = checkpoints.repair(folder)
    assert checkpoints.latest(folder) == 4
    assert told == [f"{checkpoints.TRACKER} is missing", "continuing from 4, the newest complete checkpoint"]


def test_a_first_save_that_was_cut_off_is_no_checkpoint(folder: Path) -> None:
    (folder / checkpoints.TRACKER).unlink()
    for iteration in (2, 4, 6):
        (checkpoints.place(folder, iteration) / ".metadata").unlink()
    assert checkpoints.repair(folder) == []
    assert checkpoints.latest(folder) == 0


def test_without_a_whole_one_the_run_starts_over(folder: Path) -> None:
    for iteration in (2, 4, 6):
        (checkpoints.place(folder, iteration) / ".metadata").unlink()
    assert "starting over" in checkpoints.repair(folder)[-1]
    assert not (folder / checkpoints.TRACKER).exists()


def test_a_newer_folder_that_the_tracker_does_not_name_is_not_taken(folder: Path) -> None:
    """A save that was cut off: Megatron writes the tracker last."""
    checkpoints.point_at(folder, 4)
    (checkpoints.place(folder, 6) / ".metadata").unlink()
    assert checkpoints.repair(folder) == []
    assert checkpoints.latest(folder) == 4


def test_older_ones_go_only_once_a_newer_one_is_whole(folder: Path) -> None:
    (checkpoints.place(folder, 6) / ".metadata").unlink()
    assert checkpoints.prune(folder, 1) == []
    checkpoints.repair(folder)
    assert checkpoints.prune(folder, 1) == [2]
    assert checkpoints.iterations(folder) == [4, 6]
    assert checkpoints.prune(folder, 1) == []


def test_metadata_runs_nothing(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode()
    (checkpoints.place(folder, 6) / ".metadata").write_bytes(text)
    assert checkpoints.torn(checkpoints.place(folder, 6)) is not None
    assert not canary.exists()


# Runs one function on the folder, under errors that strace injects.
_CALL = """
import sys
from pathlib import Path
from fp8launch.injob.supervisor import checkpoints
checkpoints.PAUSES = (0, 0, 0)
try:
    for one in getattr(checkpoints, sys.argv[1])(Path(sys.argv[2]), *map(int, sys.argv[3:])):
        print(one)
except OSError as problem:
    print("refused:", problem)
"""


def under_error(error: str, file: Path, *words: str) -> list[str]:
    """Call a function of `checkpoints` while every access to a file fails, or only the first (`error:when=1`)."""
    strace = ["strace", "-f", "-o", "/dev/null", "-P", str(file), "-e", f"inject=openat,newfstatat,stat:error={error}"]
    command = [*strace, sys.executable, "-c", _CALL, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split("\n")[:-1]


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the errors")


@needs_strace
@pytest.mark.parametrize("error", ["EIO", "ESTALE", "EACCES"])
@pytest.mark.parametrize("victim", [checkpoints.TRACKER, "iter_0000006", "iter_0000006/.metadata"])
def test_an_error_that_lasts_changes_no_checkpoint(folder: Path, victim: str, error: str) -> None:
    before = sorted(folder.rglob("*"))
    [told] = under_error(error, folder / victim, "repair", str(folder))
    assert told.endswith("the checkpoints are left as they are")
    assert sorted(folder.rglob("*")) == before and checkpoints.latest(folder) == 6


@needs_strace
@pytest.mark.parametrize("victim", [checkpoints.TRACKER, "iter_0000006", "iter_0000006/.metadata"])
def test_an_error_that_passes_is_not_noticed(folder: Path, victim: str) -> None:
    assert under_error("EIO:when=1", folder / victim, "repair", str(folder)) == []
    assert checkpoints.latest(folder) == 6


@needs_strace
def test_a_folder_that_cannot_be_read_is_not_empty(folder: Path) -> None:
    (checkpoints.place(folder, 6) / ".metadata").unlink()
    [told] = under_error("EIO", folder, "repair", str(folder))
    assert told.endswith("the checkpoints are left as they are") and checkpoints.latest(folder) == 6


@needs_strace
def test_a_damaged_newest_checkpoint_is_no_reason_to_give_up_one_that_cannot_be_read(folder: Path) -> None:
    (checkpoints.place(folder, 6) / ".metadata").unlink()
    metadata = checkpoints.place(folder, 4) / ".metadata"
    [told] = under_error("EIO", metadata, "repair", str(folder))
    assert told.endswith("the checkpoints are left as they are") and checkpoints.latest(folder) == 6
    assert "continuing from 4" in under_error("EIO:when=1", metadata, "repair", str(folder))[1]


@needs_strace
def test_what_cannot_be_read_is_not_removed(folder: Path) -> None:
    metadata = checkpoints.place(folder, 4) / ".metadata"
    assert under_error("ESTALE", metadata, "prune", str(folder), "2")[0].startswith("refused:")
    assert checkpoints.iterations(folder) == [2, 4, 6]
    assert under_error("ESTALE:when=1", metadata, "prune", str(folder), "2") == ["2"]


@needs_strace
def test_a_tracker_that_cannot_be_read_does_not_name_a_new_run(folder: Path) -> None:
    assert under_error("EIO", folder / checkpoints.TRACKER, "latest", str(folder))[0].startswith("refused:")


def test_whoever_shares_the_folder_may_save_the_next_checkpoint(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        checkpoints.point_at(tmp_path, 4)
    finally:
        os.umask(before)
    assert (tmp_path / checkpoints.TRACKER).stat().st_mode & 0o777 == 0o664
