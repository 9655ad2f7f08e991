import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig
from transformer_jax.config import resolve
from transformer_jax.training.sharding import default_placement
from transformer_jax.training.step import (
    all_finite,
    compile_train_step,
    compiler_options,
    create_state,
    eval_step,
    init_state,
    train_step,
)


def config_of(model=None, train=None, **optim):
    return resolve(
        Config(
            model=ModelConfig(
                context=8, d_model=16, num_heads=2, num_layers=2, init="fan_in", unroll=1, **(model or {})
            ),
            optim=OptimConfig(**{"warmup_steps": 0, "schedule": "constant", **optim}),
            train=TrainConfig(batch_size=8, **(train or {})),
        ),
        vocab_size=7,
    )


def batch_of(seed=0, lengths=(1, 8, 2, 8, 3, 1, 5, 8)):
    """8 rows with very unequal numbers of targets that count."""
    ids = np.random.default_rng(seed).integers(0, 7, (len(lengths), 9)).astype(np.int32)
    weights = (np.arange(8)[None] < np.array(lengths)[:, None]).astype(np.float32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def run(config, batches):
    step, state, metrics = jax.jit(partial(train_step, config)), jax.jit(partial(init_state, config))(), []
    for batch in batches:
        state, figures = step(state, batch)
        metrics.append(jax.device_get(figures))
    return state, metrics


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulation_changes_nothing(optimizer):
    """One batch of 8, 2 pieces of 4 and 8 of 1 teach the same, with unequal targets and one piece without any."""
    batch = batch_of(lengths=(1, 8, 0, 8, 3, 1, 5, 8))
    runs = {n: run(config_of(train={"accumulate": n}, optimizer=optimizer), [batch]) for n in (1, 2, 8)}
    reference, (figures,) = runs[1]
    for state, (other,) in runs.values():
        assert other["loss"] == pytest.approx(figures["loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(figures["grad_norm"], rel=1e-5)
        # Moments, not weights: Adam's first update is the sign of the gradient, also where that is rounding.
        for a, b in zip(moments(state), moments(reference), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-7)


def moments(state):
    """The first moments in an optimiser's state."""
    found = optax.tree.get_all_with_path(state.opt_state, "mu")
    leaves = [x for _, mu in found for x in jax.tree.leaves(mu)]
    assert leaves
    return leaves


def test_accumulation_same_weights():
    """With an epsilon that keeps Adam smooth, the weights agree to 1e-6 as well."""
    states = [run(config_of(train={"accumulate": n}, optimizer="adamw", eps=1e-2), [batch_of()])[0] for n in (1, 2, 8)]
    for state in states[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, states[0].params)


def test_batch_without_targets():
    batch = batch_of()
    batch["weights"] = np.zeros_like(batch["weights"])
    config = config_of(optimizer="adamw")
    state, (figures,) = run(config, [batch])
    assert figures["loss"] == 0
    assert figures["grad_norm"] == 0
    before = jax.jit(partial(init_state, config))()
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)


def test_ignored_rows_do_not_teach():
    batch = batch_of(lengths=(8, 8, 8, 8, 0, 0, 0, 0))
    half = {name: array[:4] for name, array in batch.items()}
    whole, (a,) = run(config_of(eps=1e-2), [batch])
    part, (b,) = run(config_of(eps=1e-2), [half])
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), whole.params, part.params)


def test_learns():
    config = config_of(learning_rate=1e-2)
    _, metrics = run(config, [batch_of()] * 60)
    assert metrics[0]["loss"] > 1.5
    assert metrics[-1]["loss"] < 0.2


def test_clipping_is_measured_once_on_the_averaged_gradient():
    """What arrives at Adam has the norm of the limit, however the batch is cut."""
    for accumulate in (1, 4):
        config = config_of(train={"accumulate": accumulate}, optimizer="adamw", clip_norm=1e-3)
        state, (figures,) = run(config, [batch_of()])
        assert figures["grad_norm"] > 0.1  # what is logged is the norm before
        norm = float(optax.tree.norm(moments(state))) / (1 - config.optim.b1)
        assert norm == pytest.approx(1e-3, rel=1e-4)


