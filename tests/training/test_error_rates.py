import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax import ModelConfig, create_model
from transformer_jax.training.error_rates import ROWS, ErrorCounts, answer, count_errors, edit_distance

ROW = st.lists(st.integers(0, 3), max_size=7)


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("flaw", "lawn", 2), ("abc", "abc", 0), ("saturday", "sunday", 3)],
)
def test_known_distances(first, second, distance):
    assert edit_distance(first, second) == distance


@given(ROW, ROW, ROW)
def test_it_is_a_distance(a, b, c):
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


def test_the_nearest_answer_counts():
    errors = count_errors([[1, 2], [1, 2], []], [[[1, 2, 3], [1, 2]], [[1, 3], [2, 2, 4]], [[5]]])
    assert errors == ErrorCounts(edits=0 + 1 + 1, symbols=2 + 2 + 1, wrong=2, sources=3)
    assert errors.symbol_error_rate == 0.4
    assert errors.sequence_error_rate == pytest.approx(2 / 3)
    assert (errors + errors).sequence_error_rate == errors.sequence_error_rate
    # Of equally near ones the longest: an error in it weighs less.
    assert count_errors([[1, 1]], [[[1], [1, 1, 1]]]).symbols == 3


def test_answers_are_those_of_a_plain_loop():
    """Greedy by full forward passes, each source alone; for more sources than are answered at once."""
    config = ModelConfig(
        architecture="encoder_decoder",
        vocab_size=6,
        source_vocab_size=5,
        context=6,
        d_model=16,
        num_heads=2,
        num_layers=1,
        init="fan_in",
    )
    model = create_model(config)
    ids = jnp.zeros((1, 2), jnp.int32)
    params = jax.tree.map(lambda p: 2 * p, jax.jit(model.init)(jax.random.key(1), ids, ids)["params"])
    random = np.random.default_rng(0)
    sources = [random.integers(0, 5, random.integers(1, 7)) for _ in range(ROWS + 3)]
    end = 5
    made = answer(model, params, sources, end)
    assert len(made) == len(sources)
    forward = jax.jit(lambda s, v, t: model.apply({"params": params}, s, t, source_valid=v))
    for source, row in [*zip(sources, made, strict=True)][-12:]:
        padded, valid = np.zeros((1, 6), np.int32), np.arange(6)[None] < len(source)
        padded[0, : len(source)] = source
        target = [end]
        for place in range(6):
            inputs = np.full((1, 6), 0, np.int32)
            inputs[0, : len(target)] = target
            symbol = int(forward(padded, valid, inputs)[0, place].argmax())
            if symbol == end:
                break
            target.append(symbol)
        assert row.tolist() == target[1:7]
    assert len({tuple(row) for row in made}) > 3
