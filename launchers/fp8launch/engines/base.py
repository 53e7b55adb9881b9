"""The interface of a training engine: everything that fp8launch must know about what runs in the job.

Code outside `engines/` never asks which engine a recipe is for. It calls these methods, or reads the values of an
engine's `EngineDescription`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from fp8launch.diagnostics import Problem
from fp8launch.engines.recipe_catalog import RecipeCatalog
from fp8launch.megatron.arguments import Argument, FlagValue, words_of
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.untyped import as_int

# What comparisons call fp8launch's own training loop.
OWN_ENTRY_TITLE = "fp8launch's entry"

# A flag that a recipe states, its value, and the recipe keys that state it.
Setting = tuple[str, FlagValue, tuple[str, ...]]

# Which checks know an engine's arguments. Each scope includes those before it.
#   hardware       GPU, CUDA and Transformer Engine, from `fp8`, `fp8_recipe`, `fp4` and `fp4_recipe` of the attributes
#   megatron_core  how Megatron-Core builds and runs a model with these attributes
#   megatron_lm    what Megatron-LM's command line and training loop add: schedule, data, tokenizer, checkpoint flags
Scope = Literal["hardware", "megatron_core", "megatron_lm"]
SCOPES: tuple[Scope, ...] = ("hardware", "megatron_core", "megatron_lm")
# What an engine's processes print about FP8, in the formats of `fp8launch.logs.evidence`.
EvidenceSource = Literal["module report", "kernel profile", "tensor statistics"]


@dataclass(frozen=True)
class EngineDescription:
    """The properties of an engine that the rest of fp8launch reads; every run's manifest records them.

    `checks` is the widest scope of rules that holds for its arguments. `validators` says whether Megatron-LM's own
    parser and validators can judge its argument list, `rehearsal` whether a step of it can run without a GPU.
    `log_dialect` is a name of `fp8launch.logs.dialects`. `evidence` is what `verify` can find in its logs.
    """

    checks: Scope
    validators: Literal["megatron_lm", "none"]
    log_dialect: str
    evidence: tuple[EvidenceSource, ...]
    rehearsal: bool = False

    def covers(self, scope: Scope) -> bool:
        """Whether rules of that scope hold for the engine's arguments."""
        return SCOPES.index(scope) <= SCOPES.index(self.checks)


@dataclass(frozen=True)
class EngineArguments:
    """The arguments of a run.

    `version` is the release of Megatron-Core, empty for an engine without it. `values` is keyed by the engine's own
    flag names, in the order of `arguments`, which holds the same as an argument list has it; `places` says which line
    set each flag. `own` are arguments of the user's script, which no flag schema knows; they come last.

    `attributes` are the stated values by Megatron's attribute names, as its argument dump has them, whatever the engine
    calls its own flags; with `Engine.defaults` they are the inputs of rules, memory model, FLOPs and reports. As a
    minimum there are `train_iters`, and `save` and `save_interval` where checkpoints are written. Without the
    attributes of a model, memory and FLOPs are not estimated. `attribute_places` says which line set each attribute.
    """

    version: str
    values: Mapping[str, FlagValue]
    arguments: tuple[Argument, ...]
    attributes: Mapping[str, Any]
    places: Mapping[str, str]
    own: tuple[Argument, ...] = ()
    attribute_places: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> tuple[Argument, ...]:
        """Everything that the processes are started with."""
        return (*self.arguments, *self.own)

    @property
    def argv(self) -> tuple[str, ...]:
        """Everything that the processes are started with, word by word."""
        return words_of(self.all)

    @property
    def own_values(self) -> dict[str, Any]:
        """The script's own arguments by name: True for a bare flag, a value, or a list of values."""
        found: dict[str, Any] = {}
        for argument in self.own:
            flag, equals, attached = argument.words[0].partition("=")
            values = list(argument.words[1:])
            if equals:
                values.insert(0, attached)
            name = flag.lstrip("-").replace("-", "_")
            if not values:
                found[name] = True
            elif len(values) == 1:
                found[name] = values[0]
            else:
                found[name] = values
        return found

    @property
    def recorded(self) -> dict[str, Any]:
        """Everything that was stated, by Megatron's attribute names or the script's own: what manifests keep."""
        return {**self.own_values, **self.attributes}

    def integer(self, flag: str, default: int) -> int:
        value = as_int(self.values.get(flag))
        if value is None:
            return default
        return value


