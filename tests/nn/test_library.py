"""Each piece alone: its example runs, and it works under every transformation and in both precisions."""

import doctest
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, nn


def heads(x):
    return x.reshape(2, 4, 2, 4)


FUNCTIONS = {
    "dot_product_attention": lambda x: nn.dot_product_attention(
        *[x.reshape(2, 4, 2, 4)] * 3, nn.IndexMask(causal=True)
    ),
    "rotary": lambda x: nn.rotary(heads(x), jnp.arange(4)[None]),
}
MODULES = {
    "LayerNorm": nn.LayerNorm(),
    "RMSNorm": nn.RMSNorm(),
    "FeedForward": nn.FeedForward(8, "swiglu"),
    "MultiHeadAttention": nn.MultiHeadAttention(2, num_kv_heads=1, rotary_base=100.0),
    "EncoderLayer": nn.EncoderLayer(d_model=8, num_heads=2, positions="alibi"),
    "DecoderLayer": nn.DecoderLayer(d_model=8, num_heads=2, norm="rms", norm_position="post"),
    "Encoder": nn.Encoder(d_model=8, num_heads=2, num_layers=2),
    "Decoder": nn.Decoder(d_model=8, num_heads=2, num_layers=2, positions="rotary"),
}


def test_every_name_has_a_running_example():
    """Values without behaviour of their own need none."""
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner()
    without = []
    for name in nn.__all__:
        found = getattr(nn, name)
        module = importlib.import_module(found.__module__)
        names = {**vars(module), "jax": jax, "jnp": jnp, "IndexMask": nn.IndexMask, "ModelConfig": ModelConfig}
        tests = finder.find(found, name, module=module, globs=names)
        if not any(test.examples for test in tests) and name not in ("IndexMask", "RecurrentState"):
            without.append(name)
        for test in tests:
            assert runner.run(test).failed == 0, name
        assert inspect.getdoc(found)
    assert without == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])
def test_works_under_every_transformation(name, dtype):
    """One jitted program: plain, vmapped, scanned, and the gradient with and without recomputing."""
    x = jax.random.normal(jax.random.key(0), (3, 2, 4, 8)).astype(dtype)
    if name in FUNCTIONS:
        run = FUNCTIONS[name]
    else:
        module = MODULES[name]
        for field in ("dtype", "compute_dtype"):
            if hasattr(module, field):
                module = module.clone(**{field: dtype})
        params = jax.jit(module.init)(jax.random.key(1), x[0])

        def run(x):
            return module.apply(params, x)

    def loss(run):
        return lambda x: jnp.sum(jnp.sin(run(x).astype(jnp.float32)))

    @jax.jit
    def every(x):
        plain = jnp.stack([run(row) for row in x])
        scanned = jax.lax.scan(lambda carry, row: (carry, run(row)), None, x)[1]
        gradients = [jax.grad(loss(f))(x[0]) for f in (run, jax.checkpoint(run))]
        return plain, jax.vmap(run)(x), scanned, gradients

    plain, mapped, scanned, (gradient, recomputed) = every(x)
    assert plain.dtype == gradient.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    for other in (mapped, scanned):
        np.testing.assert_allclose(other.astype(jnp.float32), plain.astype(jnp.float32), atol=tolerance)
    np.testing.assert_allclose(recomputed.astype(jnp.float32), gradient.astype(jnp.float32), atol=tolerance)
    assert float(jnp.abs(gradient.astype(jnp.float32)).max()) > 0
