"""Secrets: one table of the names, shapes and files that hold them, used wherever fp8launch writes, reads or prints.

A job gets its secrets by name, from the environment of the shell that submits; no file, command line or log of
fp8launch holds one. Names are judged word by word. Shapes are the prefixes and forms that issuers give their tokens
(after the plugins of Yelp's detect-secrets and the issuers' own pages). Every pattern is bounded, so that a text of
some megabytes is searched in seconds, with any content.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import PurePosixPath
from urllib.parse import quote as percent_encoded
from urllib.parse import unquote as percent_decoded

from fp8launch.diagnostics import error

HIDDEN = "(hidden by fp8launch)"

# --- names ------------------------------------------------------------------------------------------------------------

# HF_TOKEN, AWS_SECRET_ACCESS_KEY, dbPassword: a name with one of these words holds a secret, in the plural too.
_SECRET_WORDS = {
    "APIKEY", "CONNSTR", "CRED", "CREDENTIAL", "CREDS", "DSN", "JWT", "PASSCODE", "PASSPHRASE", "PASSWD", "PASSWORD",
    "PWD", "SECRET", "TOKEN", "WEBHOOK",
}  # fmt: skip
# These too, but alone they are ordinary words.
_WEAK_WORDS = {"AUTH", "COOKIE", "KEY", "PASS", "PAT"}
# PGPASSWORD, HFTOKEN, SSHPASS: such a word may be the end of a longer one.
_ENDINGS = ("APIKEY", "PASSPHRASE", "PASSWD", "PASSWORD", "PWD", "SECRET", "SSHKEY", "SSHPASS", "TOKEN")
# AWS_ACCESS_KEY_ID, HF_TOKEN_PATH: the last word says that the name holds something about a secret.
_ABOUT = {
    "ALGORITHM", "CLASS", "COUNT", "DIR", "DISPATCHER", "ENABLED", "ENDPOINT", "EXPIRY", "FILE", "FILES", "FOLDER",
    "FORMAT", "HELPER", "HOST", "ID", "IDS", "INDEX", "LEN", "LENGTH", "LIMIT", "METHOD", "MODE", "NAME", "NAMES",
    "PARALLELISM", "PATH", "PATHS", "PATTERN", "POLICY", "PORT", "PREFIX", "PROVIDER", "SIZE", "SOCK", "STORE",
    "SUFFIX", "TTL", "TYPE", "URI", "URL", "VERSION",
}  # fmt: skip
# MAX_TOKENS, PUBLIC_KEY, PAD_TOKEN, HF_HUB_DISABLE_IMPLICIT_TOKEN: tokens and keys of other kinds, and settings.
_OTHER_KINDS = {
    "BACKWARD", "BOS", "BWD", "CACHE", "DECAY", "DISABLE", "DISPATCH", "DROP", "ENABLE", "EOD", "EOS", "FIM", "FORWARD",
    "FWD", "IMPLICIT", "MASK", "MAX", "MIN", "NUM", "PAD", "PER", "PRIMARY", "PUBLIC", "QUERY", "SEQ", "SORT",
    "SPECIAL", "TOTAL", "TRAIN", "UNK", "USE", "VALUE", "WARMUP",
}  # fmt: skip
# Bash sets COMP_KEY to the key that requested a completion.
_NOT_SECRET = {"CWD", "OLDPWD", "PWD", "TOKENS", "COMP_KEY"}
# A word of a name: in capitals, in camel case, or between underscores and dashes.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def names_a_secret(name: str) -> bool:
    """Return whether a variable, key or option of this name holds a secret."""
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or "_".join(words) in _NOT_SECRET:
        return False
    if "WEBHOOK" in words or ("CONNECTION", "STRING") in pairwise(words):
        return True
    if words[-1] in _ABOUT or not _OTHER_KINDS.isdisjoint(words):
        return False
    return any(map(_is_secret_word, words)) or (len(words) > 1 and any(map(_is_weak_word, words)))


def _is_secret_word(word: str) -> bool:
    return _singular(word) in _SECRET_WORDS or _singular(word).endswith(_ENDINGS)


def _is_weak_word(word: str) -> bool:
    return word in _WEAK_WORDS or _singular(word) in _WEAK_WORDS


def _singular(word: str) -> str:
    if word.endswith("SS"):
        return word
    return word.removesuffix("S")


# --- shapes -----------------------------------------------------------------------------------------------------------

# Secrets that show by their form, whatever their name: words of which a text must have one, and the pattern.
_SHAPES: dict[str, tuple[str, str]] = {
    "a Hugging Face token": ("hf_", r"\bhf_[A-Za-z0-9]{20,256}"),
    "an API key of OpenAI or Anthropic": ("sk-", r"\bsk-[A-Za-z0-9_-]{20,512}"),
    "a GitHub token": ("ghp_ gho_ ghu_ ghs_ ghr_", r"\bgh[pousr]_[A-Za-z0-9]{20,256}"),
    "a fine-grained GitHub token": ("github_pat_", r"\bgithub_pat_\w{20,256}"),
    "a GitLab token": (
        "glpat- gldt- glft- glsoat- glrt- glcbt- glimt- glptt- glagent- gloas-",
        r"\bgl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[\w-]{20,1024}",
    ),
    "an NVIDIA API key": ("nvapi-", r"\bnvapi-[\w-]{20,256}"),
    "a Weights & Biases key": ("wandb_v", r"\bwandb_v[0-9]_\w{20,256}"),
    "an AWS access key": ("A3T ABIA ACCA AKIA ASIA", r"\b(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[A-Z0-9]{16}\b"),
    "a Slack token": ("xox xapp-", r"\bx(?:ox[aboprs]|app)-[\w-]{10,512}"),
    "a Slack webhook": ("hooks.slack.com/", r"(?<=hooks\.slack\.com/)(?:services|workflows)/[\w/-]{20,256}"),
    "a Discord webhook": ("/api/webhooks/", r"(?<=/api/webhooks/)[0-9]{10,30}/[\w-]{20,256}"),
    "a Teams webhook": ("webhook.office.com/", r"(?<=webhook\.office\.com/)[\w/@-]{20,512}"),
    "a Google API key": ("AIza", r"\bAIza[\w-]{35}"),
    "a Google OAuth token": ("ya29.", r"\bya29\.[\w-]{20,1024}"),
    "a Google client secret": ("GOCSPX-", r"\bGOCSPX-[\w-]{20,64}"),
    "an Azure key": ("Key=", r"(?<=Key=)[\w+/]{40,256}={0,2}"),
    "the signature of an Azure URL": ("sig=", r"(?<=[?&]sig=)[\w%+/=-]{20,512}"),
    "the signature of an AWS URL": ("X-Amz-Signature=", r"(?<=X-Amz-Signature=)[0-9a-f]{32,256}"),
    "a JSON web token": ("eyJ", r"\beyJ[\w-]{10,4096}\.eyJ[\w-]{10,4096}(?:\.[\w-]{0,4096})?"),
    "a PyPI token": ("pypi-", r"\bpypi-[\w-]{50,512}"),
    "an npm token": ("npm_", r"\bnpm_[A-Za-z0-9]{36}"),
    "an npm login": ("_authToken=", r"(?<=_authToken=)[\w-]{20,256}"),
    "a Docker token": ("dckr_", r"\bdckr_(?:pat|oat)_[\w-]{20,256}"),
    "a HashiCorp token": ("hvs. hvb. hvr.", r"\bhv[sbr]\.[\w-]{20,512}"),
    "a Databricks token": ("dapi", r"\bdapi[0-9a-f]{32}\b"),
    "a Groq API key": ("gsk_", r"\bgsk_[A-Za-z0-9]{40,64}"),
    "a Replicate token": ("r8_", r"\br8_[A-Za-z0-9]{30,64}"),
    "an xAI API key": ("xai-", r"\bxai-[A-Za-z0-9]{40,128}"),
    "a SendGrid key": ("SG.", r"\bSG\.[\w-]{22}\.[\w-]{43}"),
    "a Stripe key": ("k_live_ k_test_", r"\b[rs]k_(?:live|test)_[0-9A-Za-z]{24,256}"),
    "a Square secret": ("sq0csp-", r"\bsq0csp-[\w-]{43}"),
    "a Twilio key": ("SK", r"\bSK[0-9a-f]{32}\b"),
    "a Mailchimp key": ("-us", r"\b[0-9a-f]{32}-us[0-9]{1,2}\b"),
    "a Telegram token": (":AA", r"\b[0-9]{8,10}:AA[\w-]{33}\b"),
    "an age key": ("AGE-SECRET-KEY-1", r"\bAGE-SECRET-KEY-1[A-Z0-9]{20,128}"),
    "an authorization header": (
        "uthorization:",
        r"(?i:(?<=authorization: basic )|(?<=authorization: bearer )|(?<=authorization: token ))(?!\$)\S{6,4096}",
    ),
    # Not the port of a host, not the digest of an image, not a variable; a careless password may hold a slash.
    "a login in a URL": (
        "://",
        r"(?<=://)[^/\s:@\"']{0,256}:(?![0-9]{1,5}(?:/|$))(?!\$)[^\s:@\"']{1,256}(?=@(?!sha256:))",
    ),
    "a private key": (
        "PRIVATE",
        r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----(?:[^-]|-(?!----)){0,20000}"
        r"(?:-----END [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----)?",
    ),
}


def _patterns_for(text: str) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Return the patterns that may match in a text. Searching for a word first is fast, and compiles only these."""
    for kind, (needles, pattern) in _SHAPES.items():
        if any(map(text.__contains__, needles.split())):
            yield kind, re.compile(pattern)


