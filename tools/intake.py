"""Bring in a release of a package that fp8launch follows, and print what changed.

    python tools/intake.py megatron-bridge==0.6.2
    python tools/intake.py megatron-core==0.19.3 --only llama8b --random 40
    python tools/intake.py nemo==26.08 --named-in https://...      # a tag of NVIDIA's NeMo image

Packages: megatron-core, transformer-engine, megatron-bridge, nemo-run, and `nemo` for an image. pip downloads the
wheel, which is read and never installed; its hash must be the recorded one, or is recorded. Then:

1. The data made from the package is written: flag schema, recipe index, fields, recorded configurations, hashes.
2. What changed since the release before is printed: flags, defaults, recipes, functions that stand-ins lack.
3. Every recipe of the pack and of Bridge is checked before and after, and changed findings are printed.
4. Recipes (`--only` selects them by a word in their names, by default none; '' is all of the pack or of Bridge) and
   `--random` fixed random recipes are rehearsed.
5. The tests that compare the package with the code run.

`git diff` is the result to review. Exit code 1: something needs a hand (a failed test or rehearsal, a rule's symbol).
Needs what `make test` installs.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any, NoReturn

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import flag_schemas
from fp8launch.check.checker import check_all
from fp8launch.cluster.images import catalogue
from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import prepare
from fp8launch.megatron import versions
from fp8launch.plugins.bridge import attributes, index
from fp8launch.plugins.rehearse import software
from fp8launch.plugins.rehearse.compiled_te import functions_by_name
from rehearse_pack import of_bridge, whole_recipes

ROOT = Path(__file__).resolve().parent.parent
HASHES = ROOT / "tools" / "intake.json"
BRIDGE_PYTHON = ROOT / ".cache" / "bridge" / "bin" / "python"
# The wheels of megatron-core and megatron-bridge need this Python; their code is pure Python and is only read.
WHEEL_PYTHONS = ("3.12", "3.13", "3.11", "3.10")
# Names of settings that change what is computed rather than how fast.
NUMERIC = re.compile(
    r"fp8|fp4|fp16|bf16|fp32|dtype|precision|eps|dropout|init|scal|loss|router|topk|norm|lr|beta|decay|clip|softmax|"
    r"quant|seed|rope|rotary|bias|amax|activation|aux|weight"
)
TESTS: Mapping[str, tuple[str, ...]] = {
    "megatron-core": ("tests/megatron", "tests/check/test_rule_sources.py", "tests/plugins/validators"),
    "transformer-engine": ("tests/plugins/rehearse/test_compiled_te.py",),
    "megatron-bridge": ("tests/plugins/bridge",),
    "nemo-run": ("tests/plugins/nemo_run_backend",),
    "nemo": ("tests/check/test_machine.py", "tests/plugins/images"),
}
Json = Any


class Report:
    """What changed, printed as it is found; `failed` if something needs a hand."""

    failed = False

    def say(self, text: str) -> None:
        print(text, flush=True)

    def listed(self, title: str, items: Iterable[str], most: int = 40) -> None:
        """Print a title with a count, and the items, one per line."""
        found = list(items)
        self.say(f"{title}: {len(found)}")
        for item in found[:most]:
            self.say(f"  {item}")
        if len(found) > most:
            self.say(f"  ... and {len(found) - most} more")

    def problem(self, text: str) -> None:
        self.failed = True
        self.say(f"BY HAND: {text}")


# --- the wheel ------------------------------------------------------------------------------------------------------


def recorded_hash(package: str, version: str) -> str | None:
    """Return the SHA-256 that the repository has for a wheel."""
    if package == "megatron-core":
        return versions.WHEELS.get(version)
    if package == "transformer-engine":
        return dict(software.RELEASES.values()).get(version)
    known: dict[str, str] = json.loads(HASHES.read_text()) if HASHES.is_file() else {}
    return known.get(f"{package}=={version}")


def download(package: str, version: str, folder: Path, report: Report) -> Path:
    """Download a wheel and verify its hash. Ends the program if pip finds none or the hash is another one."""
    for python in WHEEL_PYTHONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, "--dest", str(folder), f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(folder.glob("*.whl"))
        if wheels:
            break
    else:
        fail(f"pip has no wheel of {package} {version}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    wheel = wheels[0]
    found, known = hashlib.sha256(wheel.read_bytes()).hexdigest(), recorded_hash(package, version)
    # Other platforms' wheels of megatron-core have the same code and another hash.
    if known is not None and found != known and wheel.name.endswith("-none-any.whl"):
        fail(f"{wheel.name} has the hash {found}, but {known} is recorded")
    needs = metadata(wheel)["Requires-Python"] or ""
    size = f"{wheel.stat().st_size / 1e6:.1f} MB"
    report.say(f"{wheel.name}, {size}, SHA-256 {found} ({'as recorded' if known == found else 'not recorded before'})")
    running = ".".join(map(str, sys.version_info[:3]))
    if running not in SpecifierSet(needs):
        report.say(f"needs Python {needs}: `pip index versions {package}` of Python {running} does not show it")
    return wheel


def metadata(wheel: Path) -> Any:
    """Return the METADATA of a wheel, an email message."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def replace_in(path: Path, pattern: str, text: str) -> None:
    """Replace the only match of a pattern in a file, if that changes anything."""
    before = path.read_text(encoding="utf-8")
    after, count = re.subn(pattern, lambda _: text, before, count=1, flags=re.MULTILINE)
    if not count:
        fail(f"{path.relative_to(ROOT)} has no line like {pattern!r}")
    if after != before:
        path.write_text(after, encoding="utf-8")


