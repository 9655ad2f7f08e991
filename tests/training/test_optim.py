import dataclasses
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig, create_model
from transformer_jax.config import Schedule, resolve
from transformer_jax.errors import ConfigError
from transformer_jax.training.optim import (
    leaf_name,
    learning_rate,
    make_optimizer,
    muon_dimension_numbers,
    schedule_shape,
)

BASE = OptimConfig(optimizer="adamw", schedule="cosine", warmup_steps=10, decay_steps=100, final_fraction=0.1)


def shape(update, **fields):
    """The rate at update n, counted from 1, as a fraction of the peak."""
    return float(schedule_shape(dataclasses.replace(BASE, **fields))(jnp.int32(update - 1)))


def params_of(**fields):
    config = ModelConfig(vocab_size=5, d_model=8, num_heads=2, num_layers=3, context=6, **fields)
    return jax.jit(create_model(config).init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def test_warmup_moves_from_the_first_update():
    assert [shape(n) for n in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_wsd():
    fields = {"schedule": "wsd", "decay_fraction": 0.2, "final_fraction": 0.0}
    assert [shape(n, **fields) for n in (10, 50, 80, 90, 100, 120)] == pytest.approx([1, 1, 1, 0.5, 0, 0])


def test_wsd_with_a_decay_longer_than_what_is_left():
    fields = {"schedule": "wsd", "decay_fraction": 0.8, "final_fraction": 0.0, "warmup_steps": 50}
    assert [shape(n, **fields) for n in (50, 75, 100)] == pytest.approx([1, 0.5, 0])


def test_constant():
    assert [shape(n, schedule="constant") for n in (5, 10, 1000)] == pytest.approx([0.5, 1, 1])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warmup_of_nothing_and_of_everything(schedule):
    assert shape(1, schedule=schedule, warmup_steps=0, decay_fraction=0.0) >= 0.99
    rising = [shape(n, schedule=schedule, warmup_steps=100) for n in (1, 50, 100)]
    assert rising == pytest.approx([0.01, 0.5, 1.0])
    assert math.isfinite(shape(1, schedule=schedule, warmup_steps=0, decay_steps=1))


def test_warmup_longer_than_the_run():
    with pytest.raises(ConfigError, match="warmup_steps 150 is longer than the schedule's 100 steps"):
        Config(optim=OptimConfig(warmup_steps=150), train=TrainConfig(steps=100))
    Config(optim=OptimConfig(warmup_steps=100), train=TrainConfig(steps=100))
    Config(optim=OptimConfig(warmup_steps=0), train=TrainConfig(steps=1))


UPDATES = st.integers(0, 50) | st.integers(0, 2**31 - 1)


@st.composite
def schedules(draw):
    warmup, decay = sorted([draw(UPDATES), draw(UPDATES | st.just(2**31 - 1))])
    fractions = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
    schedule = draw(st.sampled_from(get_args(Schedule)))
    return OptimConfig(
        schedule=schedule,
        warmup_steps=max(1, warmup) if schedule == "noam" else warmup,
        decay_steps=max(1, decay),
        final_fraction=draw(fractions),
        decay_fraction=draw(fractions),
    )


def definition(config, update):
    """The share of the peak at an update, counted from 1."""
    warmup, rest = config.warmup_steps, config.decay_steps - config.warmup_steps
    if config.schedule == "noam":
        return min(update / warmup, math.sqrt(warmup / update))
    if update <= warmup:
        return update / warmup
    after, final = min(update - warmup, rest), config.final_fraction
    if config.schedule == "cosine" and rest:
        return final + (1 - final) * (1 + math.cos(math.pi * after / rest)) / 2
    decay = min(round(config.decay_steps * config.decay_fraction), rest)
    if config.schedule == "wsd" and after > rest - decay:
        return 1 - (1 - final) * (after - rest + decay) / decay
    return 1.0


@examples(60)
@given(schedules(), st.lists(st.floats(0, 1.2), max_size=3), st.integers(-1, 2))
def test_any_schedule_is_its_definition(config, places, beside):
    """At both ends of the warmup and of the decay, and between; finite, and never above the peak."""
    shape = schedule_shape(config)
    ends = [1, config.warmup_steps + beside, config.decay_steps + beside]
    for update in [*ends, *(round(place * config.decay_steps) for place in places)]:
        update = min(max(update, 1), 2**31 - 1)
        rate = float(shape(jnp.int32(update - 1)))
        assert 0 <= rate <= 1 + 1e-6
        assert rate == pytest.approx(definition(config, update), rel=1e-5, abs=1e-6)


def moved(config, params, grads):
    optimizer = make_optimizer(config)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def test_decay_touches_matrices_and_embeddings_only():
    params = jax.tree.map(jnp.ones_like, params_of(norm="layer", use_bias=True, positions="learned", head_bias=True))
    config = dataclasses.replace(BASE, learning_rate=1e-3, weight_decay=0.1, schedule="constant", warmup_steps=0)
    after = moved(config, params, jax.tree.map(jnp.zeros_like, params))
    for path, x in jax.tree_util.tree_leaves_with_path(after):
        expected = 0.9999 if leaf_name(path).endswith(("kernel", "embedding")) else 1.0
        np.testing.assert_allclose(x, expected, rtol=1e-6, err_msg=leaf_name(path))


def test_muon_updates_each_matrix_of_the_layers_and_nothing_else():
    params = params_of(feed_forward="swiglu", positions="learned", norm="layer", use_bias=True)
    leaves = jax.tree_util.tree_leaves_with_path(
        muon_dimension_numbers(params), is_leaf=lambda x: x is None or hasattr(x, "reduction_axis")
    )
    chosen = {leaf_name(path): numbers for path, numbers in leaves if numbers is not None}
    layers = "decoder/layers"
    assert {name: (n.reduction_axis, n.output_axis) for name, n in chosen.items()} == {
        f"{layers}/self_attention/query/kernel": (1, (2, 3)),
        f"{layers}/self_attention/key/kernel": (1, (2, 3)),
        f"{layers}/self_attention/value/kernel": (1, (2, 3)),
        f"{layers}/self_attention/output/kernel": ((1, 2), 3),
        f"{layers}/ffn/up/kernel": (1, 2),
        f"{layers}/ffn/gate/kernel": (1, 2),
        f"{layers}/ffn/down/kernel": (1, 2),
    }


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_muon_updates_each_gate_of_a_recurrent_layer(kind):
    params = params_of(architecture=kind, use_bias=True)
    numbers = muon_dimension_numbers(params)
    chosen = jax.tree_util.tree_leaves_with_path(numbers, is_leaf=lambda x: hasattr(x, "output_axis"))
    assert {leaf_name(path): (n.reduction_axis, n.output_axis) for path, n in chosen} == {
        "layers/input/kernel": (1, 3),
        "layers/recurrent_kernel": (1, 3),
    }
    config = dataclasses.replace(
        BASE, optimizer="muon", muon_learning_rate=0.5, warmup_steps=0, schedule="constant", clip_norm=None
    )
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    after = moved(config, params, grads)
    change = (params["layers"]["recurrent_kernel"] - after["layers"]["recurrent_kernel"]) / 0.5
    for layer, gate in np.ndindex(change.shape[0], change.shape[2]):
        singular = np.linalg.svd(change[layer, :, gate], compute_uv=False)
        assert 0.3 < singular.min() <= singular.max() < 1.4


def test_muon_makes_each_layers_update_orthogonal():
    params = params_of(feed_forward="relu")
    keys = jax.random.split(jax.random.key(1), 100)
    grads = jax.tree.map(
        lambda p, k: jax.random.normal(k, p.shape),
        params,
        jax.tree.unflatten(jax.tree.structure(params), list(keys[: len(jax.tree.leaves(params))])),
    )
    config = dataclasses.replace(
        BASE, optimizer="muon", muon_learning_rate=0.5, warmup_steps=0, schedule="constant", clip_norm=None
    )
    after = moved(config, params, grads)
    change = jax.tree.map(lambda a, b: (b - a) / 0.5, after, params)["decoder"]["layers"]
    for layer in range(3):
        query = change["self_attention"]["query"]["kernel"][layer].reshape(8, 8)
        singular = np.linalg.svd(query, compute_uv=False)
        assert singular.max() < 1.4  # Newton-Schulz brings singular values near 1, not to it
        assert singular.min() > 0.3
        up = change["ffn"]["up"]["kernel"][layer]  # [8, 32]: scaled by sqrt(32 / 8)
        assert 1.2 < np.linalg.svd(up, compute_uv=False).mean() < 2.8


def test_clipping():
    """Adam's first moment shows the gradient that arrived: 0.1 of it after one update."""

    def arrived(grads, clip_norm):
        optimizer = make_optimizer(dataclasses.replace(BASE, clip_norm=clip_norm))
        params = {"kernel": jnp.zeros(2)}
        _, state = optimizer.update({"kernel": jnp.array(grads)}, optimizer.init(params), params)
        return optax.tree.get(state, "mu")["kernel"] / (1 - BASE.b1)

    np.testing.assert_allclose(arrived([3.0, 4.0], 1.0), [0.6, 0.8], rtol=1e-5)
    np.testing.assert_allclose(arrived([0.3, 0.4], 1.0), [0.3, 0.4], rtol=1e-5)
    np.testing.assert_allclose(arrived([3.0, 4.0], None), [3, 4], rtol=1e-5)
    np.testing.assert_array_equal(arrived([0.0, 0.0], 1.0), [0, 0])
    with pytest.raises(ConfigError, match=r"optim.clip_norm must be a positive number, got 0"):
        OptimConfig(clip_norm=0)


def test_the_logged_rate_is_the_one_applied():
    """Under plain Adam with a constant gradient each update is the rate itself."""
    config = dataclasses.replace(BASE, learning_rate=0.5, clip_norm=None, b1=0.9, b2=0.9, weight_decay=0.0)
    optimizer = make_optimizer(config)
    params = {"kernel": jnp.zeros(1)}
    state = optimizer.init(params)
    for step in range(14):
        rate = learning_rate(config, state, jnp.int32(step))
        updates, state = optimizer.update({"kernel": jnp.ones(1)}, state, params)
        assert float(-updates["kernel"][0]) == pytest.approx(float(rate), rel=1e-4)
        assert float(rate) == pytest.approx(0.5 * shape(step + 1), rel=1e-5)


def test_rates_live_in_the_state():
    """Two rates, one program."""
    config = dataclasses.replace(BASE, warmup_steps=0, weight_decay=0.0)
    optimizer = make_optimizer(config)
    params = {"kernel": jnp.zeros(1)}
    update = jax.jit(optimizer.update)
    states = [optimizer.init(params), make_optimizer(dataclasses.replace(config, learning_rate=0.1)).init(params)]
    changes = [float(update({"kernel": jnp.ones(1)}, s, params)[0]["kernel"][0]) for s in states]
    assert changes[1] / changes[0] == pytest.approx(0.1 / config.learning_rate, rel=1e-4)
    assert update._cache_size() == 1


def test_resolving_fixes_the_schedule():
    config = resolve(Config(train=TrainConfig(steps=123), optim=OptimConfig(warmup_steps=5)), 7)
    assert (config.optim.decay_steps, config.model.vocab_size) == (123, 7)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=500))
    assert resolve(longer, 7).optim.decay_steps == 123
    with pytest.raises(ConfigError, match="vocab_size is 7 and the data have 9"):
        resolve(config, 9)
