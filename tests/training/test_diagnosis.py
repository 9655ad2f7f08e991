import dataclasses

import jax
import numpy as np
import pytest

from transformer_jax.config import resolve
from transformer_jax.data.tasks import load_corpus
from transformer_jax.training.diagnosis import first_nonfinite
from transformer_jax.training.sharding import default_placement
from transformer_jax.training.step import create_state

HUGE = np.float32(1e38)


def case(config, accumulate=2):
    """A resolved config, parameters to spoil, and a batch."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=accumulate))
    corpus = load_corpus(config)
    config = resolve(config, len(corpus.vocab), None if corpus.source_vocab is None else len(corpus.source_vocab))
    placement = default_placement(8)
    params = jax.device_get(create_state(config, placement).params)
    return config, jax.tree.map(np.array, params), placement.place(corpus.training(0).batch(0, 8))


def leaf(params, name):
    for part in name.split("/"):
        params = params[part]
    return params


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("token_embedding/embedding", (3, 0), np.nan, "the parameter token_embedding/embedding"),
        ("decoder/layers/ffn/up/kernel", (1, 0, 0), np.inf, "the parameter decoder/layers/ffn/up/kernel of layer 2"),
        ("decoder/layers/ffn/down/kernel", 1, HUGE, "the output of layer 2 of 2"),
        ("decoder/layers/self_attention/output/kernel", 0, HUGE, "the output of layer 1 of 2"),
        ("head/kernel", slice(None), HUGE, "the logits"),
    ],
)
def test_the_first_part_is_named(tiny_config, name, place, value, said):
    config, params, batch = case(tiny_config)
    leaf(params, name)[place] = value
    assert first_nonfinite(config, params, batch, 0) == said


def test_gradients_are_looked_at_from_the_top_down(tiny_config):
    """The loss is finite, and 1e30 times what a layer of 1e10 passes down is not."""
    config, params, batch = case(tiny_config, accumulate=1)
    leaf(params, "head/kernel")[:] = np.random.default_rng(0).normal(size=params["head"]["kernel"].shape) * 1e30
    leaf(params, "decoder/layers/ffn/down/kernel")[0] = 1e20
    assert first_nonfinite(config, params, batch, 0).startswith("the gradient of decoder/layers/")


def test_a_norm_can_overflow_alone(tiny_config):
    config, params, batch = case(tiny_config, accumulate=1)
    leaf(params, "head/kernel")[:] = np.random.default_rng(0).normal(size=params["head"]["kernel"].shape) * 1e30
    assert first_nonfinite(config, params, batch, 0) == "the sum of squares of gradients that are finite"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["decoder", "encoder", "encoder_decoder", "gru"])
def test_every_family(families, architecture):
    config, params, batch = case(families[architecture])
    assert first_nonfinite(config, params, batch, 5) is None
    stack = "encoder" if architecture.startswith("encoder") else "decoder"
    if architecture == "gru":
        leaf(params, "layers/input/kernel")[1] = np.nan
        assert first_nonfinite(config, params, batch, 5) == "the parameter layers/input/kernel of layer 2"
        return
    leaf(params, f"{stack}/layers/ffn/down/kernel")[0] = HUGE
    which = "encoder layer" if architecture == "encoder_decoder" else "layer"
    assert first_nonfinite(config, params, batch, 5) == f"the output of {which} 1 of 2"
