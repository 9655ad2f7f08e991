import dataclasses
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, config, create_model
from transformer_jax.errors import ConfigError
from transformer_jax.nn import Transformer, kernels, layers
from transformer_jax.nn.blocks import field_names
from transformer_jax.nn.transformer import MODELS

V, T = 11, 12
SMALL = ModelConfig(
    vocab_size=V,
    context=T,
    d_model=16,
    num_heads=4,
    num_layers=2,
    d_ff=24,
    feed_forward="relu2",
    init="fan_in",
    positions="none",
    unroll=1,
)


def build(seed=0, **fields):
    """A small model, its parameters and some ids [2, T]."""
    model = create_model(dataclasses.replace(SMALL, **fields))
    ids = jax.random.randint(jax.random.key(99), (2, T), 0, V)
    return model, jax.jit(model.init)(jax.random.key(seed), ids)["params"], ids


def forward(model, params, ids, **kwargs):
    return jax.jit(lambda p, i, kw: model.apply({"params": p}, i, **kw))(params, ids, kwargs)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_matters(positions, side):
    model, params, ids = build(positions=positions)
    real = ids[:1, :4]
    expected = forward(model, params, real)
    for length, content in ((6, 0), (6, 3), (T, 3)):
        padding = jnp.full((1, length - 4), content)
        parts = (padding, real) if side == "left" else (real, padding)
        marks = (jnp.zeros((1, length - 4), bool), jnp.ones((1, 4), bool))
        valid = jnp.concatenate(marks if side == "left" else marks[::-1], axis=1)
        logits = forward(model, params, jnp.concatenate(parts, axis=1), valid=valid)
        place = slice(length - 4, None) if side == "left" else slice(0, 4)
        np.testing.assert_allclose(logits[:, place], expected, atol=1e-5)


def test_fully_padded_row_adds_nothing():
    model, params, ids = build()

    def loss(params, ids, valid):
        logits = model.apply({"params": params}, ids, valid=valid)
        return jnp.sum(jnp.where(valid[..., None], jax.nn.log_softmax(logits), 0.0)), logits

    valid = jnp.stack([jnp.ones(T, bool), jnp.zeros(T, bool)])
    (both, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, ids, valid)
    (alone, expected), grads_alone = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, ids[:1], valid[:1])
    assert jnp.isfinite(logits).all()
    np.testing.assert_allclose(logits[0], expected[0], atol=1e-5)
    assert float(both) == pytest.approx(float(alone), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), grads, grads_alone)


@pytest.mark.parametrize("form", ["plain", "all valid", "padded", "cache", "dropout"])
def test_no_look_ahead(form):
    model, params, ids = build(positions="rotary", dropout=0.5 if form == "dropout" else 0.0)
    valid = {"all valid": jnp.ones((2, T), bool), "padded": jnp.broadcast_to(jnp.arange(T)[None] < 10, (2, T))}

    @jax.jit
    def run(ids):
        if form == "cache":
            return model.apply({"params": params}, ids, cache=model.init_cache(2, T))[0]
        kwargs = {"deterministic": False, "rngs": {"dropout": jax.random.key(5)}} if form == "dropout" else {}
        return model.apply({"params": params}, ids, valid=valid.get(form), **kwargs)

    before, after = run(ids), run(ids.at[:, 7].set((ids[:, 7] + 1) % V))
    np.testing.assert_allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert float(jnp.abs(before[:, 7:10] - after[:, 7:10]).min(axis=(0, 2)).max()) > 0


def test_no_look_ahead_by_gradient():
    model, params, _ = build(positions="alibi")
    embedded = params["token_embedding"]["embedding"]

    def at(position):
        def one(table):
            changed = {**params, "token_embedding": {"embedding": table}}
            return model.apply({"params": changed}, jnp.arange(10)[None])[0, position].sum()

        return jax.grad(one)(embedded)

    grads = jax.jit(at, static_argnums=0)(4)
    assert float(jnp.abs(grads[5:10]).max()) == 0
    assert float(jnp.abs(grads[:5]).min(axis=0).max()) > 0


