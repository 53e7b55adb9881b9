"""The interface of a training engine: everything that fp8launch needs to know about the program in a job.

Code outside `engines/` never asks which engine a recipe is for. It calls these methods, or reads the values of an
engine's `EngineDescription`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from fp8launch.diagnostics import Problem
from fp8launch.megatron.arguments import Argument, FlagValue, words_of
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.untyped import as_int

# The name of fp8launch's own training loop in comparisons.
OWN_ENTRY_TITLE = "fp8launch's entry"

# A flag that a recipe states, its value, and the recipe keys that state it.
Setting = tuple[str, FlagValue, tuple[str, ...]]

# The checks that understand an engine's arguments. Each scope includes the scopes before it.
#   hardware       GPU, CUDA and Transformer Engine, from `fp8`, `fp8_recipe`, `fp4` and `fp4_recipe` of the attributes
#   megatron_core  how Megatron-Core builds and runs a model with these attributes
#   megatron_lm    the command line and training loop of Megatron-LM: schedule, data, tokenizer, checkpoint flags
Scope = Literal["hardware", "megatron_core", "megatron_lm"]
SCOPES: tuple[Scope, ...] = ("hardware", "megatron_core", "megatron_lm")


@dataclass(frozen=True)
class EngineDescription:
    """The properties of an engine that the rest of fp8launch reads; every run's manifest records them.

    `checks` is the widest scope of rules that applies to its arguments. `validators` names the validators for its
    argument list (`Plugin.validators`), `rehearsal` says whether one of its steps can run without a GPU. `log_dialect`
    is a name of `fp8launch.logs.dialects`. `evidence` is what its processes print in the formats of
    `fp8launch.logs.evidence`: "module report", and descriptions of measurements (`fp8launch.plugins.Plugin`). `trains`
    is False for programs without iterations, such as a conversion; reports on a study leave their runs out.
    """

    checks: Scope
    validators: Literal["megatron_lm", "none"]
    log_dialect: str
    evidence: tuple[str, ...]
    rehearsal: bool = False
    trains: bool = True

    def covers(self, scope: Scope) -> bool:
        """Return whether rules of this scope apply to the engine's arguments."""
        return SCOPES.index(scope) <= SCOPES.index(self.checks)


@dataclass(frozen=True)
class EngineArguments:
    """The arguments of a run.

    `version` is the release of Megatron-Core, empty for an engine without it. `values` is keyed by the engine's own
    flag names, in the order of `arguments`, which holds the same values as an argument list; `places` says which line
    set each flag. `own` are arguments of a fork of Megatron-LM or of
    the user's script, which no flag schema knows; they come last.

    `attributes` are the stated values by Megatron's attribute names, as its argument dump has them, whatever the engine
    calls its own flags; with `Engine.defaults` they are the inputs of rules, memory model, FLOPs and reports. At least
    `train_iters` must be there, and `save` and `save_interval` if checkpoints are written. Without the attributes of a
    model, memory and FLOPs are not estimated. `attribute_places` says which line set each attribute.
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
        """The arguments of the processes as a list of flags."""
        return (*self.arguments, *self.own)

    @property
    def argv(self) -> tuple[str, ...]:
        """The arguments of the processes as a list of words."""
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
        """The arguments that manifests record, under Megatron's attribute names or the script's."""
        return {**self.own_values, **self.attributes}

    def integer(self, flag: str, default: int) -> int:
        value = as_int(self.values.get(flag))
        if value is None:
            return default
        return value


@dataclass(frozen=True)
class Layout:
    """The division of a run's GPUs. `microbatches` is the number of micro batches of each pipeline per step."""

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
    None for a program of the core. `script` is the training script that the options name, None if the program itself
    trains. `title` is what comparisons call the training loop.
    """

    program: str = "worker.py"
    options: tuple[str, ...] = ()
    script: str | None = None
    title: str = OWN_ENTRY_TITLE
    plugin: str | None = None


@dataclass(frozen=True)
class NeededFile:
    """A file that the processes read but the arguments do not name: the recipe key that names it, and its path.

    `planned` says that `Engine.entry` checks for it if the run has no container.
    """

    key: tuple[str, ...]
    path: str
    code: str = "file-missing"
    kind: Literal["file", "folder"] = "file"
    planned: bool = False


class ReadCheckpoint(NamedTuple):
    """A checkpoint that a run starts from: its name in messages, its folder, and the line that states it."""

    name: str
    folder: str
    where: str


class NotRehearsable(Exception):
    """A run that cannot be rehearsed; the message says why."""


@dataclass(frozen=True)
class OwnProgram:
    """The in-job program of an engine, which a rehearsal runs on this machine: its name for users, and its arguments.

    `model` is the published configuration of the model that the program would read from the hub, None if the arguments
    name a folder. `python_path` has the folders that its packages are imported from.
    """

    title: str
    words: tuple[str, ...]
    model: Mapping[str, Any] | None
    python_path: tuple[str, ...]


@dataclass(frozen=True)
class StepArguments:
    """The content of a rehearsal: arguments of Megatron-LM's command line.

    `config` are fields of Megatron's configuration that no flag sets, by name. `without` names the parts of the
    engine's own program that the rehearsal leaves out. `translated` is true if the engine itself uses another
    interface, so that a refusal by Megatron-LM's command line is no verdict on the run. `cuda` is the version in the
    engine's containers, for runs whose recipe and image state none. A `program`, if there is one, runs instead of the
    arguments.
    """

    args: EngineArguments
    config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    translated: bool = False
    cuda: str | None = None
    program: OwnProgram | None = None


@dataclass(frozen=True)
class AttemptArguments:
    """The arguments of a run with several attempts: for all attempts, for the first start, and for a resume.

    `save` is the folder of its checkpoints, as the engine names it. `skip_flag` is followed by the iterations whose
    batches the engine skips; None if it cannot skip batches.
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
        """Divide `arguments`. The flags in `first_start` are for the first start only, and `more` for all attempts."""
        always, first = [], []
        for argument in arguments:
            if argument.flag in first_start:
                first.append(argument)
            else:
                always.append(argument)
        return cls(save, (*always, *more), tuple(first), (resume,), skip_flag)


