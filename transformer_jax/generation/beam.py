"""Beam search: the texts of highest score, of all that are near the most likely one at each step."""

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.fetch import fetch
from transformer_jax.generation.decode import CHUNK, Model, State, apart, next_logits
from transformer_jax.generation.settings import check_finite


@flax.struct.dataclass
class _Choice:
    """One symbol more for each of K beams: [P, K], or one after another [chunk, P, K].

    Attributes:
      parent: int32, the beam that it goes on from.
      token: int32, the symbol.
      log_prob: float32, what the model gave it.
    """

    parent: jax.Array
    token: jax.Array
    log_prob: jax.Array


@flax.struct.dataclass
class _Finished:
    """The best texts that have ended, best first.

    Attributes:
      score: float32 [P, K], -inf where there is none.
      length: int32 [P, K], its symbols.
      last: The choices that ended them, [P, K].
    """

    score: jax.Array
    length: jax.Array
    last: _Choice


@flax.struct.dataclass
class _Search:
    """What goes around the loop.

    Attributes:
      state: Where each of P * K rows stands.
      live: float32 [P, K], the sum of log-probabilities of each text that goes on, best first; -inf where there is
        none.
      finished: Those that have ended.
      done: bool [P], whether nothing better can come.
      made: int32, symbols made so far.
      trail: The choices of this call, [chunk, P, K].
      finite: bool, whether all logits so far were finite.
    """

    state: State
    live: jax.Array
    finished: _Finished
    done: jax.Array
    made: jax.Array
    trail: _Choice
    finite: jax.Array


