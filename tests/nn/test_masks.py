"""Who may attend to whom, against the definition in loops."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from transformer_jax.nn import IndexMask, causal_mask, combine_masks, padding_mask, window_mask
from transformer_jax.nn.stacks import Decoder, Encoder

SIZES = st.integers(1, 5)
WINDOWS = st.none() | st.integers(1, 7) | st.sampled_from([2**31 - 1, 2**31, 2**70])


@st.composite
def positions(draw, rows, length):
    """int32 [rows or 1, length], anywhere."""
    rows = draw(st.sampled_from([1, rows]))
    return np.array(
        draw(st.lists(st.lists(st.integers(0, 9), min_size=length, max_size=length), min_size=rows, max_size=rows)),
        np.int32,
    )


@st.composite
def validities(draw, rows, length, *, right=False):
    """bool [rows, length]: real tokens anywhere, or padding on the right alone."""
    if right:
        counts = draw(st.lists(st.integers(0, length), min_size=rows, max_size=rows))
        return np.arange(length) < np.array(counts)[:, None]
    row = st.lists(st.booleans(), min_size=length, max_size=length)
    return np.array(draw(st.lists(row, min_size=rows, max_size=rows)))


def definition(queries, keys, *, causal=False, window=None, valid=None):
    """bool [B, T, S], one by one, from positions [B or 1, T] and [B or 1, S]."""
    rows = max(len(queries), len(keys), 1 if valid is None else len(valid))
    seen = np.zeros((rows, queries.shape[1], keys.shape[1]), bool)
    for b, t, s in np.ndindex(seen.shape):
        query, key = queries[b % len(queries), t], keys[b % len(keys), s]
        seen[b, t, s] = (
            (not causal or key <= query)
            and (window is None or abs(int(query) - int(key)) < window)
            and (valid is None or valid[b % len(valid), s])
        )
    return seen


def assert_same(mask, expected):
    assert mask.dtype == jnp.bool_
    assert mask.shape[1] == 1
    np.testing.assert_array_equal(np.broadcast_to(mask[:, 0], expected.shape), expected)


@given(st.data(), SIZES, SIZES, st.integers(1, 3), st.booleans(), WINDOWS, st.booleans())
def test_each_mask_and_all_together(data, length, key_length, rows, causal, window, pads):
    queries, keys = data.draw(positions(rows, length)), data.draw(positions(rows, key_length))
    valid = data.draw(validities(rows, key_length)) if pads else None
    masks = [
        causal_mask(jnp.array(queries), jnp.array(keys)) if causal else None,
        None if window is None else window_mask(jnp.array(queries), jnp.array(keys), window=window),
        None if valid is None else padding_mask(jnp.array(valid)),
    ]
    apart = [
        definition(queries, keys, causal=causal),
        definition(queries, keys, window=window),
        definition(queries, keys, valid=valid),
    ]
    for mask, expected in zip(masks, apart, strict=True):
        if mask is not None:
            assert_same(mask, expected)
    combined = combine_masks(*data.draw(st.permutations(masks)))
    if all(mask is None for mask in masks):
        assert combined is None
    else:
        assert_same(combined, definition(queries, keys, causal=causal, window=window, valid=valid))


@given(st.data(), SIZES, SIZES, st.integers(1, 3), st.booleans(), WINDOWS, st.booleans())
def test_masks_by_place(data, length, key_length, rows, causal, window, pads):
    """`IndexMask`, and the short forms of the others, which take a length."""
    valid = data.draw(validities(rows, key_length)) if pads else None
    places = np.arange(length)[None], np.arange(key_length)[None]
    mask = IndexMask(None if valid is None else jnp.array(valid), causal, window).dense(length, key_length)
    if mask is None:
        assert not causal
        assert window is valid is None
    else:
        assert_same(mask, definition(*places, causal=causal, window=window, valid=valid))
    assert_same(causal_mask(length), definition(places[0], places[0], causal=True))
    assert_same(window_mask(length, window=window or 1), definition(places[0], places[0], window=window or 1))


T, S, CAPACITY, ROWS = 5, 4, 8, 2


@cache
def stack(kind, window):
    """A compiled layer without positions, which says where it attends to."""
    shared = {"d_model": 4, "num_heads": 1, "feed_forward": "none", "window": window}
    model = Encoder(**shared) if kind == "encoder" else Decoder(**shared, cross_attention=True)
    lengths = [T] if kind == "encoder" else [T, S]
    inputs = [jax.random.normal(jax.random.key(length), (ROWS, length, 4)) for length in lengths]
    params = jax.jit(model.init)(jax.random.key(0), *inputs)

    @jax.jit
    def attend(valid, length=None, **more):
        if length is not None:
            more["cache"] = model.empty_cache(ROWS, CAPACITY).replace(length=length)
        return model.apply(params, *inputs, valid=valid, capture=("attention",), **more)[-1]

    return attend


def token_places(valid, start=0):
    """[B, T]: how many real tokens of its row stand before each, those of a cache included."""
    before = [[max(int(row[: t + 1].sum()) - 1, 0) for t in range(T)] for row in valid]
    return np.array(before) + np.reshape(start, (-1, 1))


def assert_attends(weights, expected):
    """Weights [1, B, 1, T, S] are where they may be; a query that sees nothing is not looked at."""
    looks = expected.any(axis=-1, keepdims=True)
    np.testing.assert_array_equal((np.asarray(weights)[0, :, 0] > 0) & looks, expected)


@pytest.mark.parametrize("window", [None, 2])
@examples(50)
@given(valid=validities(ROWS, T))
def test_an_encoder_sees_real_tokens(window, valid):
    places = token_places(valid)
    expected = definition(places, places, window=window, valid=valid)
    assert_attends(stack("encoder", window)(valid)["attention"], expected)


@pytest.mark.parametrize("window", [None, 2])
@examples(50)
@given(valid=validities(ROWS, T), memory_valid=validities(ROWS, S))
def test_a_decoder_sees_real_tokens_before_and_all_of_the_source(window, valid, memory_valid):
    captured = stack("decoder", window)(valid, memory_valid=memory_valid)
    places, order = token_places(valid), np.arange(T)[None]
    near = definition(places, places, window=window)
    assert_attends(captured["attention"], near & definition(order, order, causal=True, valid=valid))
    source = np.arange(S)[None]
    assert_attends(captured["cross_attention"], definition(order, source, valid=memory_valid))


@pytest.mark.parametrize("window", [None, 2])
@examples(50)
@given(
    valid=validities(ROWS, T, right=True),
    memory_valid=validities(ROWS, S),
    length=st.lists(st.integers(0, CAPACITY - T), min_size=ROWS, max_size=ROWS),
)
def test_a_decoder_sees_what_its_cache_holds(window, valid, memory_valid, length):
    """Rows of other lengths each for itself; padding is not stored."""
    length = np.array(length, np.int32)
    captured = stack("decoder", window)(valid, memory_valid=memory_valid, length=length)
    places, slots = token_places(valid, length), np.arange(CAPACITY)[None]
    expected = definition(places, slots, causal=True, window=window)
    filled = slots < (length + valid.sum(axis=1))[:, None]
    real = valid[:, :, None]
    assert_attends(np.where(real, np.asarray(captured["attention"])[0, :, 0], 0)[None, :, None], expected & real)
    assert not (expected & real & ~filled[:, None]).any()
    source = np.arange(S)[None]
    assert_attends(captured["cross_attention"], definition(np.arange(T)[None], source, valid=memory_valid))
