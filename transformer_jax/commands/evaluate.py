"""`transformer-jax evaluate`."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from transformer_jax.checks import unknown
from transformer_jax.commands.terminal import note, prog
from transformer_jax.data.batches import SPLITS
from transformer_jax.errors import ConfigError
from transformer_jax.training.mesh import parse_mesh


@dataclasses.dataclass
class Options:
    """Evaluate a trained model on a whole part of its data, with the figures of its task.

    Attributes:
      run: Folder of a run, or of its checkpoints.
      split: train (first 90 %), validation (last 10 %), or its halves tune and test.
      step: Checkpoint: best (lowest validation loss), last, or a number.
      batch_size: Windows at once; changes the speed only.
      beams: For an encoder_decoder, the error rates of a search too.
      mesh: As for train.
      json: Print one JSON object.
    """

    run: tyro.conf.Positional[Path]
    split: str = "validation"
    step: str = "best"
    batch_size: int = 64
    beams: int | None = None
    mesh: str | None = None
    json: bool = False


def run(args: list[str]) -> int:
    """Measures a trained model on its data. Returns the exit status."""
    options = tyro.cli(Options, args=args, prog=prog("evaluate"))
    for name in ("batch_size", "beams"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.split not in SPLITS:
        raise ConfigError(unknown("split", options.split, SPLITS))
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    from transformer_jax import compile_cache
    from transformer_jax.training.evaluate import evaluate_run
    from transformer_jax.training.runs import load_run

    compile_cache.enable()
    run = load_run(options.run, options.step, note)
    figures = evaluate_run(run, options.split, options.batch_size, options.beams, mesh)
    print(json.dumps(figures) if options.json else _table(figures))
    return 0


def _table(figures: dict[str, Any]) -> str:
    """The figures of `evaluate_run` in lines."""
    unit = figures["unit"]
    lines = [f"{figures['split']} ({figures['targets']:,} {figures['counted']}), step {figures['step']}"]
    for name, key in ((f"nats per {unit}", "loss"), (f"bits per {unit}", "bits"), ("perplexity", "perplexity")):
        lines.append(f"{name:<24}{figures[key]:>8.4f}")
    beam = figures.get("beam", {})
    for found, how in ((figures, ", greedy" if beam else ""), (beam, f", {beam.get('beams')} beams")):
        for name, value in found.items():
            if name.endswith(("_rate", "_accuracy")):
                lines.append(f"{name.replace('_', ' ') + how:<28}{value:>8.2%}")
    if "loss_by_position" in figures:
        lines.append("nats by the characters seen in the window")
        by_position = figures["loss_by_position"]
        for first, last in _doubling(len(by_position)):
            known = [loss for loss in by_position[first - 1 : last] if loss is not None]
            if known:
                seen = str(first) if first == last else f"{first} to {last}"
                lines.append(f"  {seen:<22}{sum(known) / len(known):>8.4f}")
    return "\n".join(lines)


def _doubling(length: int) -> Iterator[tuple[int, int]]:
    """1, 2, 3 to 4, 5 to 8 and so on up to a length, both ends included."""
    first, last = 1, 1
    while first <= length:
        yield first, min(last, length)
        first, last = last + 1, 2 * last
