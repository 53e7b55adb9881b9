"""Secrets reach a job by name, and stand in no file, command line or log of ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.secrecy import HIDDEN, names_a_secret, redacted, secrets_of

Say = Callable[..., tuple[int, str, str]]
Write = Callable[[str, str], str]
VALUE = "s3cret-Value/with+signs"
LOCAL = ("--backend", "local", "--set", "launch.python=/bin/true")


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """A usual secret in the shell that submits; no recipe speaks of it."""
    monkeypatch.setenv("HF_TOKEN", VALUE)
    return VALUE


def holding(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "WANDB_API_KEY", "NGC_CLI_API_KEY", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT")
        ),
        *(
            (name, True)
            for name in ("OPENAI_API_KEY", "DB_PASSWORD", "TOKEN", "hf_token", "GOOGLE_CREDENTIALS", "X_APIKEY")
        ),
        *(
            (name, False)
            for name in ("TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "AWS_ACCESS_KEY_ID", "KEYBOARD", "MAX_TOKENS")
        ),
    ],
)
def test_usual_names(name: str, secret: bool) -> None:
    assert names_a_secret(name) is secret


def test_a_short_or_empty_value_is_none_to_look_for() -> None:
    assert secrets_of(["A", "B"], {"A": "1", "HF_TOKEN": "", "B": "long enough"}) == {"B": "long enough"}


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY"])
@pytest.mark.parametrize("verb", ["render --as sbatch", "submit --dry-run"])
def test_a_recipe_with_a_secret_in_it_is_refused(say: Say, write: Write, name: str, verb: str) -> None:
    file = write("mine.yaml", f"extends: tiny_cpu\nname: mine\nenv:\n  A: b\n  {name}: {VALUE}\n")
    first, *rest = verb.split()
    code, out, err = say(first, file, *rest)
    assert (code, "[secret-in-env]" in err, f"{file}:5" in err, VALUE in out + err) == (
        2 if first == "render" else 1,  # the check's answer
        True,
        True,
        False,
    )
    assert "secrets:" in err


def test_a_cluster_profile_with_a_secret_in_it_is_refused(say: Say, write: Write) -> None:
    file = write("c.yaml", f"env: {{HF_TOKEN: {VALUE}}}\n")
    code, _, err = say("render", "tiny_cpu", "--as", "sbatch", "--cluster", file)
    assert (code, "[secret-in-env]" in err) == (2, True)


@pytest.mark.parametrize("more", [(), ("--over", "megatron.seed=1,2", "--yes", "--wait")])
@pytest.mark.parametrize("key", ["env.A", "description", "notes"])
def test_a_secret_on_the_command_line_is_written_nowhere(
    say: Say, token: str, home: Path, key: str, more: tuple[str, ...]
) -> None:
    code, _, err = say(
        "submit", "tiny_cpu", *LOCAL, "--set", f"{key}=[x{token}]" if key == "notes" else f"{key}=x{token}", *more
    )
    assert (code, "[secret-in-run]" in err, "HF_TOKEN" in err, token in err) == (2, True, True, False)
    assert holding(home, token) == []


def test_a_secret_that_is_only_in_the_shell_stands_nowhere(say: Say, token: str, home: Path) -> None:
    for command in (("submit", "tiny_cpu", *LOCAL, "--wait"), ("runs", "--json"), ("doctor",), ("doctor", "--json")):
        _, out, err = say(*command)
        assert token not in out + err
    assert list((home / "runs").glob("*/manifest.json"))
    assert holding(home, token) == []


def test_a_diff_of_the_checkout_is_kept_without_secrets(
    say: Say, token: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")):
        monkeypatch.setenv(name, value)
    folder = tmp_path / "checkout"
    folder.mkdir()
    recipe = folder / "mine.yaml"
    recipe.write_text("extends: tiny_cpu\nname: mine\n")
    mine = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*mine, *words], check=True)
    other = "hf_" + "Ab1" * 10
    recipe.write_text(f"extends: tiny_cpu\nname: mine\n# {token} {other} https://me:pass-word@host/x\n")
    assert say("submit", str(recipe), *LOCAL, "--wait")[0] == 0
    diff = next((home / "runs").glob("*/git.diff")).read_text()
    assert diff.count(HIDDEN) == 3
    assert holding(home / "runs", token) == holding(home / "runs", other) == holding(home / "runs", "pass-word") == []


def test_what_is_no_secret_stays_in_a_diff() -> None:
    text = "+ lr: 3.0e-4\n+ url: https://host/x@y\n+ mail: a@b\n+ --hf-path /a/hf_model\n"
    assert redacted(text) == text


def test_ssh_is_given_no_secret_as_a_word(say: Say, token: str, write: Write, home: Path) -> None:
    profile = write("far.yaml", "ssh: {host: nowhere.invalid}\n")
    code, _, err = say("--at", profile, "submit", "tiny_cpu", "--set", f"env.A={token}")
    assert (code, "[secret-in-run]" in err, token in err) == (2, True, False)


def test_a_job_gets_its_secret_by_name(say: Say, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way on this machine: in the process, and in no file."""
    monkeypatch.setenv("X_TOKEN", VALUE)
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\nprintf %s "$X_TOKEN" | tr a-z A-Z\n')
    script.chmod(0o755)
    submit = ("submit", "tiny_cpu", "--backend", "local", "--wait", "--set", "secrets=[X_TOKEN]")
    assert say(*submit, "--set", f"launch.python={script}")[0] == 0
    log = next((home / "runs").glob("*/logs/*.log")).read_text()
    assert VALUE.upper() in log
    assert holding(home, VALUE) == []
    assert os.environ["X_TOKEN"] == VALUE
