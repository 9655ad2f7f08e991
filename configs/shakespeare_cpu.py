"""The recipe of `python train.py`, for a laptop.

python train.py --config configs/shakespeare_cpu.py
"""

from transformer_jax import Config

CONFIG = Config()
