"""With `--json` every command prints one JSON value on stdout, whether it answers, refuses or is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import said

from fp8launch import cli

Ask = Callable[..., Any]


def with_json(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if any(parameter.name == "as_json" for parameter in command.params):
            yield (*words, name)
        if isinstance(command, click.Group):
            yield from with_json(command, (*words, name))


@pytest.fixture
def ask(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Runs a command; returns the one JSON value on its stdout."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)

    def call(*words: object, expect: int = 0) -> Any:
        return json.loads(said(capfd, *words, expect=expect).out)

    return call


def refused(answer: Any) -> dict[str, str]:
    """The only problem of an answer."""
    assert answer["ok"] is False
    (problem,) = answer["problems"]
    assert set(problem) == {"severity", "code", "message", "where", "fix"}
    return dict(problem)


@pytest.mark.parametrize("words", list(with_json(cli.cli)), ids=" ".join)
def test_every_command_answers_wrong_usage_in_json(ask: Ask, words: tuple[str, ...]) -> None:
    problem = refused(ask(*words, "--json", "--no-such-option", expect=2))
    assert problem["code"] == "usage" and "--no-such-option" in problem["message"]
    assert problem["where"] == " ".join(("fp8launch", *words))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("submit none.yaml", "recipe-not-found"),
        ("submit tiny_cpu --dry-run --set resources.nodes=two", "bad-value"),
        pytest.param("estimate none.yaml", "recipe-not-found", marks=pytest.mark.needs_plugin("estimate")),
        pytest.param("diff tiny_cpu none.yaml", "recipe-not-found", marks=pytest.mark.needs_plugin("diff")),
        ("render none.yaml", "recipe-not-found"),
        pytest.param(
            "plan nothing_known --gpu h100 --gpus 8", "recipe-not-found", marks=pytest.mark.needs_plugin("plan")
        ),
        ("check tiny_cpu --cluster none.yaml", "file-not-found"),
        ("recipes tiny_cpv", "recipe-not-found"),
        ("parse none.log", "path-not-found"),
        pytest.param("data inspect none", "data-missing", marks=pytest.mark.needs_plugin("data")),
    ],
)
def test_what_is_refused_is_said_in_json(ask: Ask, line: str, code: str) -> None:
    assert refused(ask(*line.split(), "--json", expect=2))["code"] == code


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/x"), 3, "machine"),
        (ValueError("wrong"), 1, "bug"),
    ],
)
def test_what_ends_a_command_is_said_in_json(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, code: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.delenv("FP8LAUNCH_TRACEBACK", raising=False)
    monkeypatch.setattr("fp8launch.cli.recipes.prepare", fail)
    assert refused(ask("recipes", "tiny_cpu", "--json", expect=status))["code"] == code


@pytest.mark.parametrize(("form", "key", "begin"), [("sbatch", "script", "#!/bin/bash"), ("yaml", "yaml", "name: ")])
def test_a_rendered_text_is_a_value(ask: Ask, form: str, key: str, begin: str) -> None:
    assert ask("render", "tiny_cpu", "--as", form, "--json")[key].startswith(begin)


def test_a_dry_run_of_a_run_holds_its_script(ask: Ask, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("submit", "tiny_cpu", "--backend", "sbatch", "--dry-run")
    found = ask(*words, "--json")
    assert cli.run([*words]) == 0
    assert len(found["script"].splitlines()) == len(capfd.readouterr().out.splitlines())
    assert found["script"].startswith("#!/bin/bash\n") and "#SBATCH --nodes=1" in found["script"]
    (point,) = found["points"]
    assert (point["nodes"], point["gpus_per_node"], point["gpu"]) == (1, 1, "cpu")


def test_a_dry_run_of_a_study_holds_its_points(ask: Ask) -> None:
    found = ask("submit", "tiny_cpu", "--sweep", "batch.global=8,16", "--backend", "sbatch", "--dry-run", "--json")
    assert found["script"] is None
    assert [point["global_batch"] for point in found["points"]] == [8, 16]
