"""`generate`: from prompts and sources to rows of symbols."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import ConfigError, DataError
from transformer_jax.generation.beam import search
from transformer_jax.generation.decode import Model, begin
from transformer_jax.generation.draw import Filters
from transformer_jax.generation.sample import sample
from transformer_jax.generation.settings import check_rows, check_settings, check_symbol, padded
from transformer_jax.nn import EncoderDecoder


def generate(
    model: Model,
    params: Any,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    context: int | None = None,
    start: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[Sequence[int]] = (),
    seed: int = 0,
    num_samples: int = 1,
    beams: int | None = None,
    length_penalty: float = 1.0,
    stream: Callable[[np.ndarray], None] | None = None,
    return_log_probs: bool = False,
    return_scores: bool = False,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Continues prompts, or writes the targets of sources.

    A row's window holds its newest tokens: the last `context` of its prompt at first. When it is full, the row goes
    on from its last context / 2 tokens. That is decided for each row alone, and each row has its own random keys, so
    that a row does not depend on those beside it. A recurrent model has no window once it has read its prompt. An
    encoder-decoder reads each source once and as a whole; its targets do not slide.

    Args:
      model: From `create_model`; for an encoder there is `fill_gaps`.
      params: Its parameters.
      prompts: Rows of ids, each with at least one. For an encoder-decoder the sources, of at most `context`.
      num_tokens: New tokens for each row; for an encoder-decoder at most `context`.
      context: Most tokens in a window; None means the model's context.
      start: The symbol that each target of an encoder-decoder begins with; it is not part of the result.
      temperature: Divides the logits; 0 is arg max.
      top_k: Draw from the k most likely symbols; None, or any number above V, from all.
      top_p: Draw from the fewest symbols with this much probability, in (0, 1].
      min_p: Draw from the symbols with at least this fraction of the most likely one's probability, in [0, 1].
      repetition_penalty: Above 1 makes symbols of the row's text so far less likely; of a target only what it made.
      stop: A row ends after the first of these pieces that it makes, which is part of it.
      seed: Of the random draws.
      num_samples: Rows for each prompt: samples, or the best that the beams found, best first.
      beams: Search for the text of highest score with this many at a time instead of drawing. Then each stop is one
        symbol, temperature is 1 or 0, which change nothing, and no other setting of drawing is given.
      length_penalty: The score of a text is the sum of its log-probabilities, that of its stop included, divided by
        its length to this power: 0 ranks by probability alone, 1 by its mean over the symbols.
      stream: Called with each new piece, int32 [rows, n], as soon as it is there; not for beams.
      return_log_probs: Also return the log-probability, in nats, that the model gave each symbol: before penalty,
        temperature and filters.
      return_scores: Also return the scores of beams.

    Returns:
      int32 [rows, num_tokens] for len(prompts) * num_samples rows; those of a prompt follow each other. Where a row
      has stopped, -1 follows; where all have, the array is shorter. With log-probabilities or scores a tuple, in this
      order: tokens; log-probabilities, float32 of the same shape, 0 after a row's end; scores, float32 [rows]. Where
      there are fewer texts than beams, the last rows are -1 alone with a score of -inf.

    Raises:
      ConfigError: For settings out of range.
      DataError: For an empty prompt, unknown ids, or a source that is too long.
      TransformerJaxError: If the model gives logits that are not finite.
    """
    drawing = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    check_settings(
        num_tokens=num_tokens,
        **drawing,
        stop=stop,
        num_samples=num_samples,
        seed=seed,
        beams=beams,
        length_penalty=length_penalty,
        return_scores=return_scores,
        stream=stream,
    )
    context = model.context if context is None else context
    _check_input(model, prompts, num_tokens, context, start)
    if any(not np.issubdtype(np.asarray(piece).dtype, np.integer) for piece in stop):
        raise DataError("each stop must be a row of ids: encode a text with the run's vocabulary first")
    ends = np.zeros(model.vocab_size, bool)
    ends[[piece[0] for piece in stop if len(piece) == 1 and 0 <= piece[0] < model.vocab_size]] = True
    ids, valid = padded(prompts, context)
    state = begin(model, params, ids, valid, start=jnp.int32(start or 0), copies=beams or num_samples)
    if beams is not None:
        made, log_probs, scores = search(
            model,
            params,
            state,
            beams=beams,
            keep=num_samples,
            ends=jnp.asarray(ends),
            num_tokens=num_tokens,
            length_penalty=length_penalty,
        )
        result = made, *([log_probs] if return_log_probs else []), *([scores] if return_scores else [])
        return result if len(result) > 1 else made
    samples = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(num_samples))
    pieces = []
    for piece in sample(
        model,
        params,
        state,
        keys=jnp.tile(samples, len(prompts)),
        filters=Filters.of(model.vocab_size, **drawing),
        seen=jnp.asarray(np.repeat(_seen(model, prompts), num_samples, axis=0)),
        stop=stop,
        ends=jnp.asarray(ends),
        num_tokens=num_tokens,
    ):
        pieces.append(piece)
        if stream is not None:
            stream(piece[0])
    made, log_probs = (np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True))
    made = made[:, : max(1, int((made >= 0).sum(axis=1).max()))]
    return (made, log_probs[:, : made.shape[1]]) if return_log_probs else made


def _seen(model: Model, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """The symbols of each row's own text before it goes on: bool [P, V]. A source is not a part of it."""
    seen = np.zeros((len(prompts), model.vocab_size), bool)
    if not isinstance(model, EncoderDecoder):
        for row, prompt in enumerate(prompts):
            seen[row, np.asarray(prompt)] = True
    return seen


def _check_input(
    model: Model, prompts: Sequence[Sequence[int]], num_tokens: int, context: int, start: int | None
) -> None:
    if context < 1:
        raise ConfigError(f"context must be at least 1, got {context}")
    if not isinstance(model, EncoderDecoder):
        if model.architecture == "encoder":
            raise ConfigError("an encoder sees both sides of each symbol and does not go on; see fill_gaps")
        if start is not None:
            raise ConfigError(f"start {start} is for an encoder-decoder; put it before each prompt instead")
        check_rows(prompts, model.vocab_size, name="prompt")
        return
    if start is None:
        raise ConfigError("an encoder-decoder needs start: the id that each of its targets begins with")
    check_symbol("start", start, model.vocab_size)
    if num_tokens > context:
        raise ConfigError(f"num_tokens is {num_tokens}, and a target has at most the context, {context}; make fewer")
    sources = model.vocab_size if model.source_vocab_size is None else model.source_vocab_size
    check_rows(prompts, sources, name="source", longest=context)
