"""Who may attend to whom: bool masks, True = may attend, [B or 1, 1, T, S]."""

import jax
import jax.numpy as jnp


def causal_mask(query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Each query sees its own position and those before it.

    Args:
      query_positions: int [B or 1, T].
      key_positions: int [B or 1, S].

    Returns:
      bool [B or 1, 1, T, S].
    """
    return key_positions[:, None, None, :] <= query_positions[:, None, :, None]


def window_mask(query_positions: jax.Array, key_positions: jax.Array, window: int) -> jax.Array:
    """Each query sees positions less than `window` away: with a causal mask the newest `window`, itself included.

    Args:
      query_positions: int [B or 1, T].
      key_positions: int [B or 1, S].
      window: Positions seen on each side, the query's own included.

    Returns:
      bool [B or 1, 1, T, S].
    """
    return jnp.abs(query_positions[:, None, :, None] - key_positions[:, None, None, :]) < window


def padding_mask(valid: jax.Array) -> jax.Array:
    """Nobody attends to padding.

    Args:
      valid: bool [B, S], True where a key is real.

    Returns:
      bool [B, 1, 1, S]: on the key axis only, so that no query is left without a key because it is padding itself.
    """
    return valid[:, None, None, :]


def combine_masks(*masks: jax.Array | None) -> jax.Array | None:
    """The logical and of all masks that are given, or None where none is."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    combined = given[0]
    for mask in given[1:]:
        combined = jnp.logical_and(combined, mask)
    return combined
