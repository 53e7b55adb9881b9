"""Values are data: no shell, no git and no Slurm command reads them as anything else."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.job.build_job import plan
from fp8launch.job.prepared import prepare
from fp8launch.schedulers.local import local_script
from fp8launch.schedulers.slurm.batch_script import batch_script
from fp8launch.submit.checkout import checkout_of

Say = Callable[..., tuple[int, str, str]]


def test_bash_does_run_what_a_number_has_in_brackets(tmp_path: Path) -> None:
    """Why Slurm's variables are refused: the script reckons with them."""
    word = f"a[$(touch {tmp_path}/canary)]"
    subprocess.run(["bash", "-c", "export N=$1; echo $((20000 + N % 10))", "x", word], check=True, capture_output=True)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name",
    ["SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "BASH_ENV", "ENV", "IFS", "PS4", "PROMPT_COMMAND"],
)
@pytest.mark.parametrize("where", ["recipe", "profile"])
def test_variables_that_shells_run_or_reckon_with_are_refused(say: Say, tmp_path: Path, name: str, where: str) -> None:
    text = f"env: {{{name}: 'a[$(touch {tmp_path}/canary)]'}}\n"
    (tmp_path / "r.yaml").write_text("extends: tiny_cpu\nname: r\n" + (text if where == "recipe" else ""))
    (tmp_path / "c.yaml").write_text(text if where == "profile" else "{}\n")
    submit = ("submit", str(tmp_path / "r.yaml"), "--backend", "local", "--cluster", str(tmp_path / "c.yaml"))
    code, _, err = say(*submit)
    assert (code, "[reserved-variable]" in err, name in err) == (1, True, True)  # the check's answer
    assert not (tmp_path / "canary").exists()


# Every variable of bash's manual up to 5.3, and some that other programs read.
MANUAL = """
    BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_COMPAT BASH_ENV
    BASH_EXECUTION_STRING BASH_LINENO BASH_LOADABLES_PATH BASH_MONOSECONDS BASH_REMATCH BASH_SOURCE BASH_SUBSHELL
    BASH_TRAPSIG BASH_VERSINFO BASH_VERSION BASH_XTRACEFD CDPATH CHILD_MAX COLUMNS COMPREPLY COMP_CWORD COMP_KEY
    COMP_LINE COMP_POINT COMP_TYPE COMP_WORDBREAKS COMP_WORDS COPROC DIRSTACK EMACS ENV EPOCHREALTIME EPOCHSECONDS EUID
    EXECIGNORE FCEDIT FIGNORE FUNCNAME FUNCNEST GLOBIGNORE GLOBSORT GROUPS HISTCMD HISTCONTROL HISTFILE HISTFILESIZE
    HISTIGNORE HISTSIZE HISTTIMEFORMAT HOME HOSTFILE HOSTNAME HOSTTYPE IFS IGNOREEOF INPUTRC INSIDE_EMACS LANG LC_ALL
    LC_COLLATE LC_CTYPE LC_MESSAGES LC_NUMERIC LC_TIME LINENO LINES MACHTYPE MAIL MAILCHECK MAILPATH MAPFILE OLDPWD
    OPTARG OPTERR OPTIND OSTYPE PIPESTATUS POSIXLY_CORRECT PPID PROMPT_COMMAND PROMPT_DIRTRIM PS0 PS1 PS2 PS3 PS4 PWD
    RANDOM READLINE_ARGUMENT READLINE_LINE READLINE_MARK READLINE_POINT REPLY SECONDS SHELL SHELLOPTS SHLVL SRANDOM
    TEXTDOMAIN TEXTDOMAINDIR TIMEFORMAT TMOUT TMPDIR TZ UID USER auto_resume histchars _ FP8LAUNCH_HOME
    FP8LAUNCH_LOCAL_RUN SLURM_CONF SLURM_JOB_NAME SLURM_NNODES SLURM_NTASKS attempt begun code environment home hosts
    image job megatron_args name phase python reached run_folder runs status
""".split()  # noqa: SIM905


