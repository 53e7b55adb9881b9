"""Finding plugins: selections, packages of a site, and plugins that are broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = """\
from fp8launch.plugins import Command, Plugin

PLUGIN = Plugin({name!r}, {rest})
"""
HELLO = 'commands={"hello": Command("acme.cli:hello", "Site", "say hello")}'
CLI = """\
import click

@click.command()
def hello():
    click.echo("hello from a site")
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for packages of a site, with the plugin `acme`, which adds the command `hello`."""
    folder = tmp_path / "site"
    install(folder, "acme", PLUGIN.format(name="acme", rest=HELLO))
    (folder / "acme" / "cli.py").write_text(CLI)
    return folder


def install(folder: Path, name: str, plugin: str) -> None:
    """Install a package as pip would, with `plugin` as the text of its module `plugin`."""
    package, metadata = folder / name, folder / f"{name}-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(plugin)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[fp8launch.plugins]\n{name} = {name}.plugin:PLUGIN\n")


@pytest.fixture
def run(home: Path, site: Path) -> Run:
    def call(*words: str, plugins: str | None = None) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(site)}
        env.pop("FP8LAUNCH_PLUGINS", None)
        if plugins is not None:
            env["FP8LAUNCH_PLUGINS"] = plugins
        command = [sys.executable, "-m", "fp8launch", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    return call


def test_a_site_adds_a_command(run: Run) -> None:
    assert "hello       say hello" in run("--help").stdout
    assert run("hello").stdout == "hello from a site\n"


def test_help_does_not_import_a_command(run: Run, site: Path) -> None:
    (site / "acme" / "cli.py").write_text("raise RuntimeError('imported')")
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "say hello" in done.stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("PLUGIN = 5", "TypeError: bad.plugin:PLUGIN is a int, not a fp8launch.plugins.Plugin"),
        (PLUGIN.format(name="other", rest=""), "its entry point is called bad, but it is the plugin other"),
    ],
)
def test_a_broken_plugin_is_reported_once_and_left_out(run: Run, site: Path, text: str, reason: str) -> None:
    install(site, "bad", text)
    done = run("hello")
    assert (done.returncode, done.stdout) == (0, "hello from a site\n")
    assert done.stderr.startswith("fp8launch: the plugin bad is broken and left out: ")
    assert done.stderr.count("\n") == 1 and reason in done.stderr


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ('engines={"script": "bad:X"}', "core already has script in its engines"),
        (HELLO, "acme already has hello in its commands"),
        ('requires=("planner",)', "it requires the plugin planner, which is not active"),
    ],
)
def test_a_plugin_in_conflict_is_left_out(run: Run, site: Path, rest: str, reason: str) -> None:
    install(site, "bad", PLUGIN.format(name="bad", rest=rest))
    done = run("hello")
    assert done.stdout == "hello from a site\n"
    assert done.stderr == f"fp8launch: the plugin bad is left out: {reason}\n"


def test_a_command_that_cannot_be_imported_names_its_plugin(run: Run, site: Path) -> None:
    (site / "acme" / "cli.py").write_text("import no_such_module")
    done = run("hello")
    assert (done.returncode, done.stdout) == (3, "")
    assert "the plugin acme is broken: acme.cli:hello: ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_engine_of_a_site_stops_no_other(run: Run, site: Path) -> None:
    install(site, "bad", PLUGIN.format(name="bad", rest='engines={"bad": "bad.engine:Bad"}'))
    done = run("render", "tiny_cpu")
    assert done.returncode == 0 and "--num-layers" in done.stdout
    assert done.stderr.count("the plugin bad is broken: bad.engine:Bad: ModuleNotFoundError") == 1


def test_a_selection_leaves_the_others_out(run: Run, site: Path) -> None:
    install(site, "bad", "import no_such_module")
    for selection in ("", " , "):
        done = run("--help", plugins=selection)
        assert (done.returncode, done.stderr) == (0, "")
        assert "say hello" not in done.stdout
    assert run("hello", plugins="acme").stdout == "hello from a site\n"
    done = run("hello", plugins="")
    assert done.returncode == 2 and "no command 'hello'" in done.stderr


def test_an_unknown_selection_is_refused_with_the_nearest(run: Run) -> None:
    done = run("--help", plugins="acmee")
    assert done.returncode == 2
    assert "there is no plugin 'acmee' [unknown-plugin]" in done.stderr
    assert "did you mean 'acme'?" in done.stderr