def test_the_gradient_norm_is_not_measured_in_bfloat16():
    """Also where products are: it is the norm of the float32 gradients."""
    _, (half,) = run(config_of(model={"compute_dtype": "bfloat16"}), [batch_of()])
    _, (whole,) = run(config_of(), [batch_of()])
    assert half["grad_norm"].dtype == np.float32
    assert half["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.02)


def test_bfloat16_state_stays_float32():
    config = config_of(model={"compute_dtype": "bfloat16"})
    state, (figures,) = run(config, [batch_of()])
    floats = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats == {jnp.dtype("float32")}
    assert figures["loss"].dtype == jnp.float32
    _, (reference,) = run(config_of(), [batch_of()])
    assert figures["loss"] == pytest.approx(reference["loss"], abs=0.05)


def test_average_of_the_weights():
    """Decays 1/10, 2/11, ... at first, and never more than the field says."""
    config = config_of(train={"average_decay": 0.15})
    start = jax.jit(partial(init_state, config))()
    average = start.params
    for count, decay in ((1, 0.1), (2, 0.15)):
        state, _ = run(config, [batch_of()] * count)
        average = jax.tree.map(lambda a, b, d=decay: d * a + (1 - d) * b, average, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.average, average)
    assert state.eval_params is state.average
    assert start.replace(average=None).eval_params is start.params


def test_evaluation_does_not_know_dropout():
    params = jax.jit(partial(init_state, config_of()))().params
    totals = {
        rate: [float(eval_step(config_of(model={"dropout": rate}), params, batch_of())[0].sum()) for _ in range(2)]
        for rate in (0.0, 0.5)
    }
    assert len({total for pair in totals.values() for total in pair}) == 1


def test_dropout_differs_by_step_and_seed():
    model = {"dropout": 0.5}
    _, metrics = run(config_of(model, learning_rate=1e-12, muon_learning_rate=1e-12), [batch_of()] * 2)
    assert metrics[0]["loss"] != metrics[1]["loss"]
    _, other = run(config_of(model, {"seed": 1}), [batch_of()])
    assert other[0]["loss"] != metrics[0]["loss"]


def test_all_finite():
    state = jax.jit(partial(init_state, config_of()))()
    assert all_finite(state)
    damaged = state.replace(params=jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.inf), state.params))
    assert not all_finite(damaged)


def test_state_is_donated():
    config = config_of()
    placement = default_placement(1)
    state = create_state(config, placement)
    compile_train_step(config, state, placement)(state, batch_of())
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_fields_of_the_config_reach_the_step():
    base = run(config_of(), [batch_of()])[1][0]["loss"]
    for train in ({"label_smoothing": 0.1}, {"z_loss": 0.1}):
        assert run(config_of(train=train), [batch_of()])[1][0]["loss"] != base


def test_config_is_hashable_and_frozen():
    config = config_of()
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.d_model = 3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_that_is_not_finite_leaves_the_state(optimizer):
    """But for its step and its place in the schedule: rates stay those of their steps."""
    config = config_of(train={"average_decay": 0.9}, optimizer=optimizer, schedule="cosine", decay_steps=5)
    good, bad = batch_of(0), batch_of(1) | {"weights": np.full((8, 8), np.nan, np.float32)}
    before, _ = run(config, [good])
    after, (_, figures) = run(config, [good, bad])
    assert np.isnan(figures["loss"])
    assert int(after.step) == 2
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.average), (before.params, before.average))
    jax.tree.map(np.testing.assert_array_equal, after.opt_state[:-1], before.opt_state[:-1])
    assert int(after.opt_state[-1].count) == 2
    _, straight = run(config, [good, good, good])
    last, skipped = run(config, [good, bad, good])
    assert skipped[2]["learning_rate"] == straight[2]["learning_rate"] < straight[1]["learning_rate"]
    assert all_finite(last)
    assert not np.array_equal(last.params["head"]["kernel"], after.params["head"]["kernel"])


def test_deterministic_is_a_flag_of_the_compiler():
    assert compiler_options(config_of()) == {}
    config = config_of(train={"deterministic": True})
    assert compiler_options(config) == {"xla_gpu_deterministic_ops": True}
    placement = default_placement(8)
    state = create_state(config, placement)
    compile_train_step(config, state, placement).lower(state, placement.place(batch_of())).compile()
