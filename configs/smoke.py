"""Seconds on 2 CPU cores: to see that everything works.

    python train.py --config configs/smoke.py --out runs/smoke

Measured on 2 cores of a cloud Xeon, 2026-11-30, jax 0.10.2: 12.1 s in all, with a filled compile cache.

The schedule's end is fixed, so that runs of different `steps` have the same beginning.
"""

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig

CONFIG = Config(
    model=ModelConfig(context=16, d_model=32, num_heads=2, num_layers=2, dropout=0.1),
    optim=OptimConfig(warmup_steps=5, decay_steps=40),
    train=TrainConfig(
        steps=20,
        batch_size=8,
        accumulate=2,
        log_every=1,
        eval_every=10,
        eval_chars=1_024,
        save_every=10,
        sample_chars=60,
    ),
)
