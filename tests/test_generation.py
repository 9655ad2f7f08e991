import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, create_model
from transformer_jax.errors import ConfigError, DataError, TransformerJaxError
from transformer_jax.generation import Filters, draw, generate
from transformer_jax.generation.decode import apart, begin
from transformer_jax.generation.sample import _advance

V, CONTEXT = 9, 16
CONFIG = ModelConfig(vocab_size=V, context=CONTEXT, d_model=16, num_heads=2, num_layers=2, init="fan_in")


def build(**fields):
    model = create_model(dataclasses.replace(CONFIG, **fields))
    params = jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, 2), jnp.int32))["params"]
    return model, jax.tree.map(lambda p: 2 * p, params)  # sharper logits


MODEL, PARAMS = build()
PROMPT = [1, 5, 2, 7]


def write(prompts=(PROMPT,), tokens=10, **kwargs):
    return generate(MODEL, PARAMS, prompts, tokens, context=CONTEXT, **kwargs)


def sliding_reference(model, params, prompt, tokens):
    """Arg max by a fresh forward pass over each window: the last `context` tokens at first; a full window is cut to
    its last context / 2 tokens, the newest among them."""
    forward = jax.jit(lambda ids, valid: model.apply({"params": params}, ids, valid=valid))
    window, made = list(prompt)[-CONTEXT:], []
    for _ in range(tokens):
        if len(window) > CONTEXT:
            window = window[-(CONTEXT // 2) :]
        ids = np.zeros((1, CONTEXT), np.int32)
        ids[0, : len(window)] = window
        logits = forward(ids, jnp.arange(CONTEXT)[None] < len(window))
        made.append(int(logits[0, len(window) - 1].argmax()))
        window.append(made[-1])
    return made


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "alibi", "none"])
def test_greedy_past_the_context(positions):
    model, params = build(positions=positions)
    made = generate(model, params, [PROMPT], 60, context=CONTEXT, temperature=0)
    assert made.shape == (1, 60)
    assert made[0].tolist() == sliding_reference(model, params, PROMPT, 60)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
def test_prompts_of_any_length(length):
    prompt = np.random.default_rng(0).integers(0, V, length).tolist()
    made = write([prompt], 20, temperature=0)[0].tolist()
    assert made == sliding_reference(MODEL, PARAMS, prompt, 20)
    assert made == write([prompt[-CONTEXT:]], 20, temperature=0)[0].tolist()


@pytest.mark.parametrize("context", [1, 2, 3])
def test_tiny_contexts(context):
    model, params = build(context=context)
    made = generate(model, params, [[1, 2]], 9, context=context, temperature=0)
    assert made.shape == (1, 9)
    assert set(made[0].tolist()) <= set(range(V))


def test_a_row_does_not_depend_on_those_beside_it():
    prompts = [[1], PROMPT, list(range(9)) * 3]
    for kwargs in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}):
        together = write(prompts, 40, **kwargs)
        for row, prompt in zip(together, prompts, strict=True):
            assert row.tolist() == write([prompt], 40, **kwargs)[0].tolist()


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8])
def test_temperature_zero_is_arg_max(temperature):
    expected = sliding_reference(MODEL, PARAMS, PROMPT, 10)
    for seed in (1, 2):
        assert write(temperature=temperature, seed=seed)[0].tolist() == expected
    assert write(top_k=1, seed=5)[0].tolist() == expected
    assert write(top_p=1e-9, seed=5)[0].tolist() == expected


def test_seeds():
    first = write(tokens=40, seed=1)
    np.testing.assert_array_equal(first, write(tokens=40, seed=1))
    assert (first != write(tokens=40, seed=2)).any()
    assert (write(tokens=40, seed=0) != first).any()
    samples = write(tokens=40, num_samples=5)
    assert len({tuple(row) for row in samples.tolist()}) == 5
    np.testing.assert_array_equal(samples[:2], write(tokens=40, num_samples=2))


def test_uniform_model_draws_everything():
    """200 draws from 65 equal symbols leave about 3 unseen; one key used twice would show few."""
    model = create_model(dataclasses.replace(CONFIG, vocab_size=65, init="zero_output"))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    made = generate(model, params, [[0]], 200, context=CONTEXT, seed=0)
    assert len(set(made[0].tolist())) >= 50


def test_no_random_key_is_used_twice():
    with jax.debug_key_reuse(True):
        jax.clear_caches()
        write(tokens=5)


def test_more_symbols_than_there_are_is_no_limit():
    np.testing.assert_array_equal(write(top_k=200, seed=3), write(seed=3))


def filters(temperature=1.0, top_k=V, **kwargs):
    return Filters.of(max(V, top_k), temperature, top_k, **kwargs)


