import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import ConfigError
from transformer_jax.nn import FeedForward, LayerNorm, RMSNorm
from transformer_jax.nn.layers import ACTIVATIONS, INITS, Embedding, make_norm


def test_layer_norm_large_mean():
    x = jnp.array([10000.0, 10001, 10002, 10003])
    out = LayerNorm().apply({"params": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}}, x)
    np.testing.assert_allclose(out, [-1.3416, -0.4472, 0.4472, 1.3416], atol=1e-4)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_layer_norm_formula(eps):
    x = np.random.default_rng(0).normal(3, 2, (4, 6))
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    norm = LayerNorm(eps=eps, use_scale=False, use_bias=False)
    np.testing.assert_allclose(norm.apply({}, jnp.asarray(x, jnp.float32)), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("norm", [LayerNorm(eps=1e-12), RMSNorm(eps=1e-12)])
def test_constant_vector_in_half_precision(norm, dtype):
    x = jnp.full((8,), 3, dtype)
    params = norm.init(jax.random.key(0), x)
    out, grad = jax.value_and_grad(lambda x: jnp.sum(norm.apply(params, x).astype(jnp.float32)))(x)
    assert float(out) == (0 if isinstance(norm, LayerNorm) else 8)
    assert jnp.isfinite(grad).all()


def test_rms_norm_formula():
    x = np.random.default_rng(0).normal(3, 2, (4, 6))
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.arange(6)
    out = RMSNorm().apply({"params": {"scale": jnp.arange(6.0)}}, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_make_norm():
    x = jnp.ones((2, 3))
    assert make_norm("none", eps=1, affine=True, use_bias=True)(x) is x
    with pytest.raises(ConfigError, match="unknown norm 'batch'"):
        make_norm("batch", eps=1, affine=True, use_bias=True)


def _numpy_activation(name, x):
    from math import erf

    return {
        "relu": lambda: np.maximum(x, 0),
        "gelu": lambda: 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "relu2": lambda: np.maximum(x, 0) ** 2,
        "swiglu": lambda: x / (1 + np.exp(-x)),
    }[name]()


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_feed_forward_formula(activation):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    layer = FeedForward(d_ff=8, activation=activation)
    params = layer.init(jax.random.key(1), x)["params"]
    params = jax.tree.map(lambda p: p + 0.1, params)  # biases count too
    wide = {k: {n: np.asarray(a, np.float64) for n, a in v.items()} for k, v in params.items()}
    y = np.asarray(x, np.float64)
    hidden = _numpy_activation(activation, y @ wide["up"]["kernel"] + wide["up"]["bias"])
    if activation == "swiglu":
        hidden = hidden * (y @ wide["gate"]["kernel"] + wide["gate"]["bias"])
    expected = hidden @ wide["down"]["kernel"] + wide["down"]["bias"]
    np.testing.assert_allclose(layer.apply({"params": params}, x), expected, atol=1e-5)


def test_feed_forward_unknown_activation():
    with pytest.raises(ConfigError, match="unknown feed-forward 'tanh'"):
        FeedForward(d_ff=8, activation="tanh").init(jax.random.key(0), jnp.ones((1, 1, 4)))


def test_embedding_never_wraps_or_gives_nan():
    table = Embedding(3, 2)
    params = {"params": {"embedding": jnp.arange(6.0).reshape(3, 2)}}
    out = jax.jit(table.apply)(params, jnp.array([-1, 0, 2, 3]))
    np.testing.assert_array_equal(out, [[0, 1], [0, 1], [4, 5], [4, 5]])


def test_embedding_gradients_add_up_in_float32():
    """In bfloat16 the sum for a symbol that occurs often would stop growing."""
    table = Embedding(2, 1)
    params = {"params": {"embedding": jnp.ones((2, 1))}}
    ids = jnp.zeros((16, 256), jnp.int32)
    grads = jax.grad(lambda p: jnp.sum(table.apply(p, ids, jnp.bfloat16).astype(jnp.float32)))(params)
    assert float(grads["params"]["embedding"][0, 0]) == 4096


@pytest.mark.parametrize(("layers", "std"), [(12, 0.004082), (6, 0.005774)])
def test_gpt2_residual_scaling(layers, std):
    inits = INITS["gpt2"](2 * layers)
    key = jax.random.key(0)
    assert float(inits.output(key, (256, 1024), jnp.float32).std()) == pytest.approx(std, rel=0.05)
    assert float(inits.kernel(key, (256, 1024), jnp.float32).std()) == pytest.approx(0.02, rel=0.05)
