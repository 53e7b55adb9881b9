"""Huge files of other users, or files that expand when read, are refused quickly and with little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from indexed_files import write_dataset
from limited_command import WRONG, command, sparse, spoil


@pytest.mark.parametrize("kind", WRONG)
def test_check_names_a_manifest_that_is_no_small_file(home: Path, kind: str) -> None:
    dataset = write_dataset(home / "set", [3] * 4)
    spoil(home / "set.manifest.json", kind)
    recipe = home / "r.yaml"
    recipe.write_text(f"extends: tiny_cpu\nname: r\ndata: {{kind: indexed, blend: [{dataset}]}}\n")
    _, said = command(home, "check", recipe)
    assert "[data-manifest-unread]" in said
    assert WRONG[kind] in " ".join(said.split())


@pytest.mark.parametrize("flag", ["data_args_path", "per_split_data_args_path"])
def test_a_list_of_datasets_is_limited(home: Path, flag: str) -> None:
    sparse(home / "blend")
    recipe = home / "r.yaml"
    recipe.write_text(
        f"extends: tiny_cpu\nname: r\ndata: null\nmegatron: {{{flag}: {home}/blend, tokenizer_type: NullTokenizer}}\n"
    )
    status, said = command(home, "check", recipe)
    assert status == 0, said
