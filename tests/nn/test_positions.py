import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import ConfigError
from transformer_jax.nn.positions import (
    alibi_bias,
    alibi_slopes,
    rotary,
    sinusoidal,
    sinusoidal_positions,
    token_positions,
)


def reference(length, d_model):
    """PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) = cos of the same angle, in float64."""
    table = np.zeros((length, d_model))
    for pos in range(length):
        for dim in range(d_model):
            angle = pos / 10_000 ** ((dim - dim % 2) / d_model)
            table[pos, dim] = np.sin(angle) if dim % 2 == 0 else np.cos(angle)
    return table


@pytest.mark.parametrize("d_model", [1, 4, 5, 32])
def test_sinusoidal_table(d_model):
    np.testing.assert_allclose(sinusoidal_positions(50, d_model), reference(50, d_model), atol=1e-5)


def test_sinusoidal_odd_width():
    table = sinusoidal_positions(4, 5)
    np.testing.assert_allclose(table[1], [0.841471, 0.540302, 0.0251162, 0.9996845, 0.000631], atol=1e-6)
    np.testing.assert_allclose(table[3], [0.141120, -0.989993, 0.0752853, 0.997162, 0.0018929], atol=1e-6)


def test_sinusoidal_far_positions_differ():
    rows = sinusoidal(jnp.array([256, 257]), 16)
    assert float(jnp.abs(rows[0] - rows[1]).max()) > 0.1


def test_sinusoidal_relative():
    """The product of two encodings depends on their distance alone."""
    table = np.asarray(sinusoidal_positions(64, 32), np.float64)
    np.testing.assert_allclose(table[3] @ table[10], table[43] @ table[50], atol=1e-4)


def test_rotary_relative():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def score(i, j):
        return float(jnp.sum(rotary(query, jnp.array([[i]])) * rotary(key, jnp.array([[j]]))))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)
    assert score(0, 0) == pytest.approx(float(jnp.sum(query * key)), abs=1e-6)


def test_rotary_is_a_rotation():
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 8))
    turned = rotary(x, jnp.arange(7)[None])
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])


def test_rotary_offset_matters():
    x = jnp.ones((1, 1, 1, 4))
    assert not np.allclose(rotary(x, jnp.array([[0]])), rotary(x, jnp.array([[5]])))


def test_rotary_refuses_odd_head_dim():
    with pytest.raises(ConfigError, match="even head_dim, got 5"):
        rotary(jnp.ones((1, 2, 1, 5)), jnp.arange(2)[None])


def test_rotary_keeps_dtype_and_exact_angles():
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    turned = rotary(x, jnp.array([[257]]))
    assert turned.dtype == jnp.bfloat16
    exact = np.cos(257.0) - np.sin(257.0)
    assert float(turned[0, 0, 0, 0]) == pytest.approx(exact, abs=0.01)


def test_alibi_slopes():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    # The reference implementation's slopes for 12 heads: those of 8, then every other one of 16.
    more = [2.0 ** -(0.5 * (2 * i + 1)) for i in range(4)]
    np.testing.assert_allclose(alibi_slopes(12), [2.0**-i for i in range(1, 9)] + more, rtol=1e-6)


def test_alibi_bias_by_hand():
    whole = alibi_bias(8, jnp.arange(6)[None], jnp.arange(6)[None])
    np.testing.assert_allclose(whole[0, 0, 5], -0.5 * np.array([5, 4, 3, 2, 1, 0]))
    step = alibi_bias(8, jnp.array([[5]]), jnp.arange(6)[None])
    np.testing.assert_array_equal(step[0, :, 0], whole[0, :, 5])


def test_token_positions():
    valid = jnp.array([[True, True, False], [False, True, True]])
    np.testing.assert_array_equal(token_positions(3, valid), [[0, 1, 1], [0, 0, 1]])
    np.testing.assert_array_equal(token_positions(2, None, jnp.array([4, 7])), [[4, 5], [7, 8]])
    np.testing.assert_array_equal(token_positions(3), [[0, 1, 2]])