def test_permutation_equivariance_without_positions():
    """Without positions, one layer's prediction depends on the newest token and the set of those before it.

    More layers do see an order: each earlier position attends to those before it alone.
    """
    model, params, ids = build(num_layers=1)
    order = jnp.array([3, 1, 0, 2, 4])
    here, there = forward(model, params, ids[:, :5]), forward(model, params, ids[:, order])
    np.testing.assert_allclose(here[:, -1], there[:, -1], atol=1e-5)
    positioned, params, _ = build(num_layers=1, positions="rotary")
    here, there = forward(positioned, params, ids[:, :5]), forward(positioned, params, ids[:, order])
    assert float(jnp.abs(here[:, -1] - there[:, -1]).max()) > 1e-3


CHANGES = {
    "d_model": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_layers": 3,
    "d_ff": 32,
    "positions": "rotary",
    "norm": "layer",
    "norm_position": "post",
    "norm_eps": 0.1,
    "norm_affine": False,
    "final_norm": False,
    "attention": "none",
    "qk_norm": False,
    "window": 2,
    "feed_forward": "gelu",
    "residual": "none",
    "use_bias": True,
    "head_bias": True,
    "tie_embeddings": True,
    "scale_embeddings": True,
    "norm_embeddings": True,
    "head_transform": True,
    "architecture": "encoder",
    "init": "gpt2",
}


@pytest.mark.slow
def test_each_field_changes_the_output():
    """A field that does nothing is a lie. Parameters start from one seed, perturbed so that biases count."""

    ids = jax.random.randint(jax.random.key(99), (2, T), 0, V)

    def output(**fields):
        model = create_model(dataclasses.replace(SMALL, **fields))

        @jax.jit
        def run():
            params = jax.tree.map(lambda p: p + 0.05, model.init(jax.random.key(0), ids)["params"])
            return model.apply({"params": params}, ids), sum(p.size for p in jax.tree.leaves(params))

        return run()

    base, count = output()
    for name, value in CHANGES.items():
        changed, _ = output(**{name: value})
        assert float(jnp.abs(changed - base).max()) > 1e-5, name
    rotary, _ = output(positions="rotary")
    for fields in ({"positions": "alibi"}, {"positions": "rotary", "rotary_base": 100.0}, {"positions": "sinusoidal"}):
        assert float(jnp.abs(output(**fields)[0] - rotary).max()) > 1e-5, fields
    # Widths: embedding and head V D each; a layer 4 D D + 2 D F + gains of two norms and of queries and keys; a norm.
    d, f, k = 16, 24, 4
    assert count == 2 * V * d + 2 * (4 * d * d + 2 * d * f + 2 * d + 2 * k) + d
    assert output(tie_embeddings=True)[1] == count - V * d
    assert output(num_kv_heads=1)[1] == count - 2 * 2 * d * (d - k)
    assert output(feed_forward="swiglu")[1] == count + 2 * d * f
    assert output(positions="learned")[1] == count + T * d
    # Where no width is given, both kinds have 8 D D parameters in each feed-forward.
    assert output(d_ff=None)[1] == count + 2 * (8 * d * d - 2 * d * f)
    assert output(d_ff=None, feed_forward="swiglu")[1] == count + 2 * (3 * d * (8 * d // 3) - 2 * d * f)


def test_fields_that_must_not_change_the_output():
    model, params, ids = build()

    def loss(model):
        return jax.jit(jax.value_and_grad(lambda p: jnp.sum(model.apply({"params": p}, ids) ** 2)))(params)

    value, grads = loss(model)
    for fields in ({"unroll": 2}, {"remat": True}, {"unroll": 2, "remat": True}, {"dropout": 0.5}):
        other = create_model(dataclasses.replace(SMALL, **fields))
        assert jax.tree.structure(params) == jax.tree.structure(build(**fields)[1])
        other_value, other_grads = loss(other)
        assert float(other_value) == pytest.approx(float(value), rel=1e-5), fields
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), grads, other_grads)


