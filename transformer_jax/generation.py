"""Text from a model: one compiled loop over a cache, whatever the length."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import ConfigError, DataError, TransformerJaxError
from transformer_jax.nn import EncoderDecoder, KVCache, RecurrentLM, RecurrentState, Transformer

_CHUNK = 32
"""Most tokens made by one call of the compiled loop: how often a stream gets something to show."""

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


@flax.struct.dataclass
class _Loop:
    """What goes around the loop.

    Attributes:
      cache: Of the tokens in each row's window, but for the newest.
      window: int32 [B, S], those tokens.
      newest: int32 [B], each row's newest token, not in the cache yet.
      seen: bool [B, V], the symbols of each row's prompt and of what it made.
      made: int32, tokens made so far.
      out: int32 [B, chunk], the tokens of this call.
      log_probs: float32 [B, chunk], what the model gave each of them.
      finite: bool, whether all logits so far were finite.
    """

    cache: KVCache | RecurrentState
    window: jax.Array
    newest: jax.Array
    seen: jax.Array
    made: jax.Array
    out: jax.Array
    log_probs: jax.Array
    finite: jax.Array


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


def generate(
    model: Transformer | RecurrentLM,
    params: Any,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    context: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[Sequence[int]] = (),
    seed: int = 0,
    num_samples: int = 1,
    stream: Callable[[np.ndarray], None] | None = None,
    return_log_probs: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Continues prompts.

    A row's window holds its newest tokens: the last `context` of its prompt at first. When it is full, the row goes
    on from its last context / 2 tokens. That is decided for each row alone, and each row has its own random keys, so
    that a row does not depend on those beside it. A recurrent model has no window once it has read its prompt.

    Args:
      model: From `create_model`.
      params: Its parameters.
      prompts: Rows of ids, each with at least one.
      num_tokens: New tokens for each row.
      context: Most tokens in a window; None means the model's context.
      temperature: Divides the logits; 0 is arg max.
      top_k: Draw from the k most likely symbols; None, or any number above V, from all.
      top_p: Draw from the fewest symbols with this much probability, in (0, 1].
      min_p: Draw from the symbols with at least this fraction of the most likely one's probability, in [0, 1].
      repetition_penalty: Above 1 makes symbols of the row's text so far less likely.
      stop: A row ends after the first of these pieces that it makes, which is part of it.
      seed: Of the random draws.
      num_samples: Samples for each prompt.
      stream: Called with each new piece, int32 [rows, n], as soon as it is there.
      return_log_probs: Also return the log-probability, in nats, that the model gave each symbol: before penalty,
        temperature and filters.

    Returns:
      int32 [len(prompts) * num_samples, num_tokens]; the samples of a prompt follow each other. Where a row has
      stopped, -1 follows; where all have, the array is shorter. With log-probabilities a pair, the second float32 of
      the same shape, 0 after a row's end.

    Raises:
      ConfigError: For settings out of range.
      DataError: For an empty prompt or unknown ids.
      TransformerJaxError: If the model gives logits that are not finite.
    """
    check_settings(
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        num_samples=num_samples,
        seed=seed,
    )
    if isinstance(model, EncoderDecoder) or model.architecture == "encoder":
        raise ConfigError("generate goes on from prompts, with a decoder or a recurrent model; this model is neither")
    context = model.context if context is None else context
    _check_prompts(prompts, context, model.vocab_size)
    if any(not np.issubdtype(np.asarray(piece).dtype, np.integer) for piece in stop):
        raise DataError("each stop must be a row of ids: encode a text with the run's vocabulary first")
    filters = Filters(
        jnp.float32(temperature),
        jnp.int32(min(top_k or model.vocab_size, model.vocab_size)),
        jnp.float32(top_p),
        jnp.float32(min_p),
        jnp.float32(repetition_penalty),
    )
    key = jax.random.key(seed)
    samples = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_samples))
    keys = jnp.tile(samples, len(prompts))
    rows = [prompt for prompt in prompts for _ in range(num_samples)]
    seen = np.zeros((len(rows), model.vocab_size), bool)
    for row, prompt in enumerate(rows):
        seen[row, np.asarray(prompt)] = True
    ids, valid = _padded(rows, context)
    loop = _prefill(model, params, ids, valid, jnp.asarray(seen))
    ends = _Ends(len(rows), stop)
    pieces = []
    for piece, log_probs, finite in _pieces(model, params, keys, filters, loop, num_tokens):
        if not finite:
            raise TransformerJaxError(
                "the model's logits are not finite: the parameters are damaged or the training diverged; "
                "choose an earlier checkpoint with --step"
            )
        over = ends.after(piece)
        piece, log_probs = np.where(over, -1, piece), np.where(over, 0, log_probs)
        pieces.append((piece, log_probs))
        if stream is not None:
            stream(piece)
        if ends.all:
            break
    made, given = (np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True))
    made = made[:, : max(1, int((made >= 0).sum(axis=1).max()))]
    return (made, given[:, : made.shape[1]]) if return_log_probs else made


class _Ends:
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