def none_seen(logits):
    return jnp.zeros(logits.shape, bool)


def test_filters_keep_the_right_set():
    probabilities = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
    logits = jnp.log(jnp.asarray(np.tile(probabilities, (4000, 1)), jnp.float32))
    keys = jax.random.split(jax.random.key(0), 4000)

    def seen(already=(), **kwargs):
        before = none_seen(logits).at[:, jnp.array(already, int)].set(True)
        drawn = np.asarray(jax.jit(draw)(keys, logits, before, filters(**{"top_k": 5, **kwargs})))
        return {int(v): (drawn == v).mean() for v in np.unique(drawn)}

    assert set(seen()) == {0, 1, 2, 3, 4}
    assert set(seen(top_k=2)) == {1, 3}
    assert set(seen(top_p=0.69)) == {1, 3}  # 0.4 alone is too little
    assert set(seen(top_p=0.71)) == {1, 3, 4}
    assert set(seen(top_p=0.39)) == {1}
    assert set(seen(top_k=3, top_p=0.81)) == {1, 3}  # of 0.4, 0.3, 0.15: the first two have 0.82
    assert set(seen(min_p=0.3)) == {1, 3, 4}  # of 0.4: at least 0.12
    assert set(seen(min_p=0.8)) == {1}
    assert set(seen(min_p=1.0)) == {1}
    assert set(seen(min_p=0.3, top_p=0.69)) == {1, 3}
    assert set(seen([1], top_k=1, repetition_penalty=1.2)) == {1}  # log 0.4 * 1.2 is -1.1, log 0.3 is -1.2
    assert set(seen([1], top_k=1, repetition_penalty=1.4)) == {3}
    assert set(seen([3], top_k=1, repetition_penalty=0.5)) == {3}
    assert seen(top_k=2)[1] == pytest.approx(4 / 7, abs=0.03)
    cold = probabilities**2 / (probabilities**2).sum()
    assert seen(temperature=0.5)[1] == pytest.approx(cold[1], abs=0.03)


def test_no_limit_is_no_limit():
    """Float32 sums reach 1 before the last symbols: top_p 1 must keep them all the same."""
    logits = jnp.tile(jnp.array([20.0, 20.0, 0.0, 0.0]), (1, 1))
    keys = jax.random.split(jax.random.key(0), 1)
    ranked = np.asarray(jax.nn.softmax(logits))
    assert ranked[0, 3] < 1e-8
    hot = filters(temperature=1e8, top_k=4)
    drawn = {
        int(draw(jax.random.split(k, 1), logits, none_seen(logits), hot)[0]) for k in jax.random.split(keys[0], 60)
    }
    assert drawn == {0, 1, 2, 3}


def test_bfloat16_logits_do_not_drift():
    half, _ = build(compute_dtype="bfloat16")
    ids = jnp.asarray(np.random.default_rng(1).integers(0, V, (1, CONTEXT)))
    step = jax.jit(lambda ids, cache: half.apply({"params": PARAMS}, ids, cache=cache))
    full = jax.jit(lambda ids: half.apply({"params": PARAMS}, ids))(ids)
    cache, differences = half.init_cache(1, CONTEXT), []
    for t in range(CONTEXT):
        logits, cache = step(ids[:, t : t + 1], cache)
        differences.append(float(jnp.abs(logits[0, 0] - full[0, t]).max()))
    assert max(differences) < 0.1


def test_stream_gives_every_token_in_order():
    pieces = []
    made = write(tokens=75, seed=2, stream=pieces.append)
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), made)
    assert len(pieces) > 1


def test_positive_logits_are_divided_by_the_penalty():
    """Keskar et al. 2019, section 4.1, for logits of both signs."""
    logits, seen = jnp.array([[3.0, 2.0, -1.0]]), jnp.array([[True, False, False]])
    key = jax.random.split(jax.random.key(0), 1)
    for penalty, best in ((1.4, 0), (1.6, 1), (1e6, 1)):
        assert int(draw(key, logits, seen, filters(top_k=1, repetition_penalty=penalty))[0]) == best


def test_the_penalty_knows_prompt_and_text():
    forward = jax.jit(lambda ids: MODEL.apply({"params": PARAMS}, ids))
    text = list(PROMPT)
    for _ in range(10):
        logits = np.array(forward(jnp.array([text + [0] * (CONTEXT - len(text))]))[0, len(text) - 1])
        seen = list(set(text))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 4, logits[seen] * 4)
        text.append(int(logits.argmax()))
    made = write(tokens=10, temperature=0, repetition_penalty=4)[0].tolist()
    assert made == text[len(PROMPT) :]
    assert made != write(tokens=10, temperature=0)[0].tolist()


