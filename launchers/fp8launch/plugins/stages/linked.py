"""Prepare the stages of a recipe, each with the folder that it starts from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from fp8launch.check.job_paths import job_paths
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError, error
from fp8launch.injob.supervisor import checkpoints
from fp8launch.job.prepared import Prepared, phase_entry, prepare_loaded
from fp8launch.plugins.bridge.index import find
from fp8launch.plugins.bridge.section import bridge_of
from fp8launch.plugins.convert import conversion
from fp8launch.plugins.evaluate import evaluation
from fp8launch.plugins.stages.handover import Linked, Result, handover_problems, space_problems
from fp8launch.plugins.stages.recipe import Stage, Stages
from fp8launch.recipe.load import LoadedRecipe, Override, RecipeSource, load_recipe, read_recipe
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.yaml_source import Node
from fp8launch.submit.recipe_kinds import Part, RunSequence, named
from fp8launch.untyped import as_int
from fp8launch.wording import and_more

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def prepare(
    source: RecipeSource, overrides: Sequence[str], cluster: Cluster, root: Path, study: str | None
) -> RunSequence:
    """Prepare every stage. Raises UserError with the problems of the recipe or of all stages that cannot be prepared.

    `overrides` are `STAGE.section.key=value`, and options such as --time, which apply to every stage with a recipe.
    """
    entries = {key: node for key, node in source.tree.entries().items() if key != "extends"}
    ordinary = [key for key in entries if key in Recipe.model_fields and key not in Stages.model_fields]
    if ordinary:
        message = f"a recipe with `stages` cannot set {and_more(ordinary, 5)}: each stage names its own recipe"
        fix = "put these keys, inherited ones included, in the recipe or the `set` of each stage"
        raise error("stages-keys", message, str(source.path), fix)
    tree = Node({"name": Node(source.path.stem, str(source.path)), **entries}, source.tree.where)
    stated = Stages.from_node(tree)
    places = [node.where for node in _items(tree.find(("stages",)))]
    own = _divided(overrides, [stage.name for stage in stated.stages])
    content = json.dumps([study, _content(stated, source, own)], sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode()).hexdigest()[:6]
    study = study or f"{stated.name}-stages-{digest}"
    linker = _Linker(source.path.absolute().parent, cluster, root / study)
    problems: list[Problem] = []
    code = 0
    for stage, where in zip(stated.stages, places, strict=True):
        run_id = f"{stage.name}-{digest}"
        try:
            linker.add(stage, where, own[stage.name], run_id)
        except UserError as refused:
            problems += named(f"stage {stage.name}", refused.problems)
            code = max(code, refused.exit_code)
    if problems:
        raise UserError(problems, code)
    linked = linker.linked
    found = list(linked.values())
    together = space_problems(found, cluster)
    parts = []
    for one in found:
        between = [*handover_problems(one, linked), *together.get(one.name, ())]
        parts.append(Part(f"stage {one.name}", one.folder.name, one.prepared, tuple(between), {"stage": one.name}))
    return RunSequence(study, tuple(parts))


def _items(node: Node) -> list[Node]:
    return node.value if isinstance(node.value, list) else []


def _divided(overrides: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the overrides of each stage. Raises UserError for one that names no stage."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for text in overrides:
        stage, _, rest = text.partition(".")
        if isinstance(text, Override):
            for name in names:
                found[name].append(text)
        elif stage in found:
            found[stage].append(Override(rest, f"--set {text}"))
        else:
            fix = f"write --set STAGE.section.key=value; stages: {', '.join(names)}"
            raise error("stages-override", f"'{stage}' is not a stage of this recipe", f"--set {text}", fix)
    return found


def _content(stated: Stages, source: RecipeSource, own: Mapping[str, Sequence[str]]) -> list[Any]:
    """Return what identifies the recipe: the stages, with the content of their recipes and their overrides."""
    content = []
    for stage in stated.stages:
        tree = None
        if stage.recipe is not None:
            with contextlib.suppress(UserError):  # reported with the problems of the other stages
                tree = read_recipe(_recipe_name(stage.recipe, source.path.absolute().parent)).tree.plain()
        content.append([stage.model_dump(mode="json"), tree, list(own[stage.name])])
    return content


def _recipe_name(name: str, folder: Path) -> str:
    """Return a stage's recipe as `read_recipe` takes it: paths are relative to the recipe with the stages."""
    return str(folder / name) if name.startswith(("./", "../")) else name


