import dataclasses
import itertools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, create_model, preset
from transformer_jax.config import resolve
from transformer_jax.errors import ConfigError
from transformer_jax.nn import IndexMask, dot_product_attention, kernels

T = 128
RULES = (("batch", "data"), ("heads", "tensor"), ("kv_heads", "tensor"))


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mask"),
    [
        (2, 2, IndexMask(causal=True)),
        (4, 1, IndexMask()),
        (2, 1, IndexMask(causal=True, window=40)),
        (2, 2, IndexMask(window=40)),
        (2, 2, IndexMask(causal=True, valid=jnp.arange(T)[None] < jnp.array([[70], [0]]))),
        (2, 2, IndexMask(causal=True, valid=jnp.arange(T)[None] >= jnp.array([[70], [3]]))),
    ],
    ids=["causal", "multi-query", "grouped-window", "window", "padding", "left-padding"],
)
def test_splash_gives_the_same_answer_and_gradients(heads, kv_heads, mask):
    """The kernel's own steps, run on the CPU; at real tokens, and finite at all."""
    query, key, value = draw(0, 2, T, heads, 24), draw(1, 2, T, kv_heads, 24), draw(2, 2, T, kv_heads, 24)
    weight = draw(3, 2, T, heads, 24)
    if mask.valid is not None:
        weight = jnp.where(mask.valid[..., None, None], weight, 0)

    def run(attend):
        def loss(query, key, value):
            out = attend(query, key, value, mask)
            return jnp.sum(out * weight), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)

    expected, plain = run(dot_product_attention)
    found, fused = run(lambda *args: kernels.splash(*args, interpret=True))
    real = jnp.ones((1, T), bool) if mask.valid is None else mask.valid
    np.testing.assert_allclose(
        jnp.where(real[..., None, None], fused, 0), jnp.where(real[..., None, None], plain, 0), atol=5e-6
    )
    assert jnp.isfinite(fused).all()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)


PLAIN = {"head_dim": 64, "lengths": (256, 256), "causal": True}


def test_auto_takes_the_fused_kernel_where_it_can():
    assert kernels.choose("auto", [], **PLAIN, platform="tpu") == ("tpu", "fused, on tpu")
    assert kernels.choose("auto", [], **PLAIN, platform="gpu") == ("cudnn", "fused, on gpu")
    assert kernels.choose("auto", [], **PLAIN, platform="cpu") == ("xla", "no fused kernel for cpu")
    assert kernels.choose("auto", ["float32"], **PLAIN, platform="gpu") == ("xla", "cudnn has no float32")
    assert kernels.choose("xla", [], **PLAIN, platform="tpu") == ("xla", "as asked")


@pytest.mark.parametrize("name", ["cudnn", "tpu"])
def test_an_explicit_choice_is_never_silently_another(name):
    platform = {"cudnn": "gpu", "tpu": "tpu"}[name]
    for need, able in kernels.SUPPORT[name].items():
        if able:
            assert kernels.choose(name, [need], **PLAIN, platform=platform) == (name, "as asked")
        else:
            with pytest.raises(ConfigError, match=f"attention_impl '{name}' cannot be used here: {name} has no {need}"):
                kernels.choose(name, [need], **PLAIN, platform=platform)
            assert kernels.choose("auto", [need], **PLAIN, platform=platform)[0] == "xla"
    with pytest.raises(ConfigError, match=f"{name} runs on {platform}, and this is for cpu; choose 'auto' or 'xla'"):
        kernels.choose(name, [], **PLAIN, platform="cpu")


@pytest.mark.parametrize(
    ("name", "platform", "shape", "said"),
    [
        ("tpu", "tpu", {"lengths": (256, 200)}, "multiples of 128, and they are 256 and 200"),
        ("cudnn", "gpu", {"lengths": (255, 256)}, "even lengths, and they are 255 and 256"),
        ("cudnn", "gpu", {"head_dim": 20}, "multiple of 8 and at most 128, and it is 20"),
        ("cudnn", "gpu", {"head_dim": 256}, "at most 128, and it is 256"),
    ],
)
def test_shapes_that_a_kernel_cannot_do(name, platform, shape, said):
    with pytest.raises(ConfigError, match=said):
        kernels.choose(name, [], **{**PLAIN, **shape}, platform=platform)


def test_cudnn_windows_are_causal():
    with pytest.raises(ConfigError, match="windows for causal attention only"):
        kernels.choose("cudnn", ["a window"], **{**PLAIN, "causal": False}, platform="gpu")


def test_every_implementation_answers_for_every_feature():
    assert len({frozenset(features) for features in kernels.SUPPORT.values()}) == 1
    assert all(kernels.SUPPORT["xla"].values())
    with pytest.raises(ConfigError, match="unknown attention_impl 'flash'"):
        kernels.choose("flash", [], **PLAIN)


def test_the_documentation_has_the_same_table():
    text = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    cells = {row[0]: row[1:] for row in rows}
    for need in kernels.SUPPORT["xla"]:
        said = [cell != "no" for cell in cells[need]]
        assert said == [kernels.SUPPORT[name][need] for name in ("xla", "cudnn", "tpu")], need


