"""Steps compiled by the real TPU compiler, for slices that are not here. They need the `tpu` extra."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig, create_model, preset
from transformer_jax.config import resolve
from transformer_jax.generation import decode
from transformer_jax.planning.child import plan_elsewhere
from transformer_jax.planning.chips import chip_of, topology_devices
from transformer_jax.planning.hlo import Program
from transformer_jax.planning.plan import abstract_inputs
from transformer_jax.training import sharding
from transformer_jax.training.step import compile_train_step, init_state

pytest.importorskip("libtpu", reason="the TPU compiler is in the tpu extra")
pytestmark = pytest.mark.slow
SLICE = "v5e:2x4"


@pytest.fixture(autouse=True)
def _as_users_compile(monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    monkeypatch.setattr(jax.config, "jax_disable_most_optimizations", False, raising=False)


def gpt2(rows=64):
    """GPT-2-small with remat and without dropout: no fused kernel drops weights, and random draws compile slowly."""
    config = preset("gpt2")
    model = dataclasses.replace(config.model, dropout=0.0, attention_dropout=0.0, compute_dtype="bfloat16", remat=True)
    return resolve(
        dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, batch_size=rows)),
        config.model.vocab_size,
    )


@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=["data", "fsdp", "fsdp x tensor"]
)
def test_gpt2_small_trains_on_a_slice(mesh):
    found = plan_elsewhere(gpt2(), mesh, SLICE)
    assert found.fits
    assert 0 < found.compiled.total < found.memory
    assert found.compiled.unknown_loops == 0
    assert not found.compiled.unknown_kernels
    assert found.attention == "tpu (fused, on tpu)"
    assert found.compiled.kernel_seconds > 0
    assert 0.05 < found.utilisation < 1
    batch = 3 * 4 * found.rows * 1_024 // (mesh.get("data", 1) * mesh.get("fsdp", 1))
    # Parts of arrays are filled up to whole tiles.
    assert found.state + batch <= found.compiled.arguments < (1.02 if "data" in mesh else 1.1) * (found.state + batch)
    kinds = {one.kind for one in found.compiled.collectives}
    layer = 768 * 3_072 * 2  # the largest matrix of a layer, in bfloat16
    summed = sorted(one.bytes for one in found.compiled.collectives if one.kind == "all-reduce")
    if "fsdp" in mesh:
        # The partitioner makes rings of permutations out of some of both, which run beside the products.
        assert {"all-gather", "collective-permute"} <= kinds
        # It sums the gradient of the embedding whole, because an update that is not finite is taken back: known, and
        # one in a step.
        if summed[-1] == 50_257 * 768 * 4:
            summed.pop()
        else:
            assert "reduce-scatter" in kinds
        assert summed[-1] < found.rows // mesh["fsdp"] * 1_024 * 768 * 2 + layer, "activations at most"
        if "tensor" not in mesh:
            assert summed[-1] < layer
    else:
        assert kinds == {"all-reduce"}
        sent = sum(one.times * one.bytes for one in found.compiled.collectives)
        assert 2 * 124_439_808 < sent < 4.1 * 124_439_808, "each gradient once, in bfloat16 or float32"


def test_what_does_not_fit():
    found = plan_elsewhere(gpt2(rows=4_096), {"data": 8}, SLICE)
    assert not found.fits
    assert found.needed > found.memory == 15.75 * 2**30


def test_a_layer_costs_what_two_unrolled_depths_say():
    """The estimate multiplies a loop's body by its turns; beside its work a loop has to store what it passes on."""
    fields = {"vocab_size": 128, "context": 256, "d_model": 256, "num_heads": 2, "d_ff": 1_024, "qk_norm": False}
    fields |= {"attention_impl": "xla"}  # kernels compile slowly, and have no cycles

    def cycles(layers, unroll):
        config = Config(
            model=ModelConfig(num_layers=layers, unroll=unroll, compute_dtype="bfloat16", **fields),
            optim=OptimConfig(optimizer="adamw"),
            train=TrainConfig(batch_size=64, average_decay=None),
        )
        config = resolve(config, 128)
        placement = sharding.placement(topology_devices(SLICE)[:1], (1, 1, 1))
        with placement.use():
            state, batch = abstract_inputs(config, placement)
            compiled = compile_train_step(config, state, placement).lower(state, batch).compile()
        return Program(compiled.as_text(), 1).cycles()

    one = cycles(1, 1)
    layer = cycles(2, 2) - one
    in_loop = (cycles(12, 1) - (one - layer)) / 12
    assert layer < in_loop < 3 * layer
    # All products of a layer but those in attention, at the peak: no estimate may be below.
    products = 6 * 64 * 256 * (4 * 256**2 + 3 * 256 * 1_024)
    assert layer / chip_of(SLICE).clock > products / chip_of(SLICE).flops


@pytest.mark.parametrize("topology", [SLICE, "v5p:2x2x1", "v6e:2x2", "v4:2x2x1"])
def test_no_product_is_faster_than_the_chip(topology):
    placement = sharding.placement(topology_devices(topology)[:1], (1, 1, 1))
    x = jax.ShapeDtypeStruct((4_096, 4_096), jnp.bfloat16, sharding=placement.replicated)
    cycles = Program(jax.jit(jnp.dot).lower(x, x).compile().as_text(), 1).cycles()
    share = 2 * 4_096**3 / (cycles / chip_of(topology).clock * chip_of(topology).flops)
    assert 0.4 < share < 1


def test_a_step_of_generation():
    config = gpt2()
    model = create_model(config.model)
    placement = sharding.placement(topology_devices(SLICE), (1, 4, 2))
    with placement.use():
        params = jax.eval_shape(partial(init_state, config)).params
        params = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, placement.shardings(params)
        )
        rows = 8
        cache = jax.eval_shape(partial(model.init_cache, rows, 256))
        ids = jax.ShapeDtypeStruct((rows, 256), jnp.int32)
        state = decode.State(cache, ids, jax.ShapeDtypeStruct((rows,), jnp.int32))
        step = jax.jit(partial(decode.next_logits, model))
        compiled = step.lower(params, state).compile()
    logits, _ = compiled.out_info
    assert logits.shape == (rows, config.model.vocab_size)
    used = compiled.memory_analysis()
    assert used.argument_size_in_bytes + used.temp_size_in_bytes < 15.75 * 2**30