# --- megatron-core --------------------------------------------------------------------------------------------------


def megatron_core(version: str, wheel: Path, site: Path, report: Report) -> None:
    """Write the flag schema and the wheel's hash, and print which flags and defaults changed."""
    minor = versions.minor_of(version)
    schema = flag_schemas.SCHEMAS / f"{minor}.json.xz"
    older = schema
    if not schema.is_file():
        older = max(flag_schemas.SCHEMAS.glob("0.*.json.xz"), key=lambda path: versions.release(path.name[:-8]))
    before, text = flag_schemas.read(older), flag_schemas.generate_one(wheel)
    report.say(f"flags: compared with {before['version']}")
    compare_flags(before, json.loads(text), report)
    if minor in versions.SUPPORTED and versions.release(version) < versions.release(versions.SUPPORTED[minor]):
        report.say(f"{versions.SUPPORTED[minor]} is newer: nothing is written")
        return
    if json.loads(text) != before:
        schema.write_bytes(flag_schemas.compressed(text))
    table = ROOT / "launchers/fp8launch/megatron/versions.py"
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if minor not in versions.SUPPORTED:
        newest = list(versions.SUPPORTED.items())[-1]
        line = f'    "{newest[0]}": "{newest[1]}",\n'
        replace_in(table, f"^{re.escape(line)}", f'{line}    "{minor}": "{version}",\n')
        line = f'    "{newest[1]}": "{versions.WHEELS[newest[1]]}",\n'
        replace_in(table, f"^{re.escape(line)}", f'{line}    "{version}": "{sha256}",\n')
        for place in ("pyproject.toml (megatron-core)", "TESTED_MEGATRON of launchers/fp8launch/injob/rank/worker.py",
                      "ENGINES of tools/rehearse_pack.py and tools/random_recipes.py"):  # fmt: skip
            report.problem(f"add {minor} to {place}")
    elif versions.release(versions.SUPPORTED[minor]) < versions.release(version):
        old = versions.SUPPORTED[minor]
        replace_in(table, rf'^    "{re.escape(minor)}": "{re.escape(old)}",$', f'    "{minor}": "{version}",')
        replace_in(table, rf'^    "{re.escape(old)}": "[0-9a-f]*",$', f'    "{version}": "{sha256}",')
        report.say(f"versions.py: {old} became {version}; install it with `make test`")


