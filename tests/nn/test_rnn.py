import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax import ModelConfig, create_model
from transformer_jax.errors import ConfigError

V, T, D = 11, 10, 16
KINDS = ["rnn", "gru", "lstm"]
SMALL = ModelConfig(
    architecture="rnn", vocab_size=V, d_model=D, num_layers=2, use_bias=True, init="fan_in", unroll=1, context=T
)


def build(**fields):
    model = create_model(dataclasses.replace(SMALL, **fields))
    ids = jax.random.randint(jax.random.key(9), (2, T), 0, V)
    return model, jax.jit(model.init)(jax.random.key(0), ids)["params"], ids


def forward(model, params, ids, **kwargs):
    return jax.jit(lambda p, i, kw: model.apply({"params": p}, i, **kw))(params, ids, kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_equals_one_pass(kind):
    model, params, ids = build(architecture=kind)
    full = forward(model, params, ids)
    for sizes in ([1] * T, [4, 6], [4, 1, 5]):
        state, out, start = model.init_cache(2), [], 0
        for size in sizes:
            logits, state = forward(model, params, ids[:, start : start + size], cache=state)
            out.append(logits)
            start += size
        np.testing.assert_allclose(jnp.concatenate(out, axis=1), full, atol=1e-5)
        np.testing.assert_array_equal(state.length, [T, T])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_the_state_alone(kind, side):
    model, params, ids = build(architecture=kind)
    real = ids[:1, :4]
    expected, state = forward(model, params, real, cache=model.init_cache(1))
    padding, marks = jnp.full((1, 3), 5), (jnp.zeros((1, 3), bool), jnp.ones((1, 4), bool))
    parts = (padding, real) if side == "left" else (real, padding)
    valid = jnp.concatenate(marks if side == "left" else marks[::-1], axis=1)
    logits, padded = forward(model, params, jnp.concatenate(parts, axis=1), valid=valid, cache=model.init_cache(1))
    place = slice(3, None) if side == "left" else slice(0, 4)
    np.testing.assert_allclose(logits[:, place], expected, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state, padded)


@pytest.mark.parametrize("kind", KINDS)
def test_no_look_ahead(kind):
    model, params, ids = build(architecture=kind)
    before, after = (forward(model, params, i) for i in (ids, ids.at[:, 6].set((ids[:, 6] + 1) % V)))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert float(jnp.abs(before[:, 6:] - after[:, 6:]).min(axis=(0, 2)).max()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_learns_what_needs_memory(kind):
    """`aab` again and again: what follows an `a` depends on the symbol before it."""
    model = create_model(dataclasses.replace(SMALL, architecture=kind, vocab_size=2, num_layers=1))
    ids = jnp.tile(jnp.array([[0, 0, 1]]), (1, 9))
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    optimizer = optax.adam(0.03)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = model.apply({"params": params}, ids[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(60):
        params, state = step(params, state)
    run = jax.jit(lambda ids, state: model.apply({"params": params}, ids, cache=state))
    logits, memory = run(ids[:, :3], model.init_cache(1))
    text = []
    for _ in range(12):
        text.append(int(logits[0, -1].argmax()))
        logits, memory = run(jnp.array([[text[-1]]]), memory)
    assert text == [0, 0, 1] * 4


def test_fields_change_what_they_should():
    ids = jax.random.randint(jax.random.key(9), (2, T), 0, V)

    def output(**fields):
        model = create_model(dataclasses.replace(SMALL, **fields))

        @jax.jit
        def run():
            params = jax.tree.map(lambda p: p + 0.05, model.init(jax.random.key(0), ids)["params"])
            return model.apply({"params": params}, ids), sum(p.size for p in jax.tree.leaves(params))

        return run()

    base, count = output()
    assert count == 2 * V * D + 2 * (2 * D * D + D)
    assert output(architecture="gru")[1] == 2 * V * D + 2 * (3 * (2 * D * D + D) + D)
    assert output(architecture="lstm")[1] == 2 * V * D + 2 * 4 * (2 * D * D + D)
    for fields in (
        {"architecture": "gru"},
        {"architecture": "lstm"},
        {"d_model": 24},
        {"num_layers": 3},
        {"use_bias": False},
        {"head_bias": True},
        {"tie_embeddings": True},
        {"scale_embeddings": True},
        {"init": "xavier"},
    ):
        assert float(jnp.abs(output(**fields)[0] - base).max()) > 1e-4, fields
    assert output(tie_embeddings=True)[1] == count - V * D
    np.testing.assert_allclose(output(unroll=2)[0], base, atol=1e-5)


def test_dropout_and_bfloat16():
    model, params, ids = build(dropout=0.5, architecture="lstm")
    run = jax.jit(lambda key: model.apply({"params": params}, ids, deterministic=False, rngs={"dropout": key}))
    first, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert float(jnp.abs(first - other).max()) > 1e-3
    half, _, _ = build(architecture="lstm", compute_dtype="bfloat16")
    logits, state = forward(half, params, ids, cache=half.init_cache(2))
    assert logits.dtype == state.hidden.dtype == jnp.float32
    plain, _, _ = build(architecture="lstm")
    assert 0 < float(jnp.abs(logits - forward(plain, params, ids)).max()) < 0.1


def test_captures_its_layers():
    model, params, ids = build(architecture="gru")
    logits, captured = jax.jit(lambda p: model.apply({"params": p}, ids, capture=("hidden",)))(params)
    assert captured["hidden"].shape == (2, 2, T, D)
    np.testing.assert_allclose(captured["hidden"][-1] @ params["head"]["kernel"], logits, atol=1e-5)


def test_refuses_what_it_cannot_do():
    model, params, ids = build()
    with pytest.raises(ConfigError, match=r"ids must be in \[0, 11\), got 11 to 11"):
        model.apply({"params": params}, jnp.array([[11]]))
    with pytest.raises(ConfigError, match="unknown capture 'attention'; it is one of hidden"):
        model.apply({"params": params}, ids, capture=("attention",))
    with pytest.raises(ConfigError, match=r"valid must be bool\[2, 10\]"):
        model.apply({"params": params}, ids, valid=jnp.ones((2, T)))