class _Linker:
    """Prepares stages in order, each with what earlier ones promise.

    Of a stage that cannot be prepared, later ones only know the result. They show their own problems.
    """

    def __init__(self, folder: Path, cluster: Cluster, study: Path) -> None:
        self.folder, self.cluster, self.study = folder, cluster, study
        self.results: dict[str, Result] = {}

    @property
    def linked(self) -> dict[str, Linked]:
        return {name: one for name, one in self.results.items() if isinstance(one, Linked)}

    def add(self, stage: Stage, where: str, own: Sequence[str], run_id: str) -> None:
        run = self.study / run_id
        result = self.results.get(stage.source or "")
        before = result if isinstance(result, Linked) else None
        # Until it is prepared, which may fail.
        self.results[stage.name] = Result(stage.name, run, is_model=stage.convert is not None, model=None)
        overrides = [Override(f"{key}={json.dumps(value)}", where) for key, value in stage.set.items()]
        if stage.recipe is not None:
            loaded = load_recipe(_recipe_name(stage.recipe, self.folder), [*overrides, *own])
            if result is not None:
                links = _links(loaded, result, where)
                loaded = load_recipe(_recipe_name(stage.recipe, self.folder), [*overrides, *own, *links])
        elif before is None:
            return  # all that is known of its job comes from the earlier stage
        else:
            recipe = self._conversion if stage.convert else self._evaluation
            # --time and the like are for trainings.
            mine = [text for text in own if not isinstance(text, Override) or text.option.startswith("--set")]
            loaded = load_recipe(recipe(stage, before, run, where), [*overrides, *mine])
        promised = {folder: entries for each in self.linked.values() for folder, entries in each.promises.items()}
        loaded = replace(loaded, promised={**promised, str(self.study): {}})
        prepared = prepare_loaded(self._with_mount(loaded, before), self.cluster)
        if before is result:  # otherwise only the problems of this recipe were wanted
            self.results[stage.name] = _linked(stage, where, run, prepared, before, self._model(stage, before, where))

    def _with_mount(self, loaded: LoadedRecipe, before: Linked | None) -> LoadedRecipe:
        """Mount the study's folder into the container, unless the result of the earlier stage is visible there."""
        if before is None or job_paths(loaded, self.cluster).mounted(str(before.result)):
            return loaded
        mounts = [*loaded.recipe.container.mounts, str(self.study)]
        container = loaded.recipe.container.model_copy(update={"mounts": mounts})
        entries = {**loaded.tree.entries()}
        section = dict(entries["container"].entries())
        section["mounts"] = Node([Node(mount, before.where) for mount in mounts], before.where)
        entries["container"] = Node(section, entries["container"].where)
        recipe = loaded.recipe.model_copy(update={"container": container})
        return replace(loaded, recipe=recipe, tree=Node(entries, loaded.tree.where))

    def _model(self, stage: Stage, before: Linked | None, where: str) -> str | None:
        """Return the Hugging Face model that corresponds to a stage's weights; None if it is unknown."""
        if stage.model is not None:
            name = os.path.expanduser(stage.model)  # noqa: PTH111 a name on the hub is no path
            if name.startswith(("./", "../")):
                name = str(self.folder / name)
            return conversion.model_named(name, where)
        return before.model if before else None

    def _conversion(self, stage: Stage, before: Linked, run: Path, where: str) -> RecipeSource:
        checkpoint, model = _iteration(stage, before, where), self._model(stage, before, where)
        if model is None:
            message = f"the Hugging Face model that corresponds to stage {before.name} is unknown"
            fix = "add `model:` to the stage, a folder with its config.json, or a name on the hub"
            raise error("stage-model", message, where, fix)
        words = json.dumps([str(checkpoint), model, stage.dtype])
        fingerprint = hashlib.sha256(words.encode()).hexdigest()[:16]
        wanted = conversion.Conversion("megatron-to-hf", model, run / "model", checkpoint, stage.dtype, fingerprint)
        return conversion.recipe_of(wanted, _sizes(stage), stage.gpu, stage.image, ())

    def _evaluation(self, stage: Stage, before: Linked, run: Path, where: str) -> RecipeSource:
        keys = ("backend", "fewshot", "limit", "batch_size", "max_length", "dtype")
        stated: dict[str, Any] = {key: getattr(stage, key) for key in keys}
        stated["tasks"] = evaluation.tasks_named(",".join(stage.tasks or ()))
        if stage.task_folder is not None:
            stated["task_folder"] = str(evaluation.task_folder_at(self.folder / stage.task_folder))
        if before.is_model:
            stated["model"] = str(before.result)
        else:
            stated["model"] = self._model(stage, before, where)
            stated["checkpoint"] = str(_iteration(stage, before, where))
            if stated["model"] is None:
                fix = "add `model:` to the stage: a folder with its config.json and tokenizer, or a name on the hub"
                raise error("stage-model", f"the model of stage {before.name} is unknown", where, fix)
        trained = before.trained_by or before
        stated["run"] = str(trained.folder)
        env = _OFFLINE if stage.offline else {}
        return evaluation.recipe_of(stated, _sizes(stage), stage.gpu, stage.image, env, ())


