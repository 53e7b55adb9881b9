"""Links that another user made in a folder of theirs do not bring this user's private files into a dataset or model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.injob.ownership import leads_elsewhere
from fp8launch.plugins.convert.injob.convert import files_to_copy

Say = Callable[..., tuple[int, str, str]]
OTHER, THIRD = 54321, 54322

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def secret(home: Path) -> Path:
    file = home / "private" / "secret.jsonl"
    file.parent.mkdir(mode=0o700)
    file.write_text('{"text": "my secret"}\n')
    return file


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


def give_away(folder: Path, owner: int = OTHER) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)


def build(say: Say, home: Path, *sources: Path) -> tuple[int, str, str]:
    return say(
        "data", "build", *map(str, sources), "--tokenizer", "bytes", "--out", str(home / "out"), "--workers", "1"
    )


@pytest.mark.parametrize("place", ["folder", "file", "further link"])
def test_a_linked_private_file_does_not_become_data(
    say: Say, home: Path, theirs: Path, secret: Path, place: str
) -> None:
    (theirs / "a.jsonl").write_text('{"text": "theirs"}\n')
    target = secret
    if place == "further link":
        target = home / "mine"
        target.symlink_to(secret)
    (theirs / "b.jsonl").symlink_to(target)
    give_away(theirs)
    source = theirs
    if place == "file":
        source = theirs / "b.jsonl"
    code, _, err = build(say, home, source)
    assert (code, "[data-source]" in err, "is a link of the user 54321" in err) == (2, True, True)
    assert not (home / "out.bin").exists()


@pytest.mark.parametrize(
    "name", ["../home/private/secret.jsonl", "SECRET", "sub/../../home/private/secret.jsonl", ".."]
)
def test_a_saved_dataset_lists_files_of_its_folder_only(
    say: Say, home: Path, theirs: Path, secret: Path, name: str
) -> None:
    (theirs / "sub").mkdir()
    (theirs / "state.json").write_text(json.dumps({"_data_files": [{"filename": name.replace("SECRET", str(secret))}]}))
    give_away(theirs)
    code, _, err = say(
        "data", "build", str(theirs), "--format", "jsonl", "--tokenizer", "bytes", "--out", str(home / "out")
    )
    assert (code, "[data-source]" in err) == (2, True)
    assert not (home / "out.bin").exists()


def test_links_to_files_of_their_owner_are_followed(say: Say, home: Path, theirs: Path, tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub, whose snapshots are links to blobs."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "0").write_text('{"text": "theirs"}\n')
    (theirs / "a.jsonl").symlink_to(blobs / "0")
    give_away(theirs)
    give_away(blobs)
    assert build(say, home, theirs)[0] == 0


def test_own_links_are_followed(say: Say, home: Path, theirs: Path, secret: Path) -> None:
    (theirs / "a.jsonl").symlink_to(secret)
    assert build(say, home, theirs)[0] == 0


@pytest.mark.parametrize(
    ("owner", "target_owner", "mode", "refused"),
    [
        (OTHER, 0, 0o600, True),  # this test's own user is root
        (OTHER, 0, 0o644, True),  # the folders above may be closed to others
        (OTHER, OTHER, 0o600, False),
        (OTHER, THIRD, 0o640, True),
        (OTHER, 2, 0o644, False),
        (OTHER, 2, 0o640, True),
        (2, THIRD, 0o600, False),
        (0, OTHER, 0o600, False),
    ],
)
def test_whose_links_are_followed(tmp_path: Path, owner: int, target_owner: int, mode: int, refused: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch()
    target.chmod(mode)
    link.symlink_to(target)
    os.chown(target, target_owner, -1)
    os.chown(link, owner, -1, follow_symlinks=False)
    assert (leads_elsewhere(link) is not None) is refused
    assert leads_elsewhere(target) is None


# --- files beside the weights of a converted model --------------------------------------------------------------------


@pytest.fixture
def model(theirs: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "modeling_x.py", "model.safetensors"):
        (theirs / name).write_text("{}")
    return theirs


def test_programs_of_others_are_not_copied(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {file.name for file in files_to_copy(model)} == {"config.json", "tokenizer.json", "modeling_x.py"}
    give_away(model)
    assert {file.name for file in files_to_copy(model)} == {"config.json", "tokenizer.json"}
    assert "modeling_x.py is left out" in capsys.readouterr().err


def test_a_linked_private_file_is_not_copied(model: Path, secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "tokenizer_config.json").symlink_to(secret)
    give_away(model)
    with pytest.raises(SystemExit) as stopped:
        files_to_copy(model)
    assert stopped.value.code == 2
    assert "is a link of the user 54321 to a file of" in capsys.readouterr().err
