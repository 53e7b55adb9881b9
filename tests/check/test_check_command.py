"""`fp8launch check` and what `submit` does with it: exit codes, JSON, folders, what if."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from sets import BF16, DELAYED, MXFP8, TP2, Set

from fp8launch.cli import run

Check = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def command(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that runs one command in this process and returns exit code, JSON (if requested) and stderr."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def call(*arguments: str) -> tuple[int, Any, str]:
        code = run(list(arguments))
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, json.loads(out) if "--json" in arguments else out, err

    return call


def written(folder: Path, name: str, case: Set) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, **case.recipe()}), encoding="utf-8")
    return str(path)


# A small model: what is tested here is not whether it fits.
SMALL = {"num_layers": 4, "global_batch_size": 64}


def test_one_recipe_as_json(command: Check, tmp_path: Path) -> None:
    code, data, _ = command("check", written(tmp_path, "bad", Set({**SMALL, **MXFP8})), "--json")
    assert code == 1
    assert set(data) == {"ok", "problems", "layers", "silenced"}
    assert data["ok"] is False
    [problem] = data["problems"]
    assert set(problem) == {"severity", "code", "message", "where", "fix"}
    assert problem["code"] == "mxfp8-needs-blackwell"
    assert set(data["layers"]) == {"schema", "megatron", "rules", "memory", "machine"}


def test_one_gpu_is_singular(command: Check) -> None:
    _, data, _ = command("check", "tiny_cpu", "--set", "parallel.tp=2", "--json")
    assert [problem["message"][:22] for problem in data["problems"]] == ["1 GPU cannot be divide"]
    _, text, _ = command("estimate", "llama8b_4layers_fp8_h200x1")
    assert "1 GPU for the time limit" in text


def test_warnings_do_not_fail(command: Check, tmp_path: Path) -> None:
    case = Set({**SMALL, **DELAYED, "fp8_amax_history_len": None})
    code, data, _ = command("check", written(tmp_path, "warned", case), "--json")
    assert (code, data["ok"]) == (0, True)
    assert [p["severity"] for p in data["problems"]] == ["warning"]


def test_what_if_it_ran_elsewhere(command: Check, tmp_path: Path) -> None:
    path = written(tmp_path, "mx", Set({**SMALL, **MXFP8}))
    assert command("check", path)[0] == 1
    assert command("check", path, "--gpu", "b200")[0] == 0
    # The environment stays the recipe's: what Blackwell does without, Hopper asks for.
    path = written(tmp_path, "tp", Set({**SMALL, **TP2}, gpu="b200", env={}))
    assert command("check", path)[0] == 0
    code, data, _ = command("check", path, "--gpu", "h100", "--json")
    assert (code, data["problems"][0]["code"]) == (1, "max-connections-not-1")


def test_what_if_it_had_more_nodes(command: Check, tmp_path: Path) -> None:
    case = Set({**SMALL, "num_distributed_optimizer_instances": 8})
    path = written(tmp_path, "instances", case)
    assert command("check", path)[0] == 0
    assert command("check", path, "--nodes", "16")[0] == 0
    more = Set({**SMALL, "num_distributed_optimizer_instances": 16})
    path = written(tmp_path, "more", more)
    assert command("check", path)[0] == 1
    assert command("check", path, "--nodes", "2")[0] == 0


@pytest.mark.needs_plugin("validators")
def test_several_recipes_are_grouped(command: Check, tmp_path: Path) -> None:
    paths = [written(tmp_path, "good", Set(SMALL)), written(tmp_path, "bad", Set({**SMALL, **MXFP8}))]
    code, data, _ = command("check", *paths, "--json")
    assert code == 1
    assert {name: one["ok"] for name, one in data["recipes"].items()} == {paths[0]: True, paths[1]: False}
    assert [p["code"] for p in data["problems"]] == ["mxfp8-needs-blackwell"]
    assert data["layers"]["megatron"] == "ran"


def test_a_folder_is_the_recipes_at_its_top(command: Check, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "parts").mkdir(parents=True)
    written(folder, "one", Set(SMALL))
    written(folder, "two", Set({**SMALL, **BF16}))
    (folder / "parts" / "no_recipe.yaml").write_text("model: {}\n")
    code, data, _ = command("check", str(folder), str(folder / "one.yaml"), "--json")
    assert code == 0
    assert [Path(name).name for name in data["recipes"]] == ["one.yaml", "two.yaml"]
    (tmp_path / "empty").mkdir()
    assert command("check", str(tmp_path / "empty"))[0] == 2


def test_one_that_does_not_parse_leaves_the_others_checked(command: Check, tmp_path: Path) -> None:
    good = written(tmp_path, "good", Set(SMALL))
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: [\n")
    code, data, _ = command("check", good, str(broken), "--json")
    assert code == 2
    assert data["recipes"][good]["ok"]
    assert data["recipes"][str(broken)]["layers"]["rules"].startswith("not run")


def test_people_read_where_what_and_how(command: Check, tmp_path: Path) -> None:
    path = written(tmp_path, "bad", Set({**SMALL, **MXFP8}))
    code, out, err = command("check", path)
    assert code == 1
    line = next(i for i, text in enumerate(Path(path).read_text().splitlines(), 1) if "fp8_recipe" in text)
    assert f"{path}:{line}: error: mxfp8 runs on" in out
    assert "fix: use precision.recipe tensorwise, or one of these GPUs" in out
    assert err == "1 recipe checked, 1 with errors\n"


def test_submit_refuses_what_check_refuses(command: Check, tmp_path: Path) -> None:
    path = written(tmp_path, "bad", Set({**SMALL, **MXFP8}))
    code, _, err = command("submit", path, "--backend", "local", "--run-root", str(tmp_path / "runs"))
    assert code == 1
    assert "mxfp8-needs-blackwell" in err
    assert not (tmp_path / "runs").exists()


def test_what_was_checked_stays_in_the_manifest(command: Check, tmp_path: Path) -> None:
    """A real run on this machine, of a program that ends at once."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "extends: [tiny_cpu]\nname: tiny\nlaunch: {python: /bin/true}\n"
        "megatron: {recompute_num_layers: 1}\n"
        "silence: {flag-without-effect: kept for comparison}\n"
    )
    code, out, err = command("submit", str(recipe), "--backend", "local", "--run-root", str(tmp_path / "runs"))
    assert code == 0, err
    manifest = json.loads((tmp_path / "runs" / out.strip() / "manifest.json").read_text())
    assert manifest["check"]["ok"] is True
    [silenced] = manifest["check"]["silenced"]
    assert silenced["reason"] == "kept for comparison"
    assert "recompute_num_layers" in silenced["message"]