def _sizes(stage: Stage) -> dict[str, int]:
    return {"tp": stage.tp, "pp": stage.pp, "ep": stage.ep}


def _links(loaded: LoadedRecipe, before: Result, where: str) -> list[Override]:
    """Return the overrides that let a recipe start from the result of an earlier stage."""
    result = json.dumps(str(before.result))
    key = "checkpoint.load"
    more = []
    if loaded.recipe.engine == "bridge":
        stated = bridge_of(loaded.recipe)
        tuned = stated.recipe is not None and find(stated.recipe, stated.release, where).task != "pretrain"
        if tuned:
            key = "checkpoint.pretrained_checkpoint"
        if (
            stated.model is None
            and before.model is not None
            and before.is_model
            and PurePath(before.model).is_absolute()
        ):
            # Its config.json and tokenizer are those of the result, and they exist already.
            more = [Override(f"bridge.model={json.dumps(before.model)}", where)]
    elif before.is_model:
        message = f"the stage starts from {before.name}, a Hugging Face model, which only Megatron-Bridge loads"
        fix = "start from the stage that trained the model, or use a recipe of Bridge (bridge:NAME)"
        raise error("stage-format", message, where, fix)
    stated_load = loaded.recipe.checkpoint.load
    if stated_load is not None:
        message = f"checkpoint.load is {stated_load}, but the stage starts from {before.name}"
        raise error("stage-load", message, loaded.where("checkpoint", "load"), "remove checkpoint.load, or `from`")
    return [Override(f"{key}={result}", where), *more]


def _iteration(stage: Stage, before: Linked, where: str) -> Path:
    """Return the folder of the last checkpoint of an earlier stage. Raises UserError if its iteration is unknown."""
    if before.is_model:
        message = f"stage {before.name} writes a Hugging Face model, and a Megatron checkpoint is needed"
        raise error("stage-format", message, where, "name the stage that trained the model")
    if before.iterations is None:
        message = f"the number of the last checkpoint of stage {before.name} is unknown"
        raise error("stage-iterations", message, where, "set train.iterations of that stage")
    return checkpoints.place(before.result, before.iterations)


def _linked(
    stage: Stage, where: str, run: Path, prepared: Prepared, before: Linked | None, model: str | None
) -> Linked:
    """Return a stage with its result, and what that promises to later stages."""
    name, source = stage.name, stage.source
    if stage.recipe is None and before is not None:
        trained = before.trained_by or before
        result, is_model = before.result, before.is_model
        if stage.convert:
            result, is_model = run / "model", True
        return Linked(name, result, is_model, model, where, run, prepared, source, before.iterations, trained)
    folder = prepared.loaded.recipe.checkpoint.dir
    result, promises = run, {}
    if folder is not None:
        entries = {
            "arguments": prepared.args.recorded,
            "megatron": {"version": prepared.args.version},
            "phases": list(map(phase_entry, prepared.phases)),
        }
        result = run / folder
        promises = {str(result): entries}
    iterations = as_int(prepared.parts[-1].args.attributes.get("train_iters"))
    return Linked(name, result, False, model, where, run, prepared, source, iterations, promises=promises)
