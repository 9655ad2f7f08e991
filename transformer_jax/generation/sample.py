"""Symbols drawn one after another, until there are enough or every row has ended."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.fetch import fetch
from transformer_jax.generation.decode import CHUNK, Model, State, apart, next_logits
from transformer_jax.generation.draw import Filters, draw
from transformer_jax.generation.settings import check_finite


@flax.struct.dataclass
class _Loop:
    """What goes around the loop.

    Attributes:
      state: Where each row stands.
      seen: bool [B, V], the symbols of each row's prompt and of what it made.
      ended: bool [B], whether a row has made a symbol that ends it.
      made: int32, tokens made so far.
      out: int32 [B, chunk], the tokens of this call; only those made count.
      log_probs: float32 [B, chunk], what the model gave each of them.
      finite: bool, whether all logits so far were finite.
    """

    state: State
    seen: jax.Array
    ended: jax.Array
    made: jax.Array
    out: jax.Array
    log_probs: jax.Array
    finite: jax.Array


def sample(
    model: Model,
    params: Any,
    state: State,
    *,
    keys: jax.Array,
    filters: Filters,
    seen: jax.Array,
    stop: Sequence[Sequence[int]],
    ends: jax.Array,
    num_tokens: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Draws symbols, and gives them a piece at a time.

    Args:
      model: From `create_model`.
      params: Its parameters.
      state: From `begin`.
      keys: [B] random keys.
      filters: How symbols are drawn.
      seen: bool [B, V], symbols that count as repeated.
      stop: What a row ends after.
      ends: bool [V], those stops that are one symbol: when each row has made one, nothing more is computed.
      num_tokens: Most symbols for each row.

    Yields:
      Tokens int32 [B, n], -1 after a row's end, and their log-probabilities float32 [B, n], 0 there.

    Raises:
      TransformerJaxError: If the model gives logits that are not finite.
    """
    rows = state.newest.shape[0]
    out = jnp.zeros((rows, CHUNK), jnp.int32)
    over = jnp.zeros((rows,), bool)
    loop = _Loop(state, seen, over, jnp.int32(0), out, jnp.zeros((rows, CHUNK)), jnp.bool_(True))
    stops = _Stops(rows, stop)
    for first in range(0, num_tokens, CHUNK):
        count = min(CHUNK, num_tokens - first)
        loop = _advance(model, params, keys, filters, ends, loop, jnp.int32(first + count))
        piece, log_probs, finite = fetch((loop.out[:, :count], loop.log_probs[:, :count], loop.finite))
        check_finite(bool(finite))
        after = stops.after(piece)
        yield np.where(after, -1, piece), np.where(after, 0, log_probs)
        if stops.all:
            return


@partial(jax.jit, static_argnums=0, donate_argnames="loop")
def _advance(
    model: Model, params: Any, keys: jax.Array, filters: Filters, ends: jax.Array, loop: _Loop, until: jax.Array
) -> _Loop:
    """Makes tokens until there are `until`, at most a chunk of them, or every row has ended."""
    first, parts = loop.made, apart(model, params)

    def step(loop: _Loop) -> _Loop:
        logits, state = next_logits(model, parts, loop.state)
        token_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, loop.made)
        newest = draw(token_keys, logits, loop.seen, filters)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), newest[:, None], axis=-1)[:, 0]
        place = loop.made - first
        return _Loop(
            state=state.replace(newest=newest),
            seen=loop.seen.at[jnp.arange(newest.shape[0]), newest].set(True),
            ended=loop.ended | ends[newest],
            made=loop.made + 1,
            out=loop.out.at[:, place].set(newest),
            log_probs=loop.log_probs.at[:, place].set(log_probs),
            finite=loop.finite & jnp.all(jnp.isfinite(logits)),
        )

    return jax.lax.while_loop(lambda loop: (loop.made < until) & ~jnp.all(loop.ended), step, loop)


class _Stops:
    """Finds where rows stop. A stop is looked for in what is made, and may fall on two pieces.

    Args:
      rows: B.
      stop: Pieces of ids.
    """

    def __init__(self, rows: int, stop: Sequence[Sequence[int]]) -> None:
        self._stop = [list(piece) for piece in stop]
        self._tails: list[list[int]] = [[] for _ in range(rows)]
        self._over = np.zeros(rows, bool)

    @property
    def all(self) -> bool:
        """Whether every row has stopped."""
        return bool(self._over.all())

    def after(self, piece: np.ndarray) -> np.ndarray:
        """Which tokens of a piece [B, n] come after their row's end: bool [B, n]."""
        over = np.zeros(piece.shape, bool)
        if not self._stop:
            return over
        longest = max(map(len, self._stop))
        for row, tail in enumerate(self._tails):
            for place, token in enumerate(piece[row]):
                over[row, place] = self._over[row]
                tail.append(int(token))
                self._over[row] |= any(tail[-len(stop) :] == stop for stop in self._stop)
            del tail[:-longest]
        return over
