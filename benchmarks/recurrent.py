"""Recurrent networks against the Transformer: tiny Shakespeare, equal parameters, equal characters, one recipe.

    python benchmarks/recurrent.py --out runs/recurrent --plot docs/recurrent.svg

Each model is trained with the default recipe (`python train.py`), evaluated every 100 steps on the same characters, and
at the end on the whole validation part. Runs that are there already are not made again.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from transformer_jax import Config, DataConfig
from transformer_jax.config_files import load_config
from transformer_jax.training.loop import train
from transformer_jax.training.metrics import read_metrics

RNN = load_config(Path(__file__).parent.parent / "configs" / "rnn_shakespeare.py")


def cell(architecture: str, d_model: int) -> Config:
    """The recurrent configuration with another cell, at a width that gives it as many parameters."""
    return replace(RNN, model=replace(RNN.model, architecture=architecture, d_model=d_model))


MODELS = {
    "Transformer": Config(data=DataConfig(corpus="tiny_shakespeare")),
    "vanilla RNN": RNN,
    "GRU": cell("gru", 253),
    "LSTM": cell("lstm", 220),
}


def measure(name: str, config: Config, out: Path) -> dict:
    """The figures of a run, made where it is not there yet."""
    folder = out / name.lower().replace(" ", "_")
    if not (folder / "summary.json").exists():
        train(replace(config, train=replace(config.train, eval_every=100, sample_chars=0)), folder, overwrite=True)
    curve = [
        (record["step"], record["val_loss"])
        for record in read_metrics(folder / "metrics.jsonl")
        if "val_loss" in record
    ]
    return {"curve": curve, **json.loads((folder / "summary.json").read_text())}


def draw(figures: dict[str, dict], path: Path) -> None:
    """Validation loss by characters seen, one line for each model."""
    plt.rcParams.update({"svg.hashsalt": "recurrent", "font.size": 9})
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, values in figures.items():
        each = MODELS[name].train.batch_size * MODELS[name].model.context / 1e6
        steps, losses = zip(*values["curve"], strict=True)
        label = f"{name}, {values['parameters'] / 1e6:.2f} M: {values['val_loss']:.3f}"
        axes.plot([step * each for step in steps], losses, label=label)
    axes.set(xlabel="million characters seen", ylabel="validation loss, nats per character", ylim=(1.4, 2.6))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main(out: Path, plot: Path) -> None:
    """Trains, prints a table and draws."""
    figures = {name: measure(name, config, out) for name, config in MODELS.items()}
    print("\n| model | parameters | characters | validation, nats per character | minutes |\n|---|---|---|---|---|")
    for name, values in figures.items():
        characters = values["steps"] * MODELS[name].train.batch_size * MODELS[name].model.context
        minutes = values["seconds"] / 60
        print(f"| {name} | {values['parameters']:,} | {characters:,} | {values['val_loss']:.4f} | {minutes:.1f} |")
    draw(figures, plot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/recurrent"))
    parser.add_argument("--plot", type=Path, default=Path("docs/recurrent.svg"))
    options = parser.parse_args()
    main(options.out, options.plot)
