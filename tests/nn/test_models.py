"""Encoders and encoder-decoders: what they see, what they must not, and what they refuse."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, create_model
from transformer_jax.errors import ConfigError
from transformer_jax.nn import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    RecurrentLayer,
    Transformer,
)

V, S, T = 11, 8, 6
SMALL = ModelConfig(
    architecture="encoder_decoder",
    vocab_size=V,
    context=12,
    d_model=16,
    num_heads=4,
    num_layers=2,
    d_ff=24,
    init="fan_in",
    positions="sinusoidal",
    unroll=1,
)
SOURCE = jax.random.randint(jax.random.key(1), (2, S), 0, V)
TARGET = jax.random.randint(jax.random.key(2), (2, T), 0, V)


def build(**fields):
    """A model, its parameters and a jitted forward pass."""
    model = create_model(dataclasses.replace(SMALL, **fields))
    inputs = (SOURCE, TARGET) if model.__class__.__name__ == "EncoderDecoder" else (SOURCE,)
    params = jax.jit(model.init)(jax.random.key(0), *inputs)["params"]

    @partial(jax.jit, static_argnames="method")
    def forward(params, *args, **kwargs):
        return model.apply({"params": params}, *args, **kwargs)

    return model, params, forward


def norms(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    gains = [x for path, x in leaves if "norm" in jax.tree_util.keystr(path)]
    return sum(x.shape[0] if x.ndim == 2 else 1 for x in gains)


class TestEncoder:
    def test_every_token_sees_every_other(self):
        _, params, forward = build(architecture="encoder")
        grads = jax.jit(jax.jacrev(lambda table: forward({**params, "token_embedding": {"embedding": table}}, IDS)))(
            params["token_embedding"]["embedding"]
        )  # [1, S, V, V, D]: each symbol stands once
        assert float(jnp.abs(grads).max(axis=(0, 2, 4))[:, :S].min()) > 1e-6

    def test_permutation_equivariance_without_positions(self):
        _, params, forward = build(architecture="encoder", positions="none")
        order = jax.random.permutation(jax.random.key(5), S)
        here, there = forward(params, SOURCE), forward(params, SOURCE[:, order])
        np.testing.assert_allclose(here[:, order], there, atol=1e-5)
        _, params, forward = build(architecture="encoder", positions="rotary")
        assert float(jnp.abs(forward(params, SOURCE)[:, order] - forward(params, SOURCE[:, order])).max()) > 1e-3

    @pytest.mark.parametrize("positions", ["learned", "rotary", "alibi"])
    def test_padding_never_matters(self, positions):
        _, params, forward = build(architecture="encoder", positions=positions, window=3)
        expected = forward(params, SOURCE[:1, :4])
        for before, after, content in ((0, 2, 0), (0, 2, 7), (3, 0, 7), (2, 6, 7)):
            ids = jnp.pad(SOURCE[:1, :4], ((0, 0), (before, after)), constant_values=content)
            valid = jnp.pad(jnp.ones((1, 4), bool), ((0, 0), (before, after)))
            found = forward(params, ids, valid=valid)[:, before : before + 4]
            np.testing.assert_allclose(found, expected, atol=1e-5)

    def test_number_of_norms(self):
        for position, expected in (("pre", 7), ("post", 6)):
            _, params, _ = build(architecture="encoder", num_layers=3, norm_position=position, qk_norm=False)
            assert norms(params) == expected

    def test_has_no_cache(self):
        model, params, _ = build(architecture="encoder")
        with pytest.raises(ConfigError, match="no cache"):
            model.init_cache(1, 4)
        decoder, _, _ = build(architecture="decoder")
        with pytest.raises(ConfigError, match="no cache; call it without"):
            model.apply({"params": params}, SOURCE, cache=decoder.init_cache(2, S))


IDS = jnp.arange(S)[None]


class TestEncoderDecoder:
    def test_the_source_is_seen_whole_and_the_target_only_backwards(self):
        _, params, forward = build()
        base = forward(params, SOURCE, TARGET)
        for place in (0, S - 1):
            changed = forward(params, SOURCE.at[:, place].set((SOURCE[:, place] + 1) % V), TARGET)
            assert float(jnp.abs(changed - base).max(axis=(0, 2)).min()) > 1e-5
        later = forward(params, SOURCE, TARGET.at[:, 3].set((TARGET[:, 3] + 1) % V))
        np.testing.assert_allclose(later[:, :3], base[:, :3], atol=1e-6)
        assert float(jnp.abs(later - base)[:, 3:].max(axis=(0, 2)).min()) > 1e-5

    def test_padding_of_either_side_never_matters(self):
        _, params, forward = build(positions="learned")
        expected = forward(params, SOURCE[:1, :5], TARGET[:1, :4])
        for content, more in ((0, 1), (7, 1), (7, 5)):
            source = jnp.pad(SOURCE[:1, :5], ((0, 0), (0, more)), constant_values=content)
            target = jnp.pad(TARGET[:1, :4], ((0, 0), (0, more)), constant_values=content)
            found = forward(
                params,
                source,
                target,
                source_valid=jnp.arange(5 + more)[None] < 5,
                target_valid=jnp.arange(4 + more)[None] < 4,
            )
            np.testing.assert_allclose(found[:, :4], expected, atol=1e-5)

    def test_each_side_has_its_own_pad_id(self):
        """Source pad 0 and target pad 3: a 0 in the target is a symbol like any other."""
        _, params, forward = build()
        source, target = jnp.array([[5, 6, 0, 0]]), jnp.array([[4, 0, 7, 3]])
        valid = {"source_valid": source != 0, "target_valid": target != 3}
        base = forward(params, source, target, **valid)
        other = forward(params, source, target.at[0, 1].set(8), **valid)
        assert float(jnp.abs(other - base)[0, 2].max()) > 1e-4
        padded = forward(params, source, target.at[0, 3].set(9), **valid)
        np.testing.assert_array_equal(padded[0, :3], base[0, :3])
        np.testing.assert_allclose(base[:, :3], forward(params, source[:, :2], target[:, :3]), atol=1e-5)

    def test_a_fully_padded_source_adds_nothing(self):
        model, params, _ = build()

        def loss(params, source, target, source_valid, target_valid):
            logits = model.apply(
                {"params": params}, source, target, source_valid=source_valid, target_valid=target_valid
            )
            return jnp.sum(jnp.where(target_valid[..., None], jax.nn.log_softmax(logits), 0.0)), logits

        grad = jax.jit(jax.grad(loss, has_aux=True))
        real, none = jnp.ones((1, S), bool), jnp.zeros((1, S), bool)
        rows = jnp.concatenate([real, none]), jnp.concatenate([real[:, :T], none[:, :T]])
        both, logits = grad(params, SOURCE, TARGET, *rows)
        alone, expected = grad(params, SOURCE[:1], TARGET[:1], real, real[:, :T])
        assert jnp.isfinite(logits).all()
        np.testing.assert_allclose(logits[:1], expected, atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), both, alone)

    def test_what_a_fully_padded_source_holds_never_matters(self):
        """Nor how long it is, nor where it is encoded: a target without a source has the same logits always."""
        model, params, forward = build(positions="learned")
        expected = forward(params, SOURCE[:1], TARGET[:1], source_valid=jnp.zeros((1, S), bool))
        for source in ((SOURCE[:1] + 3) % V, SOURCE[:1, :3]):
            none = jnp.zeros(source.shape, bool)
            found = forward(params, source, TARGET[:1], source_valid=none)
            np.testing.assert_allclose(found, expected, atol=1e-5)
            memory = forward(params, source, source_valid=none, method="encode")
            cache = model.init_cache(1, T, params=params, memory=memory, source_valid=none)
            np.testing.assert_allclose(forward(params, TARGET[:1], cache=cache)[0], expected, atol=1e-5)

    def test_number_of_norms(self):
        for position, expected in (("pre", 17), ("post", 15)):
            _, params, _ = build(num_layers=3, norm_position=position, qk_norm=False)
            assert norms(params) == expected

    @pytest.mark.slow
    def test_fields_change_what_they_should(self):
        def run(**fields):
            model = create_model(dataclasses.replace(SMALL, **fields))

            @jax.jit
            def start():
                params = model.init(jax.random.key(0), SOURCE, TARGET)["params"]
                params = jax.tree.map(lambda p: p + 0.05, params)
                return model.apply({"params": params}, SOURCE, TARGET), sum(x.size for x in jax.tree.leaves(params))

            return start()

        (base, count), width = run(), 16
        one = 4 * width * width + 3 * width * 24 + 2 * width + 2 * 4
        for fields, change in (
            ({"source_vocab_size": V}, V * width),
            ({"num_encoder_layers": 1}, -one),
            ({"num_layers": 1, "num_encoder_layers": 2}, -(one + 4 * width * width + width + 2 * 4)),
            ({"tie_embeddings": True}, -V * width),
            ({"positions": "learned"}, 2 * 12 * width),
            ({"norm_embeddings": True}, 2 * width),
            ({"attention": "none"}, -4 * (4 * width * width + width + 2 * 4)),
        ):
            changed, size = run(**fields)
            assert size - count == change, fields
            assert float(jnp.abs(changed - base).max()) > 1e-4, fields

    def test_unroll_and_remat_do_not_change_the_answer(self):
        _, params, _ = build()

        def gradient(**fields):
            model = create_model(dataclasses.replace(SMALL, **fields))
            return jax.jit(jax.grad(lambda p: jnp.sum(model.apply({"params": p}, SOURCE, TARGET) ** 2)))(params)

        plain = gradient()
        for fields in ({"unroll": 2}, {"remat": True}):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), plain, gradient(**fields))

    def test_dropout_lives_in_training_only(self):
        _, params, plain = build()
        expected = plain(params, SOURCE, TARGET)
        for name in ("dropout", "attention_dropout", "feed_forward_dropout"):
            model = create_model(dataclasses.replace(SMALL, **{name: 0.5}))

            @jax.jit
            def both(key, model=model):
                run = lambda **kwargs: model.apply({"params": params}, SOURCE, TARGET, **kwargs)  # noqa: E731
                return run(), run(deterministic=False, rngs={"dropout": key})

            (calm, first), (_, again), (_, other) = (both(jax.random.key(seed)) for seed in (0, 0, 1))
            np.testing.assert_allclose(calm, expected, atol=1e-6)
            np.testing.assert_array_equal(first, again)
            assert float(jnp.abs(first - other).max()) > 1e-3, name

    def test_bfloat16(self):
        _, params, plain = build()
        model, _, half = build(compute_dtype="bfloat16")
        logits = half(params, SOURCE, TARGET)
        assert logits.dtype == jnp.float32
        assert 0 < float(jnp.abs(logits - plain(params, SOURCE, TARGET)).max()) < 0.1
        memory = jax.jit(lambda p: model.apply({"params": p}, SOURCE, method="encode"))(params)
        cache = model.init_cache(2, 4, params=params, memory=memory)
        assert {memory.dtype, cache.keys.dtype, cache.memory[0].dtype} == {jnp.dtype("bfloat16")}


class TestCapture:
    def test_attention_and_hidden_states(self):
        model, params, forward = build(architecture="decoder")
        logits, inside = jax.jit(lambda p: model.apply({"params": p}, SOURCE, capture=("attention", "hidden")))(params)
        np.testing.assert_array_equal(logits, forward(params, SOURCE))
        assert {name: x.shape for name, x in inside.items()} == {
            "attention": (2, 2, 4, S, S),
            "hidden": (2, 2, S, 16),
        }
        np.testing.assert_allclose(inside["attention"].sum(-1), 1, atol=1e-5)
        assert float(jnp.abs(jnp.triu(inside["attention"], 1)).max()) == 0
        norm = params["decoder"]["output_norm"]["scale"]
        last = inside["hidden"][-1]
        final = last / jnp.sqrt(jnp.mean(last**2, -1, keepdims=True) + 1e-6) * norm[None, None]
        np.testing.assert_allclose(final @ params["head"]["kernel"], logits, atol=1e-4)

    def test_both_stacks_and_a_cache(self):
        model, params, _ = build()
        names = ("attention", "hidden")
        logits, inside = jax.jit(lambda p: model.apply({"params": p}, SOURCE, TARGET, capture=names))(params)
        assert {name: x.shape for name, x in inside.items()} == {
            "attention": (2, 2, 4, T, T),
            "cross_attention": (2, 2, 4, T, S),
            "hidden": (2, 2, T, 16),
            "encoder_attention": (2, 2, 4, S, S),
            "encoder_hidden": (2, 2, S, 16),
        }
        memory = jax.jit(lambda p: model.apply({"params": p}, SOURCE, method="encode"))(params)
        cache = model.init_cache(2, T, params=params, memory=memory)
        stepped, cache, step = jax.jit(lambda p, c: model.apply({"params": p}, TARGET, cache=c, capture=names))(
            params, cache
        )
        np.testing.assert_allclose(stepped, logits, atol=1e-5)
        np.testing.assert_array_equal(cache.length, [T, T])
        for name, value in step.items():
            np.testing.assert_allclose(value, inside[name], atol=1e-5)

    def test_unknown_names(self):
        model, params, _ = build(architecture="encoder")
        with pytest.raises(ConfigError, match=r"a tuple of names: give \('hidden',\)"):
            model.apply({"params": params}, SOURCE, capture="hidden")
        with pytest.raises(ConfigError, match="unknown capture 'atention'; did you mean 'attention'"):
            model.apply({"params": params}, SOURCE, capture=("atention",))


class TestRefuses:
    def test_an_encoder_decoder_without_its_parts(self):
        model, params, _ = build()
        variables = {"params": params}
        for arguments, keywords, said in (
            ((SOURCE,), {}, "takes source and target"),
            ((SOURCE, TARGET[:1]), {}, "source has 2 rows and target 1"),
            ((SOURCE, TARGET), {"source_valid": jnp.ones((2, S))}, r"source_valid must be bool\[2, 8\]"),
            ((SOURCE, TARGET), {"valid": jnp.ones((2, T), bool)}, "with source_valid and target_valid"),
            ((SOURCE + 20, TARGET), {}, r"source must be in \[0, 11\)"),
            ((SOURCE, TARGET.astype(jnp.float32)), {}, r"target must be whole numbers \[B, T\], got float32"),
        ):
            with pytest.raises(ConfigError, match=said):
                model.apply(variables, *arguments, **keywords)
        with pytest.raises(ConfigError, match="needs a source"):
            model.init_cache(2, 4)
        with pytest.raises(ConfigError, match="with B = 3"):
            model.init_cache(3, 4, params=params, memory=jnp.ones((2, S, 16)))
        cache = model.init_cache(2, 4, params=params, memory=jnp.ones((2, S, 16)))
        with pytest.raises(ConfigError, match="the cache holds a source already"):
            model.apply(variables, TARGET, jnp.ones((2, S, 16)), cache=cache, method="decode")
        with pytest.raises(ConfigError, match=r"memory must be floats \[B, S, 16\], got float32\[2, 8, 8\]"):
            model.init_cache(2, 4, params=params, memory=jnp.ones((2, S, 8)))
        with pytest.raises(ConfigError, match=r"init\(...\)\['params'\], got the keys \['params'\]"):
            model.init_cache(2, 4, params=variables, memory=jnp.ones((2, S, 16)))
        with pytest.raises(ConfigError, match="at least one row and one token, got 2 and 0"):
            model.init_cache(2, 0, params=params, memory=jnp.ones((2, S, 16)))
        with pytest.raises(ConfigError, match="a cache holds the source"):
            model.apply(variables, SOURCE, TARGET, cache=cache)
        with pytest.raises(ConfigError, match="the cache holds 4 tokens and would need 6"):
            model.apply(variables, TARGET, cache=cache)
        with pytest.raises(ConfigError, match="the cache has 2 rows, and the call 1"):
            model.apply(variables, TARGET[:1, :1], cache=cache)

    def test_parts_that_do_not_fit(self):
        x, memory = jnp.ones((2, 3, 16)), jnp.ones((2, 5, 16))
        key = jax.random.key(0)
        for module, arguments, said in (
            (DecoderLayer(d_model=16, cross_attention=True), (x,), "cross-attention needs a source"),
            (DecoderLayer(d_model=16), (x, memory), "set cross_attention=True"),
            (Decoder(d_model=16, cross_attention=True), (x,), "cross-attention needs a source"),
            (Decoder(d_model=16, cross_attention=True), (x, memory[:1]), "memory must be"),
            (Encoder(d_model=32), (x,), r"x must be floats \[B, T, 32\], got float32\[2, 3, 16\]"),
            (Encoder(d_model=16), (x[0],), r"\[B, T, 16\], got float32\[3, 16\]"),
            (MultiHeadAttention(num_heads=3), (x,), "num_heads 3 does not divide d_model 16"),
            (MultiHeadAttention(num_heads=4), (x[0],), r"x must be floats \[B, T, D\], got float32\[3, 16\]"),
            (Transformer(architecture="rnn", d_model=8), (jnp.ones((1, 2), int),), "unknown architecture of one stack"),
            (Transformer(d_model=8), (jnp.ones((1, 2), int),), "vocab_size must be at least 1, got 0"),
            (Transformer(d_model=8, vocab_size=3), ([[1, 2]],), "ids must be an array, got list"),
            (EncoderLayer(d_model=8), (x,), r"x must be floats \[B, T, 8\], got float32\[2, 3, 16\]"),
            (Encoder(d_model=16), (x.astype(int),), "x must be floats"),
            (LayerNorm(), (jnp.arange(3),), r"x must be floats \[..., D\], got int32\[3\]"),
            (MultiHeadAttention(num_heads=4), (x, memory[0]), r"memory must be floats \[B, S, D\]"),
            (FeedForward(d_ff=0), (x,), "d_ff must be at least 1, got 0"),
            (MultiHeadAttention(num_heads=4, dropout=2.0), (x,), "dropout must be at least 0 and below 1, got 2.0"),
            (Transformer(d_model=8, vocab_size=3, positions="learned"), (jnp.ones((1, 2), int),), "need a context"),
            (RecurrentLayer("gru"), (x, x[..., :8], x), r"hidden must be floats \[B, 16\], got float32\[2, 3, 8\]"),
        ):
            with pytest.raises(ConfigError, match=said):
                module.init(key, *arguments)

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"num_heads": 0}, "Encoder.num_heads must be a positive number, got 0"),
            ({"num_layers": 0}, "Encoder.num_layers must be a positive number, got 0"),
            ({"dropout": 1.5}, "Encoder.dropout must be at least 0 and below 1, got 1.5"),
        ],
    )
    def test_fields_out_of_range_in_the_library_too(self, fields, said):
        with pytest.raises(ConfigError, match=said):
            Encoder(d_model=8, **fields)

    def test_a_cache_of_another_model(self):
        model, params, _ = build(architecture="decoder")
        for cache, said in (
            (build(architecture="decoder", num_kv_heads=1)[0].init_cache(2, 4), r"another model's: .* \(2, 1, 4\)"),
            (create_model(dataclasses.replace(SMALL, architecture="gru")).init_cache(2), "KVCache, got RecurrentState"),
        ):
            with pytest.raises(ConfigError, match=said):
                model.apply({"params": params}, SOURCE[:, :1], cache=cache)

    @pytest.mark.parametrize("name", ["source_vocab_size", "num_encoder_layers"])
    def test_fields_of_another_architecture(self, name):
        with pytest.raises(ConfigError, match=f"model.{name} 3 needs model.architecture 'encoder_decoder'"):
            ModelConfig(**{name: 3})