def search(
    model: Model,
    params: Any,
    state: State,
    *,
    beams: int,
    keep: int,
    ends: jax.Array,
    num_tokens: int,
    length_penalty: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the best texts for each prompt.

    At each step, of the K best of all K * V ways to go on those that end are finished, and the K best ways that do not
    end go on (as in fairseq, Ott et al. 2019); the K finished texts of highest score are kept. A prompt is done when no
    text that goes on can still reach the score of the worst of those returned: its log-probability can only fall, and
    no length divides it by more than num_tokens ** length_penalty. One beam is arg max, and is done when that ends.

    Args:
      model: From `create_model`.
      params: Its parameters.
      state: From `begin`, with `beams` rows for each prompt.
      beams: K.
      keep: Texts to return for each prompt, best first.
      ends: bool [V], the symbols that end a text.
      num_tokens: Most symbols; texts that get there count as they are.
      length_penalty: 0 ranks by probability alone, 1 by its mean over the symbols.

    Returns:
      Tokens int32 [P * keep, n], -1 after a text's end; the log-probabilities that the model gave them, float32 of
      the same shape, 0 there; and scores float32 [P * keep]. Where there are fewer texts, no tokens and -inf.

    Raises:
      TransformerJaxError: If the model gives logits that are not finite.
    """
    prompts = state.newest.shape[0] // beams
    shape = prompts, beams

    def choices(*shape: int) -> _Choice:
        return _Choice(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    none = jnp.full(shape, -jnp.inf, jnp.float32)
    loop = _Search(
        state=state,
        live=none.at[:, 0].set(0),  # all beams are the same text at first
        finished=_Finished(none, jnp.zeros(shape, jnp.int32), choices(*shape)),
        done=jnp.zeros((prompts,), bool),
        made=jnp.int32(0),
        trail=choices(CHUNK, *shape),
        finite=jnp.bool_(True),
    )
    penalty, limit, trails = jnp.float32(length_penalty), jnp.int32(num_tokens), []
    for first in range(0, num_tokens, CHUNK):
        until = min(first + CHUNK, num_tokens)
        loop = _advance(model, params, ends, penalty, limit, jnp.int32(keep), loop, jnp.int32(until))
        trail, done, finite = fetch((loop.trail, loop.done, loop.finite))
        check_finite(bool(finite))
        trails.append(trail)
        if done.all():
            break
    trail = jax.tree.map(lambda *parts: np.concatenate(parts), *trails)
    finished = fetch(loop.finished)
    kept = [(prompt, rank) for prompt in range(prompts) for rank in range(keep)]
    texts = [_text(trail, finished, *place) for place in kept]
    longest = max(1, *map(len, texts))
    tokens = np.array([[token for token, _ in text] + [-1] * (longest - len(text)) for text in texts], np.int32)
    log_probs = np.array([[given for _, given in text] + [0] * (longest - len(text)) for text in texts], np.float32)
    return tokens, log_probs, np.array([finished.score[place] for place in kept], np.float32)


def _text(trail: _Choice, finished: _Finished, prompt: int, rank: int) -> list[tuple[int, float]]:
    """Follows a finished text back to its first symbol: its symbols and their log-probabilities."""
    if finished.score[prompt, rank] == -np.inf:
        return []
    last = jax.tree.map(lambda x: x[prompt, rank], finished.last)
    text, beam = [(last.token, last.log_prob)], last.parent
    for step in range(finished.length[prompt, rank] - 2, -1, -1):
        text.append((trail.token[step, prompt, beam], trail.log_prob[step, prompt, beam]))
        beam = trail.parent[step, prompt, beam]
    return text[::-1]


@partial(jax.jit, static_argnums=0, donate_argnames="loop")
def _advance(
    model: Model,
    params: Any,
    ends: jax.Array,
    length_penalty: jax.Array,
    limit: jax.Array,
    keep: jax.Array,
    loop: _Search,
    until: jax.Array,
) -> _Search:
    """Goes on until there are `until` symbols, at most a chunk more, or all prompts are done."""
    first, (prompts, beams), parts = loop.made, loop.live.shape, apart(model, params)

    def step(loop: _Search) -> _Search:
        logits, state = next_logits(model, parts, loop.state)
        log_probs = jax.nn.log_softmax(logits).reshape(prompts, beams, -1)
        # Ranked by their distance to the best: of long texts the sums alone are too coarse.
        best = loop.live[:, :1]
        ways = ((loop.live - best)[..., None] + log_probs).reshape(prompts, -1)
        made = loop.made + 1

        def top(ways: jax.Array) -> tuple[jax.Array, _Choice]:
            """The K best: the sum of each one's log-probabilities, and the choice."""
            behind, place = jax.lax.top_k(ways, beams)
            given = jnp.take_along_axis(log_probs.reshape(prompts, -1), place, axis=1)
            return best + behind, _Choice(place // logits.shape[-1], place % logits.shape[-1], given)

        total, choice = top(ways)
        over = (ends[choice.token] | (made == limit)) & (total > -jnp.inf)
        score = jnp.where(over, total / made.astype(jnp.float32) ** length_penalty, -jnp.inf)
        new = _Finished(score, jnp.full(score.shape, made), choice)
        finished = _best(loop.finished, new)
        finished = jax.tree.map(lambda old, new: jnp.where(loop.done[:, None], old, new), loop.finished, finished)

        live, choice = top(jnp.where(jnp.tile(ends, beams)[None, :], -jnp.inf, ways))
        reachable = live[:, 0] / limit.astype(jnp.float32) ** length_penalty
        worst = finished.score[:, keep - 1]
        # One beam is arg max: where that ends, the second best has no place to go on.
        done = loop.done | (worst >= reachable) | ((beams == 1) & (worst > -jnp.inf))
        index = (jnp.arange(prompts)[:, None] * beams + choice.parent).ravel()
        return _Search(
            state=state.rows(index).replace(newest=choice.token.ravel()),
            live=live,
            finished=finished,
            done=done,
            made=made,
            trail=jax.tree.map(lambda all_, one: all_.at[loop.made - first].set(one), loop.trail, choice),
            finite=loop.finite & jnp.all(jnp.isfinite(logits)),
        )

    return jax.lax.while_loop(lambda loop: (loop.made < until) & ~jnp.all(loop.done), step, loop)


def _best(old: _Finished, new: _Finished) -> _Finished:
    """The K best of both; of equals those that were there before."""
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), old, new)
    _, place = jax.lax.top_k(both.score, old.score.shape[1])
    return jax.tree.map(lambda x: jnp.take_along_axis(x, place, axis=1), both)
