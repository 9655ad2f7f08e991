"""Beam search against a search of everything."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, create_model
from transformer_jax.errors import ConfigError, TransformerJaxError
from transformer_jax.generation import beam, generate

V, CONTEXT, START, END = 4, 8, 0, 3
KINDS = ("decoder", "gru", "encoder_decoder")


def build(kind, vocab_size=V, context=CONTEXT, seed=3):
    model = create_model(
        ModelConfig(
            architecture=kind,
            vocab_size=vocab_size,
            context=context,
            d_model=16,
            num_heads=2,
            num_layers=1,
            init="fan_in",
        )
    )
    ids = jnp.zeros((1, 2), jnp.int32)
    given = (ids, ids) if kind == "encoder_decoder" else (ids,)
    params = jax.jit(model.init)(jax.random.key(seed), *given)["params"]
    return model, jax.tree.map(lambda p: 2 * p, params)  # sharper logits


MODELS = {kind: build(kind) for kind in KINDS}
APPLY = {kind: jax.jit(model.apply) for kind, (model, _) in MODELS.items()}


def write(kind, prompts, tokens, **kwargs):
    start = {"start": START} if kind == "encoder_decoder" else {}
    return generate(*MODELS[kind], prompts, tokens, **start, **kwargs)


def log_probs(kind, prompt, texts):
    """What a whole forward pass gives each symbol of texts [N, T] of one length."""
    texts = np.asarray(texts)
    before = np.tile([START] if kind == "encoder_decoder" else prompt, (len(texts), 1))
    ids = jnp.asarray(np.concatenate([before, texts], axis=1))
    source = (jnp.tile(jnp.array(prompt), (len(texts), 1)),) if kind == "encoder_decoder" else ()
    given = jax.nn.log_softmax(APPLY[kind]({"params": MODELS[kind][1]}, *source, ids[:, :-1]))
    given = given[:, before.shape[1] - 1 :]
    return np.asarray(jnp.take_along_axis(given, jnp.asarray(texts)[..., None], axis=-1)[..., 0], np.float64)


def everything(kind, prompt, length, penalty, ends):
    """All texts of at most `length` symbols with their scores, best first."""
    texts = list(itertools.product(range(V), repeat=length))
    given = log_probs(kind, prompt, texts)
    found = {}
    for text, log_prob in zip(texts, given, strict=True):
        end = next((i + 1 for i, symbol in enumerate(text) if symbol in ends), length)
        found[text[:end]] = log_prob[:end].sum() / end**penalty
    return sorted(found.items(), key=lambda item: -item[1])


def unpadded(row):
    return tuple(row[row >= 0].tolist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", [(), (END,), (1, END)])
def test_enough_beams_find_the_best_of_everything(kind, ends):
    """And its n best in order, whatever the length penalty; with their scores."""
    for penalty in (0.0, 0.6, 1.0, 2.5):
        tokens, scores = write(
            kind,
            [[1, 2], [2]],
            3,
            beams=V**3,
            num_samples=6,
            stop=[[end] for end in ends],
            length_penalty=penalty,
            return_scores=True,
        )
        assert tokens.shape[0] == 12
        assert scores.shape == (12,)
        assert scores.dtype == np.float32
        for number, prompt in enumerate(([1, 2], [2])):
            expected = everything(kind, prompt, 3, penalty, ends)[:6]
            ours = slice(6 * number, 6 * number + 6)
            assert [unpadded(row) for row in tokens[ours]] == [text for text, _ in expected]
            np.testing.assert_allclose(scores[ours], [score for _, score in expected], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_a_whole_forward_pass(kind):
    prompts = [[1, 2, 1], [2]]
    for penalty in (0.0, 1.0):
        tokens, given, scores = write(
            kind,
            prompts,
            5,
            beams=3,
            num_samples=3,
            stop=[[END]],
            length_penalty=penalty,
            return_log_probs=True,
            return_scores=True,
        )
        assert (np.diff(scores.reshape(2, 3)) <= 0).all()
        assert len({unpadded(row) for row in tokens[:3]}) == 3
        for number, (row, own, score) in enumerate(zip(tokens, given, scores, strict=True)):
            text = unpadded(row)
            assert END not in text[:-1]
            expected = log_probs(kind, prompts[number // 3], [text])[0]
            np.testing.assert_allclose(own[: len(text)], expected, atol=1e-4)
            assert (own[len(text) :] == 0).all()
            assert score == pytest.approx(expected.sum() / len(text) ** penalty, abs=1e-4)


def test_enough_beams_are_never_worse():
    """No search finds more than there is, and one wide enough finds it."""
    for penalty in (0.0, 1.0):
        best = everything("decoder", [1, 2], 4, penalty, (END,))[0][1]
        scores = [
            write("decoder", [[1, 2]], 4, beams=beams, stop=[[END]], length_penalty=penalty, return_scores=True)[1][0]
            for beams in (1, 2, 4, 16, V**4)
        ]
        assert max(scores) <= best + 1e-5
        assert scores[-1] == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_those_beside_it(kind):
    prompts = [[1], [2, 2, 1, 3, 0], [3, 1, 0, 2, 1, 1, 2, 0]]
    settings = {"beams": 3, "num_samples": 2, "stop": [[END]], "return_scores": True}
    tokens, scores = write(kind, prompts, 8, **settings)
    for number, prompt in enumerate(prompts):
        alone, score = write(kind, [prompt], 8, **settings)
        rows = slice(2 * number, 2 * number + 2)
        np.testing.assert_array_equal(tokens[rows, : alone.shape[1]], alone)
        assert (tokens[rows, alone.shape[1] :] == -1).all()
        np.testing.assert_allclose(scores[rows], score, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_is_arg_max(kind):
    """Also where the window slides, and whatever ends it."""
    tokens = CONTEXT if kind == "encoder_decoder" else 70
    prompts = [[1], [2, 2, 1, 3, 0]]
    for stop in ([], [[END]], [[1], [2]]):
        greedy, given = write(kind, prompts, tokens, temperature=0, stop=stop, return_log_probs=True)
        made, ours = write(kind, prompts, tokens, beams=1, stop=stop, return_log_probs=True)
        np.testing.assert_array_equal(made, greedy)
        np.testing.assert_allclose(ours, given, atol=1e-5)


def test_several_beams_slide():
    """A window of 4: each text is scored as the windows that it went through see it."""
    model, params = build("decoder", context=4)
    tokens, given, scores = generate(
        model, params, [[1, 2, 0], [2]], 9, beams=3, num_samples=3, return_log_probs=True, return_scores=True
    )
    apply = jax.jit(lambda ids, valid: jax.nn.log_softmax(model.apply({"params": params}, ids, valid=valid)))
    for number, (row, own) in enumerate(zip(tokens, given, strict=True)):
        window = [[1, 2, 0], [2]][number // 3]
        for symbol, log_prob in zip(row.tolist(), own, strict=True):
            window = window if len(window) <= 4 else window[-2:]
            logits = apply(jnp.array([window + [0] * (4 - len(window))]), jnp.arange(4)[None] < len(window))
            assert log_prob == pytest.approx(float(logits[0, len(window) - 1, symbol]), abs=1e-4)
            window = [*window, symbol]
        assert scores[number] == pytest.approx(own.mean(), abs=1e-5)


def test_fewer_texts_than_beams():
    """Of one symbol there are V texts; the last rows are empty."""
    tokens, scores = write("decoder", [[1]], 1, beams=6, num_samples=6, return_scores=True)
    assert sorted(tokens[:4, 0].tolist()) == [0, 1, 2, 3]
    assert (tokens[4:] == -1).all()
    assert np.isfinite(scores[:4]).all()
    assert (scores[4:] == -np.inf).all()
    ending = [[symbol] for symbol in range(V)]
    for penalty in (1.0, 200.0):  # 5 ** 200 is too much for a float32
        settings = {"stop": ending, "length_penalty": penalty, "return_scores": True}
        tokens, scores = write("decoder", [[1]], 5, beams=6, num_samples=6, **settings)
        assert tokens.shape == (6, 1)
        assert np.isfinite(scores).tolist() == [True] * 4 + [False] * 2


def test_compiles_once_whatever_the_length():
    jax.clear_caches()
    for tokens, penalty in ((1, 0.0), (5, 1.0), (40, 2.0), (33, 0.5)):
        write("decoder", [[1] * (tokens % 5 + 1)], tokens, beams=2, length_penalty=penalty, stop=[[tokens % V]])
    assert beam._advance._cache_size() == 1


def test_logits_that_are_not_finite():
    model, params = MODELS["decoder"]
    with pytest.raises(TransformerJaxError, match="not finite"):
        generate(model, jax.tree.map(lambda p: p * jnp.nan, params), [[1]], 5, beams=2)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"beams": 0}, "beams must be at least 1, got 0"),
        ({"beams": -1}, "beams must be at least 1, got -1"),
        ({"beams": 2.5}, "beams must be a whole number, got 2.5"),
        ({"length_penalty": -1}, "length_penalty must be at least 0 .* got -1"),
        ({"length_penalty": float("nan")}, "length_penalty must be at least 0 .* got nan"),
        ({"length_penalty": 0.5, "beams": None}, "length_penalty 0.5 is for beam search"),
        ({"return_scores": True, "beams": None}, "return_scores is for beam search"),
        ({"num_samples": 5}, "2 beams find at most 2 texts for a prompt, got num_samples 5"),
        ({"temperature": 0.8}, "beams are not drawn, and temperature 0.8"),
        ({"top_k": 3}, "beams are not drawn, and top_k 3"),
        ({"top_p": 0.9}, "beams are not drawn, and top_p 0.9"),
        ({"min_p": 0.1}, "beams are not drawn, and min_p 0.1"),
        ({"repetition_penalty": 1.1}, "beams are not drawn, and repetition_penalty 1.1"),
        ({"stream": print}, "leave out stream or beams"),
        ({"stop": [[1], [1, 2]]}, r"with beams a stop is one symbol, got \[1, 2\] of 2"),
    ],
)
def test_what_is_refused(kwargs, said):
    with pytest.raises(ConfigError, match=said):
        write("decoder", [[1]], 3, **{"beams": 2, **kwargs})


def test_temperature_changes_nothing():
    expected = write("decoder", [[1]], 5, beams=2)
    np.testing.assert_array_equal(write("decoder", [[1]], 5, beams=2, temperature=0, seed=9), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_texts_end_sooner_and_are_the_same(kind):
    prompts = [[1], [2, 2, 1, 3, 0], [3, 1, 0, 2, 1]]
    for penalty in (0.0, 1.0):
        settings = {"beams": 4, "stop": [[END]], "return_scores": True, "length_penalty": penalty}
        all_four, scores = write(kind, prompts, 8, num_samples=4, **settings)
        best, score = write(kind, prompts, 8, num_samples=1, **settings)
        assert [unpadded(row) for row in best] == [unpadded(row) for row in all_four[::4]]
        np.testing.assert_allclose(score, scores[::4], atol=1e-6)
