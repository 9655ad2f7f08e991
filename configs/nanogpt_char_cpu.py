"""A GPT-2 style block with AdamW, for a like-for-like comparison with nanoGPT's CPU configuration.

python train.py --config configs/nanogpt_char_cpu.py

Measured on 2 cores of a cloud Xeon, 2026-11-30, jax 0.10.2: validation 1.9051 nats per character, in 122 s. nanoGPT
publishes 1.88, on a sample of the validation part.
"""

from dataclasses import replace

from transformer_jax import DataConfig, preset

_GPU = preset("nanogpt_char")

CONFIG = replace(
    _GPU,
    data=DataConfig(corpus="tiny_shakespeare"),
    model=replace(_GPU.model, context=64, d_model=128, num_heads=4, num_layers=4, dropout=0.0, attention_dropout=0.0),
    train=replace(_GPU.train, steps=2_000, batch_size=12),
)
