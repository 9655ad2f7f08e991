"""Checks of plain values, each with its message: what the field is, what was given, and what would do."""

import difflib
import types
import typing
from typing import Any, Literal, get_args, get_origin

from transformer_jax.errors import ConfigError

_FAR = 100_000
"""How far from a number its neighbours are tried: numbers may be of any size, and an error must not take for ever."""

_LARGEST = 3.4e38
_MOST_STEPS = 2**31 - 1


def unknown(what: str, name: object, valid: typing.Iterable[str]) -> str:
    """The message for a name that does not exist, with the closest one that does, or all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(str(name), valid, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(valid)}"
    return f"unknown {what} {name!r}; {hint}"


def check_types(config: Any, section: str) -> None:
    """Holds each field to its annotation, so that a 2.0 or a "2" fails here and not far away."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        choices = get_args(hint) if get_origin(hint) is Literal else None
        if choices is not None:
            if value not in choices:
                raise ConfigError(unknown(f"value for {section}.{name}:", value, choices))
        elif isinstance(value, int) and not isinstance(value, bool) and _allows(hint, float) and not _allows(hint, int):
            _check_size(value, f"{section}.{name}")
            object.__setattr__(config, name, float(value))
        elif not _allows(hint, type(value)) or (hint == tuple[str, ...] and not all(isinstance(v, str) for v in value)):
            raise ConfigError(f"{section}.{name} must be {_describe(hint)}, got {value!r}")
        elif isinstance(value, float):
            _check_size(value, f"{section}.{name}")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.isascii():
                _check_text(text, f"{section}.{name}")


def _check_size(value: float, name: str) -> None:
    """Refuses what float32 holds as infinity; infinity itself is left to the checks of each field."""
    if _LARGEST < abs(value) != float("inf"):
        raise ConfigError(f"{name} must be a number that float32 holds, at most {_LARGEST}, got {value}")


def _check_text(text: str, name: str) -> None:
    """Refuses what no JSON file can hold, such as the name of a file whose bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is no Unicode text, got {text!r}; use other characters, or rename the file"
        ) from error


def _allows(hint: Any, kind: type) -> bool:
    options = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    return kind in [get_origin(option) or option for option in options]


def _describe(hint: Any) -> str:
    if hint == tuple[str, ...]:
        return "a tuple of strings"
    options = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", type(None): "None"}
    return " or ".join(names[option] for option in options)


def check_positive(config: Any, section: str, names: typing.Iterable[str]) -> None:
    """Holds fields to positive, finite numbers; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{section}.{name} must be a positive number, got {value}")


def check_rates(config: Any, section: str, names: typing.Iterable[str]) -> None:
    """Holds fields to [0, 1); None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{section}.{name} must be at least 0 and below 1, got {value}")


def check_steps(config: Any, section: str, names: typing.Iterable[str]) -> None:
    """Holds numbers of updates to what their int32 counter reaches; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value > _MOST_STEPS:
            raise ConfigError(f"{section}.{name} must be at most {_MOST_STEPS}, got {value}")


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of a number that comes nearest to the one wanted, or 1 where none is near: what an error proposes."""
    wanted = min(wanted, total)
    away = range(min(wanted, _FAR))
    return next((d for step in away for d in (wanted - step, wanted + step) if total % d == 0), 1)
