"""Secrets: which variables hold one, and that no file or command line of ours ever does.

A job gets them by name, from the environment of the shell that submits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping

from fp8launch.problems import error

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, SLURM_JWT and their like.
_NAMES = re.compile(
    r"(.*_)?(TOKEN|API_?KEY|(ACCESS|SECRET|PRIVATE|STORAGE|ACCOUNT)_?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|"
    r"CREDENTIALS?|JWT)",
    re.I,
)
# What is shorter stands in many texts by chance.
_SHORTEST = 8
# Secrets that show by themselves: of Hugging Face, OpenAI, GitHub, GitLab, NGC, AWS, Slack, Google; in URLs; keys.
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{20,}|\bnvapi-[\w-]{20,}|\bAKIA[A-Z0-9]{16}\b|\bxox[abpr]-[\w-]{10,}|\bAIza[\w-]{35}"
    r"|(?<=://)[^/\s:@]*:[^/\s:@]+(?=@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(.|\n)*?-----END [A-Z ]*PRIVATE KEY-----"
)
HIDDEN = "(hidden by fp8launch)"


def names_a_secret(name: str) -> bool:
    """By its name the variable holds a secret."""
    return _NAMES.fullmatch(name) is not None


def secrets_of(declared: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The secrets of this shell by variable: those that a recipe declares, and those that are named like one."""
    env = os.environ if environment is None else environment
    wanted = {*declared, *filter(names_a_secret, env)}
    return {name: env[name] for name in sorted(wanted) if len(env.get(name, "")) >= _SHORTEST}


def refuse_secrets(texts: Mapping[str, str], declared: Iterable[str] = ()) -> None:
    """Raises UserError when one of the texts, by what they are, holds a secret of this shell."""
    for name, value in secrets_of(declared).items():
        forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        for what, text in texts.items():
            if any(form in text for form in forms):
                raise error(
                    "secret-in-run",
                    f"the value of {name} would stand in {what}",
                    "the recipe, the cluster profile or the command line",
                    f"take it out there and list {name} under `secrets:`: it reaches the job by its name",
                )


def redacted(text: str, declared: Iterable[str] = ()) -> str:
    """A text that others wrote, such as a diff, without the secrets of this shell and what looks like one."""
    for value in sorted(secrets_of(declared).values(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)
