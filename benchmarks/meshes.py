"""Training on meshes of eight devices against one device: the same seed, batch and dropout give the same numbers.

    python benchmarks/meshes.py

Runs the whole product of cases on eight simulated CPU devices and writes docs/meshes.md; the tests run a sample of the
same cases.
"""

import dataclasses
import datetime
import itertools
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig
from transformer_jax.config import resolve
from transformer_jax.training import sharding
from transformer_jax.training.mesh import parse_mesh
from transformer_jax.training.step import TrainState, compile_train_step, create_state

PAGE = Path(__file__).parent.parent / "docs" / "meshes.md"
MESHES = ("data=8", "fsdp=8", "tensor=8", "data=2,fsdp=2,tensor=2")
VOCAB, SOURCE_VOCAB, ROWS, LENGTH, STEPS = 11, 8, 16, 8, 3
LIMIT = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
      architecture, optimizer, accumulate, remat: Fields of the config.
      sequence: Whether tensor also splits the residual stream, by its positions.
    """

    architecture: str
    optimizer: str
    accumulate: int
    remat: bool
    sequence: bool = False


EVERY = [
    Case(architecture, optimizer, accumulate, remat)
    for architecture, optimizer, (accumulate, remat) in itertools.product(
        ("decoder", "encoder_decoder", "gru"), ("adamw", "muon"), ((1, False), (2, False), (2, True))
    )
    if not (architecture == "gru" and remat)  # recurrent models have no such field
] + [Case("decoder", "adamw", 1, True, True), Case("encoder_decoder", "muon", 2, False, True)]
SAMPLE = {
    Case("decoder", "muon", 2, True): MESHES,
    Case("decoder", "adamw", 1, True, True): MESHES[3:],
    Case("encoder_decoder", "adamw", 1, False): MESHES[1:],
    Case("encoder_decoder", "muon", 2, False): MESHES[3:],
    Case("gru", "muon", 2, False): (MESHES[1], MESHES[3]),
}
"""For the tests: each value of each field on several meshes."""


def config_of(case: Case) -> Config:
    """A small model with dropout; one vocabulary divides by 8, and one is a prime."""
    pairs = case.architecture == "encoder_decoder"
    model = ModelConfig(
        architecture=case.architecture,
        context=LENGTH,
        d_model=32,
        num_heads=8,
        num_layers=2,
        d_ff=64,
        init="fan_in",
        dropout=0.2,
        attention_dropout=0.2,
        remat=case.remat,
        unroll=1,  # compiles faster
    )
    return resolve(
        Config(
            model=model,
            # Adam's first update is g / (|g| + eps): with the default eps, gradients that cancel to 1e-9 decide.
            optim=OptimConfig(optimizer=case.optimizer, schedule="constant", warmup_steps=0, eps=1e-5),
            train=TrainConfig(batch_size=ROWS, accumulate=case.accumulate),
        ),
        VOCAB,
        SOURCE_VOCAB if pairs else None,
    )


def batch_of(case: Case, seed: int) -> dict[str, np.ndarray]:
    """16 rows with 0 to 8 targets that count; sources of 1 to 8 symbols."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    lengths = np.array([1, 8, 0, 2, 8, 1, 3, 0, 8, 8, 8, 7, 1, 1, 0, 4])
    weights = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}
    if case.architecture == "encoder_decoder":
        batch["source"] = random.integers(0, SOURCE_VOCAB, (ROWS, LENGTH)).astype(np.int32)
        batch["source_valid"] = np.arange(LENGTH) < random.permutation(np.maximum(lengths, 1))[:, None]
    return batch


def train(case: Case, mesh: str | None) -> tuple[list[float], TrainState]:
    """Three steps from the start: their losses, and the state after them. None is one device."""
    config = config_of(case)
    if mesh is None:
        placement = sharding.placement(jax.devices()[:1], (1, 1, 1))
    else:
        rules = [("sequence", "tensor")] if case.sequence else []
        placement = sharding.find_placement(config, parse_mesh(mesh), rules)
    with placement.use():
        state = create_state(config, placement)
        step = compile_train_step(config, state, placement)
        losses = []
        for seed in range(STEPS):
            state, metrics = step(state, placement.place(batch_of(case, seed)))
            losses.append(float(metrics["loss"]))
    return losses, state


def differences(case: Case, meshes: tuple[str, ...] = MESHES) -> Iterator[tuple[str, float, float]]:
    """For each mesh the largest difference from one device, of the losses and of the parameters after three steps."""
    losses, state = train(case, None)
    expected = jax.device_get(state.params)
    for mesh in meshes:
        others, state = train(case, mesh)
        apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), jax.device_get(state.params), expected)
        yield mesh, max(abs(a - b) for a, b in zip(losses, others, strict=True)), max(jax.tree.leaves(apart))


def largest_share(tree: Any) -> float:
    """The part of a tree's bytes that the device with the most of them holds."""
    held: dict[Any, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values()) / sum(x.nbytes for x in jax.tree.leaves(tree))


def simulate_devices() -> None:
    """Makes eight devices of the CPU; before anything is computed."""
    os.environ.setdefault("NPROC", "16")  # with fewer threads than devices their collectives can wait for ever
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def main(say: Callable[[str], None] = print) -> None:
    """Runs all cases and writes the page."""
    simulate_devices()
    jax.config.update("jax_disable_most_optimizations", True)  # half the time, and eighty programs
    rows, worst = [], 0.0
    for number, case in enumerate(EVERY):
        found = list(differences(case))
        jax.clear_caches()
        worst = max(worst, *(max(figures) for _, *figures in found))
        pieces = f"{case.accumulate}{', remat' if case.remat else ''}{', sequence' if case.sequence else ''}"
        cells = " | ".join(f"{loss:.1e}, {params:.1e}" for _, loss, params in found)
        rows.append(f"| {case.architecture} | {case.optimizer} | {pieces} | {cells} |")
        say(f"{number + 1}/{len(EVERY)} {rows[-1]}")
    lines = [
        "# Training on a mesh equals training on one device",
        "",
        f"The largest absolute difference of the losses, and of the parameters, over {STEPS} steps on eight simulated",
        f"devices and on one: the same seed, global batches of {ROWS} rows with 0 to {LENGTH} targets that count,",
        "dropout on, models of two layers in float32, compiled without most optimisations. Adam's eps is 1e-5: at the",
        "default of 1e-8 its first update shows what rounding makes of gradients that cancel to 1e-9: up to 1e-4.",
        "",
        f"Written by `python benchmarks/meshes.py` on {datetime.date.today()}, {platform.machine()} CPU, "
        f"Python {platform.python_version()}, jax {jax.__version__}. The limit is {LIMIT:.0e}.",
        "",
        f"| model | optimiser | accumulate | {' | '.join(MESHES)} |",
        f"|---|---|---|{'---|' * len(MESHES)}",
        *rows,
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not worst < LIMIT:
        raise SystemExit(f"a difference of {worst:.1e} is not below {LIMIT:.0e}")


if __name__ == "__main__":
    main()
