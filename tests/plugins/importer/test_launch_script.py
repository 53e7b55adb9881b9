"""Launch scripts are read as bash would read them, and nothing in them is ever run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.importer import shell_commands
from fp8launch.plugins.importer.from_argv import import_text
from fp8launch.plugins.importer.launch_script import read_launch
from fp8launch.plugins.importer.shell_interpreter import read_list, read_script

SCRIPTS = sorted((Path(__file__).with_name("data") / "scripts").glob("*.sh"))
SCHEMA = load_schema("0.19")


def imported(script: str) -> tuple[str, list[Problem]]:
    return import_text(script, "job.sh", None)


def argv(script: str) -> list[str]:
    return list(read_launch(script, "job.sh", SCHEMA).argv)


def told(script: str) -> list[str]:
    return [f"{p.where}: {p.message}" for p in read_launch(script, "job.sh", SCHEMA).problems]


# --- whole scripts


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_realistic_scripts(path: Path, golden: Callable[[str, str], None]) -> None:
    text, problems = import_text(path.read_text(encoding="utf-8"), path.name, None)
    golden(f"import_{path.stem}.yaml", text)
    golden(f"import_{path.stem}.txt", "".join(f"{problem}\n" for problem in problems))
    assert "doNotCopyMe" not in text + str(problems)


# --- words, held against bash

_SNIPPETS = [
    """printf '%s\\0' a  "b c" 'd  e' f\\ g "" x''y # comment""",
    """A="1 2"; printf '%s\\0' $A "$A" '$A' ${A} "${A}b" a${A}b""",
    """A=(x "y z" ''); printf '%s\\0' "${A[@]}" ${A[@]} "${A[*]}" $A ${A[1]} "p${A[@]}q" "${A[0]}"-""",
    """A=(); A+=(1 2); A+=("3 4"); B=x; B+=y; printf '%s\\0' "${A[@]}" $B "${NONE[@]:-none}" """,
    """printf '%s\\0' "${X:-d e}" ${X:-d e} ${X:-"d e"} "${X:-}" "a${X-}b" """,
    """X=; printf '%s\\0' "${X:-d}" "${X-d}" "${X:+set}" "${X+set}" ${X} "$X" """,
    """: ${N:=4}; printf '%s\\0' $N "$((N * 2))" $((N+1)) $(( (N - 5) * 7 / 2 )) $((-7 % 3)) """,
    """printf '%s\\0' one \\
      two\\
three "f\\
ive" $'a\\tb\\n' $"loc" """,
    """A='it'"'"'s'; printf '%s\\0' "$A" "\\$A" "\\"q\\"" "a\\b" \\\\ 'a\\b' "!" '#' a#b""",
    """if [[ x == x && -n "y" ]]; then A=1; elif [ 1 = 2 ]; then A=2; else A=3; fi; printf '%s\\0' $A""",
    """if [ "a" != "a" ] || [ 3 -lt 2 ]; then A=1; else A=2; fi; [ -z "" ] && B=3 || B=4; printf '%s\\0' $A $B""",
    """T=fp8; case $T in bf16) A=1 ;; fp4|fp8) A=2 ;; *) A=3 ;; esac; printf '%s\\0' $A""",
    """f() { A=in; local B=loc; }; function g { A+=$A; }; f; g; printf '%s\\0' "$A" """,
    """A=1; ( A=2; B=3 ); printf '%s\\0' "$A" "${B:-none}" """,
    """A="x y"; eval "B=\\"$A\\"; C='\\$A'"; printf '%s\\0' "$B" "$C" """,
    """O=" --a 1 \\
    --b '2' "; printf '%s\\0' ${O} """,
    """cat > /dev/null <<EOF
A=9 'unbalanced
EOF
A=1; printf '%s\\0' $A 2>&1 >&1""",
    """export A=1 B="2 3"; bash -c 'printf "%s\\0" $A "$B" $((A+1))'""",
    """declare -a L=(1 2); readonly R=5; unset L; printf '%s\\0' "${L[@]:-gone}" $R""",
    """A=(--x 1 # why
      # --y 2
      --z "3;4|5&6"
    ); printf '%s\\0' "${A[@]}" ; true && printf '' || false""",
    """A=1; printf '%s\\0' {a,b}{1..3} x{,y} {a} {,} {a,{b,c}d} {05..1..2} "{a,b}" {a,'b c'}d {3..1} \\
      {a..e..2} {-01..1} {1..2""",
    """A="x y"; B=(p/{q,r} ${A}{1,2}); printf '%s\\0' "${B[@]}" {${A},"$A"}z a{b,c {d,e} \\
      {0.5,/a,0.5,/b} ${A}{,} {x,y}""",
    """set -e; [[ ! ( a == b ) ]] && printf '%s\\0' "é ü" "日本" """,
]


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize("snippet", _SNIPPETS)
def test_words_are_those_of_bash(snippet: str) -> None:
    ran = subprocess.run(["bash", "-c", snippet], capture_output=True, env={"LC_ALL": "C.UTF-8"}, timeout=20)
    assert ran.returncode == 0, ran.stderr
    expected = ran.stdout.decode().split("\0")[:-1]
    found = [c.words for c in read_script(snippet, "x", {}).commands if c.words[0] == "printf" and len(c.words) > 2]
    assert [word for words in found for word in words[2:]] == expected


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Co"], exclude_characters="\0\r"), max_size=12), min_size=1
    )
)
def test_quoted_words_arrive_as_they_are(words: list[str]) -> None:
    line = " ".join(map(shlex.quote, words))
    assert read_list(f"--x {line}", "x")[0][1:] == words
    assert list(read_script(f'A=({line})\ncommand "${{A[@]}}"', "x", {}).commands[0].words[1:]) == words