# NAME=value, "name": "value", --name value: whether it is a secret is decided by the name.
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?:(?P<option>--?[A-Za-z][\w.-]{1,100})[ \t]{1,4}(?=[^\s=:-])"
    r"|(?P<name>-{0,2}[A-Za-z_][\w.-]{1,100})[\"']?[ \t]{0,16}(?:=|:=|:|=>)[ \t]{0,16})"
    r"(?P<value>\"[^\"\n]{1,4096}\"?|'[^'\n]{1,4096}'?|[^\s\"'(){}\[\],;&|<>`]{1,4096})"
)
# A reference to a secret is none, nor is a word that no issuer would give out.
_PLACEHOLDER = re.compile(
    r"\$.*|%.*%|<.*>|\*+|x+|\.\.\.|[0-9]{1,6}|true|false|yes|no|on|off|none|null|auto|required|optional|str|bytes", re.I
)


def secret_in(text: str, assignments: bool = False) -> str | None:
    """Return the kind of secret that a text contains, recognized by its form; None for none.

    With `assignments`, also find values assigned to secret names, as in a line of shell.
    """
    for kind, pattern in _patterns_for(text):
        if pattern.search(text):
            return kind
    if not assignments:
        return None
    for match in _ASSIGNED.finditer(text):
        if _assigns_a_secret(match):
            return f"the value of {match['option'] or match['name']}"
    return None


