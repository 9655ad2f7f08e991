"""`generate` with an encoder-decoder: sources in, targets out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, create_model
from transformer_jax.errors import ConfigError, DataError, TransformerJaxError
from transformer_jax.generation import generate, sample
from transformer_jax.generation.decode import begin

V, SOURCES, CONTEXT, START = 9, 7, 12, 8
CONFIG = ModelConfig(
    architecture="encoder_decoder", vocab_size=V, context=CONTEXT, d_model=16, num_heads=2, num_layers=2, init="fan_in"
)


def build(source_vocab_size=SOURCES, **fields):
    model = create_model(dataclasses.replace(CONFIG, **fields)).clone(source_vocab_size=source_vocab_size)
    ids = jnp.zeros((1, 2), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(3), ids, ids)["params"]
    return model, jax.tree.map(lambda p: 3 * p, params)  # sharper logits


MODEL, PARAMS = build()
SHORT, LONG = [2], [1, 5, 2, 0, 3, 3, 4, 6, 0, 1, 2, 3]


def write(sources, tokens=CONTEXT, **kwargs):
    return generate(MODEL, PARAMS, sources, tokens, start=START, **kwargs)


def forward(model, params, source):
    """Log-probabilities of each next symbol of a target, from a whole forward pass without padded sources."""
    apply = jax.jit(lambda source, target: jax.nn.log_softmax(model.apply({"params": params}, source, target)))

    def of(target):
        target = [START, *target]
        padded = jnp.array([target + [0] * (CONTEXT + 1 - len(target))])[:, :CONTEXT]
        return np.asarray(apply(jnp.array([source]), padded))[0, : len(target)]

    return of


@pytest.mark.parametrize(("positions", "shared"), [("rotary", False), ("learned", True), ("alibi", False)])
def test_targets_are_those_of_whole_forward_passes(positions, shared):
    model, params = build(None if shared else SOURCES, positions=positions)
    made, given = generate(
        model, params, [SHORT, LONG[:5], LONG], CONTEXT, start=START, temperature=0, return_log_probs=True
    )
    assert made.shape == (3, CONTEXT)
    assert len({tuple(row) for row in made.tolist()}) > 1
    for source, row, log_probs in zip([SHORT, LONG[:5], LONG], made, given, strict=True):
        expected = forward(model, params, source)(row[:-1].tolist())
        assert row.tolist() == expected.argmax(-1).tolist()
        np.testing.assert_allclose(log_probs, expected.max(-1), atol=1e-5)


def test_a_row_does_not_depend_on_those_beside_it():
    sources = [SHORT, LONG, LONG[3:8]]
    for kwargs in ({"temperature": 0}, {"seed": 4, "num_samples": 3, "top_k": 5, "repetition_penalty": 1.2}):
        together = write(sources, **kwargs).reshape(3, -1, CONTEXT)
        for rows, source in zip(together, sources, strict=True):
            np.testing.assert_array_equal(rows, write([source], **kwargs))
    assert len({tuple(row) for row in together[0].tolist()}) == 3


def test_rows_end_and_the_loop_leaves(monkeypatch):
    """The end symbol is part of its row; nothing is computed after the last row has ended."""
    whole = write([SHORT, LONG], temperature=0)
    end = int(whole[0, 2])
    lengths = [row.tolist().index(end) + 1 if end in row.tolist() else CONTEXT for row in whole]
    steps, advance = [], sample._advance

    def counting(*args):
        loop = advance(*args)
        steps.append(int(loop.made))
        return loop

    monkeypatch.setattr(sample, "_advance", counting)
    pieces = []
    made, log_probs = write([SHORT, LONG], temperature=0, stop=[[end]], return_log_probs=True, stream=pieces.append)
    assert steps == [max(lengths)]
    assert made.shape == (2, max(lengths))
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1)[:, : made.shape[1]], made)
    for row, given, before, length in zip(made, log_probs, whole, lengths, strict=True):
        np.testing.assert_array_equal(row[:length], before[:length])
        assert (row[length:] == -1).all()
        assert (given[length:] == 0).all()
    steps.clear()
    write([SHORT], temperature=0, stop=[[end], [int(whole[0, 0])], [V + 3], [-1]])
    assert steps == [1]


def test_the_penalty_knows_the_target_alone():
    of, text = forward(MODEL, PARAMS, LONG), []
    logits = jax.jit(lambda ids: MODEL.apply({"params": PARAMS}, jnp.array([LONG]), ids))
    for _ in range(8):
        now = np.array(logits(jnp.array([[START, *text] + [0] * (CONTEXT - 1 - len(text))]))[0, len(text)])
        seen = list(set(text))
        now[seen] = np.where(now[seen] > 0, now[seen] / 3, now[seen] * 3)
        text.append(int(now.argmax()))
    made, given = write([LONG], 8, temperature=0, repetition_penalty=3, return_log_probs=True)
    assert made[0].tolist() == text
    np.testing.assert_allclose(given[0], of(text[:-1])[np.arange(8), text], atol=1e-5)


def test_compiles_once_whatever_the_lengths():
    jax.clear_caches()
    for tokens, length in ((1, 3), (5, 4), (12, 12), (3, 1)):
        write([LONG[:length]], tokens, temperature=0.5, stop=[[tokens % V]])
    assert sample._advance._cache_size() == 1
    assert begin._cache_size() == 1


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"start": None}, ConfigError, "needs start"),
        ({"start": V}, ConfigError, r"start must be in \[0, 9\), got 9"),
        ({"start": -1}, ConfigError, r"start must be in \[0, 9\), got -1"),
        ({"start": "a"}, ConfigError, "start must be the id of a symbol, got 'a'"),
        ({"num_tokens": CONTEXT + 1}, ConfigError, "num_tokens is 13, and a target has at most the context, 12"),
        ({"prompts": [SHORT, [1] * (CONTEXT + 1)]}, DataError, "source 1 has 13 ids and the context is 12"),
        ({"prompts": [[SOURCES]]}, DataError, r"source 0 has ids from 7 to 7, not all in \[0, 7\)"),
        ({"prompts": [[]]}, DataError, "source 0 is empty"),
        ({"prompts": []}, DataError, "no source"),
    ],
)
def test_what_is_refused(kwargs, error, said):
    with pytest.raises(error, match=said):
        generate(MODEL, PARAMS, **{"prompts": [SHORT], "num_tokens": 3, "start": START, **kwargs})


def test_start_is_for_targets():
    model = create_model(dataclasses.replace(CONFIG, architecture="decoder"))
    with pytest.raises(ConfigError, match="start 8 is for an encoder-decoder"):
        generate(model, {}, [SHORT], 3, start=START)


def test_logits_that_are_not_finite():
    damaged = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    with pytest.raises(TransformerJaxError, match="not finite"):
        generate(MODEL, damaged, [SHORT], 5, start=START)
