"""The configuration that names the command of notifications must be this user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_files import WAYS_TO_SPOIL, Spoil

from fp8launch.plugins.notify.notify import load_config

Say = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("spoil", WAYS_TO_SPOIL)
@pytest.mark.parametrize("words", [("submit", "tiny_cpu", "--backend", "local", "--yes"), ("resume", "a-run")])
def test_a_configuration_that_names_a_command_is_one_s_own(
    say: Say, home: Path, words: tuple[str, ...], spoil: Spoil
) -> None:
    """The command of notifications would run as this user; nothing is submitted before it is refused."""
    folder = home / ".config/fp8launch"
    folder.mkdir(parents=True)
    file = folder / "config.yaml"
    file.write_text("notify: {command: [touch, canary]}\n")
    assert load_config().notify.command == ["touch", "canary"]
    spoil(folder, file)
    code, _, err = say(*words, "--wait")
    assert (code, "[not-yours]" in err, str(file) in err) == (2, True, True)
    assert not list(home.rglob("manifest.json"))
