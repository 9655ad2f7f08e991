"""Checks of what a model is called with. Values are checked outside jit only; inside it they cannot be seen."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.checks import unknown
from transformer_jax.errors import ConfigError


def check_ids(name: str, ids: jax.Array, vocab_size: int) -> None:
    """Holds ids to whole numbers [B, T] in [0, V).

    Raises:
      ConfigError: Naming what is expected.
    """
    if vocab_size < 1:
        raise ConfigError(f"vocab_size must be at least 1, got {vocab_size}")
    check_array(name, ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ConfigError(f"{name} must be whole numbers [B, T], got {ids.dtype}{list(ids.shape)}")
    if ids.size:
        lowest, highest = concrete(ids.min()), concrete(ids.max())
        if lowest is not None and highest is not None and not 0 <= lowest <= highest < vocab_size:
            raise ConfigError(f"{name} must be in [0, {vocab_size}), got {lowest} to {highest}")


def check_valid(name: str, valid: jax.Array | None, shape: tuple[int, ...]) -> None:
    """Holds a mask of real tokens to bool [B, T].

    Raises:
      ConfigError: Naming what is expected.
    """
    if valid is None:
        return
    check_array(name, valid)
    if valid.shape != shape or valid.dtype != jnp.bool_:
        raise ConfigError(
            f"{name} must be bool{list(shape)}, True = a real token, got {valid.dtype}{list(valid.shape)}"
        )


def check_positions(*positions: jax.Array) -> None:
    """Holds positions to whole numbers [B or 1, T].

    Raises:
      ConfigError: Naming what is expected.
    """
    for each in positions:
        check_array("positions", each)
        if each.ndim != 2 or not jnp.issubdtype(each.dtype, jnp.integer):
            raise ConfigError(f"positions must be whole numbers [B or 1, T], got {each.dtype}{list(each.shape)}")


def check_floats(name: str, x: jax.Array, letters: str, width: int | None = None) -> None:
    """Holds activations to floats of a rank and, where it is given, of a width.

    Args:
      name: Of the argument.
      x: What was given.
      letters: The axes, such as "B T D"; "... D" means any number before the last.
      width: Of the last axis.

    Raises:
      ConfigError: Naming what is expected.
    """
    check_array(name, x)
    axes = letters.split()
    ranks = x.ndim >= 1 if axes[0] == "..." else x.ndim == len(axes)
    if not ranks or not jnp.issubdtype(x.dtype, jnp.floating) or width not in (None, x.shape[-1]):
        wanted = ", ".join([*axes[:-1], axes[-1] if width is None else str(width)])
        raise ConfigError(f"{name} must be floats [{wanted}], got {x.dtype}{list(x.shape)}")


def check_cache(cache: Any, kind: type, batch: int) -> None:
    """Holds a cache to its kind and to the rows of the call.

    Args:
      cache: What was given, with `length` int32 [B].
      kind: The class it must have.
      batch: Rows of the call.

    Raises:
      ConfigError: Naming what is expected.
    """
    if not isinstance(cache, kind):
        raise ConfigError(f"the cache must be a {kind.__name__}, got {type(cache).__name__}")
    if cache.length.shape != (batch,):
        raise ConfigError(f"the cache has {cache.length.shape[0]} rows, and the call {batch}")


def concrete(x: jax.Array) -> int | None:
    """The value of a scalar, or None inside jit."""
    try:
        return int(x)
    except jax.errors.ConcretizationTypeError:
        return None


def check_array(name: str, x: jax.Array) -> None:
    """Holds an argument to an array: a list would be read as a tree of numbers.

    Raises:
      ConfigError: Naming what is expected.
    """
    if not hasattr(x, "dtype") or not hasattr(x, "ndim"):
        raise ConfigError(f"{name} must be an array, got {type(x).__name__}")


def check_capture(capture: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Holds a capture to a tuple of known names.

    Raises:
      ConfigError: Naming the one that is not.
    """
    if isinstance(capture, str):
        raise ConfigError(f"capture is a tuple of names: give ({capture!r},)")
    for name in capture:
        if name not in known:
            raise ConfigError(unknown("capture", name, known))
