"""Write what the docs repeat from the code: `python tools/reference.py`.

Whole pages: docs/recipe_reference.md and docs/cluster_reference.md, from the pydantic schemas, docs/advisories.md,
from the table of known bugs, and docs/command_reference.md, from the command line. Examples in docs/read_results.md are
the output of real commands. Tables between the marks
of docs/gpus.md and docs/failures.md: from the GPUs and the check's rules, and from the failure patterns. With
`--check`, say which are stale and exit with 1 instead.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fp8launch import engines
from fp8launch.check.resolved_run import resolve_run
from fp8launch.check.rule import all_rules
from fp8launch.cli import cli, commands
from fp8launch.cluster.profile import Cluster
from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import UNQUANTIZED, precision_names
from fp8launch.injob.supervisor.failure_patterns import PATTERNS
from fp8launch.job.prepared import prepare
from fp8launch.megatron.flag_map import CHOICES, FIELDS
from fp8launch.plugins.advisories.advisory import PACKAGES, PUBLISHED, Advisory
from fp8launch.plugins.advisories.table import ADVISORIES, NOT_FROM_RECIPES, releases_in_words
from fp8launch.recipe.field_types import PATTERNS_IN_WORDS
from fp8launch.recipe.schema import recipe_class
from fp8launch.recipe.sections import Phase

ROOT = Path(__file__).resolve().parents[1]
MADE = "<!-- Made by `python tools/reference.py` from the code. A test fails when it is stale. -->"

# Fields whose allowed values another table holds.
CHOSEN_ELSEWHERE = {"engine": ", ".join(f"`{name}`" for name in engines.names())}
NAME = "NAME"  # stands for a name that the user chooses

PHASE_SECTIONS = [name for name in Phase.model_fields if name != "iterations"]
# What a field means, where it has no `description` of its own and sets no single Megatron flag.
MEANING = {
    "recipe": {
        "name": "names the run, its folder and the Slurm job",
        "description": "one line for `fp8launch recipes`",
        "engine": "what trains: fp8launch's own GPT entry, a recipe of Megatron-Bridge (`bridge.recipe`), "
        "Hugging Face Accelerate (`accelerate.sharding`), or the script of `launch.script`; these keys "
        "imply it. `convert` and `evaluate` train nothing",
        "model": "Megatron's flags of the architecture, by their names in snake_case",
        "precision.recipe": "how numbers are scaled; sets `--fp8-recipe` or `--fp4-recipe`, and `--bf16`",
        "precision.format": "`--fp8-format` or `--fp4-format`; required for FP8: without it Megatron trains in bf16",
        "precision.param_gather": "`--fp8-param-gather`, and the other flags that the recipe needs for it",
        "precision.bf16_layers.start": "layers at the start that stay in bf16",
        "precision.bf16_layers.end": "layers at the end that stay in bf16",
        "parallel.sequence": "`--sequence-parallel`; `auto`: on if TP is above 1",
        "batch.scaling": "`weak`: the global batch grows with the number of nodes; `strong`: it does not change",
        "data.kind": "`mock` generates tokens; `indexed` reads Megatron's .bin and .idx files",
        "data.blend": "weights and prefixes for `--data-path`; only with `indexed`",
        "checkpoint.keep": "number of newest checkpoints to keep; without it all are kept",
        "checkpoint.allow_pickle": "let Transformer Engine unpickle FP8 state that this run did not write "
        "([security](security.md)); only for sources that you trust",
        "resources.nodes": "number of nodes",
        "resources.gpus_per_node": "GPUs per node, with one process each",
        "resources.gpu": "GPU model of the nodes, for `check` and for the peak in MFU",
        "resources.time": "the job's time limit in one of Slurm's forms",
        "resources.cpus_per_task": "CPU cores per process",
        "container.image": "a name of `fp8launch images`, a URI, or a file; null runs without a container",
        "container.mounts": "`/source[:/target[:ro]]`",
        "container.contains": "files and folders in the image that the run reads",
        "launch.mode": "`srun`: one task per GPU; `torchrun`: one torchrun per node",
        "launch.script": "another training script, with the same arguments; a relative path starts at the recipe file",
        "launch.arguments": "the script's own arguments, passed after Megatron's",
        "launch.python": "Python interpreter of the processes",
        "launch.health_check": "check every node before training; an unhealthy one ends the job with status 75",
        "launch.probe": "report after the first iteration which modules ran in FP8",
        "launch.profile.start": "first iteration to [profile](profile.md), counted from 1",
        "launch.profile.end": "last iteration to profile; `start` by default",
        "launch.profile.ranks": "ranks to profile",
        "launch.profile.tool": "`torch`: kernels; `memory`: what is allocated at the peak; `nsys`: Nsight Systems",
        "launch.profile_iteration": "short form of `profile: {start: N}`",
        "launch.config": "fields of Megatron's TransformerConfig that have no flag",
        "launch.tensor_stats": "measure FP8 tensors every N iterations: underflow, scales, largest values",
        "accelerate.sharding": "what the ranks shard: nothing (`ddp`), or the same as FSDP2 or DeepSpeed's ZeRO 1 to 3",
        "accelerate.fp8": "the library of FP8; `msamp` is refused with its reason",
        "accelerate.rowwise": "torchao scales each row, with `precision: {recipe: tensorwise, format: e4m3}`",
        "bridge.recipe": "name of a recipe of Megatron-Bridge (`fp8launch recipes --engine bridge`)",
        "bridge.release": "release that has it; the newest by default",
        "bridge.model": "local folder with the `config.json` that the recipe would read from the Hugging Face hub",
        "bridge.data": "for [fine-tuning](bridge_fine_tuning.md): local folder with `training.jsonl`, or `mock`",
        "convert.direction": "which way; `fp8launch convert` writes this section ([weights](convert.md))",
        "convert.model": "Hugging Face model, a folder or a name on the hub: the source, or what the output is like",
        "convert.checkpoint": "folder of one iteration of a checkpoint, the source of `megatron-to-hf`",
        "convert.out": "folder of the output",
        "convert.dtype": "type of the output's weights; the model's own by default",
        "convert.fingerprint": "digest of the input, which identifies a finished output",
        "evaluate.model": "Hugging Face model, a folder or a name on the hub: what is evaluated or, with a checkpoint, "
        "what it is like; `fp8launch evaluate` writes this section ([evaluation](evaluate.md))",
        "evaluate.checkpoint": "folder of one iteration of a Megatron checkpoint",
        "evaluate.run": "folder of the run that wrote the checkpoint, which gets a copy of the results",
        "evaluate.backend": "model backend of lm-eval, `hf` by default",
        "evaluate.tasks": "tasks of lm-eval, or of `task_folder`",
        "evaluate.task_folder": "folder with your own tasks, as for `lm_eval --include_path`",
        "evaluate.fewshot": "examples before a question; the task's own number by default",
        "evaluate.limit": "questions per task; all by default",
        "evaluate.batch_size": "questions at once, 1 by default",
        "evaluate.max_length": "longest input in tokens; the model's own by default",
        "evaluate.dtype": "type of the weights; the model's own by default",
        "evaluate.every": "follow `run`, and evaluate each Nth of its checkpoints",
        "evaluate.checkpoints": "folder of the followed run's checkpoints",
        "evaluate.interval": "iterations from one checkpoint to the next",
        "evaluate.patience": "minutes of silence after which a followed run counts as ended, 120 by default",
        "evaluate.keep": "keep the converted models of a followed run",
        "bridge.overrides": "fields of Bridge's configuration, such as `{ddp: {overlap_grad_reduce: false}}`",
        "software.megatron": "version of Megatron-Core in the job; selects the known flags",
        "software.transformer_engine": "version of Transformer Engine in the job",
        "software.cuda": "version of CUDA in the job",
        "survive.attempts": "total number of attempts; above 1 the run continues automatically",
        "survive.stuck": "number of attempts in a row without a newer checkpoint that ends the run",
        "survive.hang_after": "seconds without log output that count as a hang; 0: never",
        "health.loss_jump": "rise of the loss, as a fraction, that is reported (docs/health.md)",
        "health.loss_fall": "least fall of the loss of a new run, as a fraction",
        "health.actions": "what the job does about a code: `continue`, `stop` or `{rewind: N}`; about `slow-node`: "
        "`continue`, `exclude` or `exclude-later` (docs/health.md)",
        "health.max_rewinds": "number of rewinds after which the run stops instead",
        "health.skipped_steps": "share of skipped steps that is reported",
        "health.slowdown": "increase of the step time, as a fraction, that is reported",
        "health.ignore": "codes that are not reported",
        "survive.stop_before": "seconds before the time limit at which the training saves and exits",
        "survive.rules": "actions by cause that replace the defaults",
        "env": "environment of the processes; null unsets a variable that a part sets",
        "secrets": "names of variables whose values are passed to the job and never written to a file",
        "megatron": "any other Megatron flag; true is a bare flag, null removes one that a part sets",
        "megatron_extra": "flags that only a fork of Megatron-LM has; passed on as written, without a check",
        "silence": "code of a warning to suppress, with the reason",
        "notes": "shown by `fp8launch recipes NAME`",
        "reference": "a published figure to print next to the measured one",
        "phases.NAME.iterations": "iterations of the phase; one phase may omit them and gets the rest",
        **{f"phases.NAME.{section}": f"the phase's own values of `{section}`" for section in PHASE_SECTIONS},
        "axes": "values by key; the recipe becomes a study with one run per combination",
        "nodes": "numbers of nodes; the recipe becomes a study with one run per number",
    },
    "cluster": {
        "name": "shown in reports; the file's name by default",
        "description": "one line for `fp8launch clusters`",
        **{key: f"sbatch's `--{key}`" for key in ("account", "partition", "qos", "reservation", "constraint")},
        **{key: f"sbatch's `--{key}`" for key in ("nodelist", "exclude", "segment", "exclusive")},
        "gpus": "sbatch option that requests GPUs",
        "gres_type": "GPU type in that option, such as `h100`",
        "memory": "sbatch's `--mem`",
        "requeue": "true: `--requeue`; false: `--no-requeue`; unset: neither",
        "mpi": "srun's `--mpi`",
        "launch": "default of the recipe's `launch.mode`",
        "env": "environment variables; those of the recipe override them",
        "runtime": "container runtime; detected if unset",
        "mounts": "mounts for every container job",
        "ssh.user": "user name on the login node",
        "ssh.port": "ssh port of the login node",
    },
}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field by its path, those of sections in sections one by one."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{info.alias or name}"
        inner = _section(info.annotation)
        if inner is None or path == "reference":
            yield path, info
        else:
            # The entries of a mapping have names of their own.
            named = f"{NAME}." if get_origin(info.annotation) is dict else ""
            yield from fields(inner, f"{path}.{named}")


def _section(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def values(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What a field takes, from its JSON schema."""
    if "$ref" in schema:
        return values(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        kinds = [values(part, definitions) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if pattern := schema.get("pattern"):
        words = PATTERNS_IN_WORDS.get(pattern)
        return words if words and len(words) < 70 else "text"
    kind = schema.get("type")
    if kind == "array":
        return f"list of {values(schema.get('items', {}), definitions)}"
    if kind == "object":
        return "mapping"
    if kind in ("integer", "number"):
        least = (
            " above 0"
            if schema.get("exclusiveMinimum") == 0
            else f", {schema['minimum']:g} or more"
            if "minimum" in schema
            else ""
        )
        return ("whole number" if kind == "integer" else "number") + least
    return {"boolean": "`true`, `false`", "string": "text"}.get(str(kind), "value")


def page(title: str, model: type[BaseModel], meanings: dict[str, str], intro: str) -> str:
    """A table of every field of a schema, sections under headings of their own."""
    schema = model.model_json_schema()
    lines, heading = [f"# {title}", "", MADE, "", *textwrap.wrap(intro, 120, break_on_hyphens=False)], None
    for path, info in fields(model):
        section = path.rpartition(".")[0].partition(".")[0]
        if section != heading:
            lines += ["", f"## `{section}`" if section else "## Top level"]
            lines += ["", "| key | values | default | meaning |", "|---|---|---|---|"]
            heading = section
        kind = CHOSEN_ELSEWHERE.get(path) or values(_at(schema, path), schema.get("$defs", {}))
        lines.append(f"| `{path}` | {_cell(kind)} | {_default(info)} | {_cell(_meaning(path, info, meanings))} |")
    unused = set(meanings) - {path for path, _ in fields(model)}
    if unused:
        raise SystemExit(
            f"tools/reference.py explains what {model.__name__} does not have: {', '.join(sorted(unused))}"
        )
    return "\n".join(lines) + "\n"


def _at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    here: dict[str, Any] = schema
    for key in path.split("."):
        for part in (here, *here.get("anyOf", [])):
            if "$ref" in part:
                here = schema["$defs"][part["$ref"].rpartition("/")[2]]
        here = next(iter(here["patternProperties"].values())) if key == NAME else here["properties"][key]
    return here


def _meaning(path: str, info: FieldInfo, meanings: dict[str, str]) -> str:
    *section, name = path.split(".")
    flag = FIELDS.get(tuple(section), {}).get(name)
    if found := info.description or meanings.get(path):
        return found
    if flag is not None:
        return f"`--{flag.replace('_', '-')}`"
    if choices := CHOICES.get((*section, name)):
        flags = dict.fromkeys(flag for setting in choices.values() for flag in setting)
        return ", ".join(f"`--{flag.replace('_', '-')}`" for flag in flags)
    raise SystemExit(f"tools/reference.py: {path} is explained nowhere: give it a description")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    if default is None or default == "" or default in ({}, []):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def gpu_table() -> Iterator[str]:
    """Which precisions each GPU has, by the hardware rules of the check, and its memory and peaks."""
    rules = [rule for rule in all_rules().values() if rule.scope == "hardware"]
    quantized = [name for name in precision_names() if name not in UNQUANTIZED]
    gpus = [gpu for gpu in GPUS.values() if gpu.name != "cpu"]
    yield "| GPU | " + " | ".join(quantized) + " |"
    yield "|---|" + "---|" * len(quantized)
    for gpu in gpus:
        verdicts = []
        for precision in quantized:
            run = resolve_run(prepare("llama8b_bf16", [f"precision.recipe={precision}", f"resources.gpu={gpu.name}"]))
            found = [problem.severity for rule in rules for problem in rule.problems(run)]
            verdicts.append("no" if "error" in found else "slow" if found else "yes")
        yield f"| {gpu.name} | {' | '.join(verdicts)} |"
    yield ""
    # A second table, because all columns in one do not fit on a page.
    yield "| GPU | compute capability | memory, GiB | bf16 / FP8 / FP4 peak, TFLOP/s |"
    yield "|---|---|---|---|"
    for gpu in gpus:
        peaks = " / ".join(f"{peak:,.0f}" if peak else "none" for peak in (gpu.bf16, gpu.fp8, gpu.fp4))
        yield f"| {gpu.name} | {'.'.join(map(str, gpu.capability))} | {gpu.memory_gib:g} | {peaks} |"


def failure_table() -> Iterator[str]:
    """Code and advice of every failure, causes first."""
    yield "| code | what to do |"
    yield "|---|---|"
    advice: dict[str, str] = {}
    for pattern in sorted(PATTERNS, key=lambda pattern: pattern.depth):
        advice.setdefault(pattern.code, pattern.advice)
    for code, text in advice.items():
        yield f"| `{code}` | {_cell(text)} |"


def advisory_page() -> str:
    """Return the page of known bugs: reported ones, ones with undecided releases, ones that no recipe can trigger."""
    examined = "; ".join(f"{PACKAGES[package]} {known[0]} to {known[-1]}" for package, known in PUBLISHED.items())
    decided = [row for row in ADVISORIES if row.affected]
    undecided = [row for row in ADVISORIES if not row.affected]
    lines = [
        "# Known bugs",
        "",
        MADE,
        "",
        *textwrap.wrap(
            "Look up a bug that `check` or `verify` reported. The page lists bugs of Megatron-Core, Transformer Engine "
            "and Megatron-Bridge that neither crash nor warn: the run trains, but gradients, learning rates or "
            "checkpoints are wrong. `fp8launch check` warns if a recipe triggers one in the releases that it runs "
            "with. `fp8launch verify` names the bugs of a finished run. They do not change exit codes. To accept a "
            "bug, state the reason:",
            120,
            break_on_hyphens=False,
        ),
        "",
        "```yaml",
        "silence:",
        "  global-aux-dp: the coefficient is multiplied by DP",
        "```",
        "",
        *textwrap.wrap(
            "The releases come from the recipe's `software`, else from its image, else they are the newest supported "
            "ones. A release is listed as affected if its package on PyPI contains the faulty line. Examined were "
            f"{examined}. Nothing is reported for other releases.",
            120,
            break_on_hyphens=False,
        ),
        "",
        "| advisory | affected releases |",
        "|---|---|",
        *(f"| [`{row.id}`](#{row.id}) | {releases_in_words(row.affected)} |" for row in decided),
    ]
    for row in decided:
        lines += ["", f"## `{row.id}`", "", *_advisory(row)]
    lines += ["", "## Not decided", ""]
    lines += ["These bugs are documented but never reported, because the affected releases are not known."]
    for row in undecided:
        lines += ["", f"### `{row.id}`", "", *_advisory(row)]
    lines += ["", "## Not from a recipe", "", "No recipe can trigger these bugs in a supported release.", ""]
    lines += ["| bug | why |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in NOT_FROM_RECIPES.items())]
    return "\n".join(lines) + "\n"


def _advisory(row: Advisory) -> Iterator[str]:
    if row.affected:
        yield f"- Affected: {releases_in_words(row.affected)}"
    yield f"- When: {row.when}"
    yield f"- Effect: {row.effect}"
    yield f"- Fix: {row.fix}"
    yield f"- Source: <{row.source}>"


def command_page() -> str:
    """Return the page of all commands: usage, help text and options, in the groups of `fp8launch --help`."""
    groups: dict[str, list[str]] = {}
    for name, command in commands().items():
        group = groups.setdefault(command.group, [])
        group.insert(group.index(command.before) if command.before in group else len(group), name)
    context = click.Context(cli, info_name="fp8launch")
    lines = [
        "# Command reference",
        "",
        MADE,
        "",
        "Look up a command or an option. The page has what `fp8launch COMMAND --help` prints. If you are new, begin",
        "with [first steps](first_steps.md), which also lists the [exit codes](first_steps.md#exit-codes).",
        "",
        "| group | commands |",
        "|---|---|",
        *(
            f"| {group} | {', '.join(f'[`{name}`](#fp8launch-{name})' for name in names)} |"
            for group, names in groups.items()
        ),
        "",
        "## fp8launch",
        "",
        *_options(cli, context),
    ]
    for names in groups.values():
        for name in names:
            verb = cli.get_command(context, name)
            assert verb is not None
            lines += _command(verb, click.Context(verb, info_name=name, parent=context))
    return "\n".join(lines).rstrip("\n") + "\n"


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the section of a command, and those of its subcommands."""
    depth = context.command_path.count(" ") + 1
    yield from (f"{'#' * depth} {context.command_path}", "")
    yield f"`{' '.join([context.command_path, *command.collect_usage_pieces(context)])}`"
    yield ""
    yield from _help(command)
    yield from _options(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from _command(subcommand, click.Context(subcommand, info_name=name, parent=context))


def _help(command: click.Command) -> Iterator[str]:
    """Yield a command's help text as Markdown. Paragraphs that keep their line breaks (`\\b`) are examples."""
    text = inspect.cleandoc(command.help or "").split("\f")[0].strip()
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield from ("```text", *paragraph.splitlines()[1:], "```")
        else:
            yield from textwrap.wrap(_prose(" ".join(paragraph.split())), 120, break_on_hyphens=False)
        yield ""


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    rows = [
        record
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option) and "--help" not in parameter.opts
        if (record := parameter.get_help_record(context))
    ]
    if not rows:
        return
    yield "| option | meaning |"
    yield "|---|---|"
    for option, meaning in rows:
        yield f"| `{_cell(option)}` | {_cell(_prose(' '.join(meaning.split())))} |"
    yield ""


def _prose(text: str) -> str:
    """Return a help text as Markdown: what looks like a tag or emphasis is not markup there."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<>*_])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def results_page(text: str) -> str:
    """Return the page about results with what its commands print about the measured logs."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(ROOT / "benchmarks/h200/logs.tar.xz") as logs:
            names = [f"2026-11-20-verify/{precision}.log" for precision in ("bf16", "tensorwise")]
            for name in names:
                target = Path(folder, name)
                target.parent.mkdir(exist_ok=True)
                log = logs.extractfile(name)
                assert log is not None
                target.write_bytes(log.read())
        text = between_marks(text, "parse example", _printed(folder, "parse", names[1]))
        return between_marks(text, "compare example", _printed(folder, "compare", *names))


def _printed(folder: str, *arguments: str) -> Iterator[str]:
    """Yield a code block with a command and its output, 100 columns wide."""
    env = {**os.environ, "COLUMNS": "100", "HOME": folder, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "fp8launch", *arguments],
        cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=True,
    )  # fmt: skip
    yield "```text"
    yield f"$ fp8launch {' '.join(arguments)}"
    yield from (line.rstrip() for line in done.stdout.rstrip().splitlines())
    yield "```"


def between_marks(text: str, name: str, lines: Iterable[str]) -> str:
    """The page with these lines in the place that its marks keep for `name`."""
    begin, end = f"<!-- {name}: python tools/reference.py -->", f"<!-- end of {name} -->"
    replaced, count = re.subn(
        f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", lambda _: "\n".join(lines) + "\n", text, flags=re.S
    )
    if count != 1:
        raise SystemExit(f"tools/reference.py: no place for {name}")
    return replaced


def pages() -> dict[Path, str]:
    """Every page with what belongs in it."""
    docs = ROOT / "docs"
    return {
        docs / "recipe_reference.md": page(
            "Recipe reference",
            recipe_class(),
            MEANING["recipe"],
            "Look up a key of a recipe. Keys without a default that you do not set keep Megatron's default. To write a "
            "recipe, see [recipes](recipes.md).",
        ),
        docs / "cluster_reference.md": page(
            "Cluster profile reference",
            Cluster,
            MEANING["cluster"],
            "Look up a key of a cluster profile. All keys are optional. To write a profile, see "
            "[your first cluster](first_cluster.md) and [clusters](clusters.md).",
        ),
        docs / "advisories.md": advisory_page(),
        docs / "command_reference.md": command_page(),
        docs / "read_results.md": results_page((docs / "read_results.md").read_text(encoding="utf-8")),
        docs / "gpus.md": between_marks((docs / "gpus.md").read_text(encoding="utf-8"), "gpus", gpu_table()),
        docs / "failures.md": between_marks(
            (docs / "failures.md").read_text(encoding="utf-8"), "failures", failure_table()
        ),
    }


def main() -> int:
    stale = {path: text for path, text in pages().items() if not path.is_file() or path.read_text() != text}
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run python tools/reference.py", file=sys.stderr)
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
