"""Hypothesis strategies over a flag schema: values that Megatron takes, and argument lists that it may not take."""

from __future__ import annotations

from hypothesis import strategies as st

from fp8launch.megatron.arguments import FlagValue, Scalar
from fp8launch.megatron.schema import Flag, FlagSchema

# What they do at parse time depends on the machine: files that they name, packages that they need.
SIDE_EFFECTS = frozenset({"yaml_cfg", "enable_msc", "disable_msc"})

_INTS = st.integers(-(2**70), 2**70) | st.integers(-3, 300)
_FLOATS = st.floats(allow_nan=False)
# Any text that an argument list can hold; surrogates cannot be encoded, NUL ends a C string.
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_PATTERNS = st.sampled_from(["[1]*4", "([0]*3+[1]*1)*8", "[1,0,1]", "([1]+[0]*23)", "(1,)*2+([1],)", "3*[0]"])

_ODD_WORDS = [
    "-",
    "--",
    "-1",
    "-1.5",
    "-.5",
    "-1e-5",
    "1e-5",
    "-x",
    "--x",
    "-h",
    "0",
    "1",
    "7",
    "1.5",
    "nan",
    "-inf",
    "1_000",
    "x=y",
    "-1=2",
    "[1]*2",
    "[1]+2",
    "[1",
    "1,2",
    "(1,2)",
    "1,",
    "attn",
    "aux_loss",
    "True",
]


def scalars(flag: Flag) -> st.SearchStrategy[Scalar | list[Scalar]]:
    """One value of the flag."""
    if flag.choices is not None:
        return st.sampled_from(flag.choices)
    return {
        "int": _INTS,
        "float": _FLOATS | st.integers(-(10**9), 10**9),
        "bool": st.booleans(),
        "ints": st.lists(st.integers(-5, 5), min_size=1, max_size=4),
        "pattern": st.integers(0, 99) | _PATTERNS | st.lists(st.integers(0, 2), min_size=1),
        "str": _TEXT | _INTS | _FLOATS,
    }[flag.type or "str"]


@st.composite
def flag_values(draw: st.DrawFn, flag: Flag) -> FlagValue:
    if not flag.takes_value:
        return draw(st.booleans()) if flag.action == "boolean" else True
    if flag.nargs is None:
        return draw(scalars(flag))
    count = flag.nargs if isinstance(flag.nargs, int) else None
    least = count if count is not None else (1 if flag.nargs == "+" else 0)
    # Of several values none may look like an option; that is refused, and tested elsewhere.
    item = scalars(flag).filter(lambda value: not str(value).startswith("-") and not isinstance(value, list))
    return draw(st.lists(item, min_size=least, max_size=count if count is not None else 4))


@st.composite
def value_mappings(draw: st.DrawFn, schema: FlagSchema) -> dict[str, FlagValue]:
    """Flags of the schema with values that its Megatron takes."""
    flags = [flag for flag in schema.flags() if flag.name not in SIDE_EFFECTS and flag.needs is None]
    # Of the flags that set the same attribute one may say the opposite of another.
    chosen = draw(st.lists(st.sampled_from(flags), max_size=12, unique_by=lambda flag: flag.dest))
    return {flag.name: draw(flag_values(flag)) for flag in chosen}


@st.composite
def wild_argv(draw: st.DrawFn, schema: FlagSchema) -> list[str]:
    """Argument lists of known and misspelt flags, of fitting and unfitting values, well ordered or not."""
    flags = [flag for flag in schema.flags() if flag.name not in SIDE_EFFECTS and flag.needs is None]
    rare = [
        flag for flag in flags if flag.nargs or flag.action == "boolean" or flag.type in ("bool", "ints", "pattern")
    ]
    flag = st.sampled_from(rare) | st.sampled_from(flags)
    odd = st.sampled_from([*_ODD_WORDS, "", "a b", "-a b", " 2"])
    words: list[str] = []
    for one in draw(st.lists(flag, max_size=4)):
        option = draw(st.sampled_from(one.options))
        fitting = scalars(one).map(str) if one.takes_value else odd
        count = {None: int(one.takes_value), "+": 2, "*": 2}.get(one.nargs, one.nargs)
        tidy = draw(st.sampled_from([True, True, True, False]))
        values = draw(
            st.lists(fitting, min_size=count, max_size=count) if tidy else st.lists(fitting | odd, max_size=4)
        )
        form = "apart" if tidy else draw(st.sampled_from(["apart", "attached", "underscores", "shortened"]))
        if form == "attached":
            values = [f"{option}={values[0] if values else ''}", *values[1:]]
        else:
            values = [{"underscores": option.replace("-", "_"), "shortened": option[:-1]}.get(form, option), *values]
        words += values
    return words
