"""Checks of plain values, each with its message: what the field is, what was given, and what would do."""

import difflib
import math
import types
import typing
from typing import Any, Literal, get_args, get_origin

from transformer_jax.errors import ConfigError

_LEAST, _MOST = 1e-37, 1e38
"""What float32 holds: beyond, a number would become 0 or infinity in silence."""

_TRIED = 1 << 16
"""Divisors that are looked for: of an absurd number the nearest may be missed, and the search ends."""


def unknown(what: str, name: object, valid: typing.Iterable[str]) -> str:
    """The message for a name that does not exist, with the closest one that does, or all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1) if isinstance(name, str) and len(name) < 100 else []
    hint = f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(valid)}"
    return f"unknown {what} {shown(name)}; {hint}"


def shown(value: object) -> str:
    """A value as a message shows it: whatever it is, in a few words."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in a list in a list
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_types(config: Any, section: str) -> None:
    """Holds each field to its annotation, so that a 2.0 or a "2" fails here and not far away."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        choices = get_args(hint) if get_origin(hint) is Literal else None
        if choices is not None:
            if value not in choices:
                raise ConfigError(unknown(f"value for {section}.{name}:", value, choices))
        elif isinstance(value, int) and not isinstance(value, bool) and _allows(hint, float) and not _allows(hint, int):
            try:
                object.__setattr__(config, name, float(value))
            except OverflowError as error:
                raise ConfigError(f"{section}.{name} must be a number below 1e308, got {shown(value)}") from error
        elif not _allows(hint, type(value)) or (hint == tuple[str, ...] and not all(isinstance(v, str) for v in value)):
            raise ConfigError(f"{section}.{name} must be {_describe(hint)}, got {shown(value)}")


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
        if value is None:
            continue
        if not 0 < value < float("inf"):
            raise ConfigError(f"{section}.{name} must be a positive number, got {shown(value)}")
        if isinstance(value, float) and not _LEAST <= value <= _MOST:
            raise ConfigError(f"{section}.{name} must be between {_LEAST} and {_MOST}, as in float32, got {value}")


def check_largest(config: Any, section: str, limits: typing.Mapping[str, int]) -> None:
    """Holds fields to sizes at which a program can still be written down; None passes."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is not None and value > limit:
            raise ConfigError(f"{section}.{name} must be at most {limit}, got {shown(value)}")


def check_rates(config: Any, section: str, names: typing.Iterable[str]) -> None:
    """Holds fields to [0, 1); None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{section}.{name} must be at least 0 and below 1, got {shown(value)}")


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of a number that comes nearest to the one wanted: what an error can propose."""
    small = [d for d in range(1, min(math.isqrt(total), _TRIED) + 1) if total % d == 0]
    return min({*small, *(total // d for d in small)}, key=lambda d: (abs(d - wanted), d))
