"""Links in folders of other users: whose are followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8launch.injob.ownership import leads_elsewhere

OTHER, THIRD = 54321, 54322

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


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
