"""Losses as sums with their counts. Whoever has all the parts divides, once."""

import jax
import jax.numpy as jnp


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    axis: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood in nats, summed over the targets that count.

    Args:
      logits: float32 [B, T, V].
      targets: int [B, T] in [0, V); where the weight is 0 any of these will do.
      weights: float32 [B, T].
      label_smoothing: Weight of the uniform distribution in the targets (Szegedy et al. 2016, section 7).
      z_loss: Adds z_loss * log(Z)^2 (Chowdhery et al. 2022, section 5).
      axis: Sum over this axis of [B, T] alone; None sums over both.

    Returns:
      The weighted sum and the sum of the weights, both float32 and for axis None scalars.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    nll = log_z - picked
    if label_smoothing:
        nll = (1 - label_smoothing) * nll + label_smoothing * (log_z - jnp.mean(logits, axis=-1))
    if z_loss:
        nll = nll + z_loss * jnp.square(log_z)
    return jnp.sum(nll * weights, axis=axis), jnp.sum(weights, axis=axis)


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """Total / count, and 0 where nothing counts: a batch without targets adds nothing."""
    return total / jnp.maximum(count, 1)