@settings(max_examples=300)
@given(st.text(alphabet="ab=$({[]})'\"`\\ \n;|&<>#-!*@0+:?", max_size=60) | st.text(max_size=60))
def test_any_text_ends_in_words_or_a_clear_error(text: str) -> None:
    try:
        import_text(text, "x", None)
    except UserError as exc:
        assert exc.problems


@pytest.mark.parametrize(
    "text",
    [
        "$(" * 50_000,
        "${a:-" * 5_000 + "}" * 5_000,
        "if true; then " * 3_000,
        "( " * 5_000,
        "A=aaaaaaaaaa\n" + "A=$A$A$A$A\n" * 40 + "run --num-layers $A",
        "f() { f; f; }\nf\n",
        "A=(x x)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40,
        "x " * (1 << 20),
        "eval 'eval \"eval x\"'\n" * 100,
        "run " + "{" * 200_000,
        "run " + "{a" * 100_000 + "}" * 100_000,
        "run " + "{a," * 5_000 + "}" * 5_000,
        "run " + "{a,b}" * 64,
        "run {1..999999999}",
    ],
    ids=lambda text: text[:10],
)
def test_text_made_to_exhaust_the_reader_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        import_text(text, "x", None)
    assert all(len(str(problem)) < 2000 for problem in caught.value.problems)


# --- nothing runs

_TRAPS = """
A=$(touch CANARY)
B=`touch CANARY`
C=$((x[$(touch CANARY)]))
D=${Z:-$(touch CANARY)}
eval "touch CANARY"
cat <(touch CANARY) > CANARY
bash -c 'touch CANARY'
touch CANARY; exec touch CANARY
cat > CANARY <<EOF
$(touch CANARY)
EOF
python pretrain_gpt.py --num-layers $(touch CANARY; echo 2) --hidden-size $((a[$(touch CANARY)])) \\
    --save "$(touch CANARY)" --bf16 --lr `touch CANARY` --load ${D} \\
    --split '$(touch CANARY)' --data-path "$A" ; touch CANARY
"""

_GUARD = """
import sys, pathlib
from fp8launch.plugins.importer.from_argv import import_text
text = pathlib.Path(sys.argv[1]).read_text()
import_text("--bf16", "warm", None)
def guard(event, args):
    if event.startswith(("subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system", "socket.", "exec")):
        print("DID", event, args)
    if event == "open" and (args[1] is None or set(str(args[1])) & set("wax+")):
        print("OPENED", args)
sys.addaudithook(guard)
print(import_text(text, "job.sh", None)[0])
"""