def compare_flags(before: Json, after: Json, report: Report) -> None:
    old, new = ({flag["flags"][0]: flag for flag in each["flags"]} for each in (before, after))
    report.listed("new flags", sorted(new.keys() - old.keys()))
    report.listed("removed flags", sorted(old.keys() - new.keys()))
    defaults, other = [], []
    for name in sorted(old.keys() & new.keys()):
        if old[name].get("default") != new[name].get("default"):
            mark = " (may change numerics)" if NUMERIC.search(name) else ""
            defaults.append(f"{name}: {old[name].get('default')} -> {new[name].get('default')}{mark}")
        elif old[name] != new[name]:
            other.append(f"{name}: {json.dumps(old[name])} -> {json.dumps(new[name])}")
    report.listed("changed defaults", defaults)
    report.listed("other changed properties", other)
    for key in ("added_by_parse_args", "config_only"):
        report.listed(f"new in {key}", sorted(set(after[key]) - set(before[key])))
        report.listed(f"removed from {key}", sorted(set(before[key]) - set(after[key])))


# --- transformer-engine ---------------------------------------------------------------------------------------------


def transformer_engine(version: str, wheel: Path, site: Path, report: Report) -> None:
    """Record the release, and print what changed in recipes, variables and the compiled extension's functions."""
    minor, table = versions.minor_of(version), ROOT / "launchers/fp8launch/plugins/rehearse/software.py"
    known = software.RELEASES.get(minor)
    newest = known or list(software.RELEASES.values())[-1]
    try:
        older = software.transformer_engine_for(Version(newest[0]), report.say)
    except software.NoTransformerEngine as reason:
        report.problem(f"not compared with {newest[0]}: {reason}")
        older = site
    report.say(f"compared with {newest[0]}")
    for title, read in (
        ("options of precision recipes", recipe_fields),
        ("variables", lambda root: dict.fromkeys(te_variables(root))),
        ("functions of the compiled extension", lambda root: dict.fromkeys(te_functions(root))),
    ):
        compare_names(title, read(older), read(site), report)
    missing = set(te_functions(site)) - set(te_functions(older)) - set(functions_by_name())
    report.listed("new functions of the extension without a stand-in", sorted(missing))
    line = f'    "{minor}": ("{version}", "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"),'
    if known is None:
        last = list(software.RELEASES)[-1]
        replace_in(table, rf'^    "{re.escape(last)}": .*,$', f"{next_line(table, last)}\n{line}")
    elif Version(known[0]) < Version(version):
        replace_in(table, rf'^    "{re.escape(minor)}": .*,$', line)


def next_line(path: Path, minor: str) -> str:
    found = re.search(rf'^    "{re.escape(minor)}": .*,$', path.read_text(), re.MULTILINE)
    assert found is not None
    return found[0]


def recipe_fields(site: Path) -> dict[str, str]:
    """Return the fields of the dataclasses in Transformer Engine's recipes, with their defaults as source text."""
    found = {}
    for file in sorted((site / "transformer_engine/common/recipe").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        default = ast.unparse(each.value) if each.value else "required"
                        found[f"{node.name}.{each.target.id}"] = default
    return found


def te_variables(site: Path) -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "transformer_engine").rglob("*.py"))
    return set(re.findall(r"[\"'](NVTE_[A-Z0-9_]+)[\"']", text))


