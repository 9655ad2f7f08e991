"""Symbols for the gaps of rows, from an encoder that sees both sides of each."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import ConfigError
from transformer_jax.fetch import fetch
from transformer_jax.generation.draw import Filters, draw
from transformer_jax.generation.settings import (
    check_count,
    check_finite,
    check_rows,
    check_seed,
    check_symbol,
    check_temperature,
    padded,
)
from transformer_jax.nn import Transformer

_EQUAL = 1e-4
"""Nats by which certainties differ where rounding alone may decide, as in a row of nothing but gaps: the first of such
places is filled, on every machine and in every batch."""


@flax.struct.dataclass
class _Loop:
    """What goes around the loop.

    Attributes:
      ids: int32 [B, S].
      missing: bool [B, S], the gaps that are left.
      log_probs: float32 [B, S], what the model gave each symbol that it put; 0 elsewhere.
      filled: int32, gaps filled so far in each row that has any left.
      finite: bool, whether all logits so far were finite.
    """

    ids: jax.Array
    missing: jax.Array
    log_probs: jax.Array
    filled: jax.Array
    finite: jax.Array


def fill_gaps(
    model: Transformer,
    params: Any,
    rows: Sequence[Sequence[int]],
    gap: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    num_samples: int = 1,
    context: int | None = None,
    return_log_probs: bool = False,
) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]:
    """Fills gaps one after another, in each row first the one whose most likely symbol is most certain.

    After each the model looks again: mask-predict (Ghazvininejad et al. 2019, section 3) with one symbol at a time,
    none of which is taken back. A row does not depend on those beside it.

    Args:
      model: From `create_model`, of architecture "encoder".
      params: Its parameters.
      rows: Rows of ids, each with at least one.
      gap: The id that stands where a symbol is missing; it is never put there.
      temperature: Divides the logits of the place that was chosen, to draw from; 0 takes the most likely symbol.
      seed: Of the random draws, which are the same for equal rows.
      num_samples: Results for each row, which follow each other.
      context: Most ids in a row; None means the model's context.
      return_log_probs: Also return the log-probability, in nats, that the model gave each symbol, before temperature.

    Returns:
      For each row int32 [its length]. With log-probabilities a pair, the second float32 of the same lengths, 0 where
      there was no gap.

    Raises:
      ConfigError: For a model of another architecture, or settings out of range.
      DataError: For a row that is empty or longer than the context, or unknown ids.
      TransformerJaxError: If the model gives logits that are not finite.

    Example:
      >>> from transformer_jax import ModelConfig, create_model
      >>> model = create_model(ModelConfig(architecture="encoder", vocab_size=9, context=8, d_model=16, num_layers=1))
      >>> params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
      >>> first, second = fill_gaps(model, params, [[3, 8, 8, 5], [1, 2]], gap=8)
      >>> first.shape, bool((first < 8).all()), second.tolist()
      ((4,), True, [1, 2])
    """
    if getattr(model, "architecture", None) != "encoder":
        raise ConfigError("fill_gaps needs a model that sees both sides, architecture 'encoder'; others use generate")
    check_temperature(temperature)
    check_seed(seed)
    check_count("num_samples", num_samples)
    check_symbol("gap", gap, model.vocab_size)
    if model.vocab_size < 2:
        raise ConfigError("vocab_size is 1: there is no symbol to put where the gap stands")
    context = model.context if context is None else context
    if context < 1:
        raise ConfigError(f"context must be at least 1, got {context}")
    check_rows(rows, model.vocab_size, name="row", longest=context)
    samples = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(num_samples))
    keys = jnp.tile(samples, len(rows))
    rows = [row for row in rows for _ in range(num_samples)]
    ids, valid = padded(rows, context)
    filters = Filters.of(model.vocab_size, temperature)
    loop = _fill(model, params, ids, valid, jnp.int32(gap), filters, keys)
    ids, log_probs, finite = fetch((loop.ids, loop.log_probs, loop.finite))
    check_finite(bool(finite))
    filled, given = ([row[: len(own)] for row, own in zip(x, rows, strict=True)] for x in (ids, log_probs))
    return (filled, given) if return_log_probs else filled


@partial(jax.jit, static_argnums=0)
def _fill(
    model: Transformer,
    params: Any,
    ids: jax.Array,
    valid: jax.Array,
    gap: jax.Array,
    filters: Filters,
    keys: jax.Array,
) -> _Loop:
    """Fills all gaps of int32 [B, S], one in each row at a time, with B random keys."""
    rows = jnp.arange(ids.shape[0])

    def step(loop: _Loop) -> _Loop:
        logits = model.apply({"params": params}, loop.ids, valid=valid)
        log_probs = jax.nn.log_softmax(logits)
        allowed = jnp.where(jnp.arange(logits.shape[-1])[None, None, :] == gap, -jnp.inf, log_probs)
        certainty = jnp.where(loop.missing, jnp.max(allowed, axis=-1), -jnp.inf)
        best = jnp.max(certainty, axis=1, keepdims=True)
        place = jnp.argmax(certainty >= best - _EQUAL, axis=1)
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, loop.filled)
        allowed = allowed[rows, place]
        symbol = draw(now, allowed, jnp.zeros(allowed.shape, bool), filters)
        here = loop.missing & (jnp.arange(ids.shape[1])[None, :] == place[:, None])
        return _Loop(
            ids=jnp.where(here, symbol[:, None], loop.ids),
            missing=loop.missing & ~here,
            log_probs=jnp.where(here, log_probs[rows, place, symbol][:, None], loop.log_probs),
            filled=loop.filled + 1,
            finite=loop.finite & jnp.all(jnp.isfinite(logits) | ~valid[..., None]),
        )

    start = _Loop(ids, valid & (ids == gap), jnp.zeros(ids.shape), jnp.int32(0), jnp.bool_(True))
    # Where logits mean nothing no place is the most certain, and none would be filled.
    return jax.lax.while_loop(lambda loop: jnp.any(loop.missing) & loop.finite, step, start)