@dataclass(frozen=True)
class Layout:
    """How the GPUs of a run are divided. `microbatches` is the number of micro batches of a step on each pipeline."""

    world: int
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    dp: int
    micro_batch: int
    global_batch: int
    microbatches: int


@dataclass(frozen=True)
class Entry:
    """The program of a job's processes: one of `injob/rank`, with its own options before the engine's arguments.

    An engine outside fp8launch gives the absolute path of its program, which the job must be able to read. A `--` comes
    after the options, except with torchrun, which may remove it. `plugin` is the plugin whose `injob` has the program,
    None for a program of the core. `script` is the training script that the options name, None where the program trains
    by itself. `title` is what comparisons call the training loop.
    """

    program: str = "worker.py"
    options: tuple[str, ...] = ()
    script: str | None = None
    title: str = OWN_ENTRY_TITLE
    plugin: str | None = None


@dataclass(frozen=True)
class NeededFile:
    """A file that the processes read beside what the arguments name: the recipe key that names it, and its path.

    `planned` says that `Engine.entry` looks for it, where the run has no container.
    """

    key: tuple[str, ...]
    path: str
    code: str = "file-missing"
    kind: Literal["file", "folder"] = "file"
    planned: bool = False


class ReadCheckpoint(NamedTuple):
    """A checkpoint that a run starts from: what messages call it, its folder, and the line that names it."""

    name: str
    folder: str
    where: str


class NotRehearsable(Exception):
    """A run that no rehearsal can stand for; the message says why."""


@dataclass(frozen=True)
class OwnProgram:
    """An engine's in-job program, which a rehearsal runs on this machine: `title` for users, and its arguments.

    `model` is the published configuration of the model that the program would read from the hub, None where the
    arguments name a folder. `python_path` has the folders that its packages are imported from.
    """

    title: str
    words: tuple[str, ...]
    model: Mapping[str, Any] | None
    python_path: tuple[str, ...]


@dataclass(frozen=True)
class StepArguments:
    """What a rehearsal runs: arguments of Megatron-LM's command line.

    `config` are fields of Megatron's configuration that no flag sets, by name. `without` names what of the engine's
    own program the rehearsal leaves out. `translated` is true where the engine itself uses another interface, so that
    what Megatron-LM's command line says about its arguments is no verdict. `cuda` is that of the engine's own
    containers, for runs whose recipe and image state none. With `program` that runs in place of the arguments.
    """

    args: EngineArguments
    config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    translated: bool = False
    cuda: str | None = None
    program: OwnProgram | None = None


@dataclass(frozen=True)
class AttemptArguments:
    """The arguments of a run that several attempts share: of all of them, of the first start, and of a resume.

    `save` is the folder of its checkpoints, as the engine names it. `skip_flag` is followed by iterations whose batches
    the engine leaves out; None if it cannot.
    """

    save: str
    always: tuple[Argument, ...]
    first_start: tuple[Argument, ...]
    resume: tuple[Argument, ...]
    skip_flag: str | None = None

    @classmethod
    def divided(
        cls,
        save: str,
        arguments: Iterable[Argument],
        first_start: Collection[str],
        resume: Argument,
        more: Iterable[Argument] = (),
        skip_flag: str | None = None,
    ) -> AttemptArguments:
        """Divide `arguments`: the flags in `first_start` are for the first start only. `more` are for all attempts."""
        always, first = [], []
        for argument in arguments:
            if argument.flag in first_start:
                first.append(argument)
            else:
                always.append(argument)
        return cls(save, (*always, *more), tuple(first), (resume,), skip_flag)


