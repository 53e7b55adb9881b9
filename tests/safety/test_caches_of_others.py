"""Caches, profiles and half-built datasets: what is run or believed there must be this user's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.version import Version

from fp8launch.check import verdict_cache
from fp8launch.check.wheel import NoMegatron, megatron_for
from fp8launch.cli.notify import load_config
from fp8launch.injob.ownership import why_others_may_change
from fp8launch.megatron.validators import MegatronVerdict, Request, site_of
from fp8launch.rehearsal.software import NoTransformerEngine, transformer_engine_for
from fp8launch.wheels import Wheel, fetch

Say = Callable[..., tuple[int, str, str]]
Spoil = Callable[[Path, Path], object]
NOBODY = 65534
INFO = "MAJOR = 0\nMINOR = 19\nPATCH = 9\n"


def give(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, NOBODY, NOBODY)


# A cache folder and the place in it that is used, spoilt.
SPOILT: dict[str, Spoil] = {
    "everybody writes to XDG_CACHE_HOME": lambda base, place: base.chmod(0o777),
    "everybody writes to the cache": lambda base, place: (base / "fp8launch").chmod(0o777),
    "everybody writes to its part": lambda base, place: place.parent.chmod(0o777),
    "everybody writes to the code": lambda base, place: place.chmod(0o777),
    "everybody writes to a module": lambda base, place: next(place.rglob("*.py")).chmod(0o666),
    "somebody else's cache": lambda base, place: give(base / "fp8launch"),
    "somebody else's part": lambda base, place: give(place.parent),
    "somebody else's code": lambda base, place: give(place),
    "somebody else's module": lambda base, place: give(next(place.rglob("*.py"))),
    "a group's module": lambda base, place: (give(place), os.chown(place, 0, NOBODY), place.chmod(0o775)),
    "a module that is a link": lambda base, place: (place / "extra.py").symlink_to("/tmp/x.py"),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty XDG_CACHE_HOME; nothing can be fetched, and no other Megatron is here."""
    base = tmp_path / "cache"
    base.mkdir(mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    monkeypatch.setenv("FP8LAUNCH_OFFLINE", "1")
    monkeypatch.delenv("FP8LAUNCH_MEGATRON", raising=False)
    monkeypatch.setattr("fp8launch.megatron.validators._installed", lambda: iter(()))
    yield base


def unpacked_megatron(base: Path) -> Path:
    place = base / "fp8launch/megatron/0.19.9"
    (place / "megatron/core").mkdir(parents=True)
    (place / "megatron/training").mkdir()
    (place / "megatron/core/package_info.py").write_text(INFO)
    (place / "megatron/training/arguments.py").touch()
    (place / "megatron/__init__.py").write_text(f"open({str(base.parent / 'canary')!r}, 'w')\n")
    return place


def unpacked_engine(base: Path) -> Path:
    place = base / "fp8launch/transformer_engine/2.20.9"
    (place / "transformer_engine/pytorch").mkdir(parents=True)
    (place / "transformer_engine/pytorch/__init__.py").touch()
    return place


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_code_that_others_could_have_written_is_not_used(cache: Path, spoil: Spoil) -> None:
    place = unpacked_megatron(cache)
    assert megatron_for("0.19") == place
    spoil(cache, place)
    with pytest.raises(NoMegatron, match=r"other users could have changed the code in it.*remove it, or set XDG"):
        megatron_for("0.19")


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_nor_to_rehearse_with(cache: Path, spoil: Spoil) -> None:
    place = unpacked_engine(cache)
    assert transformer_engine_for(Version("2.20")) == place
    spoil(cache, place)
    with pytest.raises(NoTransformerEngine, match="other users could have changed the code in it"):
        transformer_engine_for(Version("2.20"))


def test_check_runs_no_code_of_a_cache_that_others_can_write(cache: Path, say: Say) -> None:
    place = unpacked_megatron(cache)
    (cache / "fp8launch").chmod(0o777)
    _, out, err = say("check", "tiny_cpu", "--json")
    assert "other users could have changed the code in it" in out + err
    (cache / "fp8launch").chmod(0o700)
    assert not (cache.parent / "canary").exists()
    say("check", "tiny_cpu")
    assert (cache.parent / "canary").exists(), f"{place} is run where nobody else can write to it"


def test_what_the_system_installed_and_a_link_to_one_s_own_are_used(cache: Path, tmp_path: Path) -> None:
    place = unpacked_megatron(cache)
    if not os.geteuid():
        for path in (cache / "fp8launch", *(cache / "fp8launch").rglob("*")):
            os.chown(path, 2, 2)
    assert megatron_for("0.19") == place
    elsewhere = tmp_path / "elsewhere"
    (cache / "fp8launch").rename(elsewhere)
    (cache / "fp8launch").symlink_to(elsewhere)
    assert megatron_for("0.19") == place
    elsewhere.chmod(0o777)
    with pytest.raises(NoMegatron, match=str(elsewhere)):
        megatron_for("0.19")


def test_a_wheel_unpacked_by_others_is_left_aside(cache: Path, tmp_path: Path) -> None:
    """A wheel of the user's own is unpacked into the cache once; what is in the cache then must still be hers."""
    wheel = tmp_path / "megatron_core-0.19.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("megatron/core/package_info.py", INFO)
    unpacked = site_of(wheel)
    assert unpacked.parent == cache / "fp8launch/megatron"
    assert site_of(wheel) == unpacked
    (unpacked / "megatron").chmod(0o777)
    assert site_of(wheel) == wheel
    cache.chmod(0o777)
    assert site_of(wheel) == wheel


def test_what_is_fetched_is_one_s_own_whatever_the_umask(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "plain-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("plain-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
        archive.writestr("plain-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("plain-1.0.dist-info/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("FP8LAUNCH_OFFLINE")
    folder = cache / "fp8launch" / "plain"

    def find() -> Path | None:
        return next(folder.glob("*.whl"), None)

    def keep(file: Path) -> None:
        file.rename(folder / file.name)

    release = Wheel("plain", "1.0", sha256(wheel.read_bytes()).hexdigest(), "1 kB")
    before = os.umask(0)
    try:
        found = fetch(release, folder, find, keep)
    finally:
        os.umask(before)
    assert found.is_file()
    assert why_others_may_change(found) is None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_verdict_is_believed_only_where_nobody_can_replace_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []

    def validate(requests: list[Request], megatron: Path) -> list[MegatronVerdict]:
        asked.extend(requests)
        return [MegatronVerdict(True, "num_microbatches", None, None, None, (), 0.0) for _ in requests]

    monkeypatch.setattr(verdict_cache, "validate", validate)
    request = Request(argv=("--num-layers", "2"), world_size=1, compute_capability=(9, 0), te_version=None)
    site = unpacked_megatron(cache)
    for expected in (1, 1):
        verdict_cache.cached_verdicts([request], site)
        assert len(asked) == expected
    cache.chmod(0o777)
    verdict_cache.cached_verdicts([request], site)
    assert len(asked) == 2


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "site"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, file: file.chmod(0o666),
        lambda folder, file: folder.chmod(0o777),
        lambda folder, file: give(file),
        lambda folder, file: give(folder),
    ],
)
def test_a_profile_that_a_name_leads_to_is_one_s_own(
    say: Say, home: Path, monkeypatch: pytest.MonkeyPatch, name: str, spoil: Spoil
) -> None:
    """It holds shell lines; a shared XDG_CONFIG_HOME would hand them to whoever can write there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    folder = home / "config/fp8launch/clusters"
    folder.mkdir(parents=True)
    file = folder / f"{name}.yaml"
    file.write_text("setup: [touch canary]\n")
    words = ("render", "tiny_cpu", "--as", "sbatch", *(() if name == "default" else ("--cluster", name)))
    assert say(*words)[0] == 0
    spoil(folder, file)
    code, _, err = say(*words)
    assert (code, "[not-yours]" in err, "--cluster" in err) == (2, True, True)
    assert say("render", "tiny_cpu", "--as", "sbatch", "--cluster", str(file))[0] == 0


def test_a_profile_named_by_its_path_is_read(say: Say, home: Path) -> None:
    file = home / "theirs.yaml"
    file.write_text("setup: [module load cuda]\n")
    file.chmod(0o666)
    code, out, _ = say("render", "tiny_cpu", "--as", "sbatch", "--cluster", str(file))
    assert (code, "module load cuda" in out) == (0, True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, file: file.chmod(0o666),
        lambda folder, file: folder.chmod(0o777),
        lambda folder, file: give(file),
        lambda folder, file: give(folder),
    ],
)
@pytest.mark.parametrize("words", [("submit", "tiny_cpu", "--backend", "local", "--yes"), ("resume", "a-run")])
def test_a_configuration_that_names_a_command_is_one_s_own(
    say: Say, home: Path, words: tuple[str, ...], spoil: Spoil
) -> None:
    """The command of notifications would run as this user; nothing is submitted before it is refused."""
    folder = home / ".config/fp8launch"
    folder.mkdir(parents=True)
    file = folder / "config.yaml"
    file.write_text("notify: {command: [touch, canary]}\n")
    assert load_config().notify.command == ["touch", "canary"]
    spoil(folder, file)
    code, _, err = say(*words, "--wait")
    assert (code, "[not-yours]" in err, str(file) in err) == (2, True, True)
    assert not list(home.rglob("manifest.json"))


# --- datasets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def build(say: Say, home: Path) -> Callable[..., tuple[int, str, str]]:
    (home / "a.jsonl").write_text('{"text": "a b c"}\n')
    words = ("data", "build", str(home / "a.jsonl"), "--tokenizer", "bytes", "--out", str(home / "out"))
    return lambda *more: say(*words, *more)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: folder.chmod(0o777),
        lambda folder: give(folder),
        lambda folder: ((folder / "plan.json").write_text("{}"), give(folder / "plan.json")),
        lambda folder: ((folder / "array.sbatch").write_text(""), (folder / "array.sbatch").chmod(0o666)),
        lambda folder: (folder.rename(folder.with_name("x")), folder.symlink_to(folder.with_name("x"))),
    ],
)
def test_a_build_does_not_go_on_in_a_folder_of_others(
    build: Callable[..., tuple[int, str, str]], say: Say, home: Path, spoil: Callable[[Path], object]
) -> None:
    """Its name follows from the prefix; shards, scripts and a plan lie there."""
    folder = home / "out.build"
    folder.mkdir(mode=0o755)
    spoil(folder)
    code, _, err = build()
    assert (code, "[not-yours]" in err) == (3, True)
    assert not (home / "out.bin").exists()
    assert say("data", "build-part", str(folder))[0] in (1, 3)


def test_a_task_follows_no_plan_of_others(say: Say, home: Path, build: Callable[..., tuple[int, str, str]]) -> None:
    """A plan names the file that is written: a task of mine must not write where somebody else says."""
    (home / "b.jsonl").write_text('{"text": "a"}\nbroken\n')
    failed = say("data", "build", str(home / "b.jsonl"), "--tokenizer", "bytes", "--out", str(home / "b"))
    assert failed[0] == 1
    plan = home / "b.build/plan.json"
    content = json.loads(plan.read_text())
    plan.write_text(json.dumps({**content, "prefix": str(home / "elsewhere")}))
    (home / "b.build").chmod(0o777)
    code, _, err = say("data", "build-part", str(home / "b.build"), "--on-error", "skip")
    assert (code, "[not-yours]" in err) == (3, True)
    assert not list(home.glob("elsewhere*"))


@pytest.mark.parametrize("env", ["OPTIND: 'BASH_VERSINFO[$(touch canary)]'", "BASH_ENV: /tmp/x", "HF_TOKEN: c4n4ry"])
def test_the_profile_of_a_build_sets_no_reserved_variable(
    build: Callable[..., tuple[int, str, str]], home: Path, env: str
) -> None:
    profile = home / "site.yaml"
    profile.write_text(f"env: {{{env}}}\n")
    code, _, err = build("--cluster", str(profile))
    assert (code, "[reserved-variable]" in err or "[secret-in-env]" in err) == (2, True)
    assert not (home / "out.build").exists()


def test_the_jobs_of_a_build_import_nothing_from_the_folder_where_it_was_typed(tmp_path: Path) -> None:
    from fp8launch.cluster.profile import Cluster
    from fp8launch.submit.data_array import _script

    class Plan:
        prefix = str(tmp_path / "out")
        folder = tmp_path / "out.build"

    Plan.folder.mkdir()
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    command = f"{sys.executable} -m fp8launch --version"
    script = tmp_path / "s.sh"
    script.write_text(_script(Plan, "shards", {}, Cluster(), command))  # type: ignore[arg-type]
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "canary").exists()