def test_remat_saves_memory():
    """With the default config too: it is scanning that lets the compiler forget what is inside a layer."""

    def temporary(**fields):
        model = create_model(ModelConfig(vocab_size=V, context=128, d_model=32, num_heads=4, **fields))
        ids = jax.ShapeDtypeStruct((4, 128), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
        gradient = jax.grad(lambda p, ids: jnp.sum(model.apply({"params": p}, ids)))
        return jax.jit(gradient).lower(params, ids).compile().memory_analysis().temp_size_in_bytes

    assert temporary(remat=True) < 0.6 * temporary()


def test_names_that_stored_runs_depend_on():
    """Checkpoints are read by the names of parameters, and dropout draws by the names of its modules."""
    _, params, ids = build(positions="learned", qk_norm=True, use_bias=True, feed_forward="swiglu", head_bias=True)
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)}
    maps = [f"self_attention/{name}" for name in ("query", "key", "value", "output")]
    maps += [f"ffn/{name}" for name in ("up", "gate", "down")]
    scales = [f"{n}/scale" for n in ("self_attention_norm", "query_norm", "key_norm", "ffn_norm")]
    assert names == {
        "token_embedding/embedding",
        "position_embedding/embedding",
        *(f"decoder/layers/{name}/{leaf}" for name in maps for leaf in ("kernel", "bias")),
        *(f"decoder/layers/{name}" for name in scales),
        "decoder/output_norm/scale",
        "head/kernel",
        "head/bias",
    }
    drawn = []

    def record(call, args, kwargs, context):
        if isinstance(context.module, nn.Dropout) and context.module.rate:
            drawn.append("/".join(context.module.path))
        return call(*args, **kwargs)

    model = create_model(dataclasses.replace(SMALL, dropout=0.5, attention_dropout=0.5))
    with nn.intercept_methods(record):
        jax.eval_shape(
            lambda: model.apply({"params": build()[1]}, ids, deterministic=False, rngs={"dropout": jax.random.key(0)})
        )
    assert list(dict.fromkeys(drawn)) == [
        "Dropout_0",
        "decoder/layers/self_attention/Dropout_0",
        "decoder/layers/Dropout_0",
        "decoder/layers/Dropout_1",
    ]


