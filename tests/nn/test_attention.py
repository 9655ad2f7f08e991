import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import ConfigError
from transformer_jax.nn import (
    IndexMask,
    KVCache,
    alibi_bias,
    alibi_slopes,
    causal_mask,
    combine_masks,
    dot_product_attention,
    padding_mask,
    rotary,
    sinusoidal_positions,
    window_mask,
)
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
    with pytest.raises(ConfigError, match=r"query must be floats \[B, T, H, K\], got float32\[3, 4, 8\]"):
        dot_product_attention(x[0], x, x)
    with pytest.raises(ConfigError, match="4 query heads are no multiple of 3"):
        dot_product_attention(x, x[:, :, :3], x[:, :, :3])
    for arguments, said in (
        ((x, x, x[:, :2]), r"do not fit together: query \[1, 3, 4, 8\], key \[1, 3, 4, 8\], value \[1, 2, 4, 8\]"),
        ((x, x[..., :4], x[..., :4]), "do not fit together"),
        ((x, x, x, jnp.ones((1, 1, 3, 3))), r"a mask must be bool, True = may attend, got float32\[1, 1, 3, 3\]"),
        (
            (x, x, x, IndexMask(jnp.ones((1, 4), bool))),
            r"valid must be bool\[1, 3\], .* got bool\[1, 4\]",
        ),
        ((x.astype(int),) * 3, r"query must be floats \[B, T, H, K\], got int32"),
        ((x, x, x, jnp.ones((3, 3), bool)), r"broadcast to \[B, H, T, S\] = \[1, 4, 3, 3\], got \[3, 3\]"),
        ((x, x, x, jnp.ones((1, 1, 3, 4), bool)), r"got \[1, 1, 3, 4\]"),
        ((x, x, x, None, jnp.ones((1, 1, 3, 3), bool)), "a bias must be a float, added to the scores, got bool"),
    ):
        with pytest.raises(ConfigError, match=said):
            dot_product_attention(*arguments)


def test_masks_and_positions_of_another_kind():
    ids, positions = jnp.array([[7, 8, 0]]), jnp.arange(3)[None]
    for call, said in (
        (lambda: padding_mask(ids), r"valid must be bool \[B, S\], True = a real token, got int32\[1, 3\]"),
        (lambda: combine_masks(None, ids), "a mask must be bool, True = may attend, got int32"),
        (lambda: causal_mask(positions.astype(jnp.float32), positions), "positions must be whole numbers"),
        (lambda: causal_mask(0), "a length must be at least 1, got 0"),
        (lambda: causal_mask(positions[0], positions), r"\[B or 1, T\], got int32\[3\]"),
        (lambda: window_mask(4, window=0), "a window must be a whole number of at least 1"),
        (lambda: window_mask(4, window=1.5), "whole number of at least 1, .* got 1.5"),
        (lambda: causal_mask(8.0), "positions must be an array, got float"),
        (lambda: padding_mask([[True]]), "valid must be an array, got"),
        (lambda: combine_masks(IndexMask(causal=True)), "a mask must be an array, got IndexMask"),
        (lambda: rotary(jnp.ones((1, 3, 2, 4)), positions, -1.0), "must be above 0, got -1.0"),
        (
            lambda: rotary(jnp.ones((1, 3, 2, 4)), positions.astype(jnp.float32)),
            r"whole numbers \[B or 1, T\], got float32",
        ),
        (lambda: rotary(jnp.ones((1, 3, 2, 4)), positions[:, :2]), "of different lengths or rows"),
        (lambda: rotary(jnp.ones((1, 3, 2, 5)), positions), "even head_dim, got 5"),
        (
            lambda: combine_masks(ids != 0, jnp.ones((1, 2), bool)),
            r"to one \[B, H, T, S\], got \[1, 3\], \[1, 2\]",
        ),
        (lambda: alibi_bias(2, positions[0], positions[0]), "positions must be whole numbers"),
        (lambda: sinusoidal_positions(-1, 4), "length must be at least 1, got -1"),
        (lambda: alibi_slopes(0), "at least 1, got 0"),
        (lambda: sinusoidal_positions(3, 0), "at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()


def test_products_add_up_in_float32():
    """Adding ones in bfloat16 stops at 256."""
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    assert float((ones @ ones.T)[0, 0]) == 4096


def test_cache_drops_what_finds_no_room():
    cache = KVCache(jnp.zeros((2, 1, 1, 3, 4)), jnp.zeros((2, 1, 1, 3, 4)), jnp.array([2]))
    new = jnp.ones((1, 2, 1, 4))
    written, keys, _ = LayerCache(cache, 1, jnp.array([[2, 3]])).write(new, new)
    np.testing.assert_array_equal(keys[0, :, 0, 0], [0, 0, 1])
    assert float(written.cache.keys[0].sum()) == 0  # the other layer is untouched
