"""A GPT-2 style block with AdamW, for a like-for-like comparison with nanoGPT's CPU configuration.

python train.py --config configs/nanogpt_char_cpu.py

Measured on 2 cores of a cloud Xeon, 2026-11-30, jax 0.10.2: validation 1.9051 nats per character, in 122 s. nanoGPT
publishes 1.88, on a sample of the validation part.
"""

from transformer_jax import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

CONFIG = Config(
    data=DataConfig(corpus="tiny_shakespeare"),
    model=ModelConfig(
        context=64,
        d_model=128,
        num_heads=4,
        num_layers=4,
        positions="learned",
        norm="layer",
        norm_eps=1e-5,
        qk_norm=False,
        feed_forward="gelu",
        tie_embeddings=True,
        init="gpt2",
    ),
    optim=OptimConfig(
        optimizer="adamw",
        learning_rate=1e-3,
        b1=0.9,
        b2=0.99,
        weight_decay=0.1,
        warmup_steps=100,
        final_fraction=0.1,
        clip_norm=1.0,
    ),
    train=TrainConfig(steps=2_000, batch_size=12, average_decay=None),
)
