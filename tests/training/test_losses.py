import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.training.losses import cross_entropy, mean


def softmax_cross_entropy(logits, targets):
    logits = np.asarray(logits, np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probabilities, targets[..., None], -1)[..., 0]


def example():
    logits = jax.random.normal(jax.random.key(0), (3, 4, 7)) * 3
    targets = np.arange(12).reshape(3, 4) % 7
    weights = (np.arange(12).reshape(3, 4) % 3 > 0).astype(np.float32)
    return logits, targets, weights


def test_cross_entropy_formula():
    logits, targets, weights = example()
    total, count = cross_entropy(logits, targets, weights)
    assert float(total) == pytest.approx((softmax_cross_entropy(logits, targets) * weights).sum(), rel=1e-5)
    assert float(count) == weights.sum()


def test_sums_over_rows_alone():
    logits, targets, weights = example()
    totals, counts = cross_entropy(logits, targets, weights, axis=0)
    np.testing.assert_allclose(totals, (softmax_cross_entropy(logits, targets) * weights).sum(0), rtol=1e-5)
    np.testing.assert_array_equal(counts, weights.sum(0))


def test_label_smoothing_formula():
    logits, targets, weights = example()
    uniform = np.mean([softmax_cross_entropy(logits, np.full((3, 4), v)) for v in range(7)], axis=0)
    expected = 0.9 * softmax_cross_entropy(logits, targets) + 0.1 * uniform
    total, _ = cross_entropy(logits, targets, weights, label_smoothing=0.1)
    assert float(total) == pytest.approx((expected * weights).sum(), rel=1e-5)


def test_z_loss_formula():
    logits, targets, weights = example()
    log_z = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
    with_z, _ = cross_entropy(logits, targets, weights, z_loss=0.01)
    without, _ = cross_entropy(logits, targets, weights)
    assert float(with_z - without) == pytest.approx((0.01 * log_z**2 * weights).sum(), rel=1e-3)


def test_matches_pytorch():
    torch = pytest.importorskip("torch")
    logits, targets, _ = example()
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(np.array(logits).reshape(-1, 7)), torch.from_numpy(targets.ravel()), label_smoothing=0.1
    )
    total, count = cross_entropy(logits, targets, jnp.ones((3, 4)), label_smoothing=0.1)
    assert float(total / count) == pytest.approx(float(expected), rel=1e-5)


def test_parts_are_weighted_by_their_targets():
    """1 target at 4.0 and 9 at 1.0 have the mean 1.3, not 2.5."""
    totals, counts = jnp.array([4.0, 9.0]), jnp.array([1.0, 9.0])
    assert float(mean(totals.sum(), counts.sum())) == pytest.approx(1.3)


def test_nothing_counts():
    logits, targets, _ = example()

    def loss(logits):
        return mean(*cross_entropy(logits, targets, jnp.zeros((3, 4))))

    value, grad = jax.value_and_grad(loss)(logits)
    assert float(value) == 0
    assert float(jnp.abs(grad).max()) == 0


def test_ignored_targets_may_hold_anything():
    logits, targets, weights = example()
    total, _ = cross_entropy(logits, targets, weights)
    odd, _ = cross_entropy(logits, np.where(weights > 0, targets, -1), weights)
    assert float(total) == float(odd)