@dataclass(frozen=True)
class EntryTraits:
    """How an engine's entry differs from Megatron-LM's own scripts, as far as the rules of the check ask.

    `fills_in` are attributes that it sets where the arguments do not. `refuses` are flags that it stops at.
    `sets_config` says that it takes `launch.config`.
    """

    fills_in: Mapping[str, object] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()
    sets_config: bool = False


class Engine(ABC):
    """One training engine. Methods are pure, except that `entry` may look at the files of this machine.

    `own_keys` are the recipe keys that belong to it alone, such as `launch.script`. A recipe that states one of them
    and no `engine` is for this engine, and another engine refuses it. The module of an engine must import quickly:
    finding the engine of a recipe imports all of them. `packages` are the modules that every process of a run imports,
    with the names under which pip installs them. `installation` says how they are installed where pip alone does not.
    `seed_key` is the recipe key of the random seed.
    """

    name: ClassVar[str]
    description: ClassVar[EngineDescription]
    own_keys: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch"}
    installation: ClassVar[str | None] = None
    seed_key: ClassVar[str] = "megatron.seed"

    def stated_seed(self, recipe: Recipe) -> int | None:
        """Return the random seed that a recipe states, None if the engine's default holds."""
        return as_int(recipe.megatron.get("seed"))

    def catalog(self) -> RecipeCatalog | None:
        """The recipes of the engine's own project; None for an engine whose recipes are those of the pack."""
        return None

    def problems(self, loaded: LoadedRecipe) -> Iterable[Problem]:
        """Settings of the recipe that this engine cannot use, beside keys that belong to another engine."""
        return ()

    def warnings(self, loaded: LoadedRecipe) -> Iterable[Problem]:
        """What the check reports of this engine's recipes beside its rules; it stops no run."""
        return ()

    @abstractmethod
    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        """The arguments that a recipe means. Raises UserError with every problem that the flag schema shows."""

    def settings(self, recipe: Recipe) -> Iterable[Setting]:
        """Every flag that the recipe states, before it is checked; importers read translation backwards with it."""
        return ()

    def defaults(self, args: EngineArguments) -> Mapping[str, Any]:
        """The engine's values for what `args.attributes` do not state, by Megatron's attribute names."""
        return {}

    def compared(self, args: EngineArguments) -> Collection[str] | None:
        """The attributes that a run of another engine can be compared by; None for all."""
        return None

    def spelled(self, overrides: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Overrides for a recipe of Megatron-LM as recipes of this engine say them; None where they cannot."""
        shared = all(key.startswith(("batch.", "parallel.", "env.")) for key in overrides)
        if not shared and not self.description.covers("megatron_lm"):
            return None
        return overrides

    @abstractmethod
    def layout(self, args: EngineArguments, loaded: LoadedRecipe) -> Layout:
        """The division of the run's GPUs. Raises UserError when they or the batch do not divide."""

    @abstractmethod
    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        """The program of each process. Raises UserError, with `check_paths`, for a file that does not exist."""

    @abstractmethod
    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        """The arguments of a first start and of a resume; None for a run that saves no checkpoints."""

    def files(self, recipe: Recipe) -> Sequence[NeededFile]:
        """Files beside those of the arguments that must exist where the processes run."""
        return ()

    def read_checkpoints(self, loaded: LoadedRecipe) -> Iterable[ReadCheckpoint]:
        """Checkpoints that the run starts from, besides those in Megatron's own flags."""
        return ()

    def traits(self, recipe: Recipe) -> EntryTraits:
        """Differences between this recipe's entry and Megatron-LM's own scripts."""
        return EntryTraits()

    def rehearsal(self, args: EngineArguments, layout: Layout, loaded: LoadedRecipe) -> StepArguments:
        """What a rehearsal of the run runs. Raises NotRehearsable."""
        return StepArguments(args)

    def bridge_release(self, args: EngineArguments) -> str | None:
        """Return the release of Megatron-Bridge that the run trains with; None for an engine without it."""
        return None

    def environment(self, recipe: Recipe, begin: int) -> dict[str, str]:
        """Variables that the entry reads, such as those that make it prove FP8. `begin` is the iteration before."""
        return {}
