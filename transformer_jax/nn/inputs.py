"""Checks of what a model is called with. Values are checked outside jit only; inside it they cannot be seen."""

import jax
import jax.numpy as jnp

from transformer_jax.errors import ConfigError


def check_ids(name: str, ids: jax.Array, vocab_size: int) -> None:
    """Holds ids to whole numbers [B, T] in [0, V).

    Raises:
      ConfigError: Naming what is expected.
    """
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
    if valid is not None and (valid.shape != shape or valid.dtype != jnp.bool_):
        raise ConfigError(
            f"{name} must be bool{list(shape)}, True = a real token, got {valid.dtype}{list(valid.shape)}"
        )


def check_rows(length: jax.Array, batch: int) -> None:
    """Holds a cache to the rows of the call.

    Args:
      length: The cache's own, int32 [B].
      batch: Rows of the call.

    Raises:
      ConfigError: Naming both.
    """
    if length.shape != (batch,):
        raise ConfigError(f"the cache has {length.shape[0]} rows, and the call {batch}")


def concrete(x: jax.Array) -> int | None:
    """The value of a scalar, or None inside jit."""
    try:
        return int(x)
    except jax.errors.ConcretizationTypeError:
        return None
