"""`fill_gaps`: an encoder puts symbols where they are missing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, create_model
from transformer_jax.errors import ConfigError, DataError, TransformerJaxError
from transformer_jax.generation import fill_gaps, gaps, generate

V, CONTEXT, GAP = 9, 12, 8
CONFIG = ModelConfig(
    architecture="encoder", vocab_size=V, context=CONTEXT, d_model=16, num_heads=2, num_layers=2, init="fan_in"
)
MODEL = create_model(CONFIG)
PARAMS = jax.tree.map(
    lambda p: 2 * p, jax.jit(MODEL.init)(jax.random.key(3), jnp.zeros((1, 2), jnp.int32))["params"]
)  # sharper logits
ROWS = [[GAP, 2, GAP, GAP, 5], [1], [GAP] * CONTEXT, [3, GAP], [0, 1, 2, 3, 4, 5, 6, 7]]
LOOK = jax.jit(lambda ids, valid: jax.nn.log_softmax(MODEL.apply({"params": PARAMS}, ids, valid=valid)))


def one_at_a_time(row):
    """The same in plain NumPy: the row, what the model gave, and the order in which places were filled."""
    row, given, order = np.array(row), np.zeros(len(row)), []
    while (row == GAP).any():
        ids = np.zeros((1, CONTEXT), np.int32)
        ids[0, : len(row)] = row
        log_probs = np.array(LOOK(ids, np.arange(CONTEXT)[None] < len(row)))[0, : len(row)]
        log_probs[:, GAP] = -np.inf
        certainty = np.where(row == GAP, log_probs.max(-1), -np.inf)
        place = (certainty >= certainty.max() - 1e-4).argmax()  # of equals, as in a row of gaps alone, the first
        row[place], given[place] = log_probs[place].argmax(), log_probs[place].max()
        order.append(int(place))
    return row, given, order


def test_as_one_at_a_time_in_numpy():
    filled, given = fill_gaps(MODEL, PARAMS, ROWS, GAP, return_log_probs=True)
    orders = []
    for row, ours, log_probs in zip(ROWS, filled, given, strict=True):
        expected, theirs, order = one_at_a_time(row)
        orders.append(order)
        assert ours.dtype == np.int32
        assert log_probs.dtype == np.float32
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_allclose(log_probs, theirs, atol=1e-5)
        kept = np.array(row) != GAP
        np.testing.assert_array_equal(ours[kept], np.array(row)[kept])
        assert (log_probs[kept] == 0).all()
    assert orders[2] != sorted(orders[2])  # a test of the order needs one that is not from left to right


class Certain:
    """An encoder by hand, with V = 5 and 4 for a gap: each place is sure of its symbol to a degree of its own, and
    place 1 wants another symbol once place 2 has one. It likes the gap best of all."""

    architecture, vocab_size, context = "encoder", 5, 4

    def apply(self, variables, ids, *, valid):
        wanted = jnp.array([0, 1, 2, 3])[None, :] + 0 * ids
        wanted = wanted.at[:, 1].set(jnp.where(ids[:, 2] == 2, 3, wanted[:, 1]))
        sure = jnp.array([1.0, 2.0, 4.0, 3.0])[None, :, None]
        return sure * jax.nn.one_hot(wanted, 5) + 9 * jax.nn.one_hot(jnp.full_like(ids, 4), 5)


def test_the_most_certain_place_is_first():
    model = Certain()
    assert [row.tolist() for row in fill_gaps(model, {}, [[4, 4, 4, 4], [4, 4, 0], [4, 4]], 4)] == [
        [0, 3, 2, 3],  # place 2 before place 1
        [0, 1, 0],
        [0, 1],
    ]


def test_rows_alone_are_rows_together():
    for settings in ({}, {"temperature": 1.0, "seed": 5}):
        together = fill_gaps(MODEL, PARAMS, ROWS, GAP, **settings)
        for row, filled in zip(ROWS, together, strict=True):
            np.testing.assert_array_equal(filled, fill_gaps(MODEL, PARAMS, [row], GAP, **settings)[0])
            assert GAP not in filled


def test_seeds():
    def fill(seed, temperature=2.0):
        return [row.tolist() for row in fill_gaps(MODEL, PARAMS, ROWS, GAP, temperature=temperature, seed=seed)]

    assert fill(1) == fill(1)
    assert fill(1) != fill(2)
    assert fill(1, 0.0) == fill(2, 0) == fill(3, 1e-8)
    everything = {symbol for seed in range(20) for symbol in fill(seed, 1e6)[2]}
    assert everything == set(range(V)) - {GAP}


def test_no_random_key_is_used_twice():
    with jax.debug_key_reuse(True):
        jax.clear_caches()
        fill_gaps(MODEL, PARAMS, ROWS, GAP, temperature=1.0)


def test_compiles_once_whatever_the_lengths():
    jax.clear_caches()
    for rows, temperature in (([[GAP]], 0), ([[1, GAP, GAP]], 0.5), ([[1, 2] * 6], 1)):
        fill_gaps(MODEL, PARAMS, rows, GAP, temperature=temperature)
    assert gaps._fill._cache_size() == 1


def test_logits_that_are_not_finite():
    damaged = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    with pytest.raises(TransformerJaxError, match="not finite"):
        fill_gaps(MODEL, damaged, ROWS, GAP)


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"gap": V}, ConfigError, r"gap must be in \[0, 9\), got 9"),
        ({"gap": None}, ConfigError, "gap must be the id of a symbol, got None"),
        ({"temperature": -1}, ConfigError, "temperature must be at least 0 .* got -1"),
        ({"seed": -1}, ConfigError, "seed must be between 0 and 4294967295, got -1"),
        ({"context": 0}, ConfigError, "context must be at least 1, got 0"),
        ({"rows": []}, DataError, "no row"),
        ({"rows": [[1], []]}, DataError, "row 1 is empty"),
        ({"rows": [[V]]}, DataError, r"row 0 has ids from 9 to 9, not all in \[0, 9\)"),
        ({"rows": [[1], [GAP] * (CONTEXT + 1)]}, DataError, "row 1 has 13 ids and the context is 12"),
    ],
)
def test_what_is_refused(kwargs, error, said):
    with pytest.raises(error, match=said):
        fill_gaps(MODEL, PARAMS, **{"rows": ROWS, "gap": GAP, **kwargs})


def test_each_architecture_has_its_function():
    with pytest.raises(ConfigError, match="does not go on; see fill_gaps"):
        generate(MODEL, PARAMS, ROWS, 3)
    for other in ("decoder", "gru", "encoder_decoder"):
        model = create_model(ModelConfig(architecture=other, vocab_size=V))
        with pytest.raises(ConfigError, match="fill_gaps needs a model that sees both sides"):
            fill_gaps(model, {}, ROWS, GAP)
