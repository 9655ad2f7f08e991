"""A vanilla recurrent network with as many parameters as the default Transformer, on the same data for as long.

python train.py --config configs/rnn_shakespeare.py

`--model.architecture gru --model.d-model 253` and `lstm --model.d-model 220` have as many too.
"""

from transformer_jax import Config, DataConfig, ModelConfig

CONFIG = Config(
    data=DataConfig(corpus="tiny_shakespeare"),
    model=ModelConfig(architecture="rnn", num_layers=2, d_model=432),
)
