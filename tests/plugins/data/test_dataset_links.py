"""Links that another user made in a folder of theirs do not bring this user's private files into a dataset."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_files import NEEDS_ROOT, give_away

Say = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT)


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
