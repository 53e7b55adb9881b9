"""Every command, with a run root, datasets, checkpoints, models and recipes that belong to another user.

Nothing of theirs is executed or imported, every file of theirs is opened by a reader with a limit, and no private file
that they link to gets into what a command writes. `foreign_worker.py` runs the commands as an unprivileged user.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import log_bytes, real_logs

from fp8launch import plugin_registry
from fp8launch.cli import cli

WORKER = Path(__file__).with_name("foreign_worker.py")
# Numbers without accounts: nobody else on this machine has them.
ME, THEM = 54321, 54322
MOST_READ, MOST_MEMORY_KIB = 600 << 20, 1_500_000
SECRET = "private-7351"
# Python programs and packages import these; a folder that is searched for modules would give them.
MODULES = ("sitecustomize", "usercustomize", "json", "numpy", "yaml", "torch", "fp8launch", "submitit", "tokenizers")
EXAMPLES = int(os.environ.get("FP8LAUNCH_FUZZ", "0")) // 30 or 10

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux"),
]


class Evil:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.canary}/pickle",))


@dataclass(frozen=True)
class World:
    """`theirs` belongs to the other user, `mine` to the one who types; anybody may write to `canaries`."""

    root: Path

    @property
    def theirs(self) -> Path:
        return self.root / "theirs"

    @property
    def mine(self) -> Path:
        return self.root / "mine"

    @property
    def canaries(self) -> Path:
        return self.root / "canaries"

    def run(self, commands: list[list[str]], preload: bool = False) -> list[dict[str, Any]]:
        """Run commands as ME in the folder of their recipes."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(self.mine), "LANG": "C.UTF-8",
            "FP8LAUNCH_RUNS": str(self.theirs / "runs"), "FP8LAUNCH_OFFLINE": "1", "TMPDIR": str(self.mine / "tmp"),
            "SLURM_CONF": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "80", "PYTHONSAFEPATH": "1",
        }  # fmt: skip
        if (selection := os.environ.get(plugin_registry.SELECTION)) is not None:
            environment[plugin_registry.SELECTION] = selection
        # The capability only opens the Python of the tests, wherever it is; all files have another owner.
        as_me = ["setpriv", f"--reuid={ME}", f"--regid={ME}", "--clear-groups", "--inh-caps=+dac_read_search"]
        done = subprocess.run(
            [*as_me, "--ambient-caps=+dac_read_search", sys.executable, str(WORKER)],
            input=json.dumps({"theirs": str(self.theirs), "commands": commands, "preload": preload}),
            env=environment,
            cwd=self.theirs / "recipes",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers

    def leaked(self) -> list[Path]:
        """Files that a command wrote with the private text in them."""
        found = []
        for file in self.mine.rglob("*"):
            if file.is_file() and file.name != "private.txt" and SECRET.encode() in file.read_bytes():
                found.append(file)
        return found


def commands(world: World) -> dict[str, list[list[str]]]:
    """Each command of the core and the active plugins with arguments that lead it to files of the other user."""
    runs, data = world.theirs / "runs", world.theirs / "data"
    recipe, script = str(world.theirs / "recipes/r.yaml"), str(world.theirs / "recipes/script.yaml")
    model, stored = str(world.theirs / "model"), str(world.theirs / "checkpoints")
    out = str(world.mine / "out")
    local = ["--backend", "local"]
    log = str(runs / "r-1/logs/local-0.log")
    accelerate, bridge, plain = (
        str(world.theirs / f"recipes/{name}.yaml") for name in ("accelerate", "bridge", "plain")
    )
    table = {
        "init cluster": [["init", "cluster", "x", "--out", out, "--yes", "--force"]],
        "init recipe": [["init", "recipe", model, "--data", str(data / "set"), "--out", out, "--yes", "--force"]],
        "recipes": [["recipes", recipe], ["recipes"]],
        "import": [["import", str(world.theirs / "recipes/launch.sh")]],
        "data build": [
            ["data", "build", str(data / name), "--tokenizer", tokenizer, "--out", out, "--on-error", "skip",
             "--overwrite", "--restart", "--workers", "1", "--json"]
            for name, tokenizer in (("texts", "bytes"), ("saved", "bytes"), ("texts", str(data / "tokenizer")))
        ],
        "data tokenizer": [["data", "tokenizer", str(data / "texts"), "--vocab-size", "300", "--out", f"{out}-tok"]],
        "data inspect": [["data", "inspect", str(data / "set")], ["data", "inspect", str(data / "set"), "--verify"]],
        "data split": [
            ["data", "split", str(data / "set"), "--part", f"{out}-a=1", "--part", f"{out}-b=1", "--overwrite"],
        ],
        "data sample": [["data", "sample", str(runs / "r-1"), "--prompt", "x", "--tokenizer", "bytes"]],
        "data blend": [["data", "blend", str(data / "set"), str(data / "set")]],
        "convert hf-to-megatron": [
            ["convert", "hf-to-megatron", model, f"{out}-m", *local, *more] for more in ([], ["--dry-run"])
        ],
        "convert megatron-to-hf": [
            ["convert", "megatron-to-hf", place, f"{out}-h", *local, *more]
            for place in (stored, str(runs / "r-1")) for more in (["--dry-run"], ["--dry-run", "--model", model], [])
        ],
        "check": [
            ["check", recipe, *more] for more in ([], ["--set", f"checkpoint.load={stored}"], ["--json"])
        ] + [["check", script], ["check", str(runs / "r-1")], ["check", accelerate], ["check", bridge]]
        + [["check", str(place), "--rehearse"] for place in (runs / "r-1", runs / "s", script, Path(script).parent)],
        "estimate": [["estimate", recipe], ["estimate", str(runs / "r-1")]],
        "prove": [["prove", str(runs / "r-1")], ["prove", script]],
        "plan": [["plan", model, "--gpu", "h100", "--gpus", "8"], ["plan", recipe, "--gpu", "h100", "--gpus", "8"]],
        "render": [["render", recipe, "--as", form] for form in ("args", "sbatch", "yaml", "json")]
        + [["render", script], ["render", accelerate], ["render", bridge], ["render", recipe, "--portable"]],
        "diff": [["diff", recipe, str(runs / "r-1")]],
        "submit": [
            ["submit", recipe, *local, "--dry-run"], ["submit", str(runs / "r-1"), *local],
            ["submit", recipe, "--backend", "sbatch", "--dry-run"], ["submit", script, *local, "--dry-run"],
            *(["submit", named, *local] for named in (recipe, script, accelerate, "s")),
            ["submit", plain, *local, "--run-root", str(world.mine / "runs"), "--dry-run", "--rehearse"],
            ["submit", "tiny_cpu", *local],
            ["submit", "tiny_cpu", *local, "--over", "megatron.seed=1,2", "--study", "s"],
        ],
        "runs": [["runs"], ["runs", "s"], ["runs", "--json"]],
        "watch": [["watch", "r-1"]],
        "logs": [["logs", "r-1"], ["logs", "r-1", "--batch"], ["logs", "r-1", "-n", "5"], ["logs", "r-1", "--metrics"]],
        "cancel": [["cancel", "r-1"], ["cancel", "s"]],
        "resume": [["resume", "r-1"], ["resume", str(runs / "r-1"), "--attempts", "2"], ["resume", "s"]],
        "tune": [["tune", named, *local, "--dry-run"] for named in (recipe, script, str(runs / "r-1"))]
        + [["tune", recipe, *local]],
        "parse": [["parse", "r-1"], ["parse", log], ["parse", str(runs / "s"), "--json"]],
        "verify": [["verify", "r-1"], ["verify", log]],
        "compare": [
            ["compare", "r-1", log, "--force", "--html", f"{out}.html", "--csv", f"{out}.csv"], ["compare", "s"],
        ],
        "tag": [["tag", "r-1", "--add", "x"], ["tag", str(runs / "r-1")]],
        "rename": [["rename", "r-1", "x"]],
        "annotate": [["annotate", "r-1", "s", "--note", "x"]],
        "delete": [["delete", "--yes"], ["delete", "r-1", "s", "--yes"], ["delete", "--older-than", "1d", "--dry-run"]],
        "archive": [["archive", "r-1", "--out", f"{out}.tar.gz", "--force"]],
        "evaluate": [["evaluate", "r-1"], ["evaluate", "r-1", "--tasks", "x", "--every", "2"]],
        "export": [
            ["export", "r-1", "--to", tracker, "--offline", "--dir", f"{out}-{tracker}"]
            for tracker in ("tensorboard", "wandb", "mlflow")
        ],
        "schema build": [["schema", "build", model], ["schema", "build", str(world.theirs)]],
        "clusters": [["clusters"]],
        "images": [["images"]],
        "images import": [["images", "import", "nope", "--to", str(world.theirs / "images")]],
        "doctor": [["doctor"]],
        "completion": [["completion", "bash"]],
    }  # fmt: skip
    absent = plugin_registry.absent("commands")
    return {name: lines for name, lines in table.items() if name.split()[0] not in absent}


def all_commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            if command.invoke_without_command:
                yield " ".join((*path, name))
            yield from all_commands(command, (*path, name))
        else:
            yield " ".join((*path, name))


def test_no_command_is_missing(tmp_path: Path) -> None:
    assert sorted(commands(World(tmp_path))) == sorted(all_commands(cli))


# --- their folders ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    # Folders of pytest are closed to other users.
    root = Path(tempfile.mkdtemp(prefix="fp8launch-others-"))
    root.chmod(0o755)
    made = World(root)
    try:
        for folder in (made.theirs, made.mine, made.canaries):
            folder.mkdir()
        made.canaries.chmod(0o777)
        (made.mine / "tmp").mkdir()
        (made.mine / "private.txt").write_text(f'{{"text": "{SECRET}"}}\n')
        (made.mine / "private.txt").chmod(0o600)
        fill(made)
        own(made.mine, ME)
        own(made.theirs, THEM)
        yield made
    finally:
        shutil.rmtree(root)


def own(folder: Path, owner: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)


def fill(world: World) -> None:
    """Write the other user's folders, with programs in every place where one may be looked for."""
    make_runs(world)
    make_data(world)
    make_checkpoints(world)
    make_recipes(world)
    for folder in [
        world.theirs,
        *(each for each in world.theirs.rglob("*") if each.is_dir() and ".git" not in each.parts),
    ]:
        for name in MODULES:
            file = folder / f"{name}.py"
            if not file.exists() and not (folder / name).exists():
                file.write_text(f"open({str(world.canaries / name)!r}, 'w')\n")
        for name in ("git", "python", "sbatch", "bash", "nvidia-smi"):
            program = folder / name
            if not program.exists():
                program.write_text(f"#!/bin/sh\ntouch {world.canaries}/{name}\n")
                program.chmod(0o755)


def as_root(world: World, *words: str) -> None:
    environment = {**os.environ, "HOME": str(world.root), "FP8LAUNCH_RUNS": str(world.theirs / "runs")}
    environment.pop(plugin_registry.SELECTION, None)  # the other user has every plugin
    done = subprocess.run(
        [sys.executable, "-m", "fp8launch", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def make_runs(world: World) -> None:
    here = ["--backend", "local", "--wait", "--yes", "--set", "launch.python=/bin/true"]
    as_root(world, "submit", "tiny_cpu", *here)
    as_root(world, "submit", "tiny_cpu", *here, "--over", "megatron.seed=1,2", "--study", "s")
    runs = world.theirs / "runs"
    single = next(
        path for path in runs.iterdir() if path.is_dir() and path.name != "s" and not path.name.startswith(".")
    )
    single.rename(runs / "r-1")
    log = log_bytes(real_logs("runs") / "tiny_cpu_0.17_1rank.log")
    for run in (runs / "r-1", *(path for path in (runs / "s").iterdir() if path.is_dir())):
        if (run / "logs").is_dir():
            (run / "logs/local-0.log").write_bytes(log)
            (run / "job.sh").write_text(f"#!/bin/bash\ntouch {world.canaries}/job.sh\n")
            (run / "attempts.json").write_text('{"attempts": [], "waiting": null, "excluded": []}')
            (run / "survive.json").write_text(
                json.dumps({"checkpoint": str(world.theirs / "checkpoints"), "owner": {}})
            )
    manifest = json.loads((runs / "r-1/manifest.json").read_text())
    words = ["--save", str(world.theirs / "checkpoints"), "--data-path", str(world.theirs / "data/set")]
    manifest["megatron"]["argv"] += words
    (runs / "r-1/manifest.json").write_text(json.dumps(manifest))


def make_data(world: World) -> None:
    data = world.theirs / "data"
    for name in ("texts", "saved", "tokenizer"):
        (data / name).mkdir(parents=True)
    (data / "texts/a.jsonl").write_text('{"text": "one two three"}\n' * 50)
    (data / "saved/b.arrow").write_bytes(b"no table")
    (data / "saved/state.json").write_text('{"_data_files": [{"filename": "b.arrow"}]}')
    (data / "tokenizer/tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {"o": 0, "n": 1, "<|endoftext|>": 2}, "merges": []}}'
    )
    (data / "tokenizer/tokenizer_config.json").write_text(
        '{"eos_token": "<|endoftext|>", "auto_map": {"AutoTokenizer": "x.X"}}'
    )
    as_root(
        world,
        "data",
        "build",
        str(data / "texts"),
        "--tokenizer",
        "bytes",
        "--out",
        str(data / "set"),
        "--workers",
        "1",
    )


def make_checkpoints(world: World) -> None:
    evil = pickle.dumps({"storage_data": {"a": Evil(world.canaries)}})
    place = world.theirs / "checkpoints/iter_0000007"
    place.mkdir(parents=True)
    (world.theirs / "checkpoints/latest_checkpointed_iteration.txt").write_text("7")
    (world.theirs / "checkpoints/fp8launch_owner.json").write_text("{}")
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (place / "run_config.yaml").write_text(f"model: {{hf_model_id: {world.theirs}/model}}\n")
    for name in (".metadata", "common.pt"):
        (place / name).write_bytes(evil)
    model = world.theirs / "model"
    model.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 128, "rope_theta": 1e4,
        "vocab_size": 512, "auto_map": {"AutoConfig": "configuration_x.X"},
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (model / "configuration_x.py").write_text(f"open({str(world.canaries / 'configuration_x')!r}, 'w')\n")
    (model / "model.safetensors").write_bytes(b"weights")


def make_recipes(world: World) -> None:
    recipes = world.theirs / "recipes"
    recipes.mkdir()
    data = f"data: {{kind: indexed, blend: [{world.theirs}/data/set]}}\n"
    whole = data.replace("]}", '], split: "1,0,0", tokenizer: {type: NullTokenizer}}')
    (recipes / "base.yaml").write_text("extends: tiny_cpu\n")
    (recipes / "r.yaml").write_text(f"extends: base.yaml\nname: r\n{data}launch: {{python: {recipes}/python}}\n")
    (recipes / "train.py").write_text(f"open({str(world.canaries / 'train')!r}, 'w')\n")
    (recipes / "script.yaml").write_text(
        f"engine: script\nname: q\nlaunch: {{script: {recipes}/train.py, python: {recipes}/python}}\n"
        "resources: {nodes: 1, gpus_per_node: 1, gpu: cpu}\n"
    )
    (recipes / "plain.yaml").write_text(f"extends: tiny_cpu\nname: plain\n{whole}")
    (recipes / "accelerate.yaml").write_text(
        f"extends: tiny_cpu\nname: a\nengine: accelerate\naccelerate: {{sharding: ddp}}\n{data}"
    )
    (recipes / "bridge.yaml").write_text(
        "engine: bridge\nname: b\nbridge: {recipe: llama3_8b_pretrain_8gpu_h100_fp8cs_config}\n"
        "resources: {nodes: 1, gpus_per_node: 8, gpu: h100}\n"
    )
    (recipes / "launch.sh").write_text("python pretrain_gpt.py --num-layers 2 --hidden-size 64 $(touch x)\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        subprocess.run([*git, *words], cwd=recipes, check=True, capture_output=True)
    for option in ("core.fsmonitor", "core.pager", "diff.external", "core.sshCommand"):
        subprocess.run(["git", "config", option, f"touch {world.canaries}/git"], cwd=recipes, check=True)


# --- what may be in the place of their files --------------------------------------------------------------------------

# Each is read by some command. `*`: of every run of the study.
SLOTS = (
    "runs/r-1/manifest.json", "runs/r-1/attempts.json", "runs/r-1/survive.json", "runs/r-1/recipe.yaml",
    "runs/r-1/logs/local-0.log", "runs/r-1/logs/local-0.exit", "runs/s/study.json", "data/set.manifest.json",
    "data/set.idx", "data/set.bin", "data/texts/a.jsonl", "data/saved/state.json", "data/saved/b.arrow",
    "data/tokenizer/tokenizer.json", "data/tokenizer/tokenizer_config.json",
    "checkpoints/latest_checkpointed_iteration.txt", "checkpoints/fp8launch_owner.json",
    "checkpoints/iter_0000007/.metadata", "checkpoints/iter_0000007/metadata.json",
    "checkpoints/iter_0000007/common.pt", "checkpoints/iter_0000007/run_config.yaml", "model/config.json",
    "recipes/r.yaml", "recipes/base.yaml", "recipes/launch.sh", "recipes/.git/HEAD", "recipes/.git/index",
)  # fmt: skip


def a_file(content: bytes) -> Callable[[World, Path], None]:
    def write(world: World, place: Path) -> None:
        place.write_bytes(content)

    return write


def sparse(world: World, place: Path) -> None:
    with place.open("wb") as file:
        file.truncate(6 << 30)


def several(lines: bytes) -> Callable[[World, Path], None]:
    return a_file(lines * (15_000_000 // len(lines)))


# Nine times as many values in each line, by a reference to the line before.
ALIASES = b"a: &a [x, x]\n"
for _letter in range(ord("b"), ord("p")):
    ALIASES += b"%c: &%c [%s]\n" % (_letter, _letter, b", ".join([b"*%c" % (_letter - 1)] * 9))

KINDS: dict[str, Callable[[World, Path], None]] = {
    "a pipe": lambda world, place: os.mkfifo(place),
    "a device": lambda world, place: place.symlink_to("/dev/zero"),
    "a folder": lambda world, place: place.mkdir(),
    "sparse": sparse,
    "a private file": lambda world, place: place.symlink_to(world.mine / "private.txt"),
    "a link to itself": lambda world, place: place.symlink_to(place.name),
    "empty": a_file(b""),
    "zeros": a_file(bytes(4096)),
    "deep": a_file(b"[" * 900_000),
    "no numbers": a_file(b'{"model": NaN, "points": Infinity, "megatron": {"argv": [1e999]}, "documents": -1}'),
    "a long number": a_file(b'{"tokens": ' + b"9" * 100_000 + b"}"),
    "a pickle": lambda world, place: place.write_bytes(pickle.dumps(Evil(world.canaries), 0)),
    "a pickle's table": a_file(b"\x80\x02Nr\xff\xff\xff\x0f."),
    "15 MB of YAML": several(b"k: [1, 2, {a: b}]\n"),
    "aliases": a_file(ALIASES),
}  # fmt: skip


@contextlib.contextmanager
def spoiled(world: World, spoils: dict[str, str]) -> Iterator[None]:
    """Their folders with something else in the place of some files."""
    kept = {}
    try:
        for slot, kind in spoils.items():
            place = world.theirs / slot
            if os.path.lexists(place):
                kept[place] = place.with_name(f".kept-{place.name}")
                place.rename(kept[place])
                KINDS[kind](world, place)
                os.chown(place, THEM, THEM, follow_symlinks=False)
        yield
    finally:
        for place, before in kept.items():
            if place.is_dir() and not place.is_symlink():
                place.rmdir()
            else:
                place.unlink()
            before.rename(place)


def require_harmless(world: World, answers: list[dict[str, Any]]) -> None:
    wrong = [(" ".join(answer["words"]), *problems) for answer in answers if (problems := problems_of(answer))]
    assert wrong == []
    assert [file.name for file in world.canaries.iterdir()] == []
    assert world.leaked() == []


def problems_of(answer: dict[str, Any]) -> list[str]:
    """What a command did that no command may do with files of others."""
    if "died" in answer:
        return [f"it was ended by signal {-answer['died']}: it waited for ever, or computed too long"]
    found = sorted(set(answer["seen"]))
    if answer["status"] not in (0, 1, 2, 3):
        found.append(f"exit code {answer['status']}")
    if "a bug in" in answer["said"]:
        found.append(answer["said"][-600:])
    if answer["read"] > MOST_READ:
        found.append(f"read {answer['read'] >> 20} MiB")
    if answer["memory_kib"] > MOST_MEMORY_KIB:
        found.append(f"used {answer['memory_kib'] >> 10} MiB")
    return found


def test_the_worker_sees_what_it_looks_for(world: World) -> None:
    """A command that did any of this would be found."""
    code = (
        "import json, os, subprocess, sys\n"
        "sys.path.insert(0, os.path.dirname(sys.argv[1])); from foreign_worker import Watch\n"
        "theirs = sys.argv[2]; watch = Watch(theirs); sys.addaudithook(watch); watch.watching = True\n"
        "def tell(): print(len(watch.seen)); watch.seen.clear()\n"
        "subprocess.run([theirs + '/recipes/git'], env={}); tell()\n"
        "subprocess.run(['bash', theirs + '/recipes/git']); tell()\n"
        "subprocess.run([sys.executable, '-P', theirs + '/recipes/train.py']); tell()\n"
        "open(theirs + '/recipes/r.yaml').read(); tell()\n"
        "import pathlib; pathlib.Path(theirs + '/recipes/r.yaml').read_text(); tell()\n"
        "import pickle; pickle.loads(b'cposix\\nsystem\\n.'); tell()\n"
        "sys.path.insert(0, theirs + '/model'); import configuration_x; tell()\n"
        "from fp8launch.injob.regular_files import read_regular\n"
        "read_regular(pathlib.Path(theirs + '/recipes/r.yaml'), 999); tell()\n"
    )
    words = [sys.executable, "-c", code, str(WORKER), str(world.theirs)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    counts = list(map(int, done.stdout.split()))
    assert all(counts[:7]) and counts[7] == 0, counts
    for file in world.canaries.iterdir():
        file.unlink()


@functools.cache
def names() -> list[str]:
    return sorted(commands(World(Path("/"))))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_usual_world(world: World, part: int) -> None:
    table = commands(world)
    require_harmless(world, world.run([words for name in names()[part::4] for words in table[name]]))


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_a_world_with_other_things_in_the_place_of_files(world: World, data: st.DataObject) -> None:
    kinds = st.sampled_from(sorted(KINDS))
    spoils = data.draw(st.dictionaries(st.sampled_from(SLOTS), kinds, min_size=6, max_size=len(SLOTS)), "spoils")
    chosen = data.draw(st.lists(st.sampled_from(names()), min_size=10, max_size=16, unique=True), "commands")
    table = commands(world)
    with spoiled(world, spoils):
        require_harmless(world, world.run([words for name in chosen for words in table[name]], preload=True))
