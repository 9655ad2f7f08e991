"""Known models as configs: the papers', the teaching texts' own blocks, and a modern one.

Sizes and recipes are those of the source where it gives them. `vocab_size` is set where the model has one of its own;
for another text set it to None, and it is filled in from the data.
"""

import dataclasses
from dataclasses import replace

from transformer_jax.checks import unknown
from transformer_jax.config import Config, ModelConfig, OptimConfig, TrainConfig
from transformer_jax.errors import ConfigError

TINY_SHAKESPEARE = 65
"""Symbols of the benchmark text: the vocabulary where a config leaves it open and there are no data to ask."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """A known model.

    Attributes:
      text: What it is, its source, and where it differs from it.
      config: The model and its recipe.
    """

    text: str
    config: Config


_CLASSIC = ModelConfig(
    positions="sinusoidal", norm="layer", qk_norm=False, feed_forward="relu", use_bias=True, init="xavier"
)
"""What the papers and texts before 2018 have in common; each then says what is its own."""

_ATTENTION = replace(
    _CLASSIC,
    architecture="encoder_decoder",
    vocab_size=37_000,
    context=512,
    d_model=512,
    num_heads=8,
    num_layers=6,
    d_ff=2_048,
    norm_position="post",
    norm_eps=1e-6,
    tie_embeddings=True,
    scale_embeddings=True,
    dropout=0.1,
)

_GPT2 = ModelConfig(
    vocab_size=50_257,
    context=1_024,
    d_model=768,
    num_heads=12,
    num_layers=12,
    positions="learned",
    norm="layer",
    norm_eps=1e-5,
    qk_norm=False,
    feed_forward="gelu_tanh",
    use_bias=True,
    tie_embeddings=True,
    init="gpt2",
    dropout=0.1,
    attention_dropout=0.1,
)


def _noam(d_model: int, warmup_steps: int) -> OptimConfig:
    """The schedule of Vaswani et al. 2017, section 5.3: its peak follows from the width."""
    return OptimConfig(
        optimizer="adamw",
        learning_rate=(d_model * warmup_steps) ** -0.5,
        schedule="noam",
        warmup_steps=warmup_steps,
        b2=0.98,
        eps=1e-9,
        clip_norm=None,
    )


PRESETS: dict[str, Preset] = {
    "module_6": Preset(
        "Module 6's language model in Haskell: pre-norm blocks with ReLU, layer norm without gain at eps 1e-6, no norm "
        "before the biased head. Its blocks see both sides; here they are causal, which a language model has to be.",
        Config(model=replace(_CLASSIC, norm_eps=1e-6, norm_affine=False, final_norm=False, head_bias=True)),
    ),
    "week_16": Preset(
        "Week 16's block in NumPy: post-norm, ReLU, four heads, layer norm without gain at eps 1e-5; causal, as its "
        "exercise wants it.",
        Config(model=replace(_CLASSIC, norm_position="post", norm_eps=1e-5, norm_affine=False)),
    ),
    "module_26": Preset(
        "Module 26's encoder block in PyTorch: post-norm, GELU, 512 wide, dropout on attention weights, inside the "
        "feed-forward and after each sub-layer; six of them, with its diagram's positions and a head.",
        Config(
            model=replace(
                _CLASSIC,
                architecture="encoder",
                d_model=512,
                num_heads=8,
                num_layers=6,
                d_ff=2_048,
                norm_position="post",
                norm_eps=1e-5,
                feed_forward="gelu",
                dropout=0.1,
                attention_dropout=0.1,
                feed_forward_dropout=0.1,
            )
        ),
    ),
    "post_55": Preset(
        "Post 55's encoder block: LayerNorm(x + Sublayer(x)), ReLU, sinusoidal positions. For its exercise, language "
        'modelling, set architecture="decoder".',
        Config(model=replace(_CLASSIC, architecture="encoder", norm_position="post", norm_eps=1e-5)),
    ),
    "attention_is_all_you_need": Preset(
        "Vaswani et al. 2017, base: 6+6 layers, one table for both sides and the head. The paper's attention maps have "
        "no biases and these do (0.1 % of the parameters). Its batches hold 25,000 tokens of each side; batch_size, in "
        "sentences, is not set.",
        Config(
            model=_ATTENTION,
            optim=_noam(512, 4_000),
            train=TrainConfig(steps=100_000, label_smoothing=0.1, average_decay=None),
        ),
    ),
    "attention_is_all_you_need_big": Preset(
        "Vaswani et al. 2017, big: as base, twice as wide, with dropout 0.3.",
        Config(
            model=replace(_ATTENTION, d_model=1_024, num_heads=16, d_ff=4_096, dropout=0.3),
            optim=_noam(1_024, 4_000),
            train=TrainConfig(steps=300_000, label_smoothing=0.1, average_decay=None),
        ),
    ),
    "gpt2": Preset(
        "Radford et al. 2019, the smallest: 124 million parameters. The paper gives no recipe: the learning rate is "
        "that of the same size in Brown et al. 2020, table 2.1, the rest is nanoGPT's reproduction.",
        Config(
            model=_GPT2,
            optim=OptimConfig(
                optimizer="adamw", learning_rate=6e-4, weight_decay=0.1, warmup_steps=2_000, final_fraction=0.1
            ),
            train=TrainConfig(steps=600_000, batch_size=512, average_decay=None),
        ),
    ),
    "bert": Preset(
        "Devlin et al. 2019, base, with the head that predicts masked symbols. Without segments and next-sentence "
        "prediction: with one segment, its vector is part of each position's.",
        Config(
            model=replace(
                _GPT2,
                architecture="encoder",
                vocab_size=30_522,
                context=512,
                norm_position="post",
                norm_eps=1e-12,
                feed_forward="gelu",
                norm_embeddings=True,
                head_transform=True,
                head_bias=True,
                init="bert",
            ),
            optim=OptimConfig(
                optimizer="adamw",
                learning_rate=1e-4,
                schedule="wsd",
                warmup_steps=10_000,
                decay_fraction=1.0,
                final_fraction=0.0,
                b2=0.999,
                eps=1e-6,
                weight_decay=0.01,
            ),
            train=TrainConfig(steps=1_000_000, batch_size=256, average_decay=None),
        ),
    ),
    "t5_like": Preset(
        "The shape of Raffel et al. 2020, base: 12+12 layers, RMS norm, no biases, ReLU. ALiBi stands for its learned "
        "bias by distance, scores are scaled and the tied head's input is not, and AdamW with the schedule of Vaswani "
        "et al. stands for Adafactor with its own.",
        Config(
            model=replace(
                _ATTENTION,
                vocab_size=32_128,
                d_model=768,
                num_heads=12,
                num_layers=12,
                d_ff=3_072,
                positions="alibi",
                norm="rms",
                norm_position="pre",
                use_bias=False,
                scale_embeddings=False,
                attention_dropout=0.1,
                feed_forward_dropout=0.1,
            ),
            optim=OptimConfig(optimizer="adamw", schedule="noam", learning_rate=1e-3, warmup_steps=10_000),
            train=TrainConfig(steps=524_288, batch_size=128, average_decay=None),
        ),
    ),
    "nanogpt_char": Preset(
        "nanoGPT's character model for one GPU: 10.7 million parameters, GPT-2's block without biases.",
        Config(
            model=replace(
                _GPT2,
                vocab_size=None,
                context=256,
                d_model=384,
                num_heads=6,
                num_layers=6,
                feed_forward="gelu",
                use_bias=False,
                dropout=0.2,
                attention_dropout=0.2,
            ),
            optim=OptimConfig(
                optimizer="adamw", learning_rate=1e-3, b2=0.99, weight_decay=0.1, warmup_steps=100, final_fraction=0.1
            ),
            train=TrainConfig(steps=5_000, batch_size=64, average_decay=None),
        ),
    ),
    "modern": Preset(
        "GPT-2's size with the parts of today: rotary positions (Su et al. 2021), RMS norm, query-key norm, SwiGLU "
        "(Shazeer 2020), grouped heads (Ainslie et al. 2023), no biases, Muon.",
        Config(
            model=ModelConfig(
                context=1_024,
                d_model=768,
                num_heads=12,
                num_kv_heads=4,
                num_layers=12,
                compute_dtype="bfloat16",
            ),
            optim=OptimConfig(weight_decay=0.1, warmup_steps=1_000),
            train=TrainConfig(steps=20_000, batch_size=512),
        ),
    ),
    "llama_7b": Preset(
        "Touvron et al. 2023, table 2, the smallest: 6.7 billion parameters, for slices and clusters.",
        Config(
            model=ModelConfig(
                vocab_size=32_000,
                context=2_048,
                d_model=4_096,
                num_heads=32,
                num_layers=32,
                d_ff=11_008,
                qk_norm=False,
                compute_dtype="bfloat16",
            ),
            optim=OptimConfig(
                optimizer="adamw", learning_rate=3e-4, weight_decay=0.1, warmup_steps=2_000, final_fraction=0.1
            ),
            train=TrainConfig(steps=250_000, batch_size=2_048, average_decay=None),
        ),
    ),
}
"""By name."""


def preset(name: str) -> Config:
    """A known model and its recipe; change it with `dataclasses.replace`, and give its `.model` to `create_model`.

    Raises:
      ConfigError: For an unknown name, with the nearest one.

    Example:
      >>> preset("gpt2").model.d_model
      768
    """
    if name not in PRESETS:
        raise ConfigError(unknown("preset", name, PRESETS))
    return PRESETS[name].config
