"""`transformer-jax train`."""

import dataclasses
import shlex
import time
from pathlib import Path

from transformer_jax.commands.overrides import parse_config, parse_options
from transformer_jax.commands.terminal import note, prog
from transformer_jax.config import Config
from transformer_jax.config_files import load_config, stored_config
from transformer_jax.errors import ConfigError
from transformer_jax.training.mesh import parse_mesh


@dataclasses.dataclass
class Options:
    """Train a model.

    Attributes:
      config: A Python file that sets CONFIG, the config.json of a run, or a preset such as nanogpt_char; other flags
        change single fields of it.
      out: Folder of the run; a new one under runs/ where it is left out.
      resume: Go on from the newest good checkpoint of --out.
      overwrite: Replace the run in --out.
      mesh: How all devices share the work, such as data=4,fsdp=2,tensor=1; a size of -1 is the rest. Where it is left
        out each of as many devices as divide the batch has a whole model. A run goes on with any other mesh.
    """

    config: Path | None = None
    out: Path | None = None
    resume: bool = False
    overwrite: bool = False
    mesh: str | None = None


def run(args: list[str]) -> int:
    """Trains a model, or goes on with one. Returns the exit status."""
    started = time.monotonic()
    where = parse_options(Options, args, prog("train"))
    if where.resume and where.out is None:
        raise ConfigError("--resume needs --out RUN: the folder of the run to go on with")
    if where.resume and where.overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite replaces it; give one of them")
    mesh = None if where.mesh is None else parse_mesh(where.mesh)
    default = Config() if where.config is None else load_config(where.config)
    if where.resume and where.config is None:
        default = stored_config(where.out, note)
    config = parse_config(Options, args, default, prog("train"))
    out = where.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.data.corpus}"

    # Imported only now: a mistyped option is found before the second that this takes.
    from transformer_jax import compile_cache
    from transformer_jax.training import loop

    counts = compile_cache.enable()
    try:
        loop.train(config, out, resume=where.resume, overwrite=where.overwrite, mesh=mesh)
    except loop.Interrupted as interrupted:
        again = ["transformer-jax", "train", "--out", str(out), "--resume"] + (["--mesh", where.mesh] if mesh else [])
        print(f"\n{interrupted}: saved; go on with: {shlex.join(again)}", flush=True)
        return 128 + interrupted.signum
    cache = "off" if counts is None else ", ".join(f"{counts[name]} {name}" for name in ("hits", "misses"))
    print(f"took       {time.monotonic() - started:.1f} s in all; compile cache: {cache}")
    return 0