def _pieces(
    model: Transformer | RecurrentLM, params: Any, keys: jax.Array, filters: Filters, loop: _Loop, num_tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Runs the loop a chunk at a time: tokens, their log-probabilities, and whether all logits were finite."""
    for first in range(0, num_tokens, _CHUNK):
        count = min(_CHUNK, num_tokens - first)
        loop = _advance(model, params, keys, filters, loop, jnp.int32(first + count))
        out, log_probs, finite = jax.device_get((loop.out, loop.log_probs, loop.finite))
        yield out[:, :count], log_probs[:, :count], bool(finite)


@partial(jax.jit, static_argnums=0)
def _prefill(model: Transformer | RecurrentLM, params: Any, ids: jax.Array, valid: jax.Array, seen: jax.Array) -> _Loop:
    """Fills the cache with all tokens of the prompts but the last of each.

    Args:
      model: From `create_model`.
      params: Its parameters.
      ids: int32 [B, S], prompts on the left.
      valid: bool [B, S], at least one in each row.
      seen: bool [B, V], the symbols of the whole prompts.
    """
    batch, capacity = ids.shape
    length = jnp.sum(valid, axis=1, dtype=jnp.int32)
    newest = jnp.take_along_axis(ids, length[:, None] - 1, axis=1)[:, 0]
    valid = jnp.arange(capacity)[None, :] < length[:, None] - 1
    _, cache = model.apply({"params": params}, ids, valid=valid, cache=model.init_cache(batch, capacity))
    out = jnp.zeros((batch, _CHUNK), jnp.int32)
    return _Loop(cache, ids, newest, seen, jnp.int32(0), out, jnp.zeros((batch, _CHUNK)), jnp.bool_(True))


@partial(jax.jit, static_argnums=0, donate_argnames="loop")
def _advance(
    model: Transformer | RecurrentLM, params: Any, keys: jax.Array, filters: Filters, loop: _Loop, until: jax.Array
) -> _Loop:
    """Makes tokens until there are `until`, at most a chunk of them."""
    first = loop.made

    def step(loop: _Loop) -> _Loop:
        if isinstance(loop.cache, KVCache):
            loop = jax.lax.cond(jnp.any(loop.cache.length >= loop.cache.capacity), slide, lambda x: x, loop)
        rows = jnp.arange(loop.newest.shape[0])
        window = loop.window.at[rows, loop.cache.length].set(loop.newest)
        logits, cache = model.apply({"params": params}, loop.newest[:, None], cache=loop.cache)
        logits = logits[:, 0]
        token_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, loop.made)
        newest = draw(token_keys, logits, loop.seen, filters)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), newest[:, None], axis=-1)[:, 0]
        place = loop.made - first
        return _Loop(
            cache=cache,
            window=window,
            newest=newest,
            seen=loop.seen.at[rows, newest].set(True),
            made=loop.made + 1,
            out=loop.out.at[:, place].set(newest),
            log_probs=loop.log_probs.at[:, place].set(log_probs),
            finite=loop.finite & jnp.all(jnp.isfinite(logits)),
        )

    def slide(loop: _Loop) -> _Loop:
        """Full rows start anew from their last half window, of which `newest` is one; the others stay as they are."""
        batch, capacity = loop.window.shape
        full = loop.cache.length >= capacity
        half = max(capacity // 2, 1) - 1
        window = jnp.roll(loop.window, half, axis=1)  # the last `half` tokens come first
        if half:
            empty = model.init_cache(batch, capacity)
            _, fresh = model.apply({"params": params}, window[:, :half], cache=empty)
        else:
            fresh = loop.cache.cleared()

        def choose(new: jax.Array, old: jax.Array, axis: int) -> jax.Array:
            return jnp.where(full.reshape([-1 if i == axis else 1 for i in range(new.ndim)]), new, old)

        cache = KVCache(
            choose(fresh.keys, loop.cache.keys, 1),
            choose(fresh.values, loop.cache.values, 1),
            choose(fresh.length, loop.cache.length, 0),
        )
        return loop.replace(cache=cache, window=choose(window, loop.window, 0))

    return jax.lax.while_loop(lambda loop: loop.made < until, step, loop)


def _padded(prompts: Sequence[Sequence[int]], context: int) -> tuple[jax.Array, jax.Array]:
    """The last `context` ids of each prompt, on the left of [B, context]: all prompts share one program."""
    ids = np.zeros((len(prompts), context), np.int32)
    valid = np.zeros((len(prompts), context), bool)
    for row, prompt in enumerate(prompts):
        kept = np.asarray(prompt)[-context:]
        ids[row, : len(kept)], valid[row, : len(kept)] = kept, True
    return jnp.asarray(ids), jnp.asarray(valid)


def check_settings(
    *,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    stop: Sequence[Sequence[int] | str],
    num_samples: int,
    seed: int,
) -> None:
    """Refuses what `generate` cannot do, before anything is loaded.

    Raises:
      ConfigError: Naming the setting, its value and the limit.
    """
    for name, value in (("num_tokens", num_tokens), ("num_samples", num_samples)):
        if not isinstance(value, int | np.integer):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be at least 0 (0 is arg max), got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}; leave it out to draw from all symbols")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be between 0 and {2**32 - 1}, got {seed}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= min_p <= 1:
        raise ConfigError(f"min_p must be between 0 and 1, got {min_p}")
    if not 0 < repetition_penalty < float("inf"):
        raise ConfigError(f"repetition_penalty must be above 0 (1 is none), got {repetition_penalty}")
    if any(len(piece) == 0 for piece in stop):
        raise ConfigError("a stop is empty, and every text would end before it begins; leave it out")


def _check_prompts(prompts: Sequence[Sequence[int]], context: int, vocab_size: int) -> None:
    if context < 1:
        raise ConfigError(f"context must be at least 1, got {context}")
    if len(prompts) == 0:
        raise DataError("there is no prompt")
    if np.ndim(prompts[0]) != 1:
        raise DataError("prompts must be rows of ids: put one prompt into a list")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(f"prompt {number} is empty: a model needs at least one symbol to go on from")
        if not np.issubdtype(np.asarray(prompt).dtype, np.integer):
            raise DataError(f"prompt {number} must hold whole numbers, got {np.asarray(prompt).dtype}")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise DataError(
                f"prompt {number} has ids from {min(prompt)} to {max(prompt)}, not all in [0, {vocab_size})"
            )
