"""Spelling to phonemes: an encoder-decoder on the CMU Pronouncing Dictionary, without stress marks.

python train.py --config configs/cmudict.py
"""

from transformer_jax import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

CONFIG = Config(
    data=DataConfig(corpus="cmudict"),
    model=ModelConfig(
        architecture="encoder_decoder",
        context=32,
        d_model=160,
        num_layers=3,
        dropout=0.1,
        compute_dtype="bfloat16",
    ),
    optim=OptimConfig(warmup_steps=200, final_fraction=0.05),
    train=TrainConfig(
        steps=4_400,
        batch_size=256,
        log_every=20,
        eval_every=400,
        save_every=800,
        label_smoothing=0.1,
        average_decay=0.995,
    ),
)
