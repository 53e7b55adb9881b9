"""Secrets reach a job by name, and stand in no file, command line or log of ours."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch import plugin_registry
from fp8launch.secrets import HIDDEN, holds_credentials, names_a_secret, redacted, secret_in, secrets_of

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


SECRET_NAMES = [
    "HF_TOKEN", "WANDB_API_KEY", "NGC_CLI_API_KEY", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "OPENAI_API_KEY", "TOKEN",
    "DB_PASSWORD", "hf_token", "GOOGLE_CREDENTIALS", "X_APIKEY", "DEPLOY_KEY", "SIGNING_KEY", "GITHUB_TOKENS",
    "MY_SECRETS", "PASSPHRASE", "SSH_PASSPHRASE", "X_JWT", "WANDB_KEY", "OPENAI_KEY", "PGPASSWORD", "GITHUB_PAT",
    "SSHPASS", "HF_TOKEN_WRITE", "MYSQL_PWD", "AZURE_STORAGE_CONNECTION_STRING", "AWS_SECRET", "HF_TOKENS",
    "REGISTRY_AUTH", "WANDB_API_KEY_2", "SLACK_WEBHOOK_URL", "HFTOKEN", "SENTRY_DSN", "DB_PASS",
]  # fmt: skip
ORDINARY_NAMES = [
    "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "AWS_ACCESS_KEY_ID", "KEYBOARD", "MAX_TOKENS", "PWD", "OLDPWD", "KEY",
    "SSH_AUTH_SOCK", "HF_TOKEN_PATH", "PUBLIC_KEY", "NCCL_IB_PKEY", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "GIT_AUTHOR_NAME",
    "XAUTHORITY", "MONKEY", "TOKENS", "GIT_ASKPASS", "NVTE_FUSED_ATTN", "CUDA_DEVICE_MAX_CONNECTIONS",
    "PAD_TOKEN", "lr_warmup_tokens",
]  # fmt: skip
# Each made up, in the form that its issuer uses.
SHAPED = [
    "hf_AbCdEfGhIjKlMnOpQrStUvWx", "sk-proj-abcdefghijklmnopqrstuvwx", "ghp_" + "aB1" * 12, "glpat-" + "aB1" * 8,
    "nvapi-" + "aB1" * 10, "AKIA" + "ABCD" * 4, "xoxb-1234567890-abcdefghij", "AIza" + "aB1d5" * 7,
    "https://hooks.slack.com/services/T0000/B0000/abcdefghijkl", "AccountKey=" + "aB1d" * 22, "pypi-" + "aB1d5" * 12,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijk", "npm_" + "aB1d" * 9, "dckr_pat_" + "aB1d5" * 5,
    "hvs." + "aB1d5" * 5, "gsk_" + "aB1d5" * 8, "https://user:pass-word@host/x", "docker://user:p/w@reg/x",
    "Authorization: Bearer abcdefgh", "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----",
    "https://a.blob.core.windows.net/c?sv=1&sig=abcdefghijklmnopqrstuvwx%3D", "SG." + "a" * 22 + "." + "b" * 43,
]  # fmt: skip
ORDINARY_TEXTS = [
    "docker://ubuntu:22.04@sha256:" + "a" * 64, "docker://reg.corp:5000/team/image:1@v", "https://host/x@y", "a@b",
    "http://proxy:3128/x@y", "https://${USER}:${TOKEN}@host/x", "https://user@host/x", "sk-learn", "hf_model", "b" * 40,
    "/a/eyJ/b", "seq_length=8192 tokens=4096", "99,1,0", "NCCL_IB_HCA=mlx5_0:1,mlx5_1:1",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_names_of_other_things(name: str) -> None:
    assert not names_a_secret(name)


@pytest.mark.parametrize("text", SHAPED)
def test_a_secret_shows_by_its_form(text: str) -> None:
    assert secret_in(text) and secret_in(f"a text with {text} inside")
    assert text not in redacted(f"+ {text}\n") and HIDDEN in redacted(f"+ {text}\n")


@pytest.mark.parametrize("text", ORDINARY_TEXTS)
def test_ordinary_texts_hold_no_secret(text: str) -> None:
    assert secret_in(text) is None
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('password = "hunter2"', "password = "), ("API_KEY=abcd1234", "API_KEY="), ('"apiKey": "zzz"', '"apiKey": '),
        ("run --password hunter2 --lr 3e-4", "--lr 3e-4"), ("Server=a;Password=xyz;User=b", ";User=b"),
        ("db_password: 'x y'", "db_password: "), ("export WANDB_KEY=abc", "export WANDB_KEY="),
    ],
)  # fmt: skip
def test_what_is_assigned_to_the_name_of_a_secret_is_hidden(text: str, kept: str) -> None:
    assert secret_in(text, assignments=True)
    assert HIDDEN in redacted(text) and kept in redacted(text)
    assert not [word for word in ("hunter2", "abcd1234", "zzz", "xyz", "x y", "=abc") if word in redacted(text)]


@pytest.mark.parametrize(
    "text",
    ["export WANDB_KEY=$(cat key)", "TOKEN=${HF_TOKEN}", "PASSWORD=", "max_tokens: 4096", "secrets: [HF_TOKEN]",
     "key = value", "for token in tokens:", "the password is in the vault", "HF_HUB_DISABLE_IMPLICIT_TOKEN=1"],
)  # fmt: skip
def test_a_reference_to_a_secret_is_none(text: str) -> None:
    assert secret_in(text, assignments=True) is None
    assert redacted(text) == text


@pytest.mark.parametrize(
    "piece", ["://a:", "a", "-----BEGIN PRIVATE KEY-----", "eyJ", "eyJaaaaaaaaaa.", "password", "token= ", 'token="',
              "hf_", "- -a ", "AKIA", "/api/webhooks/1", "authorization: basic "],
)  # fmt: skip
def test_no_text_takes_long_to_search(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    before = time.process_time()
    redacted(text)
    secret_in(text)
    assert time.process_time() - before < 5


@pytest.mark.parametrize("path", [".env", "a/.env.local", "id_rsa", ".aws/credentials", "x.pem", "secrets/a.txt",
                                  "conf/Credentials.json", ".netrc", "kubeconfig", "token"])  # fmt: skip
def test_files_that_hold_credentials(path: str) -> None:
    assert holds_credentials(path)


@pytest.mark.parametrize("path", ["", "a.yaml", "environment.yaml", "tokenizer.py", "keys.py", "src/secrets.py"])
def test_files_that_do_not(path: str) -> None:
    assert not holds_credentials(path)


def test_a_short_or_empty_value_is_none_to_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"A": "1", "HF_TOKEN": "", "B": "long enough"})
    assert secrets_of(["A", "B"]) == {"B": "long enough"}


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


@pytest.mark.parametrize(
    "text",
    [
        "env: {FOO: hf_AbCdEfGhIjKlMnOpQrStUvWx}", "env: {PIP_INDEX_URL: 'https://user:c4n4ry@pypi.corp/simple'}",
        "description: uses hf_AbCdEfGhIjKlMnOpQrStUvWx", "container: {image: 'docker://user:c4n4ry@reg.corp/team/i:1'}",
        "notes: [a, 'b glpat-aB1aB1aB1aB1aB1aB1aB1']", "megatron: {wandb_project: nvapi-aB1aB1aB1aB1aB1aB1aB1}",
        "secrets: [hf_AbCdEfGhIjKlMnOpQrStUvWx]", "env: {GITHUB_PAT: c4n4ry}",
        "phases: {a: {iterations: 5, env: {SSHPASS: c4n4ry}}, b: {}}\ncheckpoint: {dir: c, interval: 5}",
    ],
)  # fmt: skip
def test_a_secret_anywhere_in_a_recipe_is_refused_with_its_place(say: Say, write: Write, home: Path, text: str) -> None:
    file = write("mine.yaml", f"extends: tiny_cpu\nname: mine\n{text}\n")
    code, _, err = say("submit", file, *LOCAL, "--wait")
    codes = ("[secret-in-recipe]", "[secret-in-env]", "[password-in-uri]")
    assert (code, any(one in err for one in codes), f"{file}:3" in err) == (1, True, True)
    assert not holding(home, "c4n4ry") + holding(home, "hf_AbCd")
    assert say("render", file, "--as", "sbatch")[0] == 2


@pytest.mark.parametrize(
    "text",
    [
        'setup: ["export WANDB_API_KEY=c4n4ry"]', "options: {comment: 'token hf_AbCdEfGhIjKlMnOpQrStUvWx'}",
        "images: {a: 'docker://user:c4n4ry@reg.corp/x'}", "description: sk-proj-abcdefghijklmnopqrstuvwx",
        "env: {OPENAI_KEY: c4n4ry}",
    ],
)  # fmt: skip
def test_a_secret_anywhere_in_a_cluster_profile_is_refused(say: Say, write: Write, text: str) -> None:
    code, _, err = say("render", "tiny_cpu", "--as", "sbatch", "--cluster", write("c.yaml", text + "\n"))
    assert (code, "[secret-in-recipe]" in err or "[secret-in-env]" in err) == (2, True)
    assert "cluster profile: " + text.partition(":")[0] in err


def test_a_setup_line_may_read_a_secret_from_its_file(say: Say, write: Write) -> None:
    profile = write("c.yaml", "setup: ['export WANDB_API_KEY=$(cat ~/.wandb)', 'export HF_TOKEN=${MY_TOKEN}']\n")
    assert say("render", "tiny_cpu", "--as", "sbatch", "--cluster", profile)[0] == 0


@pytest.mark.parametrize("form", ["base64", "percent", "percent, more than needed", "quotes", "short"])
def test_a_secret_in_another_form_is_found(
    say: Say, home: Path, monkeypatch: pytest.MonkeyPatch, write: Write, form: str
) -> None:
    value, text = {
        "base64": ("abcd-efgh-ijkl", base64.b64encode(b"abcd-efgh-ijkl").decode()),
        "percent": ("abcd/efgh+ijkl", "abcd%2Fefgh%2Bijkl"),
        "percent, more than needed": ("abcd-efgh-ijkl", "abcd%2Defgh%2dijkl"),
        "quotes": ("q'u\"o\\te-é-12345", "q'u\"o\\te-é-12345"),
        "short": ("shrt123", "shrt123"),
    }[form]
    monkeypatch.setenv("HF_TOKEN", value)
    file = write("mine.yaml", f"extends: tiny_cpu\nname: mine\nenv: {{A: {json.dumps(text)}}}\n")
    code, _, err = say("submit", file, *LOCAL, "--wait")
    assert (code, "[secret-in-run]" in err, "HF_TOKEN" in err) == (2, True, True)
    assert holding(home, text) == []


@pytest.mark.parametrize("more", [(), ("--sweep", "megatron.seed=1,2", "--yes", "--wait")])
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
    commands = [("submit", "tiny_cpu", *LOCAL, "--wait"), ("runs", "--json"), ("doctor",), ("doctor", "--json")]
    for command in (words for words in commands if words[0] not in plugin_registry.absent("commands")):
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
    (folder / ".env").write_text("SOMETHING=c4n4ry-1\n")
    (folder / "settings.py").write_text("DB_PASSWORD = 'c4n4ry-2'\nAPI_KEY='c4n4ry-3'\n")
    subprocess.run([*mine, "add", "-f", "."], check=True)
    assert say("submit", str(recipe), *LOCAL, "--wait")[0] == 0
    file = next((home / "runs").glob("*/git.diff"))
    assert file.stat().st_mode & 0o777 == 0o600
    diff = file.read_text()
    assert diff.count(HIDDEN) == 5
    assert holding(home / "runs", "c4n4ry") == []
    assert holding(home / "runs", token) == holding(home / "runs", other) == holding(home / "runs", "pass-word") == []


def test_what_is_no_secret_stays_in_a_diff() -> None:
    text = "+ lr: 3.0e-4\n+ url: https://host/x@y\n+ mail: a@b\n+ --hf-path /a/hf_model\n"
    assert redacted(text) == text


@pytest.mark.needs_plugin("ssh")
def test_ssh_is_given_no_secret_as_a_word(say: Say, token: str, write: Write, home: Path) -> None:
    profile = write("far.yaml", "ssh: {host: nowhere.invalid}\n")
    code, _, err = say("--remote", profile, "submit", "tiny_cpu", "--set", f"env.A={token}")
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
