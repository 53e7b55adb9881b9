"""A training script that the recipe names, which gets Megatron's arguments in a job of fp8launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import ClassVar

from fp8launch.cluster.images import local_path
from fp8launch.diagnostics import Problem, error
from fp8launch.engines.base import EngineArguments, EngineDescription, Entry, EntryTraits, NeededFile
from fp8launch.engines.megatron_lm.engine import MegatronLM
from fp8launch.megatron.arguments import Argument
from fp8launch.megatron.schema import DEFAULT_TOKENIZER
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.yaml_source import is_file


class Script(MegatronLM):
    """Megatron-LM's command line for a script of Megatron-LM or of the user."""

    name: ClassVar[str] = "script"
    description: ClassVar[EngineDescription] = MegatronLM.description
    own_keys: ClassVar[tuple[str, ...]] = ("launch.script", "launch.arguments")
    # A script may bring its own Megatron; torchrun starts it.
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch"}

    def problems(self, loaded: LoadedRecipe) -> Iterator[Problem]:
        launch = loaded.recipe.launch
        if launch.script is not None:
            return
        key: tuple[str, ...] = ("engine",)
        message = "`engine: script` needs `launch.script`, the path of the training script"
        if launch.arguments:
            key = ("launch", "arguments")
            message = "`launch.arguments` are passed to `launch.script`, which is not set"
        yield Problem("error", "no-script", message, loaded.where(*key), "set launch.script")

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        args = super().translate(loaded)
        words = tuple(map(str, loaded.recipe.launch.arguments))
        return replace(args, own=(*args.own, *_flag_by_flag(words)))

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        script = loaded.recipe.launch.script
        assert script is not None, "`problems` asks for launch.script"
        title = PurePath(script).name
        if not in_container:
            where = loaded.where("launch", "script")
            path = local_path(script, where)
            if check_paths and not is_file(path):
                raise error("script-missing", f"training script {path} does not exist", where)
            script = str(path)
        return Entry(options=("--script", script), script=script, title=title)

    def files(self, recipe: Recipe) -> Sequence[NeededFile]:
        return [NeededFile(("launch", "script"), recipe.launch.script or "", "script-missing", planned=True)]

    def traits(self, recipe: Recipe) -> EntryTraits:
        # The default of Megatron-LM's pretrain_gpt.py.
        return EntryTraits(fills_in={"tokenizer_type": DEFAULT_TOKENIZER})


def _flag_by_flag(words: Sequence[str]) -> tuple[Argument, ...]:
    """Return words that no schema knows, in groups that start with two dashes."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return tuple(Argument(group[0].lstrip("-"), tuple(group)) for group in groups)
