"""The formulas of the four teaching texts that the library grew from, in NumPy and float64, against the library.

Haskell: Module 6, The Transformer Architecture. Week 16: The Full Transformer Architecture. Module 26: Transformer
Basics. Post 55: The Transformer Architecture, Why It Beat Everything.
"""

from dataclasses import replace
from math import cos, erf, sin

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import create_model, preset
from transformer_jax.nn import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    IndexMask,
    LayerNorm,
    MultiHeadAttention,
    sinusoidal_positions,
)
from transformer_jax.nn.blocks import field_names
from transformer_jax.training.losses import cross_entropy

B, T, S, D, V = 2, 6, 4, 16, 11
SMALL = {"d_model": D, "num_heads": 4, "d_ff": 24, "vocab_size": V, "num_layers": 3, "unroll": 1}


def small(name, **fields):
    """A text's preset, small enough to test."""
    return replace(preset(name).model, **SMALL, **fields)


def layer(kind, model_config):
    """One layer of a model."""
    names = set(field_names(kind)) & set(model_config.__dataclass_fields__)
    return kind(**{name: getattr(model_config, name) for name in names}, weight_init=model_config.init)


def haskell_positions(length, d_model):
    def pe(pos, dim):
        if dim % 2 == 0:
            return sin(pos / 10000 ** (dim / d_model))
        return cos(pos / 10000 ** ((dim - 1) / d_model))

    return np.array([[pe(pos, dim) for dim in range(d_model)] for pos in range(length)])


