"""What tests of properties share: how many examples they look at, and the configs there are.

`pytest -m hypothesis --hypothesis-profile=campaign` looks at a hundred times as many, others each time.
"""

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import settings
from hypothesis import strategies as st

from transformer_jax import Config, DataConfig, ModelConfig
from transformer_jax.errors import ConfigError, TransformerJaxError

SECTIONS = get_type_hints(Config)
FIELDS = {(section, name): hint for section, kind in SECTIONS.items() for name, hint in get_type_hints(kind).items()}
"""The type of every field of a config, by section and name."""

# One alphabet of both would hold the signs once among a million others.
_SYMBOLS = st.characters() | st.sampled_from("_□▁\0\t\r\n\x85\u2028 e\u0301\ud83d\ude00😀")
TEXT = st.lists(_SYMBOLS).map("".join)
"""Any code points, and often those that tend to make trouble: halves of a surrogate pair too."""

_LARGE = [16, 256, 1_000, 2**31 - 1, 2**32 - 1, 2**32, 2**70]
_REFUSED = [math.nan, math.nan, math.inf, -math.inf, 1e39]
_VALUES = {
    int: st.integers(-1, 8) | st.integers(9, 70) | st.sampled_from(_LARGE),
    float: st.floats(0, 1) | st.sampled_from([0.0, 0.5, 3.0, 2]) | st.floats() | st.sampled_from(_REFUSED),
    bool: st.booleans(),
    str: st.sampled_from(["utf-8", "latin-1"]) | TEXT,
    type(None): st.none(),
    tuple[str, ...]: st.lists(TEXT, max_size=3).map(tuple),
}


def examples(count: int) -> settings:
    """How many examples a property gets, where one without gets 100; a profile multiplies them."""
    return settings(max_examples=count * settings().max_examples // 100)


def values(hint: Any) -> st.SearchStrategy:
    """Values of a type, most of which a field may have."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is types.UnionType:
        return st.one_of(map(values, get_args(hint)))
    return _VALUES[hint]


EVERY_CHANGE = st.fixed_dictionaries({field: values(hint) for field, hint in FIELDS.items()})
"""A value for each field."""

CHANGES = st.one_of([st.tuples(st.just(field), values(hint)) for field, hint in FIELDS.items()])
"""A field, by section and name, and a value for it."""


def changed(config: Config, changes: dict[tuple[str, str], Any]) -> Config:
    """A config with other values in some fields."""
    sections = {name: {} for name in SECTIONS}
    for (section, name), value in changes.items():
        sections[section][name] = value
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    )


FIRST = [
    Config(),
    Config(data=DataConfig(corpus="file", path=("text.txt",))),
    Config(ModelConfig(architecture="encoder_decoder"), DataConfig(corpus="pairs", path=("pairs.tsv",))),
]
"""Where changes of single fields begin: fields that need each other are set here."""


def outcome(make: Callable[..., Any], *args: Any) -> Any:
    """What a call gives, or the error in its place, which has to be one line."""
    try:
        return make(*args)
    except TransformerJaxError as error:
        said = str(error)
    assert len(said.splitlines()) == 1
    return said


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Valid configs: any fields changed one after the other, but for the changes that are refused."""
    config = draw(st.sampled_from(FIRST))
    for field, value in draw(st.lists(CHANGES, min_size=8, max_size=40)):
        with contextlib.suppress(ConfigError):
            config = changed(config, {field: value})
    return config