def te_functions(site: Path) -> Iterator[str]:
    """Return the functions of the compiled extension that Transformer Engine's Python code names."""
    for path in sorted((site / "transformer_engine" / "pytorch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id in ("tex", "transformer_engine_torch") and node.attr[0].islower():
                yield node.attr


def compare_names(title: str, before: Mapping[str, Any], after: Mapping[str, Any], report: Report) -> None:
    report.listed(f"new {title}", sorted(after.keys() - before.keys()))
    report.listed(f"removed {title}", sorted(before.keys() - after.keys()))
    changed = [f"{n}: {before[n]} -> {after[n]}" for n in sorted(before.keys() & after.keys()) if before[n] != after[n]]
    if any(value is not None for value in after.values()):
        report.listed(f"changed defaults of {title}", changed)


# --- megatron-bridge ------------------------------------------------------------------------------------------------


def megatron_bridge(version: str, wheel: Path, site: Path, report: Report) -> None:
    """Write index, fields and recorded configurations, and print which recipes changed."""
    install_bridge(version, wheel, report)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "launchers"), "HF_HUB_OFFLINE": "1"}
    replace_in(ROOT / "tools" / "bridge_configuration.py", r"^RELEASE = .*$", f'RELEASE = "{version}"')
    for tool, *options in (
        ("bridge_recipes.py", f"{version}={site}"),
        ("bridge_fields.py", f"{version}={site}"),
        ("bridge_configuration.py", str(site), "--write"),
    ):
        done = subprocess.run([BRIDGE_PYTHON, ROOT / "tools" / tool, *options], env=environment, check=False)
        if done.returncode:
            fail(f"{tool} failed")
    for cache in (index._read, index.releases, index.recipes_of):
        cache.cache_clear()
    earlier = [each for each in index.releases() if each != version]
    before = index.recipes_of(earlier[-1])
    after = index.recipes_of(version)
    report.say(f"recipes: {len(after)}, compared with {earlier[-1]}")
    report.listed("new recipes", sorted(after.keys() - before.keys()))
    report.listed("removed recipes", sorted(before.keys() - after.keys()))
    changed: dict[str, list[str]] = {}
    for name in sorted(before.keys() & after.keys()):
        if fields := changed_fields(before[name].as_dict(), after[name].as_dict()):
            changed.setdefault("\n      ".join(fields), []).append(name)
    report.say(f"changed recipes: {sum(map(len, changed.values()))}")
    for fields_text, names in sorted(changed.items(), key=lambda item: -len(item[1])):
        report.say(f"  {len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}\n      {fields_text}")
    lacking = [f"{n}: {', '.join(one.missing_files)}" for n, one in after.items() if one.missing_files]
    report.listed("recipes that read files which the wheel lacks", lacking)
    if version not in attributes.MEGATRON:
        core = attributes.megatron_of(version)
        table = "MEGATRON of launchers/fp8launch/plugins/bridge/attributes.py"
        text = f"{table} has no {version}: its Megatron-Core is assumed to be {core}"
        # A patch release keeps the minor release of Megatron-Core.
        same = versions.minor_of(version) in map(versions.minor_of, attributes.MEGATRON)
        (report.say if same else report.problem)(text)
    record_hash("megatron-bridge", version, wheel)


def install_bridge(version: str, wheel: Path, report: Report) -> None:
    """Let .cache/bridge, in which the tests with Bridge's own code run, have this release and what it requires."""
    needs = {}
    for text in metadata(wheel).get_all("Requires-Dist"):
        required = Requirement(text)
        if required.marker is None:
            needs[required.name] = str(required.specifier)
    packages = " ".join(f"'{name}{needs[name]}'" for name in ("transformers", "hydra-core"))
    script = ROOT / "tools" / "setup.sh"
    replace_in(script, r"^bridge=.*$", f"bridge={version}")
    replace_in(script, r"^beside_bridge=.*$", f"beside_bridge=({packages})")
    report.say(f"installing Megatron-Bridge {version} into {BRIDGE_PYTHON.parents[1].relative_to(ROOT)}")
    if subprocess.run(["bash", script, "bridge", sys.prefix], cwd=ROOT, check=False).returncode:
        fail("tools/setup.sh bridge failed")


