"""How a symbol is drawn from logits."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

_GREEDY_BELOW = 1e-6
"""Temperatures below this are arg max: dividing by them says the same with less precision."""

_LARGEST = float(np.finfo(np.float32).max)
_FAR = 1e30
"""Temperatures and penalties go no further, nor below its reciprocal: at the ends of float32 quotients are NaN."""


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
        penalty = jnp.float32(min(max(repetition_penalty, 1 / _FAR), _FAR))
        temperature = jnp.float32(min(temperature, _FAR))
        top_k = jnp.int32(min(top_k or vocab_size, vocab_size))
        return cls(temperature, top_k, jnp.float32(top_p), jnp.float32(min_p), penalty)


def rank(logits: jax.Array, seen: jax.Array, filters: Filters) -> tuple[jax.Array, jax.Array]:
    """Puts the symbols of each row in order, and takes out those that are not to be drawn.

    Symbols seen before lose by the penalty: positive logits are divided by it, others multiplied (Keskar et al. 2019,
    section 4.1). The top k symbols are kept, then the fewest of these whose probabilities, at this temperature, add up
    to top_p (Holtzman et al. 2020, section 3.1), then those that have min_p times the probability of the most likely
    one (Nguyen et al. 2024, section 3). The most likely symbol is always kept; of equals the lower id comes first.

    Args:
      logits: float32 [B, V]; -inf for what is never to be drawn, in each row at least one finite.
      seen: bool [B, V].
      filters: How.

    Returns:
      int32 [B, V], the most likely symbol first, and float32 [B, V], the logits in this order at this temperature:
      0 for the first, -inf for those that are not kept.
    """
    penalty = filters.repetition_penalty
    # Within float32: two symbols at infinity would have no difference.
    penalised = jnp.clip(jnp.where(logits > 0, logits / penalty, logits * penalty), -_LARGEST, _LARGEST)
    logits = jnp.where(seen & (logits > -jnp.inf), penalised, logits)
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    ranked = (ranked - ranked[:, :1]) / jnp.maximum(filters.temperature, _GREEDY_BELOW)
    place = jnp.arange(logits.shape[-1])[None, :]
    ranked = jnp.where(place < filters.top_k, ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    likely = ((before < filters.top_p) | (filters.top_p >= 1)) & (probabilities >= filters.min_p * probabilities[:, :1])
    return order, jnp.where(likely | (place == 0), ranked, -jnp.inf)


def draw(keys: jax.Array, logits: jax.Array, seen: jax.Array, filters: Filters) -> jax.Array:
    """Draws one symbol for each row from those that `rank` keeps.

    Args:
      keys: [B] random keys.
      logits: float32 [B, V].
      seen: bool [B, V].
      filters: How.

    Returns:
      int32 [B].
    """
    order, ranked = rank(logits, seen, filters)
    drawn = jax.vmap(jax.random.categorical)(keys, ranked)
    place = jnp.where(filters.temperature < _GREEDY_BELOW, 0, drawn)
    return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0].astype(jnp.int32)
