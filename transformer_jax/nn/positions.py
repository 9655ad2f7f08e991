"""Where a token stands: sinusoidal, rotary and ALiBi positions as pure functions.

Angles are float32 whatever the type of the activations: in bfloat16 position 257 and position 256 are the same.
"""

import jax
import jax.numpy as jnp

from transformer_jax.errors import ConfigError
from transformer_jax.nn.inputs import check_floats, check_positions


def token_positions(length: int, valid: jax.Array | None = None, start: jax.Array | None = None) -> jax.Array:
    """Counts the real tokens of each row, so that padding on either side never shifts a position.

    Args:
      length: Number of tokens (T).
      valid: bool [B, T], True where a token is real; None means all are.
      start: int32 [B], position of each row's first real token; None means 0.

    Returns:
      int32 [B, T], or [1, T] where neither valid nor start is given.
    """
    if valid is None:
        positions = jnp.arange(length, dtype=jnp.int32)[None, :]
    else:
        positions = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
    return positions if start is None else positions + start[:, None]


def sinusoidal(positions: jax.Array, d_model: int) -> jax.Array:
    """Sinusoidal encoding of any positions (Vaswani et al. 2017, section 3.5).

    Even features are sin(pos / 10000^(2i / D)), odd ones the cosine of the same angle; an odd D ends with a sine.

    Args:
      positions: int [...].
      d_model: Width (D).

    Returns:
      float32 [..., D].

    Raises:
      ConfigError: For a width below 1.
    """
    if d_model < 1:
        raise ConfigError(f"d_model must be at least 1, got {d_model}")
    feature = jnp.arange(d_model)
    rates = 10_000.0 ** (-(feature // 2 * 2).astype(jnp.float32) / d_model)
    angles = positions[..., None].astype(jnp.float32) * rates.reshape((1,) * positions.ndim + (-1,))
    even = (feature % 2 == 0).reshape((1,) * positions.ndim + (-1,))
    return jnp.where(even, jnp.sin(angles), jnp.cos(angles))


def sinusoidal_positions(length: int, d_model: int) -> jax.Array:
    """The table of `sinusoidal` for positions 0 to length - 1.

    Args:
      length: Positions (T).
      d_model: Width (D), even or odd.

    Returns:
      float32 [T, D].

    Example:
      >>> [[round(float(x), 3) for x in row] for row in sinusoidal_positions(2, 5)]
      [[0.0, 1.0, 0.0, 1.0, 0.0], [0.841, 0.54, 0.025, 1.0, 0.001]]
    """
    if length < 1:
        raise ConfigError(f"length must be at least 1, got {length}")
    return sinusoidal(jnp.arange(length), d_model)


def rotary(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotates pairs of features by an angle that grows with the position (Su et al. 2021, section 3.2).

    Features i and i + K/2 form a pair. The product of two rotated vectors depends on their distance alone.

    Args:
      x: [B, T, H, K], queries or keys.
      positions: int [B, T] or [1, T].
      base: The slowest pair turns once in about 2 pi * base positions.

    Returns:
      [B, T, H, K], in the dtype of x.

    Raises:
      ConfigError: If head_dim K is odd, x is not floats [B, T, H, K], or positions are not whole numbers [B or 1, T].

    Example:
      >>> x = jnp.ones((1, 3, 1, 2))
      >>> rotary(x, jnp.arange(3)[None])[0, :, 0].round(2).tolist()[0]
      [1.0, 1.0]
    """
    check_floats("x", x, "B T H K")
    check_positions(positions)
    if base <= 0:
        raise ConfigError(f"the base of rotary positions must be above 0, got {base}")
    if positions.shape[1] != x.shape[1] or positions.shape[0] not in (1, x.shape[0]):
        raise ConfigError(f"x {list(x.shape)} and positions {list(positions.shape)} are of different lengths or rows")
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ConfigError(f"rotary positions need an even head_dim, got {head_dim}")
    rates = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, :, None, None].astype(jnp.float32) * rates[None, None, None, :]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def alibi_slopes(num_heads: int) -> jax.Array:
    """One slope for each head: a geometric sequence that starts at 2^(-8/H) (Press et al. 2022, section 3).

    For a number of heads that is no power of two, the paper's rule: the sequence of the power below, then every
    other slope of the sequence of the power above.

    Args:
      num_heads: H.

    Returns:
      float32 [H].

    Raises:
      ConfigError: For less than one head.

    Example:
      >>> alibi_slopes(4).tolist()
      [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if num_heads < 1:
        raise ConfigError(f"num_heads must be at least 1, got {num_heads}")
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return jnp.asarray(slopes, dtype=jnp.float32)


def alibi_bias(num_heads: int, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """What ALiBi adds to the scores: minus the slope times the distance.

    Args:
      num_heads: H.
      query_positions: int [B or 1, T].
      key_positions: int [B or 1, S].

    Returns:
      float32 [B or 1, H, T, S].

    Raises:
      ConfigError: For less than one head, or positions of another kind.

    Example:
      >>> alibi_bias(8, jnp.array([[5]]), jnp.arange(6)[None])[0, 0, 0].tolist()
      [-2.5, -2.0, -1.5, -1.0, -0.5, -0.0]
    """
    check_positions(query_positions, key_positions)
    distance = jnp.abs(query_positions[:, None, :, None] - key_positions[:, None, None, :])
    return -alibi_slopes(num_heads)[None, :, None, None] * distance.astype(jnp.float32)
