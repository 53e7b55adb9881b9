"""Megatron-Bridge: NVIDIA's own recipes by name, in Bridge's own training loop (injob/bridge.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, ClassVar

from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError
from fp8launch.engines.base import (
    AttemptArguments,
    Engine,
    EngineArguments,
    EngineDescription,
    Entry,
    Layout,
    NeededFile,
    StepArguments,
)
from fp8launch.engines.megatron_lm.layout import layout
from fp8launch.megatron.arguments import Argument
from fp8launch.megatron.schema import parser_defaults
from fp8launch.plugins.bridge import attributes, fine_tuning
from fp8launch.plugins.bridge.fields import (
    AXES,
    DERIVED,
    attribute_of,
    blend_prefixes,
    fields_of,
    flat,
    hydra,
)
from fp8launch.plugins.bridge.index import BridgeRecipe, find, releases
from fp8launch.plugins.bridge.injob.local_files import MOCK, TRAINING_FILE, has_tokenizer
from fp8launch.plugins.bridge.section import bridge_of
from fp8launch.plugins.bridge.settings import Setting, settings, size
from fp8launch.plugins.bridge.translate_overrides import translate_overrides
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.untyped import as_int, as_mapping

# Releases whose recipes are in scripts/performance instead of the package.
_OF_SCRIPTS = ("0.4.0", "0.5.0")
# Tasks whose recipes the in-job program can start.
TASKS = ("pretrain", "sft", "peft")
_TASKS_OF_SCRIPTS = ("pretrain",)
# Sections of Megatron-LM's command line, and what replaces them in a recipe for Bridge.
_NOT_HERE = {
    "precision": "choose the Bridge recipe of that precision, or set fields of `mixed_precision`",
    "data": "set fields of `dataset`, such as dataset.blend",
    "megatron": "write Bridge's fields: SECTION.FIELD, such as model.recompute_granularity",
    "megatron_extra": "write Bridge's fields: SECTION.FIELD, such as model.recompute_granularity",
    "optimizer": "set fields of Bridge's `optimizer` and `ddp`, such as ddp.grad_reduce_in_fp32",
}
# The first matching prefix of a recipe's name gives the module and name of its forward step
# (RECIPE_FORWARD_STEP_PREFIXES and STEP_FUNCTIONS of Bridge 0.6.0, scripts/training).
_IMAGES_AND_TEXT = "megatron.bridge.training.vlm_step:forward_step"
_STEPS = {
    "nemotron_nano_v2_vl_": "megatron.bridge.training.llava_step:forward_step",
    "nemotron_omni_": "megatron.bridge.training.nemotron_omni_step:forward_step",
    "qwen2_audio_": "megatron.bridge.training.audio_lm_step:forward_step",
    "qwen3_omni_": "megatron.bridge.models.qwen_omni.qwen3_omni_step:forward_step",
    "step37_": "megatron.bridge.models.stepfun.step37_flickr8k_step:forward_step",
    "gemma3_vl_": _IMAGES_AND_TEXT,
    "gemma4_vl_": _IMAGES_AND_TEXT,
    "glm_45v_": _IMAGES_AND_TEXT,
    "kimi_k25_vl_": _IMAGES_AND_TEXT,
    "ministral3_": _IMAGES_AND_TEXT,
    "qwen25_vl_": _IMAGES_AND_TEXT,
    "flux_": "megatron.bridge.diffusion.models.flux.flux_step:FluxForwardStep",
    "qwen3_vl_": "megatron.bridge.models.qwen_vl.qwen3_vl_step:forward_step",
    "qwen35_vl_": "megatron.bridge.models.qwen_vl.qwen3_vl_step:forward_step",
    "wan_": "megatron.bridge.diffusion.models.wan.wan_step:WanForwardStep",
    "": "megatron.bridge.training.gpt_step:forward_step",
}
# Fields with another name up to 0.5.
_OLDER_NAMES = {"dataset.seq_length": "dataset.sequence_length"}
_WITH_STEP = "overlap_param_gather_with_optimizer_step"
# These prepare a first start; a resume loads the run's own checkpoint.
_FIRST_START = frozenset(("checkpoint.load", "checkpoint.pretrained_checkpoint", "checkpoint.finetune"))
# Adapters are added to the pretrained weights at every start, and only then read from the run's own checkpoint.
_FIRST_START_OF_ADAPTERS = _FIRST_START - {"checkpoint.pretrained_checkpoint"}
# Variables that name a cache of the hub's files.
_HUB_CACHES = frozenset(("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
_HUB_TOKENIZER = "HuggingFaceTokenizer"
# What huggingface_hub takes as true, in upper case.
_ON = frozenset(("1", "ON", "YES", "TRUE"))
# Slurm sends SIGTERM before it ends or preempts a job. With this, Bridge then saves and exits.
_LEAVE_ON_SIGTERM = "train.exit_signal_handler"


class Bridge(Engine):
    """A recipe of Megatron-Bridge with overrides in Bridge's own syntax, run by its `pretrain` or `finetune`."""

    name: ClassVar[str] = "bridge"
    description: ClassVar[EngineDescription] = EngineDescription(
        checks="megatron_core",
        validators="none",
        log_dialect="megatron",
        evidence=("module report", "kernel profile"),
        rehearsal=True,
    )
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "megatron.bridge": "Megatron-Bridge"}
    installation: ClassVar[str | None] = "set PYTHONPATH to the src folder of a release of Megatron-Bridge"
    own_keys: ClassVar[tuple[str, ...]] = (
        "bridge.recipe",
        "bridge.overrides",
        "bridge.model",
        "bridge.data",
    )
    seed_key: ClassVar[str] = "rng.seed"

    def stated_seed(self, recipe: Recipe) -> int | None:
        for field, _, value in flat(bridge_of(recipe).overrides):
            if field == self.seed_key:
                return as_int(value)
        return None

    def problems(self, loaded: LoadedRecipe) -> Iterator[Problem]:
        recipe = loaded.recipe
        if bridge_of(recipe).recipe is None:
            fix = "write `bridge: {recipe: NAME}`; `fp8launch recipes --engine bridge` lists the names"
            message = "`engine: bridge` needs the name of a recipe"
            yield Problem("error", "no-bridge-recipe", message, loaded.where("engine"), fix)
        for section, fix in _NOT_HERE.items():
            if section in recipe.model_fields_set:
                message = f"`{section}` is for Megatron-LM's command line, which `engine: bridge` does not use"
                yield Problem("error", "key-of-other-engine", message, loaded.where(section), fix)
        for section, key, other in (("parallel", "fsdp", "ddp"), ("launch", "config", "model")):
            if getattr(getattr(recipe, section), key):
                message = f"`{section}.{key}` is for Megatron-LM's command line, which `engine: bridge` does not use"
                fix = f"set fields of `{other}`"
                yield Problem("error", "key-of-other-engine", message, loaded.where(section, key), fix)

    def warnings(self, loaded: LoadedRecipe) -> Iterator[Problem]:
        stated, recipe = loaded.recipe, _recipe(loaded)
        offline = stated.environment.get("HF_HUB_OFFLINE", "").upper() in _ON
        by_token = "HF_TOKEN" in stated.secrets and not offline
        if not by_token and not _HUB_CACHES & stated.environment.keys():
            yield from _read_from_the_hub(recipe, loaded)
            data = fine_tuning.hub_data(recipe, loaded)
            if data is not None:
                message = f"the recipe reads the data set {data} from the Hugging Face hub when the job starts"
                fix = f"name a local folder with {TRAINING_FILE} as bridge.data, if the data are text"
                yield Problem("warning", "hub-data", message, loaded.where("bridge", "recipe"), fix)
        if stated.checkpoint.interval is not None and stated.checkpoint.dir is None:
            message = "checkpoint.interval has no effect: no checkpoint is saved without checkpoint.dir"
            fix = "set checkpoint.dir, or remove it"
            yield Problem("warning", "flag-without-effect", message, loaded.where("checkpoint", "interval"), fix)
        yield from _other_vocabulary(recipe, loaded)
        yield from fine_tuning.chat_warnings(recipe, settings(loaded, recipe), loaded)
        for file in recipe.missing_files:
            message = f"the recipe reads {file}, which the wheel of Megatron-Bridge {recipe.release} lacks"
            fix = "run it in an image of NeMo, or set PYTHONPATH to `src` of a source checkout"
            yield Problem("warning", "bridge-file-missing", message, loaded.where("bridge", "recipe"), fix)

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        recipe = _recipe(loaded)
        _refuse_untrained(recipe, loaded)
        found = settings(loaded, recipe)
        problems = list(fine_tuning.problems(recipe, found, loaded))
        if problems:
            raise UserError(problems, ANSWER_IS_NO)
        found |= _runner_defaults(recipe, found, loaded)
        if loaded.recipe.checkpoint.dir is None:
            # By default, every Bridge recipe saves to its own folder.
            found.setdefault("checkpoint.save", Setting(None, loaded.where("bridge", "recipe")))
        elif recipe.fsdp:
            # Bridge refuses to save FSDP's shards in its default format.
            found.setdefault("checkpoint.ckpt_format", Setting("fsdp_dtensor", loaded.where("checkpoint", "dir")))
        stated = attributes.of_run(recipe, found, bridge_of(loaded.recipe).model)
        where = loaded.where("bridge", "recipe")
        arguments = [
            Argument("recipe", (f"--recipe={recipe.module}:{recipe.function}",)),
            Argument("step", (f"--step={_step(recipe)}",)),
            Argument("release", (f"--release={recipe.release}",)),
        ]
        if bridge_of(loaded.recipe).model is not None:
            arguments.append(Argument("model", (f"--model={bridge_of(loaded.recipe).model}",)))
        if recipe.task != "pretrain":
            arguments.append(Argument("task", (f"--task={recipe.task}",)))
        if bridge_of(loaded.recipe).data is not None:
            arguments.append(Argument("data", (f"--data={bridge_of(loaded.recipe).data}",)))
        if recipe.arguments:
            given = ",".join(f"{name}={value}" for name, value in recipe.arguments.items())
            arguments.append(Argument("arguments", (f"--arguments={given}",)))
        places = {}
        attribute_places = dict.fromkeys(stated, where)
        for field, setting in found.items():
            written = field
            if recipe.release in _OF_SCRIPTS:
                written = _OLDER_NAMES.get(field, field)
            arguments.append(Argument(field, (hydra(written, setting.value),)))
            places[field] = setting.where
            if attribute := attribute_of(field):
                attribute_places[attribute] = setting.where
        return EngineArguments(
            version=attributes.megatron_of(recipe.release),
            values={field: setting.value for field, setting in found.items()},
            arguments=tuple(arguments),
            attributes=stated,
            places=places,
            attribute_places=attribute_places,
        )

    def translate_overrides(self, overrides: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return translate_overrides(overrides)

    def defaults(self, args: EngineArguments) -> Mapping[str, Any]:
        # Megatron-LM's parser has the defaults of TransformerConfig and OptimizerConfig, as Bridge does.
        own = {field.partition(".")[2] for field in _fields("model", "optimizer")}
        found = {name: value for name, value in parser_defaults(args.version).items() if name in own}
        # TransformerConfig's own default, which Megatron-LM's parser reverses, and MixedPrecisionConfig's, which the
        # optimizer also reads with FP4.
        return {**found, "bias_dropout_fusion": False, "fp8_recipe": "tensorwise"}

    def compared(self, args: EngineArguments) -> Collection[str]:
        """The fields of Megatron's classes for model, data parallelism and optimizer, and the batch."""
        sections = ("model", "mixed_precision", "ddp", "optimizer", "comm_overlap")
        known = set(map(attribute_of, _fields(*sections)))
        return set(filter(None, known)) - DERIVED | {"global_batch_size", "micro_batch_size", "train_iters"}

    def layout(self, args: EngineArguments, loaded: LoadedRecipe) -> Layout:
        return layout(replace(args, values=args.attributes, places=args.attribute_places), loaded)

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        return Entry("bridge.py", title=f"Megatron-Bridge {_recipe(loaded).release}", plugin="bridge")

    def files(self, recipe: Recipe) -> Sequence[NeededFile]:
        found: list[NeededFile] = []
        stated = bridge_of(recipe)
        if stated.model is not None:
            found.append(NeededFile(("bridge", "model"), str(PurePath(stated.model, "config.json"))))
        if stated.data not in (None, MOCK):
            file = str(PurePath(str(stated.data), TRAINING_FILE))
            found.append(NeededFile(("bridge", "data"), file, "data-missing"))
        named: dict[tuple[str, ...], Any] = {("checkpoint", "load"): recipe.checkpoint.load}
        for field, path, value in flat(stated.overrides):
            key = ("bridge", "overrides", *path)
            if field == "checkpoint.pretrained_checkpoint":
                named[key] = value
            if field == "dataset.blend" and value is not None:
                for prefix in blend_prefixes(value):
                    found.append(NeededFile(key, f"{prefix}.bin", "data-missing"))
                    found.append(NeededFile(key, f"{prefix}.idx", "data-missing"))
        for key, folder in named.items():
            # A run that loads its own checkpoints finds them only from the second start on.
            if isinstance(folder, str) and folder != recipe.checkpoint.dir:
                found.append(NeededFile(key, folder, "checkpoint-missing", "folder"))
        return found

    def rehearsal(self, args: EngineArguments, layout: Layout, loaded: LoadedRecipe) -> StepArguments:
        from fp8launch.plugins.bridge.rehearsal import step_arguments

        return step_arguments(args, layout, _recipe(loaded), bridge_of(loaded.recipe).model)

    def bridge_release(self, args: EngineArguments) -> str | None:
        for argument in args.arguments:
            if argument.flag == "release":
                return argument.words[0].partition("=")[2]
        return None

    def environment(self, recipe: Recipe, begin: int) -> dict[str, str]:
        return {"FP8LAUNCH_DEVICE": recipe.resources.device, **recipe.launch.measurements(begin)}

    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        save = args.values.get("checkpoint.save")
        if not isinstance(save, str):
            return None
        more = []
        if _LEAVE_ON_SIGTERM not in args.values:
            more.append(Argument(_LEAVE_ON_SIGTERM, (hydra(_LEAVE_ON_SIGTERM, True),)))
        resume = Argument("resume", (f"--resume={save}",))
        first_start = _FIRST_START
        if "--task=peft" in args.argv:
            first_start = _FIRST_START_OF_ADAPTERS
        return AttemptArguments.divided(save, args.arguments, first_start, resume, more)


def _fields(*sections: str) -> Iterator[str]:
    """Return the fields of these sections in the newest release."""
    known = fields_of(releases()[-1])
    for section in sections:
        for name in known[section]:
            yield f"{section}.{name}"


def _recipe(loaded: LoadedRecipe) -> BridgeRecipe:
    stated = bridge_of(loaded.recipe)
    assert stated.recipe is not None, "`problems` asks for it"
    return find(stated.recipe, stated.release, loaded.where("bridge", "recipe"))


def _read_from_the_hub(recipe: BridgeRecipe, loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield a warning for the model's configuration and one for the tokenizer, if a job would download them."""
    where, model = loaded.where("bridge", "recipe"), bridge_of(loaded.recipe).model
    token = "or pass a token by name (secrets: [HF_TOKEN])"
    if recipe.hub and model is None:
        message = f"the recipe reads the configuration of {recipe.hub[0]} from the Hugging Face hub when the job starts"
        fix = f"name a local folder with its config.json (bridge.model: /path), {token}"
        yield Problem("warning", "hub-model", message, where, fix)
    overrides = {field: value for field, _, value in flat(bridge_of(loaded.recipe).overrides)}
    kind = overrides.get("tokenizer.tokenizer_type", _HUB_TOKENIZER if recipe.tokenizer else None)
    tokenizer = overrides.get("tokenizer.tokenizer_model", recipe.tokenizer)
    # Bridge reads a path from the disk. `bridge.model` replaces the tokenizer only if its folder has one.
    local = tokenizer is None or str(tokenizer).startswith(("/", ".", "~"))
    local = local or (model is not None and has_tokenizer(Path(model)))
    if kind == _HUB_TOKENIZER and not local:
        message = f"the recipe reads the tokenizer of {tokenizer} from the Hugging Face hub when the job starts"
        size = attributes.own_vocabulary(recipe, model) or "SIZE"
        fix = f"name a local folder (--set tokenizer.tokenizer_model=/path), {token}"
        if recipe.task == "pretrain":
            null = f"--set tokenizer.tokenizer_type={attributes.NULL_TOKENIZER} --set tokenizer.vocab_size={size}"
            fix = f"for mock data: {null}; else {fix}"
        yield Problem("warning", "hub-tokenizer", message, where, fix)


def _other_vocabulary(recipe: BridgeRecipe, loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield a warning if the NullTokenizer's vocabulary size is not the one in the model's configuration."""
    found, folder = settings(loaded, recipe), bridge_of(loaded.recipe).model
    given, own = attributes.null_vocabulary(recipe, found), attributes.own_vocabulary(recipe, folder)
    decided = own is None and "tokenizer.vocab_size" in found
    if given is None or given == own or decided or not recipe.hub:
        return
    message = f"the recipe's {attributes.NULL_TOKENIZER} gives the model a vocabulary of {given:,}, "
    if own is None:
        message += f"regardless of the vocabulary of {recipe.hub[0]}"
    else:
        message += f"but {recipe.hub[0]} has {own:,}; memory use and speed will differ from that model's"
    fix = f"for mock data: --set tokenizer.vocab_size={own or 'SIZE'}; else set tokenizer.tokenizer_type and its model"
    yield Problem("warning", "bridge-vocabulary", message, loaded.where("bridge", "recipe"), fix)


def _refuse_untrained(recipe: BridgeRecipe, loaded: LoadedRecipe) -> None:
    tasks: tuple[str, ...] = TASKS
    if recipe.release in _OF_SCRIPTS:
        tasks = _TASKS_OF_SCRIPTS
    if recipe.task not in tasks:
        message = (
            f"{recipe.name} is for {recipe.task}; only recipes of Megatron-Bridge {recipe.release} for "
            f"{', '.join(tasks)} can be run by name"
        )
        raise UserError([Problem("error", "bridge-task", message, loaded.where("bridge", "recipe"))], ANSWER_IS_NO)


def _runner_defaults(recipe: BridgeRecipe, found: dict[str, Setting], loaded: LoadedRecipe) -> dict[str, Setting]:
    """Return the settings that Bridge's own runner adds to the recipe.

    It adds none to recipes of the library, which save to `nemo_experiments` in the current folder and continue from
    what they find there. Here, a run has its own folder, and starts from what the recipe names.

    Sources: `_apply_benchmark_runtime_defaults` of run_recipe.py, 0.6.0; up to 0.5 `set_post_overrides` of
    scripts/performance/utils/overrides.py and the garbage collection of perf_plugins.py.
    """
    values: dict[str, Any] = {}
    optimizer = as_mapping(recipe.sections.get("optimizer")).get("optimizer", "adam")
    if recipe.library or recipe.task != "pretrain":
        values |= {"checkpoint.load": None, "logger.tensorboard_dir": None}
    if recipe.precision == "bf16" and optimizer == "adam" and not recipe.library:
        values["optimizer.use_precision_aware_optimizer"] = True
    if recipe.release in _OF_SCRIPTS:
        values |= {"train.manual_gc": True, "train.manual_gc_interval": 100}
        tp, pp, cp, vp = (size(AXES[axis], found, recipe) for axis in ("tp", "pp", "cp", "vp"))
        replicas = loaded.recipe.resources.world_size // (tp * pp * cp)
        if min(replicas, pp, vp) > 1 and recipe.precision not in ("fp8mx", "nvfp4") and optimizer != "dist_muon":
            values[f"optimizer.{_WITH_STEP}"] = True
            if isinstance(recipe.sections.get("comm_overlap"), Mapping):
                values[f"comm_overlap.{_WITH_STEP}"] = True
    where = loaded.where("bridge", "recipe")
    return {field: Setting(value, where) for field, value in values.items() if field not in found}


def _step(recipe: BridgeRecipe) -> str:
    return next(step for prefix, step in _STEPS.items() if recipe.name.startswith(prefix))