def changed_fields(before: Json, after: Json, prefix: str = "") -> list[str]:
    """Return `field: old -> new` for each field that differs, those of mappings one by one."""
    found = []
    for key in sorted({*before, *after} - {"release"}):
        a, b = before.get(key), after.get(key)
        if a != b and isinstance(a or {}, Mapping) and isinstance(b or {}, Mapping):
            found += changed_fields(a or {}, b or {}, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {shortened(a)} -> {shortened(b)}")
    return found


def shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def record_hash(package: str, version: str, wheel: Path) -> None:
    known = json.loads(HASHES.read_text()) if HASHES.is_file() else {}
    known[f"{package}=={version}"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    HASHES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


# --- nemo-run and images --------------------------------------------------------------------------------------------


def nemo_run(version: str, wheel: Path, site: Path, report: Report) -> None:
    """Print the fields of the executor that the backend uses and the wheel lacks."""
    defined = set()
    for file, name in (("slurm.py", "SlurmExecutor"), ("base.py", "Executor")):
        text = (site / "nemo_run/core/execution" / file).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                defined |= {field.id for field in fields if isinstance(field, ast.Name)}
    backend = (ROOT / "launchers/fp8launch/plugins/nemo_run/scheduler.py").read_text(encoding="utf-8")
    used = set()
    for node in ast.walk(ast.parse(backend)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "SlurmExecutor":
            used |= {keyword.arg for keyword in node.keywords if keyword.arg}
    report.listed("fields of SlurmExecutor that the backend sets", sorted(used))
    for name in sorted(used - defined):
        report.problem(f"SlurmExecutor of {version} has no field {name}")
    record_hash("nemo-run", version, wheel)


def image(tag: str, named_in: str | None, report: Report) -> None:
    """Add a tag of NVIDIA's NeMo image to the catalogue, without versions."""
    name, path = f"nemo-{tag}", ROOT / "containers" / "images.yaml"
    if name in catalogue():
        report.say(f"{name} is in the catalogue")
        return
    if named_in is None:
        fail(f"name the public document that names {tag}: --named-in URL")
    source = next(iter(catalogue().values()))["source"]
    entry = f"{name}:\n  uri: nvcr.io/nvidia/nemo:{tag}\n  source: {source}\n  named_in: {named_in}\n"
    path.write_text(path.read_text(encoding="utf-8") + entry, encoding="utf-8")
    catalogue.cache_clear()
    report.say(f"{name} is new in the catalogue; add the versions of its packages if they are published")


# --- what every package shares --------------------------------------------------------------------------------------


def findings() -> dict[str, list[str]]:
    """Return the codes of the errors of every recipe of the pack and of Bridge's newest release."""
    found, names, runs = {}, [], []
    for name in [*map(str, whole_recipes()), *of_bridge()]:
        short = name.removeprefix(f"{ROOT / 'recipes'}/")
        try:
            runs.append(prepare(name))
            names.append(short)
        except UserError as error:
            found[short] = sorted(problem.code for problem in error.problems)
    for name, result in zip(names, check_all(runs, layers=("rules",)), strict=True):
        found[name] = sorted({one.code for one in result.problems if one.severity == "error"})
    return found


def findings_of_another_process() -> dict[str, list[str]]:
    """Read the data anew: this process has the data that it started with."""
    command = [sys.executable, __file__, "--findings"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare_findings(before: Mapping[str, list[str]], after: Mapping[str, list[str]], report: Report) -> None:
    report.say(f"recipes checked: {len(after)}, {sum(map(bool, after.values()))} with errors")
    changed = [f"{n}: {before[n]} -> {after[n]}" for n in sorted(before.keys() & after.keys()) if before[n] != after[n]]
    report.listed("recipes with other errors than before", changed)
    fresh = [f"{name}: {', '.join(after[name])}" for name in sorted(after.keys() - before.keys()) if after[name]]
    report.listed("new recipes with errors", fresh)


def rehearse(only: str | None, bridge: bool, count: int, environment: Mapping[str, str], report: Report) -> None:
    """Rehearse recipes of the pack or of Bridge whose names contain `only`, and the first random recipes."""
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        if only is not None:
            words = ["rehearse_pack.py", f"{folder}/pack.jsonl", "--only", only, "--jobs", "1", "--roles", "2"]
            commands.append([*words, *(["--bridge"] if bridge else [])])
        if count:
            commands.append(["rehearse_random.py", f"{folder}/random.jsonl", "--count", str(count), "--jobs", "1"])
        for script, *options in commands:
            subprocess.run(
                [sys.executable, ROOT / "tools" / script, *options], stdout=subprocess.DEVNULL, check=False,
                env=environment,
            )  # fmt: skip
            rows = [json.loads(line) for line in Path(options[0]).read_text().splitlines()]
            counts: dict[str, int] = {}
            for row in rows:
                counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
            verdicts = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
            report.say(f"{script}: {len(rows)} recipes: {verdicts}")
            for row in rows:
                if row["verdict"] not in ("passed", "check"):
                    name = row.get("recipe") if isinstance(row.get("recipe"), str) else f"seed {row.get('seed')}"
                    report.say(f"  {row['verdict']} {name}: {str(row.get('message', ''))[:200]}")
                    report.failed |= row["verdict"] == "error"


def run_tests(package: str, environment: Mapping[str, str], report: Report) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slurm and not drill"]
    command += TESTS[package]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    for line in lines:
        # What an assertion shows, such as the symbols of rules that are missing, and the names of tests.
        if line.startswith(("FAILED", "ERROR", "E  ")):
            report.say(f"  {line}")
    report.say(f"tests: {lines[-1] if lines else done.stderr.strip()[-200:]}")
    report.failed |= done.returncode != 0


def fail(message: str) -> NoReturn:
    print(f"intake: {message}", file=sys.stderr)
    raise SystemExit(3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", nargs="?", metavar="PACKAGE==VERSION")
    parser.add_argument("--named-in", metavar="URL", help="the public document that names an image's tag")
    parser.add_argument("--only", metavar="WORD", help="rehearse the recipes whose names contain this")
    parser.add_argument("--random", type=int, default=20, metavar="N", help="rehearse this many fixed random recipes")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--findings", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.findings:
        print(json.dumps(findings()))
        return 0
    package, _, version = (options.release or "").replace("_", "-").partition("==")
    take: dict[str, Callable[[str, Path, Path, Report], None]] = {
        "megatron-core": megatron_core,
        "transformer-engine": transformer_engine,
        "megatron-bridge": megatron_bridge,
        "nemo-run": nemo_run,
    }
    if package not in TESTS or not version:
        fail(f"write PACKAGE==VERSION with one of {', '.join(TESTS)}")
    report = Report()
    before = findings_of_another_process()
    if package == "nemo":
        image(version, options.named_in, report)
    else:
        with tempfile.TemporaryDirectory() as folder:
            wheel = download(package, version, Path(folder), report)
            site = unpack(wheel, Path(folder) / "sites" / version)
            take[package](version, wheel, site, report)
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "launchers")}
            if package == "megatron-core":
                # Rehearsals and tests use this release, whichever is installed.
                environment["PYTHONPATH"] += f"{os.pathsep}{site}"
                environment["FP8LAUNCH_TEST_MEGATRON"] = str(site.parent)
            rehearse(options.only, package == "megatron-bridge", options.random, environment, report)
            if not options.no_tests:
                run_tests(package, environment, report)
    compare_findings(before, findings_of_another_process(), report)
    if package == "nemo":
        run_tests(package, dict(os.environ), report)
    changes = subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    report.say(f"changed files, to review with `git diff`:\n{changes}" if changes else "no file changed")
    return int(report.failed)


if __name__ == "__main__":
    raise SystemExit(main())
