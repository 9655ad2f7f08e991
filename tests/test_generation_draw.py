"""Which symbols may be drawn, against the definition in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from transformer_jax.generation.draw import Filters, draw, rank
from transformer_jax.generation.settings import check_settings

RANK, DRAW = jax.jit(rank), jax.jit(draw)
LARGEST = float(np.finfo(np.float32).max)
SIZES = (7, 7, 7, 7, 2, 1)
"""Of vocabularies, most of them of the largest: a program each."""

PLAIN = st.floats(-2, 2, width=32, allow_subnormal=False)
LOGITS = st.sampled_from(
    [
        PLAIN,
        PLAIN,
        st.sampled_from([-1.0, 0.0, -0.0, 1.0]),
        st.floats(-1e3, 1e3, width=32, allow_subnormal=False) | st.sampled_from([-np.inf, 1e-30, -1e9, 3e38, -3e38]),
        st.sampled_from([-np.inf, 3e38, -3e38]),
    ]
)
"""As different as a model's, equal ones, and such as no model has."""

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.1, 10) | st.sampled_from([0.0, 0.0, 1e-6, 1e30]) | st.floats(0, 1e308),
        "top_k": st.integers(1, 9),
        "top_p": st.floats(0.1, 0.9) | st.floats(0, 1, exclude_min=True) | st.sampled_from([1e-30, 1e-300, 1 - 1e-9]),
        "min_p": st.floats(0, 1) | st.just(1.0),
        "repetition_penalty": st.floats(0.1, 5) | st.floats(0, 1e308, exclude_min=True),
    },
)
PLAINLY = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@st.composite
def rows(draw):
    """Logits, at least one of them finite, as the model's are; and which symbols were seen."""
    size = draw(st.sampled_from(SIZES))
    logits = draw(LOGITS.flatmap(lambda each: st.lists(each, min_size=size, max_size=size)))
    if max(logits) == -np.inf:
        logits[draw(st.integers(0, size - 1))] = draw(PLAIN)
    seen = draw(st.just([True] * size) | st.lists(st.booleans(), min_size=size, max_size=size))
    return np.float32(logits), np.array(seen)


def definition(logits, seen, temperature, top_k, top_p, min_p, repetition_penalty):
    """The order of the symbols; which of them, in this order, must be kept; and which may."""
    penalty = np.float32(np.clip(repetition_penalty, 1e-30, 1e30))
    with np.errstate(over="ignore", under="ignore"):
        lowered = np.clip([x / penalty if x > 0 else x * penalty for x in logits], -LARGEST, LARGEST)
    logits = np.where(seen & np.isfinite(logits), lowered, logits).astype(float)
    logits[abs(logits) < np.finfo(np.float32).tiny] = 0  # XLA has no smaller ones
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    scaled = [(logits[i] - logits[order[0]]) / np.clip(temperature, 1e-6, 1e30) for i in order]
    weights = [np.exp(x) if place < (top_k or len(order)) else 0.0 for place, x in enumerate(scaled)]
    shares = [weight / sum(weights) for weight in weights]
    must, may = [], []
    for place, share in enumerate(shares):
        in_k = place < (top_k or len(order))
        before = sum(shares[:place])
        # Sums and quotients are rounded in float32: what is this near to a limit may fall on either side.
        for kept, near in ((must, -1e-5), (may, 1e-5)):
            in_p = top_p >= 1 - 6e-8 or before < top_p + near
            likely = min_p == 0 or share >= min_p * shares[0] * (1 - 10 * near) - (near > 0) * 1e-37
            kept.append(place == 0 or (in_k and in_p and likely and scaled[place] > -np.inf))
    return order, must, may, scaled


@examples(300)
@given(rows(), SETTINGS, st.integers(0, 2**32 - 1))
def test_the_right_symbols_are_kept(row, how, seed):
    logits, seen = row
    how = PLAINLY | how
    drawing = {"num_tokens": 1, "stop": (), "num_samples": 1, "seed": seed}
    check_settings(**drawing, **how)  # all of these can be asked for
    filters = Filters.of(len(logits), **how)
    order, ranked = (np.asarray(x)[0] for x in RANK(logits[None], seen[None], filters))
    expected, must, may, scaled = definition(logits, seen, **how)
    assert order.tolist() == expected
    assert ranked[0] == 0
    kept = ranked > -np.inf
    finite = np.array(scaled) > -1e8  # of what is further down the probability is 0 all the same
    assert (kept >= (np.array(must) & finite)).all()
    assert (kept <= np.array(may)).all()
    np.testing.assert_allclose(ranked[kept], np.array(scaled)[kept], rtol=1e-5, atol=1e-35)
    drawn = int(DRAW(jax.random.split(jax.random.key(seed), 1), logits[None], seen[None], filters)[0])
    assert drawn in order[kept]
    if how["temperature"] < 1e-6:
        assert drawn == order[0]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_of_equals_the_lower_ids_are_kept(size):
    """Of 8 symbols `size` share the probability: no sum of these is rounded."""
    logits = jnp.where(jnp.arange(8) % (8 // size) == 0, 3.0, -jnp.inf)[None]
    likely = [i for i in range(8) if i % (8 // size) == 0]
    for count in range(1, size + 1):
        for how in ({"top_k": count}, {"top_p": count / size}, {"top_k": count, "min_p": 1.0}):
            order, ranked = RANK(logits, jnp.zeros((1, 8), bool), Filters.of(8, 1.0, **how))
            assert order[0, np.asarray(ranked[0]) > -np.inf].tolist() == likely[:count]
    keys, greedy = jax.random.split(jax.random.key(0), 20), Filters.of(8, 0.0)
    assert not DRAW(keys, jnp.tile(logits, (20, 1)), jnp.zeros((20, 8), bool), greedy).any()