def typed_variables() -> set[str]:
    """The variables that the bash of this machine makes numbers, lists or read-only as it starts."""
    shown = subprocess.run(["bash", "-c", "declare -p"], env={}, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^declare -[a-zA-Z]*[irAa][a-zA-Z]* (\w+)", shown, re.M))


def planned_with(folder: Path, name: str, value: str) -> tuple[str, str]:
    """The scripts of a run whose recipe sets one variable. Raises UserError where that is refused."""
    recipe = folder / "r.yaml"
    recipe.write_text(f"extends: tiny_cpu\nname: r\nlaunch: {{python: {folder}/bin/srun}}\n")
    prepared = prepare(str(recipe), [f"env.{name}={json.dumps(value)}"])
    job = plan(prepared, Cluster(), folder / "run", runtime="none", check_paths=False)
    return batch_script(job), local_script(job)


@pytest.mark.parametrize("name", sorted({*MANUAL, *typed_variables()}))
def test_a_variable_is_refused_or_arrives_and_is_never_run(tmp_path: Path, name: str) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    # A program's first environment, before its shell has read any of it.
    (tools / "srun").write_text(f"#!/bin/sh\ncat /proc/$$/environ > {tmp_path}/got\n")
    (tools / "scontrol").write_text("#!/bin/sh\necho node-a\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    outer = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node-a"}
    for value in (f"BASH_VERSINFO[$(touch {tmp_path}/canary)]", "two words; 'quoted'", "7"):
        try:
            scripts = planned_with(tmp_path, name, value)
        except UserError as refused:
            assert {problem.code for problem in refused.problems} == {"reserved-variable"}
            assert name not in ("HOME", "LANG", "TMPDIR", "TZ", "USER"), "programs need to be told these"
            continue
        assert name not in typed_variables()
        for script in scripts:
            (tmp_path / "got").unlink(missing_ok=True)
            file = tmp_path / "script"
            file.write_text(script)
            done = subprocess.run(["bash", str(file)], env=outer, cwd=tmp_path, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, b""), done.stderr
            got = (tmp_path / "got").read_bytes().split(b"\0")
            assert os.fsencode(f"{name}={value}") in got
            assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["SLURM_CPU_BIND", "SLURM_MPI_TYPE", "OMP_NUM_THREADS"])
def test_other_variables_of_slurm_may_be_set(say: Say, name: str) -> None:
    assert say("render", "tiny_cpu", "--as", "sbatch", "--set", f"env.{name}=1")[0] == 0


@pytest.mark.parametrize("option", ["array", "wrap", "wait", "parsable", "test-only"])
def test_options_that_would_hide_a_job_from_us_are_refused(say: Say, tmp_path: Path, option: str) -> None:
    (tmp_path / "c.yaml").write_text(f"options: {{{option}: '1'}}\n")
    code, _, err = say("render", "tiny_cpu", "--as", "sbatch", "--cluster", str(tmp_path / "c.yaml"))
    assert (code, "[reserved-option]" in err) == (2, True)


def test_git_runs_nothing_of_a_foreign_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unpacked archive with a .git of its own: filters, text conversion and file system monitors are programs."""
    for name, value in (("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")):
        monkeypatch.setenv(name, value)
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "r.yaml").write_text("name: r\n")
    mine = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*mine, *words], check=True)
    (folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    run = f"sh -c 'touch {tmp_path}/canary; cat'"
    settings = {
        "filter.evil.clean": run, "filter.evil.smudge": run, "filter.evil.required": "true", "diff.evil.textconv": run,
        "diff.evil.command": run, "core.fsmonitor": run, "diff.external": run, "core.pager": run,
    }  # fmt: skip
    for name, value in settings.items():
        subprocess.run([*mine, "config", name, value], check=True)
    (folder / "r.yaml").write_text("name: other\n")
    state, diff = checkout_of(folder / "r.yaml")
    assert state is not None and state["dirty"]
    assert "+name: other" in diff
    assert not (tmp_path / "canary").exists()


def test_a_path_may_begin_with_a_dash(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-x.yaml").write_text("extends: tiny_cpu\nname: x\n")
    assert say("render", "--", "-x.yaml")[0] == 0
