"""A masked language model: an encoder finds hidden characters of tiny Shakespeare.

python train.py --config configs/masked_shakespeare.py
"""

from transformer_jax import Config, DataConfig, ModelConfig

CONFIG = Config(
    data=DataConfig(corpus="tiny_shakespeare"),
    model=ModelConfig(architecture="encoder", context=64),
)