def is_secret(name: str, value: object) -> bool:
    """Return whether a variable holds a secret: by its value, or by its name unless the value is a setting (`1`)."""
    if value is None:
        return False
    return _is_secret_by_name(name, str(value)) or secret_in(str(value)) is not None


def _assigns_a_secret(match: re.Match[str]) -> bool:
    return _is_secret_by_name(match["option"] or match["name"], match["value"].strip("\"'"))


def _is_secret_by_name(name: str, value: str) -> bool:
    return names_a_secret(name) and value != "" and not _PLACEHOLDER.fullmatch(value)


# --- files ------------------------------------------------------------------------------------------------------------

# Files and folders that hold credentials by convention, in lower case.
_CREDENTIAL_FILES = (
    ".env", ".env.*", "*.env", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ovpn",
    "*.asc", "*.gpg", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*_rsa", "*_ed25519", ".netrc", "_netrc",
    ".pypirc", ".npmrc", ".yarnrc*", ".pgpass", ".my.cnf", ".htpasswd", ".git-credentials", ".s3cfg", ".boto",
    ".dockercfg", ".dockerconfigjson", "rclone.conf", "kubeconfig*", "*.kubeconfig", "*.tfvars", "*.tfstate*",
    "credentials", "credentials.*", ".credentials", "*credentials*.json", "client_secret*", "service-account*.json",
    "secret", "secrets", "secret.*", "secrets.*", "*.secret", "*.secrets", "token", "token.txt", "*.token",
    "stored_tokens", "password*", "passwd", "*.password",
)  # fmt: skip
_CREDENTIAL_FOLDERS = frozenset(
    (".ssh", ".aws", ".gnupg", ".kube", ".docker", ".azure", ".gcloud", ".oci", "secrets", ".secrets", ".huggingface")
)
_SOURCE_CODE = (".c", ".cc", ".cpp", ".cu", ".go", ".h", ".js", ".md", ".py", ".rs", ".rst", ".sh", ".ts")


