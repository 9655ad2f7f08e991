"""Checks of plain values, each with its message: what the field is, what was given, and what would do."""

import difflib
import math
import types
import typing
from typing import Any, Literal, get_args, get_origin

from transformer_jax.errors import ConfigError

_LEAST, _MOST = 1e-37, 3.4e38
"""What float32 holds: beyond, a number would become 0 or infinity in silence."""

LARGEST = {
    **dict.fromkeys(("vocab_size", "source_vocab_size", "context", "window", "batch_size"), 1 << 24),
    **dict.fromkeys(("d_model", "num_heads", "num_kv_heads"), 1 << 20),
    "d_ff": 1 << 22,
    **dict.fromkeys(("num_layers", "num_encoder_layers", "unroll"), 1 << 12),
    **dict.fromkeys(("steps", "warmup_steps", "decay_steps"), 2**31 - 1),
}
"""Of fields by name. Sizes are far above any model, and low enough that no array's size overflows 64 bits, which ends
JAX; updates are counted in int32."""

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
    """Holds each field to its annotation and to `LARGEST`, so that a 2.0 or a "2" fails here and not far away."""
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
            raise ConfigError(f"{section}.{name} must be {_describe(hint)}, got {shown(value)}")
        elif isinstance(value, float):
            _check_size(value, f"{section}.{name}")
        if name in LARGEST and value is not None and value > LARGEST[name]:
            raise ConfigError(f"{section}.{name} must be at most {LARGEST[name]}, got {shown(value)}")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.isascii():
                _check_text(text, f"{section}.{name}")


def _check_size(value: float, name: str) -> None:
    """Refuses what float32 holds as infinity; infinity itself is left to the checks of each field."""
    if _MOST < abs(value) != float("inf"):
        raise ConfigError(f"{name} must be a number that float32 holds, at most {_MOST}, got {shown(value)}")


def _check_text(text: str, name: str) -> None:
    """Refuses what no JSON file can hold, such as the name of a file whose bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is no Unicode text, got {shown(text)}; use other characters, or rename the file"
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
        if value is None:
            continue
        if not 0 < value < float("inf"):
            raise ConfigError(f"{section}.{name} must be a positive number, got {shown(value)}")
        if isinstance(value, float) and value < _LEAST:
            raise ConfigError(f"{section}.{name} must be a number that float32 holds, at least {_LEAST}, got {value}")


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