def test_nothing_is_run_or_written(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(_TRAPS.replace("CANARY", str(tmp_path / "canary")), encoding="utf-8")
    command = [sys.executable, "-c", _GUARD, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "DID" not in ran.stdout and "OPENED" not in ran.stdout
    assert "precision: {recipe: bf16}" in ran.stdout and "$(touch" in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["job.sh"]
    # The trap would catch something: a shell that runs the script leaves the canary.
    subprocess.run(["bash", str(script)], cwd=tmp_path, capture_output=True, timeout=60)
    assert (tmp_path / "canary").exists()


# --- what cannot be known

_NOT_SET = "is not set in the script"
_CONDITION = "A=... of line {} depends on a condition that is not known here"


@pytest.mark.parametrize(
    ("before", "arguments", "kept", "message"),
    [
        ("", "--bf16 --lr $LR", "--bf16", "1: `--lr $LR` is omitted: $LR of line 1 " + _NOT_SET),
        ("", "--bf16 $EXTRA", "--bf16", "1: `$EXTRA` is omitted: it " + _NOT_SET),
        ("", "--bf16 $1 --split 1", "--bf16 --split 1", "1: `$1` is omitted: it is an argument of the script"),
        (
            "A=$(date)",
            "--bf16 --save=/x/$A",
            "--bf16",
            "1: `--save=/x/$(date ...)` is omitted: $(date ...) of line 1 is the output of a command",
        ),
        (
            "",
            "--data-path 1 /a 2 $B --bf16",
            "--bf16",
            "1: `--data-path 1 /a 2 $B` is omitted: $B of line 1 " + _NOT_SET,
        ),
        (
            "for L in $B 2; do A=$L; done",
            "--bf16 --num-layers $A",
            "--bf16",
            "1: `--num-layers A=...` is omitted: " + _CONDITION.format(1),
        ),
        (
            "A=1\n[ -f x ] && A=2",
            "--bf16 --num-layers $A",
            "--bf16",
            "2: `--num-layers A=...` is omitted: " + _CONDITION.format(2),
        ),
        (
            "N=$((SLURM_NNODES * 2))",
            "--bf16 --num-layers $N",
            "--bf16",
            "1: `--num-layers $((SLURM_NNODES * 2))` is omitted: "
            "$((SLURM_NNODES * 2)) of line 1 is arithmetic that is not known here",
        ),
        # In a job Slurm sets it, so its default says nothing.
        (
            "",
            "--bf16 --num-layers ${SLURM_NNODES:-2}",
            "--bf16",
            "1: `--num-layers ${SLURM_NNODES:-2}` is omitted: ${SLURM_NNODES:-2} of line 1 " + _NOT_SET,
        ),
    ],
)
def test_what_is_not_known_is_left_out_and_told(before: str, arguments: str, kept: str, message: str) -> None:
    script = f"{before}\npretrain_gpt.py {arguments}".lstrip("\n")
    assert argv(script) == kept.split()
    assert told(script) == [f"job.sh:{message}"]


def test_a_training_command_under_an_unknown_condition_is_told() -> None:
    script = "if ping host; then\n  python pretrain_gpt.py --num-layers 2 --bf16\nfi"
    assert argv(script) == ["--num-layers", "2", "--bf16"]
    assert [p.code for p in read_launch(script, "x", SCHEMA).problems] == ["import-condition"]


def test_one_of_two_training_commands_is_taken_and_the_other_told() -> None:
    script = "a.py --num-layers 2 --bf16 --swiglu\nb.py --num-layers 4 --bf16 --swiglu --lr 1"
    assert argv(script)[1] == "4"
    assert "job.sh:1: another training command was not imported; the one in line 2 was" in told(script)


def test_arrays_without_a_command_are_taken_and_told() -> None:
    script = "MODEL=(--num-layers 2 --hidden-size 8)\nNAMES=(a b)\nOPT=(--lr 1)"
    assert argv(script) == ["--num-layers", "2", "--hidden-size", "8", "--lr", "1"]
    assert told(script) == [
        "job.sh: no training command was found; the variables MODEL, OPT were taken as its arguments"
    ]


@pytest.mark.parametrize(
    ("script", "line", "what"),
    [
        ("a=1\nb='x\ny", 2, "never closes"),
        ('echo "a\nb', 1, "never closes"),
        ("x=1\nA=(1 2", 2, "never closes"),
        ("a.py --moe-layer-freq ([0]*3+[1]*58) --bf16", 1, "'(' after a word"),
        ("\n\n$(a", 3, "never closes"),
    ],
)
def test_what_a_shell_refuses_is_refused_with_its_line(script: str, line: int, what: str) -> None:
    with pytest.raises(UserError) as caught:
        import_text(script, "job.sh", None)
    (problem,) = caught.value.problems
    assert problem.where == f"job.sh:{line}" and what in problem.message


# --- around the arguments


@pytest.mark.parametrize(
    ("script", "resources"),
    [
        ("#SBATCH -N 4 --ntasks-per-node=8 -t 90", {"nodes": 4, "gpus_per_node": 8, "time": "90"}),
        ("#SBATCH -N 2\n#SBATCH --gres=gpu:h200:4 -c 14", {"nodes": 2, "gpus_per_node": 4, "gpu": "h200", "cpus_per_task": 14}),  # noqa: E501
        ("#SBATCH -N2 --gpus-per-node=B200:8 --ntasks-per-node=1", {"nodes": 2, "gpus_per_node": 8, "gpu": "b200"}),
        ("torchrun --nnodes=3 --nproc_per_node 4 a.py --bf16", {"nodes": 3, "gpus_per_node": 4}),
        ("python -m torch.distributed.run --nproc-per-node=2 a.py --bf16", {"gpus_per_node": 2}),
        ("srun -N 2 --ntasks-per-node 4 python a.py --bf16", {"nodes": 2, "gpus_per_node": 4}),
        ("#SBATCH -N 2\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node 8 a.py --bf16", {"nodes": 2, "gpus_per_node": 8}),  # noqa: E501
    ],
)  # fmt: skip
def test_resources(script: str, resources: dict[str, object]) -> None:
    # The options of training itself are none of Slurm's.
    script = script if "--bf16" in script else f"{script}\na.py --bf16 --num-workers 2"
    assert read_launch(script, "x", SCHEMA).sections.get("resources") == resources


def test_resources_that_contradict_are_told() -> None:
    assert "nodes is 1 for the launcher and 2 for Slurm" in " ".join(
        told("#SBATCH -N 2\ntorchrun --nnodes 1 a.py --bf16")
    )
    assert "$((2 * X))" in " ".join(told("torchrun --nnodes $((2 * X)) a.py --bf16"))
    assert "auto is not a fixed count" in " ".join(told("torchrun --nproc-per-node auto a.py --bf16"))


def test_environment_is_what_the_command_gets() -> None:
    script = """
    NCCL_NOT_EXPORTED=1
    NVTE_LATER=2
    export NCCL_DEBUG=WARN NVTE_LATER
    export TORCH_GONE=1; unset TORCH_GONE
    export -n NCCL_DEBUG
    declare -x CUDA_DEVICE_MAX_CONNECTIONS=1
    export NCCL_IB_HCA=$(ls /sys) HOME=/x
    NCCL_ALGO="Ring,Tree" a.py --bf16
    """
    assert read_launch(script, "x", SCHEMA).sections["env"] == {
        "NVTE_LATER": 2,
        "CUDA_DEVICE_MAX_CONNECTIONS": 1,
        "NCCL_ALGO": "Ring,Tree",
    }
    assert ["NCCL_IB_HCA" in message for message in told(script)].count(True) == 1


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD", "aws_secret_access_key"])
def test_secrets_are_named_and_never_copied(name: str) -> None:
    script = f"""
    {name}=hush-hush
    export {name}
    COPY="x-${name}"
    echo ${name} > log
    if [ -f x ]; then {name}=hush-hush-2; fi
    a.py --bf16 --save /x/${name} --load $COPY
    """
    text, problems = imported(script)
    assert "hush" not in text + str(problems)
    assert f"secrets: [{name}]" in text and "precision: {recipe: bf16}" in text
    assert "looks like a secret" in text


def test_container_and_script_are_kept() -> None:
    script = "srun --container-image=nvcr.io/x:1 --container-mounts=/a:/b,/c python /w/train.py --bf16"
    sections = read_launch(script, "x", SCHEMA).sections
    assert sections["container"] == {"image": "nvcr.io/x:1", "mounts": ["/a:/b", "/c"]}
    assert sections["launch"] == {"script": "/w/train.py"}
    assert "launch" not in read_launch("python /opt/Megatron-LM/pretrain_gpt.py --bf16", "x", SCHEMA).sections
    assert told("python train.py --bf16")[0].startswith("job.sh:1: runs train.py, whose path")


# --- argument lists


@pytest.mark.parametrize(
    "text",
    [
        '["--bf16", "--data-path", "/a b", "--pipeline-model-parallel-layout", "Et|(t|)*2"]',
        "--bf16 --data-path '/a b' --pipeline-model-parallel-layout Et|(t|)*2",
        "# a list\n--bf16   # precision\n--data-path \"/a b\" \\\n--pipeline-model-parallel-layout 'Et|(t|)*2'\n",
        "--bf16 \\\r\n--data-path '/a b'\r\n--pipeline-model-parallel-layout\r\nEt|(t|)*2",
        "\\\n  --bf16 --data-path /a\\ b --pipeline-model-parallel-layout Et|(t|)*2",
    ],
)
def test_lists_in_every_form(text: str) -> None:
    assert argv(text) == ["--bf16", "--data-path", "/a b", "--pipeline-model-parallel-layout", "Et|(t|)*2"]


def test_variables_in_a_list_are_told() -> None:
    assert argv("--bf16 --lr $LR") == ["--bf16"]
    assert told("--bf16\n--lr $LR") == ["job.sh:2: `--lr $LR` is omitted: $LR of line 2 is not set in the script"]


def test_the_stated_size_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
    stated = re.search(r"a launch script may have 1 MiB and expand to (\d+) MiB", page)
    assert stated is not None and int(stated[1]) << 20 == shell_commands._MAX_SIZE
