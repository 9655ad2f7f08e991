"""Trains a character-level Transformer: the `train` command of `transformer-jax`.

python train.py                                       the recipe of configs/shakespeare_cpu.py
python train.py --config configs/smoke.py             another config
python train.py --model.d-model 256 --train.steps 500 single fields
python train.py --out runs/first --resume             go on with a run
"""

import sys

from transformer_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