def test_dropout_is_alive_in_training_only():
    for fields in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        model, params, ids = build(**fields)

        def training(key, model=model, params=params, ids=ids):
            return model.apply({"params": params}, ids, deterministic=False, rngs={"dropout": key})

        first, again, other = (jax.jit(training)(jax.random.key(seed)) for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert float(jnp.abs(first - other).max()) > 1e-3
        same = jnp.broadcast_to(ids[:1], ids.shape)
        rows = jax.jit(lambda ids, model=model, params=params: training(jax.random.key(0), model, params, ids))(same)
        assert float(jnp.abs(rows[0] - rows[1]).max()) > 1e-3  # two equal rows have masks of their own


@pytest.mark.parametrize(("norm_position", "expected"), [("pre", 7), ("post", 6)])
def test_number_of_norms(norm_position, expected):
    _, params, _ = build(num_layers=3, norm_position=norm_position, qk_norm=False)
    gains = [x for path, x in jax.tree_util.tree_leaves_with_path(params) if "norm" in jax.tree_util.keystr(path)]
    assert sum(x.shape[0] if x.ndim == 2 else 1 for x in gains) == expected


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_hidden_states_are_normalised(norm_position):
    from transformer_jax.nn import Decoder

    decoder = Decoder(d_model=64, num_layers=3, norm_position=norm_position)
    x = 5 + 3 * jax.random.normal(jax.random.key(0), (2, 8, 64))
    out, _ = jax.jit(decoder.init_with_output)(jax.random.key(1), x)
    np.testing.assert_allclose(out.mean(-1), 0, atol=1e-4)
    np.testing.assert_allclose(out.var(-1), 1, atol=1e-3)


def test_gpt2_init_in_the_model():
    _, params, _ = build(init="gpt2", d_model=256, num_layers=6, d_ff=1024)
    layer = params["decoder"]["layers"]
    assert float(layer["self_attention"]["output"]["kernel"].std()) == pytest.approx(0.005774, rel=0.05)
    assert float(layer["ffn"]["down"]["kernel"].std()) == pytest.approx(0.005774, rel=0.05)
    assert float(layer["ffn"]["up"]["kernel"].std()) == pytest.approx(0.02, rel=0.05)


def test_bfloat16_compute():
    model, params, ids = build(compute_dtype="bfloat16", positions="rotary")
    reference, _, _ = build(positions="rotary")
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = forward(model, params, ids)
    assert logits.dtype == jnp.float32
    assert float(jnp.abs(logits - forward(reference, params, ids)).max()) < 0.1
    assert model.init_cache(1, 4).keys.dtype == jnp.bfloat16


def test_bfloat16_stays_bfloat16_inside():
    from transformer_jax.nn import DecoderLayer

    layer = DecoderLayer(d_model=16, positions="rotary", qk_norm=True, compute_dtype=jnp.bfloat16)
    x = jnp.ones((1, 4, 16), jnp.bfloat16)
    (_, state) = layer.init_with_output(jax.random.key(0), x, capture_intermediates=True, mutable=True)
    inside = jax.tree_util.tree_leaves_with_path(state["intermediates"])
    assert len(inside) > 10
    assert {jax.tree_util.keystr(path): x.dtype for path, x in inside if x.dtype != jnp.bfloat16} == {}


def test_ids_are_checked():
    model, params, _ = build()
    for ids, said in (
        (jnp.array([[10, 11]]), r"\[0, 11\), got 10 to 11"),
        (jnp.array([[-1, 0]]), "got -1 to 0"),
        (jnp.array([[0.3, 2.9]]), r"whole numbers \[B, T\], got float32"),
        (jnp.array([1, 2]), r"\[B, T\]"),
    ):
        with pytest.raises(ConfigError, match=said):
            model.apply({"params": params}, ids)
    with pytest.raises(ConfigError, match="valid must be bool"):
        model.apply({"params": params}, jnp.array([[1, 2]]), valid=jnp.ones((1, 2)))
    assert jnp.isfinite(forward(model, params, jnp.array([[-1, 11]]))).all()


def test_lengths_are_checked():
    model, params, ids = build(positions="learned")
    with pytest.raises(ConfigError, match="13 tokens are more than the 12"):
        model.apply({"params": params}, jnp.zeros((1, 13), jnp.int32))
    with pytest.raises(ConfigError, match="13 tokens is longer than the 12"):
        model.init_cache(1, 13)
    _, cache = model.apply({"params": params}, ids[:, :3], cache=model.init_cache(2, 3))
    with pytest.raises(ConfigError, match="holds 3 tokens and would need 4"):
        model.apply({"params": params}, ids[:, :1], cache=cache)
    # Inside jit nothing can be refused: the token is dropped, and what comes out is finite.
    logits, after = forward(model, params, ids[:, :1], cache=cache)
    assert jnp.isfinite(logits).all()
    np.testing.assert_array_equal(after.length, [3, 3])
    jax.tree.map(np.testing.assert_array_equal, after.keys, cache.keys)


@pytest.mark.parametrize("field", ["positions", "norm_position", "attention", "residual"])
def test_unknown_names_are_refused_in_the_library_too(field):
    with pytest.raises(ConfigError, match=f"unknown value for {field}: 'nine'"):
        Transformer(d_model=8, **{field: "nine"})


def test_create_model_needs_a_vocabulary():
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        create_model(ModelConfig())
    with pytest.raises(ConfigError, match=r"takes a ModelConfig, got Config; .* have one in .model"):
        create_model(config.Config())


def test_names_agree():
    """Each name a config allows has an implementation, and each implementation a name."""
    assert set(typing.get_args(config.Init)) == set(layers.INITS)
    assert set(typing.get_args(config.FeedForwardKind)) == {*layers.ACTIVATIONS, "none"}
    assert set(typing.get_args(config.Norm)) == set(layers.NORMS)
    assert set(typing.get_args(config.Architecture)) == set(MODELS)
    assert set(typing.get_args(config.AttentionImpl)) == {"auto", *kernels.SUPPORT}
    fields = {f.name for f in dataclasses.fields(ModelConfig)} - {"init"} | {"weight_init"}
    ours = [set(field_names(kind)) for kind in MODELS.values()]
    assert set.union(*ours) == fields
    assert all(names <= fields for names in ours)
