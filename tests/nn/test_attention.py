import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import ConfigError
from transformer_jax.nn import KVCache, causal_mask, combine_masks, dot_product_attention, padding_mask, window_mask
from transformer_jax.nn.cache import LayerCache


def reference(query, key, value, mask, bias):
    """One head at a time, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, _, num_heads, head_dim = query.shape
    groups = num_heads // key.shape[2]
    out = np.zeros(query.shape)
    for b in range(batch):
        for h in range(num_heads):
            scores = query[b, :, h] @ key[b, :, h // groups].T / np.sqrt(head_dim)
            scores = np.where(mask[b, 0], scores + bias[0, h], -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, :, h] = weights / weights.sum(-1, keepdims=True) @ value[b, :, h // groups]
    return out


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_matches_numpy(num_kv_heads):
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (2, 5, 4, 8))
    key = jax.random.normal(keys[1], (2, 7, num_kv_heads, 8))
    value = jax.random.normal(keys[2], (2, 7, num_kv_heads, 8))
    bias = jax.random.normal(keys[3], (1, 4, 5, 7))
    mask = jnp.broadcast_to(jnp.arange(7)[None, None, None] <= jnp.arange(5)[None, None, :, None] + 2, (2, 1, 5, 7))
    out = dot_product_attention(query, key, value, mask, bias)
    np.testing.assert_allclose(out, reference(query, key, value, mask, bias), atol=1e-5)


def test_mask_per_head():
    query = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
    mask = jnp.stack([jnp.eye(3, dtype=bool), jnp.ones((3, 3), bool)])[None]
    out = dot_product_attention(query, query, query, mask)
    np.testing.assert_allclose(out[:, :, 0], query[:, :, 0], atol=1e-6)  # each position sees itself alone
    whole = dot_product_attention(query, query, query)
    np.testing.assert_allclose(out[:, :, 1], whole[:, :, 1], atol=1e-6)


def test_query_without_keys_is_finite():
    query = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))

    def total(x):
        return jnp.sum(dot_product_attention(x, x, x, jnp.zeros((1, 1, 3, 3), bool)))

    value, grad = jax.value_and_grad(total)(query)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()


def test_refuses_what_does_not_fit():
    x = jnp.ones((1, 3, 4, 8))
    with pytest.raises(ConfigError, match="rank 4"):
        dot_product_attention(x[0], x, x)
    with pytest.raises(ConfigError, match="4 query heads are no multiple of 3"):
        dot_product_attention(x, x[:, :, :3], x[:, :, :3])
    with pytest.raises(ConfigError, match="must be bool"):
        dot_product_attention(x, x, x, jnp.ones((1, 1, 3, 3)))


def test_products_add_up_in_float32():
    """Adding ones in bfloat16 stops at 256."""
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    assert float((ones @ ones.T)[0, 0]) == 4096


def test_masks_by_hand():
    positions = jnp.arange(4)[None]
    causal = causal_mask(positions, positions)
    np.testing.assert_array_equal(causal[0, 0], np.tril(np.ones((4, 4), bool)))
    both = combine_masks(causal, None, window_mask(positions, positions, 2))
    np.testing.assert_array_equal(both[0, 0], np.tril(np.ones((4, 4), bool)) & ~np.tril(np.ones((4, 4), bool), -2))
    padded = combine_masks(causal, padding_mask(jnp.array([[True, True, False, False]])))
    assert padded.shape == (1, 1, 4, 4)
    np.testing.assert_array_equal(padded[0, 0, 3], [True, True, False, False])
    assert combine_masks(None, None) is None


def test_cache_drops_what_finds_no_room():
    cache = KVCache(jnp.zeros((2, 1, 3, 1, 4)), jnp.zeros((2, 1, 3, 1, 4)), jnp.array([2]))
    new = jnp.ones((1, 2, 1, 4))
    written, keys, _ = LayerCache(cache, 1, jnp.array([[2, 3]])).write(new, new)
    np.testing.assert_array_equal(keys[0, :, 0, 0], [0, 0, 1])
    assert float(written.cache.keys[0].sum()) == 0  # the other layer is untouched
