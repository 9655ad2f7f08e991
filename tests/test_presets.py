import dataclasses

import jax
import jax.numpy as jnp
import pytest

from transformer_jax import create_model, preset
from transformer_jax.errors import ConfigError
from transformer_jax.presets import PRESETS

PARAMETERS = {
    # As published, or as counted in the published weights.
    "gpt2": 124_439_808,
    "bert": 109_514_298 - 2 * 768,  # Hugging Face's BertForMaskedLM, less its two segment vectors
    "t5_like": 222_903_552 - 2 * 32 * 12,  # t5-base, less its biases by distance
    "nanogpt_char": 10_646_784 + 256 * 384,  # nanoGPT prints 10.65M, without the positions
    # Counted by hand: embedding and head (one table, or two), then layers.
    "attention_is_all_you_need": 37_000 * 512
    + 6 * (4 * 512 * 513 + 2 * 512 * 2_048 + 2_560 + 4 * 512)
    + 6 * (8 * 512 * 513 + 2 * 512 * 2_048 + 2_560 + 6 * 512),
    "attention_is_all_you_need_big": 37_000 * 1_024
    + 6 * (4 * 1_024 * 1_025 + 2 * 1_024 * 4_096 + 5_120 + 4 * 1_024)
    + 6 * (8 * 1_024 * 1_025 + 2 * 1_024 * 4_096 + 5_120 + 6 * 1_024),
    "module_26": 2 * 65 * 512 + 6 * (4 * 512 * 513 + 2 * 512 * 2_048 + 2_560 + 4 * 512),
    "post_55": 2 * 65 * 128 + 4 * (4 * 128 * 129 + 2 * 128 * 512 + 640 + 4 * 128),
    "modern": 2 * 65 * 768 + 768 + 12 * (768 * 768 * 2 + 2 * 768 * 256 + 3 * 768 * 2_048 + 2 * 768 + 2 * 64),
    "llama_7b": 6_738_415_616,
    "module_6": 65 * 128 + 128 * 65 + 65 + 4 * (4 * 128 * 129 + 2 * 128 * 512 + 640),
    "week_16": 65 * 128 + 128 * 65 + 4 * (4 * 128 * 129 + 2 * 128 * 512 + 640),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_models_of_the_right_size(name):
    model_config = preset(name).model
    model = create_model(dataclasses.replace(model_config, vocab_size=model_config.vocab_size or 65))
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    inputs = (ids, ids) if model_config.architecture == "encoder_decoder" else (ids,)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    count = sum(x.size for x in jax.tree.leaves(params))
    assert count == PARAMETERS[name]
    assert PRESETS[name].text.endswith(".")


def test_the_papers_schedule():
    """Vaswani et al. 2017, section 5.3, equation 3."""
    from transformer_jax.training.optim import schedule_shape

    optim = preset("attention_is_all_you_need").optim
    for step in (1, 100, 4_000, 100_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4_000**-1.5)
        assert float(optim.learning_rate * schedule_shape(optim)(step - 1)) == pytest.approx(expected, rel=1e-5)


def test_unknown_presets():
    with pytest.raises(ConfigError, match="unknown preset 'gpt3'; did you mean 'gpt2'"):
        preset("gpt3")
