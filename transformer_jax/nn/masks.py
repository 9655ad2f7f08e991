"""Who may attend to whom: bool masks, True = may attend, [B or 1, 1, T, S]."""

from numbers import Integral

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.errors import ConfigError
from transformer_jax.nn.inputs import check_array, check_positions


def causal_mask(query_positions: jax.Array | int, key_positions: jax.Array | None = None) -> jax.Array:
    """Each query sees its own position and those before it (Vaswani et al. 2017, section 3.2.3).

    Args:
      query_positions: int [B or 1, T]; or a length, for positions 0 to T - 1.
      key_positions: int [B or 1, S]; None means those of the queries.

    Returns:
      bool [B or 1, 1, T, S].

    Raises:
      ConfigError: For positions that are not whole numbers of rank 2, or a length below 1.

    Example:
      >>> causal_mask(3).astype(int).tolist()
      [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]
      >>> causal_mask(jnp.array([[2]]), jnp.arange(4)[None]).astype(int).tolist()
      [[[[1, 1, 1, 0]]]]
    """
    query_positions, key_positions = _both(query_positions, key_positions)
    return key_positions[:, None, None, :] <= query_positions[:, None, :, None]


def window_mask(query_positions: jax.Array | int, key_positions: jax.Array | None = None, *, window: int) -> jax.Array:
    """Each query sees positions less than `window` away: with a causal mask the newest `window`, itself included.

    The sliding window of Beltagy et al. 2020, section 3.1.

    Args:
      query_positions: int [B or 1, T]; or a length, for positions 0 to T - 1.
      key_positions: int [B or 1, S]; None means those of the queries.
      window: Positions seen on each side, the query's own included.

    Returns:
      bool [B or 1, 1, T, S].

    Raises:
      ConfigError: For positions that are not whole numbers of rank 2, or a length or window below 1.

    Example:
      >>> window_mask(3, window=2).astype(int).tolist()
      [[[[1, 1, 0], [1, 1, 1], [0, 1, 1]]]]
    """
    query_positions, key_positions = _both(query_positions, key_positions)
    if not isinstance(window, Integral) or window < 1:
        raise ConfigError(f"a window must be a whole number of at least 1, the query's own position, got {window}")
    window = min(window, jnp.iinfo(jnp.int32).max)
    return jnp.abs(query_positions[:, None, :, None] - key_positions[:, None, None, :]) < window


def padding_mask(valid: jax.Array) -> jax.Array:
    """Nobody attends to padding.

    Args:
      valid: bool [B, S], True where a key is real: `ids != pad_id`, with each side's own pad id.

    Returns:
      bool [B, 1, 1, S]: on the key axis only, so that no query is left without a key because it is padding itself.

    Raises:
      ConfigError: For anything that is not bool [B, S].

    Example:
      >>> padding_mask(jnp.array([[7, 8, 0]]) != 0).tolist()
      [[[[True, True, False]]]]
    """
    check_array("valid", valid)
    if valid.ndim != 2 or valid.dtype != jnp.bool_:
        raise ConfigError(f"valid must be bool [B, S], True = a real token, got {valid.dtype}{list(valid.shape)}")
    return valid[:, None, None, :]


def combine_masks(*masks: jax.Array | None) -> jax.Array | None:
    """The logical and of all masks that are given, or None where none is.

    Args:
      *masks: bool, of shapes that broadcast to [B, H, T, S].

    Raises:
      ConfigError: For a mask that is not bool, or masks that do not fit together.

    Example:
      >>> combine_masks(None, jnp.array([[[[True, False]]]]), jnp.array([[[[True]], [[False]]]])).tolist()
      [[[[True, False]], [[False, False]]]]
    """
    given = [mask for mask in masks if mask is not None]
    for mask in given:
        check_array("a mask", mask)
        if mask.dtype != jnp.bool_:
            raise ConfigError(f"a mask must be bool, True = may attend, got {mask.dtype}{list(mask.shape)}")
    if not given:
        return None
    try:
        jnp.broadcast_shapes(*(mask.shape for mask in given))
    except ValueError:
        shapes = ", ".join(str(list(mask.shape)) for mask in given)
        raise ConfigError(f"masks must broadcast to one [B, H, T, S], got {shapes}") from None
    combined = given[0]
    for mask in given[1:]:
        combined = jnp.logical_and(combined, mask)
    return combined


@flax.struct.dataclass
class IndexMask:
    """A mask that follows from places in the arrays alone, which fused kernels need not store.

    Query i and key j are at places i and j; keys that are not valid are seen by nobody.

    Attributes:
      valid: bool [B, S], True where a key is real; None means all.
      causal: Each query sees its own place and those before it.
      window: Each query sees places less than this far away; None means all.

    Example:
      >>> IndexMask(valid=jnp.array([[True, True, False]]), causal=True).dense(3, 3).astype(int).tolist()
      [[[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]]
    """

    valid: jax.Array | None = None
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    window: int | None = flax.struct.field(pytree_node=False, default=None)

    def dense(self, query_length: int, key_length: int) -> jax.Array | None:
        """The same mask as an array: bool [B or 1, 1, T, S], or None where everybody sees everything."""
        queries = jnp.arange(query_length, dtype=jnp.int32)[None, :]
        keys = jnp.arange(key_length, dtype=jnp.int32)[None, :]
        return combine_masks(
            causal_mask(queries, keys) if self.causal else None,
            None if self.window is None else window_mask(queries, keys, window=self.window),
            None if self.valid is None else padding_mask(self.valid),
        )


def _both(queries: jax.Array | int, keys: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The positions of queries and keys, checked."""
    if isinstance(queries, Integral) and not isinstance(queries, bool):
        if queries < 1:
            raise ConfigError(f"a length must be at least 1, got {queries}")
        queries = jnp.arange(queries, dtype=jnp.int32)[None, :]
    keys = queries if keys is None else keys
    check_positions(queries, keys)
    return queries, keys