def test_what_attention_needs_is_seen_in_its_arguments(monkeypatch):
    """On a pretended TPU each argument that the kernel cannot take is refused by name."""
    monkeypatch.setattr(kernels, "current_platform", lambda: "tpu")
    x = draw(0, 1, T, 2, 8)
    dense = jnp.ones((1, 1, T, T), bool)
    for arguments, need in (
        ({"mask": dense}, "a mask given as an array"),
        ({"bias": jnp.zeros((1, 1, T, T))}, "ALiBi or another bias"),
        ({"return_weights": True}, "captured attention weights"),
        ({"dropout": lambda w: w}, "dropout of attention weights"),
        ({"mask": IndexMask(dense[:, 0, 0], window=3)}, "a window together with padding"),
    ):
        with pytest.raises(ConfigError, match=f"tpu has no {need}"):
            dot_product_attention(x, x, x, implementation="tpu", **arguments)
        dot_product_attention(x, x, x, implementation="auto", **arguments)


def test_explain():
    gpt2 = preset("gpt2").model
    assert kernels.explain(gpt2, "cpu") == "xla (no fused kernel for cpu)"
    assert kernels.explain(gpt2, "tpu") == "xla (tpu has no dropout of attention weights)"
    assert kernels.explain(dataclasses.replace(gpt2, attention_dropout=0.0), "tpu") == "tpu (fused, on tpu)"
    assert kernels.explain(preset("modern").model, "gpu") == "cudnn (fused, on gpu)"
    assert kernels.explain(preset("t5_like").model, "tpu") == "xla (tpu has no ALiBi or another bias)"
    with pytest.raises(ConfigError, match="tpu runs on tpu"):
        kernels.explain(dataclasses.replace(gpt2, attention_impl="tpu"))


def test_mesh_axes_have_to_divide(monkeypatch):
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    with nn.logical_axis_rules(RULES):
        for sizes, said in (
            ({"batch": 3}, "3 batch do not divide into 4 parts of the mesh"),
            ({"batch": 8, "heads": 4, "kv_heads": 1}, "1 kv_heads do not divide into 2 parts"),
        ):
            assert said in kernels.choose("auto", [], **PLAIN, sizes=sizes, platform="tpu")[1]
            with pytest.raises(ConfigError, match=said):
                kernels.choose("tpu", [], **PLAIN, sizes=sizes, platform="tpu")
        even = {"batch": 8, "heads": 4, "kv_heads": 2}
        assert kernels.choose("auto", [], **PLAIN, sizes=even, platform="tpu")[0] == "tpu"
    with nn.logical_axis_rules((("length", "tensor"),)):
        _, reason = kernels.choose("auto", [], **PLAIN, sizes={}, platform="tpu")
        assert reason == "the rules cut sequences into 2 parts, and fused kernels need them whole"


def test_what_cudnn_is_told(monkeypatch):
    """By JAX's own plain implementation of the same function, in float32."""
    told = []
    plain = jax.nn.dot_product_attention

    def stub(*args, implementation, **kwargs):
        told.append(implementation)
        return plain(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stub)
    query, key = draw(0, 2, 6, 4, 8), draw(1, 2, 6, 2, 8)
    valid = jnp.arange(6)[None] < jnp.array([[6], [4]])
    for mask, bias in (
        (None, None),
        (IndexMask(causal=True), None),
        (IndexMask(causal=True, window=3), None),
        (IndexMask(valid), None),
        (IndexMask(valid, causal=True), draw(2, 1, 4, 1, 6)),
        (valid[:, None, None, :], None),
    ):
        expected = dot_product_attention(query, key, key, mask, bias)
        np.testing.assert_allclose(kernels.cudnn(query, key, key, mask, bias), expected, atol=1e-5)
    assert set(told) == {"cudnn"}


@pytest.mark.parametrize("name", ["cudnn", "tpu"])
def test_training_states_are_made_whatever_the_kernel(name):
    from transformer_jax import Config
    from transformer_jax.training.step import init_state

    config = Config(model=ModelConfig(vocab_size=9, d_model=16, num_heads=2, attention_impl=name))
    with jax.numpy_dtype_promotion("standard"):
        assert jax.eval_shape(lambda: init_state(resolve(config, 9))).params


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "window"), list(itertools.product([None, 1], [None, 50])))
def test_a_model_with_splash_attention(kv_heads, window, monkeypatch):
    """Whole models go by the kernel where the platform is a TPU's, padding included."""
    config = ModelConfig(
        vocab_size=9, context=T, d_model=32, num_heads=2, num_layers=2, num_kv_heads=kv_heads, window=window, unroll=1
    )
    ids = jax.random.randint(jax.random.key(0), (2, T), 0, 9)
    valid = None if window else jnp.arange(T)[None] < jnp.array([[T], [60]])
    model = create_model(config)
    params = jax.jit(model.init)(jax.random.key(1), ids)["params"]
    run = lambda: jax.jit(lambda p: model.apply({"params": p}, ids, valid=valid))(params)  # noqa: E731
    plain = run()
    called = []
    splash = kernels.splash
    monkeypatch.setattr(kernels, "current_platform", lambda: "tpu")
    monkeypatch.setattr(kernels, "splash", lambda *args: called.append(1) or splash(*args, interpret=True))
    fused = run()
    assert called
    real = jnp.ones((2, T), bool) if valid is None else valid
    np.testing.assert_allclose(jnp.where(real[..., None], fused, 0), jnp.where(real[..., None], plain, 0), atol=1e-4)