def test_log_probabilities_are_the_models_own():
    made, log_probs = write(tokens=8, temperature=0.5, top_k=3, repetition_penalty=1.3, return_log_probs=True)
    ids = jnp.asarray([[*PROMPT, *made[0]]])
    logits = jax.jit(lambda ids: MODEL.apply({"params": PARAMS}, ids))(ids)
    expected = jax.nn.log_softmax(logits)[0, jnp.arange(len(PROMPT) - 1, ids.shape[1] - 1), made[0]]
    np.testing.assert_allclose(log_probs[0], expected, atol=1e-5)


def test_rows_end_after_a_stop():
    """Each for itself, also where the stop falls on two pieces of the stream, and together no later than needed."""
    whole = write([PROMPT, PROMPT[::-1]], tokens=80, seed=4)
    for first, last in ((30, 34), (3, 5), (0, 1)):
        stop = whole[0, first:last].tolist()
        end = next(i for i in range(80) if whole[0, : i + 1].tolist()[-len(stop) :] == stop) + 1
        pieces = []
        made, log_probs = write(
            [PROMPT, PROMPT[::-1]], tokens=80, seed=4, stop=[stop], stream=pieces.append, return_log_probs=True
        )
        np.testing.assert_array_equal(made[0, :end], whole[0, :end])
        assert (made[0, end:] == -1).all()
        assert (log_probs[0, end:] == 0).all()
        np.testing.assert_array_equal(np.concatenate(pieces, axis=1)[:, : made.shape[1]], made)
        alone = write(tokens=80, seed=4, stop=[[V + 1], stop])
        np.testing.assert_array_equal(alone[0], whole[0, :end])


def test_layers_as_a_loop_and_as_straight_code():
    """Straight code gets its layers' parameters one by one, a loop gets their stack."""
    rolled, _ = build(unroll=1)
    assert apart(rolled, PARAMS) is PARAMS
    assert len(jax.tree.leaves(apart(MODEL, PARAMS))) > len(jax.tree.leaves(PARAMS))
    made = generate(rolled, PARAMS, [PROMPT], 40, context=CONTEXT, temperature=0)
    np.testing.assert_array_equal(made, write(tokens=40, temperature=0))


def test_compiles_once_whatever_the_length():
    jax.clear_caches()
    for tokens, length in ((1, 3), (5, 4), (60, 5), (33, 12)):
        write([PROMPT * 3][:1] if length == 12 else [PROMPT[:1] * length], tokens, temperature=0.5, top_k=tokens)
    assert _advance._cache_size() == 1
    assert begin._cache_size() == 1


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"temperature": -1}, "temperature must be at least 0 .* got -1"),
        ({"temperature": float("nan")}, "temperature .* got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": -3}, "top_k must be at least 1, got -3"),
        ({"top_p": 0}, "top_p must be above 0 .* got 0"),
        ({"top_p": 1.5}, "top_p .* got 1.5"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1, got -0.1"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1, got 1.1"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be above 0 \(1 is none\), got 0"),
        ({"stop": [[1], []]}, "a stop is empty"),
        ({"tokens": 5.5}, "num_tokens must be a whole number, got 5.5"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"tokens": 0}, "num_tokens must be at least 1"),
        ({"seed": 2**32}, "seed must be between 0 and 4294967295"),
    ],
)
def test_settings_out_of_range(kwargs, said):
    with pytest.raises(ConfigError, match=said):
        write(**kwargs)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[]], "is empty"),
        ([], "no prompt"),
        ([[9]], r"\[0, 9\)"),
        ([[-1]], "-1"),
        ([[0.9, 2.7]], "must hold whole numbers, got float64"),
    ],
)
def test_prompts_that_cannot_be_used(prompts, said):
    with pytest.raises(DataError, match=said):
        write(prompts)


def test_logits_that_are_not_finite():
    damaged = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    with pytest.raises(TransformerJaxError, match="not finite"):
        generate(MODEL, damaged, [PROMPT], 5, context=CONTEXT)


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_recurrent_models_have_no_window(kind):
    """Prompts of different lengths in one batch, each read as a whole; and far past the context."""
    model, params = build(architecture=kind)
    prompts = [[1, 5], [2, 7, 7, 3, 1]]
    made = generate(model, params, prompts, 2 * CONTEXT, temperature=0)
    forward = jax.jit(lambda ids: model.apply({"params": params}, ids))
    for prompt, row in zip(prompts, made, strict=True):
        text = [*prompt, *row]
        logits = forward(jnp.array([text + [0] * (40 - len(text))]))[0]
        np.testing.assert_array_equal(row, logits[len(prompt) - 1 : len(text) - 1].argmax(-1))
