"""How a symbol is drawn from logits."""

import flax.struct
import jax
import jax.numpy as jnp

_GREEDY_BELOW = 1e-6
"""Temperatures below this are arg max: dividing by them says the same with less precision."""


@flax.struct.dataclass
class Filters:
    """How a symbol is drawn; traced, so that other values compile nothing.

    Attributes:
      temperature: float32 scalar; 0 is arg max.
      top_k: int32 scalar, most symbols to draw from.
      top_p: float32 scalar, share of the probability to draw from.
      min_p: float32 scalar, least probability of a symbol to draw, as a fraction of the most likely one's.
      repetition_penalty: float32 scalar; 1 is none.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array

    @classmethod
    def of(
        cls,
        vocab_size: int,
        temperature: float,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
    ) -> "Filters":
        """From plain numbers; a top_k of None, or above the vocabulary, draws from all symbols."""
        floats = (jnp.float32(value) for value in (top_p, min_p, repetition_penalty))
        return cls(jnp.float32(temperature), jnp.int32(min(top_k or vocab_size, vocab_size)), *floats)


def draw(keys: jax.Array, logits: jax.Array, seen: jax.Array, filters: Filters) -> jax.Array:
    """Draws one symbol for each row.

    Symbols seen before lose by the penalty: positive logits are divided by it, others multiplied (Keskar et al. 2019,
    section 4.1). The top k symbols are kept, then the fewest of these whose probabilities, at this temperature, add up
    to top_p (Holtzman et al. 2020, section 3.1), then those that have min_p times the probability of the most likely
    one (Nguyen et al. 2024, section 3). The most likely symbol is always kept; of equals the lower id comes first.

    Args:
      keys: [B] random keys.
      logits: float32 [B, V].
      seen: bool [B, V].
      filters: How.

    Returns:
      int32 [B].
    """
    penalty = filters.repetition_penalty
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    ranked = (ranked - ranked[:, :1]) / jnp.maximum(filters.temperature, _GREEDY_BELOW)
    rank = jnp.arange(logits.shape[-1])[None, :]
    ranked = jnp.where(rank < filters.top_k, ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    likely = ((before < filters.top_p) | (filters.top_p >= 1)) & (probabilities >= filters.min_p * probabilities[:, :1])
    ranked = jnp.where(likely | (rank == 0), ranked, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, ranked)
    place = jnp.where(filters.temperature < _GREEDY_BELOW, 0, drawn)
    return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0].astype(jnp.int32)
