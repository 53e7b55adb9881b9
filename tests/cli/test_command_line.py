"""The command line as users and scripts meet it: help, exit codes, what goes where, what is imported."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8launch.cli import commands, run

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def fp8launch(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs one command in this process, as the entry point would."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.chdir(ROOT)

    def call(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = run(list(arguments))
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "a bug in fp8launch" not in err
        assert code in (0, 1, 2, 3)
        return Done(code, out, err)

    return call


@pytest.mark.parametrize("verb", ["", *commands()])
def test_help_fits_one_screen(fp8launch: Callable[..., Done], verb: str) -> None:
    done = fp8launch(*([verb] if verb else []), "--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    # The list of all commands has a line for each.
    assert len(lines) <= (44 if verb else 50)
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("verb", commands())
def test_help_fits_a_narrow_screen(fp8launch: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = fp8launch(verb, "--help").stdout.splitlines()
    assert len(lines) <= 46
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "a.log", "--price-per-gpu-hour"],
        ["compare", "a.log", "--tolerance"],
        ["estimate", "tiny_cpu", "--tokens"],
        ["estimate", "tiny_cpu", "--tokens-per-second-per-gpu"],
        ["tune", "tiny_cpu", "--dry-run", "--budget"],
        ["tune", "tiny_cpu", "--dry-run", "--minutes"],
        ["data", "blend", "a", "--tokens"],
        ["data", "blend", "a", "--temperature"],
        ["data", "sample", "a", "--prompt", "x", "--temperature"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_numbers_are_finite(fp8launch: Callable[..., Done], arguments: list[str], number: str) -> None:
    """Click accepts both, and JSON has neither."""
    done = fp8launch(*arguments, number, "--json")
    assert done.returncode == 2
    assert "nan" in done.stderr or "inf" in done.stderr
    assert "NaN" not in done.stdout


@pytest.mark.parametrize("arguments", ["recipes", "check tiny_cpu", "runs --json", "estimate llama8b_fp8"])
def test_a_closed_pipe_is_not_an_answer(home: Path, arguments: str) -> None:
    """Click exits with 1 if `head` stops reading, which for `check` means that it found errors."""
    command = [sys.executable, "-m", "fp8launch", *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        messages = process.stderr.read().decode()
    assert process.returncode == 141
    assert "Traceback" not in messages and "pipe" not in messages


def test_help_imports_nothing_heavy(home: Path) -> None:
    code = (
        "import sys; from fp8launch.cli import run; run(['--help'])\n"
        "bad = {'torch','megatron','submitit','nemo_run','pydantic','yaml','rich','numpy'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["render", "recipes/llama8b_fp8.yaml"],
        ["render", "recipes/llama8b_fp8.yaml", "--as", "sbatch"],
        ["submit", "recipes/tiny_cpu.yaml", "--backend", "local", "--dry-run"],
        ["runs"],
        ["recipes"],
    ],
    ids=" ".join,
)
def test_the_login_node_needs_neither_torch_nor_submitit(home: Path, arguments: list[str]) -> None:
    code = (
        f"import sys; from fp8launch.cli import run; assert run({arguments!r}) == 0\n"
        "bad = {'torch','megatron','submitit','nemo_run','numpy'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (
            ["render", "recipes/llama8b_fp8.yaml"],
            ["check", "cluster.profile", "datasets", "logs", "report", "schedulers"],
        ),
        (
            ["check", "recipes/llama8b_fp8.yaml"],
            [
                "plugins.importer.cli",
                "logs",
                "plugins.plan.step_time",
                "plugins.rehearse.layer",
                "report",
            ],
        ),
    ],
    ids=["render", "check"],
)
def test_a_command_imports_only_what_it_uses(home: Path, arguments: list[str], unused: list[str]) -> None:
    code = f"import sys; from fp8launch.cli import run; run({arguments!r})\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    imported = done.stdout.splitlines()[-1].split()
    assert "fp8launch.recipe.schema" in imported
    assert [name for name in unused if f"fp8launch.{name}" in imported] == []


def test_unknown_commands_and_options_are_usage_errors(fp8launch: Callable[..., Done]) -> None:
    wrong = fp8launch("sumbit")
    assert wrong.returncode == 2
    assert "Did you mean 'submit'?" in wrong.stderr
    assert fp8launch("submit").returncode == 2
    assert fp8launch("render", "tiny_cpu", "--as", "xml").returncode == 2


def bad_recipes(folder: Path) -> dict[str, tuple[Path, str]]:
    """Each kind of bad file, and a word that its message must have."""
    written = {
        "empty": ("", "empty"),
        "not-yaml": ("a: [1, 2\nb: }", "YAML"),
        "not-a-mapping": ("- 1\n- 2\n", "mapping"),
        "bomb": (
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(8)),
            "expands",
        ),
        "wrong-types": ("parallel: {tp: two}\nresources: [1]\n", "whole number"),
        "missing-parent": ("extends: [models/none_such]\n", "none_such"),
        "large": ("# " + "x" * (10 << 20), "larger"),
        "tag": ("model: !!python/object/apply:os.system ['true']\n", "tag"),
        "null-byte": ("name: a\0b\n", "NUL"),
    }
    found = {}
    for name, (text, word) in written.items():
        path = folder / f"{name}.yaml"
        path.write_text(text)
        found[name] = (path, word)
    one, two = folder / "one.yaml", folder / "two.yaml"
    one.write_text("extends: [two]\n")
    two.write_text("extends: [one]\n")
    binary = folder / "binary.yaml"
    binary.write_bytes(bytes(range(256)))
    (folder / "folder.yaml").mkdir()
    return {
        **found,
        "cycle": (one, "extends itself"),
        "binary": (binary, "text"),
        "folder": (folder / "folder.yaml", "cannot be read"),
        "none": (folder / "none.yaml", "no such recipe"),
    }


@pytest.mark.parametrize("verb", ["submit", "check", "render", "recipes"])
def test_bad_recipes_get_one_clear_message_and_submit_nothing(
    fp8launch: Callable[..., Done], tmp_path: Path, home: Path, verb: str
) -> None:
    for name, (path, word) in bad_recipes(tmp_path).items():
        if (verb, name) == ("check", "folder"):
            continue  # check takes a folder of recipes
        done = fp8launch(verb, str(path), *(["--backend", "local"] if verb == "submit" else []))
        assert done.returncode == 2, f"{name}: {done.stdout}{done.stderr}"
        said = done.stdout if verb == "check" else done.stderr
        assert word in said, f"{name}: {said}"
        assert str(path.parent) in said, name
        assert len(done.stdout + done.stderr) < 2000, name
    assert not (home / "fp8launch-runs").exists()


def test_check_tells_all_problems_at_once_as_json(fp8launch: Callable[..., Done], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("parallel: {tp: two}\nprecision: {recipe: fp8}\nbatsh: {}\n")
    done = fp8launch("check", str(recipe), "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"]) == (2, False)
    assert {p["where"] for p in answer["problems"]} == {f"{recipe}:{line}" for line in (1, 2, 3)}
    assert all(set(p) == {"severity", "code", "message", "where", "fix"} for p in answer["problems"])


def test_a_wrong_flag_is_the_answer_no(fp8launch: Callable[..., Done]) -> None:
    done = fp8launch("check", "tiny_cpu", "--set", "megatron.no_rope_fusoin=true")
    assert done.returncode == 1
    assert "no_rope_fusion" in done.stdout or "no-rope-fusion" in done.stdout


def test_render_args_is_the_exact_argument_list(fp8launch: Callable[..., Done]) -> None:
    argv = json.loads(fp8launch("render", "recipes/llama8b_fp8.yaml", "--as", "args", "--json").stdout)
    assert all(isinstance(word, str) for word in argv)
    assert argv[argv.index("--fp8-format") + 1] == "hybrid"
    assert argv[argv.index("--fp8-recipe") + 1] == "tensorwise"
    assert "--fp8-param-gather" in argv


def test_a_rendered_recipe_is_a_recipe(fp8launch: Callable[..., Done], tmp_path: Path) -> None:
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(fp8launch("render", "recipes/llama8b_fp8.yaml", "--as", "yaml").stdout)
    assert fp8launch("render", str(resolved)).stdout == fp8launch("render", "recipes/llama8b_fp8.yaml").stdout


@pytest.mark.needs_plugin("importer")
def test_rendered_arguments_import_to_the_same_arguments(fp8launch: Callable[..., Done], tmp_path: Path) -> None:
    argv = fp8launch("render", "recipes/llama8b_fp8.yaml").stdout
    mine = tmp_path / "mine.yaml"
    mine.write_text(fp8launch("import", "-", stdin=argv).stdout)
    assert sorted(fp8launch("render", str(mine)).stdout.splitlines()) == sorted(argv.splitlines())


def test_an_unknown_run_names_the_nearest(fp8launch: Callable[..., Done]) -> None:
    done = fp8launch("parse", "latest")
    assert done.returncode == 2
    assert "fp8launch submit RECIPE" in done.stderr


@pytest.mark.parametrize("verb", ["parse", "logs", "cancel", "resume", "verify", "compare", "runs"])
def test_a_path_that_does_not_exist_is_named(fp8launch: Callable[..., Done], verb: str) -> None:
    done = fp8launch(verb, "/nope/run")
    assert done.returncode == 2
    assert "/nope/run: error: this path does not exist" in done.stderr


def test_without_any_run_the_list_says_what_to_do(fp8launch: Callable[..., Done]) -> None:
    done = fp8launch("runs")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no runs yet; submit one: `fp8launch submit RECIPE`" in done.stderr


def test_a_folder_that_is_no_run_is_named(fp8launch: Callable[..., Done]) -> None:
    done = fp8launch("logs", "./docs")
    assert done.returncode == 2
    assert "is not a run folder" in done.stderr


def test_a_closed_pipe_is_no_error(home: Path) -> None:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m fp8launch render tiny_cpu --as json | head -n 1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