@dataclass(frozen=True)
class EntryTraits:
    """The differences between an engine's entry and Megatron-LM's scripts that rules of the check use.

    `fills_in` are attributes that it sets if the arguments do not. `refuses` are flags that it rejects. `sets_config`
    says that it accepts `launch.config`.
    """

    fills_in: Mapping[str, object] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()
    sets_config: bool = False


class Engine(ABC):
    """One training engine. Methods are pure, except that `entry` may read files of this machine.

    `own_keys` are the recipe keys that only this engine has, such as `launch.script`. A recipe that states one of them
    and no `engine` is for this engine, and another engine refuses it. The module of an engine must import quickly:
    finding the engine of a recipe imports all of them. `packages` are the modules that every process of a run imports,
    with the names under which pip installs them. `installation` says how to install them if pip alone is not enough.
    `seed_key` is the recipe key of the random seed.
    """

    name: ClassVar[str]
    description: ClassVar[EngineDescription]
    own_keys: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch"}
    installation: ClassVar[str | None] = None
    seed_key: ClassVar[str] = "megatron.seed"

    def stated_seed(self, recipe: Recipe) -> int | None:
        """Return the random seed that a recipe states; None for the engine's default."""
        return as_int(recipe.megatron.get("seed"))

    def problems(self, loaded: LoadedRecipe) -> Iterable[Problem]:
        """Return problems of settings that this engine cannot use, except for keys of another engine."""
        return ()

    def warnings(self, loaded: LoadedRecipe) -> Iterable[Problem]:
        """Return warnings of this engine, in addition to the rules of the check."""
        return ()

    @abstractmethod
    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        """Return the arguments of a recipe. Raises UserError with every problem that the flag schema shows."""

    def settings(self, recipe: Recipe) -> Iterable[Setting]:
        """Return every flag that the recipe states, before it is checked. Importers reverse the translation with it."""
        return ()

    def defaults(self, args: EngineArguments) -> Mapping[str, Any]:
        """Return the engine's defaults for attributes that `args` does not state, by Megatron's attribute names."""
        return {}

    def compared(self, args: EngineArguments) -> Collection[str] | None:
        """Return the attributes by which runs of other engines can be compared; None for all."""
        return None

    def translate_overrides(self, overrides: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Translate overrides for recipes of Megatron-LM to recipes of this engine; None if that is impossible."""
        shared = all(key.startswith(("batch.", "parallel.", "env.")) for key in overrides)
        if not shared and not self.description.covers("megatron_lm"):
            return None
        return overrides

    @abstractmethod
    def layout(self, args: EngineArguments, loaded: LoadedRecipe) -> Layout:
        """Return the division of the run's GPUs. Raises UserError if GPUs or batch cannot be divided."""

    @abstractmethod
    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        """Return the program of each process. With `check_paths`, raises UserError for a missing file."""

    @abstractmethod
    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        """Return the arguments of first start and resume; None for a run that saves no checkpoints."""

    def files(self, recipe: Recipe) -> Sequence[NeededFile]:
        """Return files that must exist where the processes run, but that the arguments do not name."""
        return ()

    def read_checkpoints(self, loaded: LoadedRecipe) -> Iterable[ReadCheckpoint]:
        """Return checkpoints that the run starts from, except for checkpoints in Megatron's flags."""
        return ()

    def traits(self, recipe: Recipe) -> EntryTraits:
        """Return the differences between this recipe's entry and Megatron-LM's scripts."""
        return EntryTraits()

    def rehearsal(self, args: EngineArguments, layout: Layout, loaded: LoadedRecipe) -> StepArguments:
        """Return what a rehearsal of the run executes. Raises NotRehearsable."""
        return StepArguments(args)

    def bridge_release(self, args: EngineArguments) -> str | None:
        """Return the release of Megatron-Bridge that the run trains with; None for an engine without it."""
        return None

    def environment(self, recipe: Recipe, begin: int) -> dict[str, str]:
        """Return variables that the entry reads, such as settings of FP8 evidence. The run starts after `begin`."""
        return {}
