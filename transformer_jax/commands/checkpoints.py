"""`transformer-jax checkpoints`."""

import dataclasses
import json
from pathlib import Path

import tyro

from transformer_jax.commands.terminal import prog
from transformer_jax.errors import CheckpointError


@dataclasses.dataclass
class Options:
    """List the checkpoints of a run, with what can be used of them.

    Attributes:
      run: Folder of a run, or of its checkpoints.
      verify: Read every array, and compare it with what was saved; without it only what checkpoints say of themselves.
      json: Print one JSON object.
    """

    run: tyro.conf.Positional[Path]
    verify: bool = False
    json: bool = False


def run(args: list[str]) -> int:
    """Lists checkpoints. Returns the exit status."""
    options = tyro.cli(Options, args=args, prog=prog("checkpoints"))
    from transformer_jax.output import Output
    from transformer_jax.training.runs import find_run, survey

    run = find_run(options.run)
    found, others = survey(run, verify=options.verify), run.checkpoints.others()
    if options.json:
        print(json.dumps({"checkpoints": [dataclasses.asdict(one) for one in found], "others": others}))
    else:
        out = Output()
        rows = [
            (
                str(one.step),
                f"{one.bytes:,}",
                _loss(one.metrics.get("loss")),
                _loss(one.metrics.get("val_loss")),
                one.state,
            )
            for one in found
        ]
        out.table(["step", "bytes", "loss", "validation", "state"], rows)
        for name, kind in others.items():
            out.say(f"{name}: {kind}")
    if damaged := [str(one.step) for one in found if not one.good]:
        raise CheckpointError(
            f"{len(damaged)} of {len(found)} checkpoints cannot be used: {', '.join(damaged)}; "
            "--resume goes on from the newest of the others"
        )
    return 0


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
