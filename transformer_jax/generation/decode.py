"""One symbol after another over a cache: what prompts or sources leave in it, and the logits of each next symbol."""

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.nn import EncoderDecoder, KVCache, RecurrentLM, RecurrentState, Transformer

CHUNK = 32
"""Most symbols made by one call of a compiled loop: how often a stream gets something to show."""

Model = Transformer | EncoderDecoder | RecurrentLM
"""What can go on from what it has: all but an encoder."""


@flax.struct.dataclass
class State:
    """Where each row stands.

    Attributes:
      cache: Of the tokens in each row's window, but for the newest.
      window: int32 [B, S], those tokens.
      newest: int32 [B], each row's newest token, not in the cache yet.
    """

    cache: KVCache | RecurrentState
    window: jax.Array
    newest: jax.Array

    def rows(self, index: jax.Array) -> "State":
        """The rows at an index, int32 [B']; see `KVCache.rows`."""
        return State(self.cache.rows(index), self.window[index], self.newest[index])


@partial(jax.jit, static_argnums=0, static_argnames="copies")
def begin(model: Model, params: Any, ids: jax.Array, valid: jax.Array, *, start: jax.Array, copies: int) -> State:
    """Reads each prompt but for its last token, or each source as a whole.

    Args:
      model: From `create_model`.
      params: Its parameters.
      ids: int32 [P, S], prompts or sources, on the left.
      valid: bool [P, S], at least one in each row.
      start: int32 scalar, the first symbol of a target; only read with a source.
      copies: Rows for each prompt or source; they follow each other.

    Returns:
      Of P * copies rows.
    """
    batch, capacity = ids.shape
    if isinstance(model, EncoderDecoder):
        memory = model.apply({"params": params}, ids, source_valid=valid, method="encode")
        memory, valid = (jnp.repeat(x, copies, axis=0) for x in (memory, valid))
        rows = batch * copies
        cache = model.init_cache(rows, capacity, params=params, memory=memory, source_valid=valid)
        return State(cache, jnp.zeros((rows, capacity), jnp.int32), jnp.full((rows,), start, jnp.int32))
    length = jnp.sum(valid, axis=1, dtype=jnp.int32)
    newest = jnp.take_along_axis(ids, length[:, None] - 1, axis=1)[:, 0]
    valid = jnp.arange(capacity)[None, :] < length[:, None] - 1
    _, cache = model.apply({"params": params}, ids, valid=valid, cache=model.init_cache(batch, capacity))
    return State(cache, ids, newest).rows(jnp.repeat(jnp.arange(batch), copies))


def apart(model: Model, params: Any) -> Any:
    """The parameters with each layer's taken out of its stack, for a loop around `next_logits`.

    The compiler sees that a stack of parts gives back the parts, but not that cutting parts out of a stack gives the
    same at each step: of one row's step the copying would be more than half. Layers that are not compiled as straight
    code need their stack, and stay as they are.
    """
    if model.unroll < model.num_layers:
        return params

    def cut(path: tuple, leaf: jax.Array) -> Any:
        return tuple(leaf) if jax.tree_util.DictKey("layers") in path else leaf

    return jax.tree_util.tree_map_with_path(cut, params)


def _together(params: Any) -> Any:
    """The inverse of `apart`."""

    def is_cut(x: Any) -> bool:
        return isinstance(x, tuple)

    return jax.tree.map(lambda x: jnp.stack(x) if is_cut(x) else x, params, is_leaf=is_cut)


def next_logits(model: Model, params: Any, state: State) -> tuple[jax.Array, State]:
    """What follows each row's newest token.

    A row whose window is full first goes on from its last half window. A target does not slide: it must be no longer
    than the cache.

    Args:
      model: From `create_model`.
      params: Its parameters, from `apart`.
      state: Where each row stands.

    Returns:
      Logits float32 [B, V], and the state with the newest token in window and cache.
    """
    if isinstance(model, Transformer):
        full = jnp.any(state.cache.length >= state.cache.capacity)
        state = jax.lax.cond(full, partial(_slide, model, params), lambda state: state, state)
    rows = jnp.arange(state.newest.shape[0])
    window = state.window.at[rows, state.cache.length].set(state.newest)
    logits, cache = model.apply({"params": _together(params)}, state.newest[:, None], cache=state.cache)
    return logits[:, 0], State(cache, window, state.newest)


def _slide(model: Transformer, params: Any, state: State) -> State:
    """Full rows start anew from their last half window, of which `newest` is one; the others stay as they are."""
    batch, capacity = state.window.shape
    full = state.cache.length >= capacity
    half = max(capacity // 2, 1) - 1
    window = jnp.roll(state.window, half, axis=1)  # the last `half` tokens come first
    if half:
        empty = model.init_cache(batch, capacity)
        _, fresh = model.apply({"params": _together(params)}, window[:, :half], cache=empty)
    else:
        fresh = state.cache.cleared()

    def choose(new: jax.Array, old: jax.Array, axis: int) -> jax.Array:
        return jnp.where(full.reshape([-1 if i == axis else 1 for i in range(new.ndim)]), new, old)

    cache = KVCache(
        choose(fresh.keys, state.cache.keys, 1),
        choose(fresh.values, state.cache.values, 1),
        choose(fresh.length, state.cache.length, 0),
    )
    return State(cache, choose(window, state.window, 0), state.newest)
