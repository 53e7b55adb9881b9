"""A frozen view of a run for the rules: Megatron's arguments with their defaults, the layout and the target."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8launch.cluster.images import software_in
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.engines.base import EngineArguments, EngineDescription, EntryTraits, Layout
from fp8launch.hardware.gpus import Gpu, gpu
from fp8launch.hardware.quantization import (
    DEFAULT_RECIPE,
    UNQUANTIZED,
    QuantizationRecipe,
    quantization_recipes,
    requested,
)
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.schema import value_of
from fp8launch.megatron.versions import Release, release
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.untyped import as_int

# The version of Transformer Engine in NVIDIA's current images. It is assumed if neither recipe nor image gives one.
ASSUMED_TE = "2.20"


@dataclass(frozen=True)
class InstalledSoftware:
    """Software versions in the job, each None if neither the recipe nor the image catalogue gives it.

    `megatron_bridge` is the release whose recipe the run trains. It is None for other engines.
    """

    transformer_engine: Release | None
    cuda: Release | None
    pytorch: Release | None = None
    megatron_bridge: Release | None = None


@dataclass(frozen=True)
class ResolvedRun:
    """The arguments, layout, GPU and software of a run.

    `given` has the arguments that the recipe sets, by Megatron's attribute name (dest). `defaults` has the values that
    this Megatron version's parser or the engine's entry fills in. `env` has the environment variables that the recipe,
    the engine and the cluster profile set. `megatron` is a release such as (0, 19, 2). `before` has the arguments of
    the run or phase whose training this one continues; it is None if there is none or it is unknown. `cluster` is the
    profile of the cluster that the run is for, if any.
    """

    loaded: LoadedRecipe
    args: EngineArguments
    layout: Layout
    megatron: Release
    software: InstalledSoftware
    gpu: Gpu
    env: Mapping[str, str]
    engine: EngineDescription
    entry: EntryTraits
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    places: Mapping[str, str]
    before: Mapping[str, Any] | None = None
    cluster: Cluster | None = None

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        """All arguments by Megatron's attribute name. The recipe's values override the defaults."""
        return {**self.defaults, **self.given}

    def value(self, dest: str) -> Any:
        """Return the value of an argument by Megatron's attribute name, or None if this version does not have it.

        Raises KeyError if no supported version has it.
        """
        return value_of(self.arguments, dest)

    def integer(self, dest: str, default: int = 0) -> int:
        value = as_int(self.value(dest))
        return default if value is None else value

    def on(self, dest: str) -> bool:
        """Return whether a switch is on, or a value is neither zero nor empty."""
        return bool(self.value(dest))

    def silences(self, problem: Problem) -> bool:
        """Return whether the problem is a warning that the recipe silences."""
        return problem.severity == "warning" and problem.code in self.loaded.recipe.silence

    def where(self, *names: str) -> str:
        """Return `file:line` of the first of these arguments or variables in the recipe, else the recipe's file."""
        for name in names:
            if name in self.places:
                return self.places[name]
        return str(self.loaded.files[-1])

    @property
    def precision(self) -> str:
        """The name of the run's quantization recipe, or bf16, fp16 or fp32."""
        names = ["bf16", "fp16"]
        for operands in DEFAULT_RECIPE:
            names += [operands, f"{operands}_recipe", f"{operands}_quantizer_factory"]
        return requested({name: self.value(name) for name in names})

    @property
    def quantization(self) -> QuantizationRecipe | None:
        """The run's quantization recipe, or None if it has none or the table does not list it."""
        return quantization_recipes().get(self.precision)

    @property
    def quantized(self) -> bool:
        return self.precision not in UNQUANTIZED

    @property
    def transformer_engine(self) -> str:
        """The version of Transformer Engine from the recipe or its image, else the assumed one."""
        return ".".join(map(str, self.software.transformer_engine or ())) or ASSUMED_TE

    @property
    def fsdp(self) -> bool:
        return self.on("use_megatron_fsdp") or self.on("use_torch_fsdp2")

    @property
    def uses_te(self) -> bool:
        """Whether the layers are Transformer Engine's and run on a GPU."""
        return self.value("transformer_impl") == "transformer_engine" and self.gpu.name != "cpu"

    @property
    def has_linear_biases(self) -> bool:
        """Whether linear layers have biases. False if the default of the engine's model is unknown."""
        known = "add_bias_linear" in self.given or self.engine.covers("megatron_lm")
        return known and self.on("add_bias_linear")

    @property
    def is_estimated(self) -> bool:
        """Whether the memory and speed models apply: they cover Megatron-Core's layers with Transformer Engine."""
        return self.uses_te and self.engine.covers("megatron_core")


def resolve_run(prepared: Prepared, cluster: Cluster | None = None) -> ResolvedRun:
    """Resolve a prepared run for the rules. The recipe's variables override the cluster profile's."""
    loaded, args = prepared.loaded, prepared.args
    recipe = loaded.recipe
    entry = prepared.engine.traits(recipe)
    places = dict(args.attribute_places)
    for name in recipe.env:
        places[name] = loaded.where("env", name)
    for name in recipe.launch.config:
        places.setdefault(name, loaded.where("launch", "config", name))
    defaults = {**prepared.engine.defaults(args), **entry.fills_in}
    # Fields of `launch.config` override flags with the same meaning.
    behind = {}
    if entry.sets_config:
        behind = {name: value for name, value in recipe.launch.config.items() if name in defaults}
    site_env = {} if cluster is None else cluster.environment
    for name in ("gpu", "nodes", "gpus_per_node"):
        if name in recipe.resources.model_fields_set:
            places[name] = loaded.where("resources", name)
    bridge = _release_or_none(prepared.engine.bridge_release(args))
    return ResolvedRun(
        loaded=loaded,
        args=args,
        layout=prepared.layout,
        megatron=release(args.version),
        software=replace(installed_software(loaded), megatron_bridge=bridge),
        gpu=gpu(recipe.resources.gpu),
        env={**prepared.engine.environment(recipe, 0), **site_env, **recipe.environment},
        engine=prepared.engine.description,
        entry=entry,
        given={**args.attributes, **behind},
        defaults=defaults,
        places=places,
        cluster=cluster,
    )


def installed_software(loaded: LoadedRecipe) -> InstalledSoftware:
    """Return the versions set by the recipe, else those that the image catalogue lists for its image."""
    stated = loaded.recipe.software
    image = software_in(loaded.recipe.container.image)
    te = stated.transformer_engine or image.get("transformer_engine")
    return InstalledSoftware(
        _release_or_none(te),
        _release_or_none(stated.cuda or image.get("cuda")),
        _release_or_none(image.get("pytorch")),
    )


def _release_or_none(text: str | None) -> Release | None:
    return release(text) if text else None
