"""`transformer-jax inspect`."""

import dataclasses
from functools import partial
from pathlib import Path

import tyro

from transformer_jax.commands.terminal import note, prog
from transformer_jax.config_files import find_config
from transformer_jax.errors import ConfigError


@dataclasses.dataclass
class Options:
    """Show a model's diagram, parameters and FLOPs before it runs, or what tells two apart.

    Attributes:
      what: A preset's name, the folder of a run, or a config file.
      other: Another one, to compare with the first.
      vocab_size: Symbols, in place of the config's; where neither says it, the other's or 65.
      svg: Also draw the model into this file.
      json: Print one JSON object.
    """

    what: tyro.conf.Positional[str]
    other: tyro.conf.Positional[str | None] = None
    vocab_size: int | None = None
    svg: Path | None = None
    json: bool = False


def run(args: list[str]) -> int:
    """Shows a model before it runs. Returns the exit status."""
    options = tyro.cli(Options, args=args, prog=prog("inspect"))
    from transformer_jax.inspection.command import inspect
    from transformer_jax.training.metrics import escape_unprintable

    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {options.svg} lies in a folder that does not exist; make it first")
    escape_unprintable()
    inspect(
        options.what,
        options.other,
        partial(find_config, report=note),
        vocab_size=options.vocab_size,
        picture=options.svg,
        as_json=options.json,
    )
    return 0
