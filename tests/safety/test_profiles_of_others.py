"""Cluster profiles that a name leads to must be this user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_files import WAYS_TO_SPOIL, Spoil

Say = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("name", ["default", "site"])
@pytest.mark.parametrize("spoil", WAYS_TO_SPOIL)
def test_a_profile_that_a_name_leads_to_is_one_s_own(
    say: Say, home: Path, monkeypatch: pytest.MonkeyPatch, name: str, spoil: Spoil
) -> None:
    """It holds shell lines; a shared XDG_CONFIG_HOME would hand them to whoever can write there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    folder = home / "config/fp8launch/clusters"
    folder.mkdir(parents=True)
    file = folder / f"{name}.yaml"
    file.write_text("setup: [touch canary]\n")
    words = ("render", "tiny_cpu", "--as", "sbatch", *(() if name == "default" else ("--cluster", name)))
    assert say(*words)[0] == 0
    spoil(folder, file)
    code, _, err = say(*words)
    assert (code, "[not-yours]" in err, "--cluster" in err) == (2, True, True)
    assert say("render", "tiny_cpu", "--as", "sbatch", "--cluster", str(file))[0] == 0


def test_a_profile_named_by_its_path_is_read(say: Say, home: Path) -> None:
    file = home / "theirs.yaml"
    file.write_text("setup: [module load cuda]\n")
    file.chmod(0o666)
    code, out, _ = say("render", "tiny_cpu", "--as", "sbatch", "--cluster", str(file))
    assert (code, "module load cuda" in out) == (0, True)
