from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from transformer_jax import ModelConfig, preset
from transformer_jax.errors import ConfigError
from transformer_jax.flops import Flops, abstract_model, count, model_flops

SMALL = ModelConfig(vocab_size=11, context=8, d_model=16, num_heads=4, num_layers=3, d_ff=24)
T, D, L, F, V = 8, 16, 3, 24, 11
SELF_ATTENTION = 4 * D * D
"""Parameters of the four maps; what they cost for one token is twice this, and 4 T D for scores and values."""
SWIGLU = 3 * D * F


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@pytest.mark.parametrize(
    ("fields", "per_token"),
    [
        ({}, L * (2 * (SELF_ATTENTION + SWIGLU) + 4 * T * D) + 2 * D * V),
        ({"architecture": "encoder"}, L * (2 * (SELF_ATTENTION + SWIGLU) + 4 * T * D) + 2 * D * V),
        ({"tie_embeddings": True, "window": 2}, L * (2 * (SELF_ATTENTION + SWIGLU) + 4 * T * D) + 2 * D * V),
        ({"num_kv_heads": 1}, L * (2 * (2 * D * D + 2 * D * 4 + SWIGLU) + 4 * T * D) + 2 * D * V),
        ({"feed_forward": "relu"}, L * (2 * (SELF_ATTENTION + 2 * D * F) + 4 * T * D) + 2 * D * V),
        ({"attention": "none", "head_transform": True}, L * 2 * SWIGLU + 2 * D * D + 2 * D * V),
        ({"architecture": "rnn"}, L * 2 * 2 * D * D + 2 * D * V),
        ({"architecture": "gru"}, L * 2 * 3 * 2 * D * D + 2 * D * V),
        ({"architecture": "lstm", "use_bias": True}, L * 2 * 4 * 2 * D * D + 2 * D * V),
    ],
    ids=str,
)
def test_by_hand(fields, per_token):
    flops = model_flops(replace(SMALL, **fields))
    assert flops.forward_per_token == per_token
    # Each product has a gradient on both sides: everything that is multiplied depends on a parameter.
    assert flops.training == 3 * flops.forward


def test_encoder_decoder_by_hand():
    flops = model_flops(replace(SMALL, architecture="encoder_decoder", num_encoder_layers=2, source_vocab_size=7))
    encoder_layer = 2 * (SELF_ATTENTION + SWIGLU) + 4 * T * D
    decoder_layer = 2 * (2 * SELF_ATTENTION + SWIGLU) + 2 * 4 * T * D
    assert flops.forward_per_token == 2 * encoder_layer + L * decoder_layer + 2 * D * V
    assert flops.training == 3 * flops.forward


@pytest.mark.parametrize(
    ("fields", "last_map"),
    [({}, D * F), ({"feed_forward": "none"}, D * D), ({"norm_position": "post"}, 0)],
    ids=str,
)
def test_remat_computes_each_layer_again_but_for_a_last_map_that_no_gradient_needs(fields, last_map):
    model = replace(SMALL, **fields)
    flops, again = model_flops(model), model_flops(replace(model, remat=True))
    assert again.forward == flops.forward
    head = 2 * T * D * V
    assert again.training == flops.training + (flops.forward - head) - L * 2 * T * last_map


def test_gpt2():
    matrices = 12 * 12 * 768**2 + 768 * 50_257
    assert model_flops(preset("gpt2").model).forward_per_token == 2 * matrices + 12 * 4 * 1_024 * 768


@pytest.mark.parametrize(
    "fields", [{"unroll": 3}, {"attention_impl": "cudnn"}, {"compute_dtype": "bfloat16"}, {"dropout": 0.5}], ids=str
)
def test_what_changes_nothing(fields):
    assert model_flops(replace(SMALL, **fields)) == model_flops(SMALL)


def test_the_largest_model_needs_no_memory():
    model = ModelConfig(vocab_size=128_000, context=2**17, d_model=2**14, num_heads=128, num_layers=126, d_ff=53_248)
    _, variables, inputs = abstract_model(model)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((variables, inputs)))
    assert model_flops(model).forward_per_token > 10**12


def test_vocab_size_must_be_known():
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        model_flops(ModelConfig())


def test_per_token():
    assert Flops(30, 90, 4).forward_per_token == 7.5
    assert Flops(30, 90, 4).training_per_token == 22.5


def test_products():
    assert count(jnp.matmul, shape(5, 2, 3), shape(5, 3, 4)) == 2 * 5 * 2 * 3 * 4
    assert count(lambda x: jnp.einsum("abc,abd->", x, x), shape(2, 3, 4)) == count(
        lambda x: jnp.einsum("abc,abd->", x, x).sum(), shape(2, 3, 4)
    )
    assert count(jnp.exp, shape(5)) == 0


def test_inner_programs():
    x, one = shape(4, 4), 2 * 4**3

    def repeated(x):
        return jax.lax.scan(lambda x, _: (jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0], None), x, length=5)

    @jax.custom_vjp
    def custom(x):
        return x @ x

    custom.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x @ x @ x,))

    assert count(repeated, x) == 15 * one
    assert count(jax.jit(lambda x: x @ x), x) == one
    assert count(jax.checkpoint(lambda x: x @ x), x) == one
    assert count(custom, x) == one
    assert count(jax.grad(lambda x: custom(x).sum()), x) == 4 * one
    assert count(lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ x @ x, lambda x: x @ x, x), x) == 2 * one
    assert count(lambda x: jax.lax.fori_loop(0, 7, lambda i, x: x @ x, x), x) == 7 * one


def test_what_cannot_be_counted():
    def unknown(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    with pytest.raises(ConfigError, match="how often it turns is not known"):
        count(unknown, shape(4, 4))
    with pytest.raises(ConfigError, match="inside conv_general_dilated cannot be counted"):
        count(lambda x, k: jax.lax.conv(x, k, (1,), "SAME"), shape(1, 2, 5), shape(2, 2, 3))
    assert count(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, jnp.exp, x), shape(4)) == 0
