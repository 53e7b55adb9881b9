"""A frozen view of one run, for rules to ask: Megatron's arguments with their defaults, the layout, the target."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8launch.hardware.gpus import Gpu, gpu
from fp8launch.job.images import software_in
from fp8launch.megatron.argv import parse_argv
from fp8launch.megatron.schema import FlagSchema, load_schema
from fp8launch.megatron.translate import Layout, MegatronArgs
from fp8launch.problems import Problem
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.runs.submit import Prepared

Version = tuple[int, ...]


@dataclass(frozen=True)
class Software:
    """What the job will find; None where neither the recipe nor the image catalogue says."""

    transformer_engine: Version | None
    cuda: Version | None
    pytorch: Version | None = None


@dataclass(frozen=True)
class Facts:
    """What a run asks for and where it will run.

    `given` holds what the recipe states, by Megatron's own attribute name (dest); `defaults` what the parser of this
    Megatron version fills in. `env` is what the processes get beside the cluster's. `megatron` is (major, minor).
    """

    loaded: LoadedRecipe
    args: MegatronArgs
    layout: Layout
    megatron: Version
    software: Software
    gpu: Gpu
    env: Mapping[str, str]
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    places: Mapping[str, str]

    def value(self, dest: str) -> Any:
        """The value of an argument by Megatron's attribute name, None for one that this version lacks."""
        return self.given[dest] if dest in self.given else self.defaults.get(dest)

    def integer(self, dest: str, default: int = 0) -> int:
        value = self.value(dest)
        return value if isinstance(value, int) else default

    def on(self, dest: str) -> bool:
        """A switch that is set, or a value that is neither zero nor empty."""
        return bool(self.value(dest))

    def silences(self, problem: Problem) -> bool:
        """Whether it is a warning that the recipe silences."""
        return problem.severity == "warning" and problem.code in self.loaded.recipe.silence

    def where(self, *names: str) -> str:
        """`file:line` of the first of these arguments or variables that the recipe states, else the recipe file."""
        for name in names:
            if name in self.places:
                return self.places[name]
        return str(self.loaded.files[-1])

    @property
    def precision(self) -> str:
        """`bf16` or the quantization recipe in force: delayed, tensorwise, blockwise, mxfp8, nvfp4 or custom."""
        if self.on("fp8"):
            return str(self.value("fp8_recipe"))
        return str(self.value("fp4_recipe")) if self.on("fp4") else "bf16"

    @property
    def quantized(self) -> bool:
        return self.precision != "bf16"

    @property
    def fsdp(self) -> bool:
        return self.on("use_megatron_fsdp") or self.on("use_torch_fsdp2")

    @property
    def uses_te(self) -> bool:
        """Layers are Transformer Engine's, on a GPU."""
        return self.value("transformer_impl") == "transformer_engine" and self.gpu.name != "cpu"

    @property
    def own_entry(self) -> bool:
        """fp8launch's own training entry runs, not a script that the recipe names."""
        return self.loaded.recipe.launch.script is None


def facts(prepared: Prepared, cluster_env: Mapping[str, str] | None = None) -> Facts:
    """The facts of a prepared run; `cluster_env` are the cluster profile's variables, which the recipe overrides."""
    loaded, args = prepared.loaded, prepared.args
    recipe = loaded.recipe
    schema = load_schema(args.version)
    given, places = _given(args, schema)
    for name in recipe.env:
        places[name] = loaded.where("env", name)
    resources = ("gpu", "nodes", "gpus_per_node")
    places |= {name: loaded.where("resources", name) for name in resources if name in recipe.resources.model_fields_set}
    return Facts(
        loaded=loaded,
        args=args,
        layout=prepared.layout,
        megatron=version(args.version)[:2],
        software=software(loaded),
        gpu=gpu(recipe.resources.gpu),
        env={**recipe.launch.environment, **(cluster_env or {}), **recipe.environment},
        given=given,
        defaults=_defaults(schema.minor),
        places=places,
    )


def software(loaded: LoadedRecipe) -> Software:
    """Versions that the recipe states, else those that the image catalogue knows of its image."""
    stated = loaded.recipe.software
    image = software_in(loaded.recipe.container.image)
    te = stated.transformer_engine or image.get("transformer_engine")
    versions = (te, stated.cuda or image.get("cuda"), image.get("pytorch"))
    return Software(*(version(text) if text else None for text in versions))


def version(text: object) -> Version:
    """The leading numbers of a version: 2.20.0.dev0 is (2, 20, 0)."""
    return tuple(int(part) for part in re.findall(r"\d{1,18}", str(text))[:3])


def _given(args: MegatronArgs, schema: FlagSchema) -> tuple[dict[str, Any], dict[str, str]]:
    """Stated values by dest, as Megatron's parser would store them, and the place of each."""
    stored: dict[str, Any] = {}
    for name, value in parse_argv(args.argv, schema)[0].items():
        flag = schema.find(name)
        assert flag is not None, name
        stored[flag.dest] = value if flag.takes_value or flag.action == "boolean" else flag.const
    places = {flag.dest: place for name, place in args.places.items() if (flag := schema.find(name)) is not None}
    return stored, places


@functools.cache
def _defaults(minor: str) -> Mapping[str, Any]:
    return {flag.dest: flag.default for flag in load_schema(minor).flags()}
