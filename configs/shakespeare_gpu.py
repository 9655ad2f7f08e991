"""The size of nanoGPT's GPU configuration: 10.7 million parameters.

python train.py --config configs/shakespeare_gpu.py

Not measured yet: it wants a GPU. nanoGPT publishes 1.4697 for this size.
"""

from transformer_jax import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

CONFIG = Config(
    data=DataConfig(corpus="tiny_shakespeare"),
    model=ModelConfig(context=256, d_model=384, num_heads=6, num_layers=6, dropout=0.2, compute_dtype="bfloat16"),
    optim=OptimConfig(warmup_steps=100),
    train=TrainConfig(steps=5_000, batch_size=64, eval_every=250, eval_chars=65_536, save_every=500),
)