def week_16_positions(length, d_model):
    position = np.arange(length)[:, np.newaxis]
    dim = np.arange(d_model)[np.newaxis, :]
    angles = position / np.power(10000, (2 * (dim // 2)) / d_model)
    pe = np.zeros((length, d_model))
    pe[:, 0::2] = np.sin(angles[:, 0::2])
    pe[:, 1::2] = np.cos(angles[:, 1::2])
    return pe


def layer_norm(x, eps):
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps)


def gained_layer_norm(params, x, eps=1e-5):
    return layer_norm(x, eps) * params["scale"] + params["bias"]


def relu(x):
    return np.maximum(0, x)


def gelu(x):
    return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2


def feed_forward(params, x, activation=relu):
    hidden = activation(x @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def multi_head_attention(params, query, memory, mask=None):
    def head(h):
        q, k, v = (
            x @ params[name]["kernel"][:, h] + params[name]["bias"][h]
            for name, x in (("query", query), ("key", memory), ("value", memory))
        )
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        return softmax(scores if mask is None else np.where(mask, scores, -np.inf)) @ v

    kernel = params["output"]["kernel"]
    heads = np.concatenate([head(h) for h in range(len(kernel))], axis=-1)
    return heads @ kernel.reshape(-1, kernel.shape[-1]) + params["output"]["bias"]


def causal(length):
    return np.tril(np.ones((length, length), bool))


def haskell_block(params, x, mask=None):
    norm_1 = layer_norm(x, 1e-6)
    after_attention = x + multi_head_attention(params["self_attention"], norm_1, norm_1, mask)
    norm_2 = layer_norm(after_attention, 1e-6)
    return after_attention + feed_forward(params["ffn"], norm_2)


def week_16_encoder_block(params, x):
    x = layer_norm(x + multi_head_attention(params["self_attention"], x, x), 1e-5)
    return layer_norm(x + feed_forward(params["ffn"], x), 1e-5)


def week_16_decoder_block(params, x, encoder_output):
    x = layer_norm(x + multi_head_attention(params["self_attention"], x, x, causal(x.shape[1])), 1e-5)
    x = layer_norm(x + multi_head_attention(params["cross_attention"], x, encoder_output), 1e-5)
    return layer_norm(x + feed_forward(params["ffn"], x), 1e-5)


def module_26_block(params, x, activation=gelu):
    x = gained_layer_norm(params["self_attention_norm"], x + multi_head_attention(params["self_attention"], x, x))
    return gained_layer_norm(params["ffn_norm"], x + feed_forward(params["ffn"], x, activation))


def post_55_block(activation):
    """LayerNorm(x + Sublayer(x)), with a ReLU or GELU: what Module 26 writes out."""
    return lambda params, x: module_26_block(params, x, activation)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape)


def with_random_params(module, *inputs, **kwargs):
    """The module's output, and its parameters in float64; none of them is 0 or 1."""
    inputs = [jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else jnp.int32) for x in inputs]
    params = jax.jit(lambda *x: module.init(jax.random.key(0), *x, **kwargs))(*inputs)["params"]
    draw = np.random.default_rng(2)
    params = jax.tree.map(lambda p: jnp.asarray(draw.normal(p, 0.2), jnp.float32), params)
    out = jax.jit(lambda p, *x: module.apply({"params": p}, *x, **kwargs))(params, *inputs)
    return out, jax.tree.map(lambda p: np.asarray(p, np.float64), params)


def layers_of(params):
    depth = len(jax.tree.leaves(params)[0])
    return [jax.tree.map(lambda p, i=i: p[i], params) for i in range(depth)]


def assert_close(out, expected):
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("formula", [haskell_positions, week_16_positions])
@pytest.mark.parametrize("d_model", [1, 2, 5, 16])
def test_positions(d_model, formula):
    assert_close(sinusoidal_positions(20, d_model), formula(20, d_model))


def test_values_of_positions():
    table = sinusoidal_positions(4, 5)
    np.testing.assert_allclose(table[1], [0.841471, 0.540302, 0.0251162, 0.9996845, 0.000631], atol=1e-6)
    np.testing.assert_allclose(table[3], [0.141120, -0.989993, 0.0752853, 0.997162, 0.0018929], atol=1e-6)


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_layer_norm(eps):
    x = 0.01 * normal(B, T, D)  # small enough for eps to count
    out = LayerNorm(eps, use_scale=False, use_bias=False).apply({}, jnp.asarray(x, jnp.float32))
    assert_close(out, layer_norm(x, eps))


def test_feed_forward():
    x = normal(B, T, D)
    out, params = with_random_params(FeedForward(d_ff=4 * D), x)
    assert_close(out, feed_forward(params, x))


@pytest.mark.parametrize("masked", [False, True])
def test_self_attention(masked):
    x = normal(B, T, D)
    out, params = with_random_params(MultiHeadAttention(num_heads=4), x, mask=IndexMask(causal=masked))
    assert_close(out, multi_head_attention(params, x, x, causal(T) if masked else None))


def test_cross_attention():
    x, memory = normal(B, T, D), normal(B, S, D, seed=3)
    out, params = with_random_params(MultiHeadAttention(num_heads=4), x, memory)
    assert_close(out, multi_head_attention(params, x, memory))


BLOCKS = {
    "Haskell": (haskell_block, small("module_6")),
    "Week 16": (week_16_encoder_block, small("week_16")),
    "Module 26": (module_26_block, small("module_26")),
    "Post 55, ReLU": (post_55_block(relu), small("post_55")),
    "Post 55, GELU": (post_55_block(gelu), small("post_55", feed_forward="gelu")),
}


@pytest.mark.parametrize("seed", list(BLOCKS))
def test_encoder_block(seed):
    formula, model_config = BLOCKS[seed]
    x = 0.01 * normal(B, T, D)  # small enough for eps to count in a block that norms first
    out, params = with_random_params(layer(EncoderLayer, model_config), x)
    assert_close(out, formula(params, x))


def test_module_26_drops_where_its_block_does():
    model = preset("module_26").model
    assert (model.dropout, model.attention_dropout, model.feed_forward_dropout) == (0.1, 0.1, 0.1)
    assert (model.d_model, model.num_heads, model.d_ff, model.num_layers) == (512, 8, 2_048, 6)


def test_week_16_decoder_block():
    x, encoder_output = normal(B, T, D), normal(B, S, D, seed=3)
    block = layer(DecoderLayer, small("week_16")).clone(cross_attention=True)
    out, params = with_random_params(block, x, encoder_output, mask=IndexMask(causal=True))
    assert_close(out, week_16_decoder_block(params, x, encoder_output))


def haskell_forward(params, ids, blocks, mask=None):
    embeds = np.array([[params["token_embedding"]["embedding"][i] for i in row] for row in ids])
    x = embeds + haskell_positions(ids.shape[1], D)
    for block in blocks:
        x = haskell_block(block, x, mask)
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def haskell_cross_entropy(logits, targets):
    return np.mean([-np.log(softmax(logits[i])[targets[i]]) for i in range(len(targets))])


@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_haskell_language_model(architecture):
    """The text masks nothing; under a causal mask the same model is a decoder."""
    ids, targets = np.random.default_rng(4).integers(V, size=(2, B, T))
    logits, params = with_random_params(create_model(small("module_6", architecture=architecture)), ids)
    mask = causal(T) if architecture == "decoder" else None
    expected = haskell_forward(params, ids, layers_of(params[architecture]["layers"]), mask)
    assert_close(logits, expected)
    for row in range(B):
        total, count = cross_entropy(logits[row : row + 1], targets[row : row + 1], jnp.ones((1, T)))
        assert_close(total / count, haskell_cross_entropy(expected[row], targets[row]))


def test_week_16_encoder_decoder():
    source, target = np.random.default_rng(5).integers(V, size=(2, B, T))
    source = source[:, :S]
    model = create_model(small("week_16", architecture="encoder_decoder"))
    logits, params = with_random_params(model, source, target)
    table = params["token_embedding"]["embedding"]
    memory = table[source] + week_16_positions(S, D)
    for block in layers_of(params["encoder"]["layers"]):
        memory = week_16_encoder_block(block, memory)
    x = table[target] + week_16_positions(T, D)
    for block in layers_of(params["decoder"]["layers"]):
        x = week_16_decoder_block(block, x, memory)
    assert_close(logits, x @ params["head"]["kernel"])