def holds_credentials(path: str) -> bool:
    """Return whether a file of this path holds credentials by convention."""
    file = PurePosixPath(path.lower())
    if not _CREDENTIAL_FOLDERS.isdisjoint(file.parent.parts):
        return True
    if file.name.endswith(_SOURCE_CODE):
        return False
    return any(fnmatchcase(file.name, pattern) for pattern in _CREDENTIAL_FILES)


# --- secrets of this shell --------------------------------------------------------------------------------------------


def secrets_of(declared: Iterable[str]) -> dict[str, str]:
    """Return the secrets of this shell by variable: the declared ones, and variables with the name of a secret."""
    stated = set(declared)
    found = {}
    for name in sorted({*stated, *filter(names_a_secret, os.environ)}):
        value = os.environ.get(name, "")
        if _can_be_found(value, name in stated):
            found[name] = value
    return found


def _can_be_found(value: str, declared: bool) -> bool:
    """Return whether a value is long enough to search for: shorter ones occur in unrelated texts by coincidence."""
    shortest = 8
    if re.search(r"[0-9]", value) and re.search(r"[A-Za-z]", value):
        shortest = 6
    if len(value) < shortest:
        return False
    # The path of a key is not a secret.
    return declared or not (value.startswith(("/", "~")) and os.path.lexists(os.path.expanduser(value)))  # noqa: PTH111


def _forms(value: str) -> Iterator[str]:
    """Yield the forms of a value in files and commands that fp8launch writes, and in usual encodings."""
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield value.replace("'", "'\"'\"'")  # between the single quotes of a shell
    yield percent_encoded(value, safe="", errors="replace")
    yield base64.b64encode(value.encode(errors="surrogateescape")).decode().rstrip("=")


def refuse_secrets(texts: Mapping[str, str], declared: Iterable[str] = ()) -> None:
    """Raise UserError if a text contains a secret, or what looks like one. `texts` maps descriptions to texts."""
    for name, value in secrets_of(declared).items():
        forms = set(_forms(value))
        for what, text in texts.items():
            # Any character may be percent-encoded, in either case.
            if any(map(text.__contains__, forms)) or ("%" in text and value in percent_decoded(text)):
                raise error(
                    "secret-in-run",
                    f"the value of {name} would be written to {what}",
                    "the recipe, the cluster profile or the command line",
                    f"remove it there and list {name} under `secrets:`: the job gets it by name",
                )
    for what, text in texts.items():
        if kind := secret_in(text):
            raise error(
                "secret-in-run",
                f"{kind} would be written to {what}",
                "the recipe, the cluster profile or the command line",
                "remove it there, export it as a variable in your shell, and list its name under `secrets:`",
            )


def redacted(text: str, declared: Iterable[str] = ()) -> str:
    """Return a text, such as a diff, without the secrets of this shell and anything that looks like one."""
    for value in sorted(secrets_of(declared).values(), key=len, reverse=True):
        for form in set(_forms(value)):
            text = text.replace(form, HIDDEN)
    for _, pattern in _patterns_for(text):
        text = pattern.sub(HIDDEN, text)
    return _ASSIGNED.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    if HIDDEN.startswith(match["value"]) or not _assigns_a_secret(match):
        return match[0]
    return match[0][: match.start("value") - match.start()] + HIDDEN
