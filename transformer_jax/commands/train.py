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
from transformer_jax.training import hosts
from transformer_jax.training.cluster import find_cluster
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
      coordinator: For several processes, HOST:PORT at which process 0 waits for the others. Cloud TPU, SLURM and
        Open MPI say this, and the next two, by themselves.
      process_id: Number of this process, from 0.
      num_processes: Of all; 1 is alone, whatever a launcher says.
      join_timeout: Seconds to wait for the other processes at the start.
    """

    config: Path | None = None
    out: Path | None = None
    resume: bool = False
    overwrite: bool = False
    mesh: str | None = None
    coordinator: str | None = None
    process_id: int | None = None
    num_processes: int | None = None
    join_timeout: int = 60


def run(args: list[str]) -> int:
    """Trains a model, or goes on with one. Returns the exit status."""
    started = time.monotonic()
    where = parse_options(Options, args, prog("train"))
    if where.resume and where.out is None:
        raise ConfigError("--resume needs --out RUN: the folder of the run to go on with")
    if where.resume and where.overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite replaces it; give one of them")
    if where.join_timeout < 1:
        raise ConfigError(f"--join-timeout must be at least 1 second, got {where.join_timeout}")
    mesh = None if where.mesh is None else parse_mesh(where.mesh)
    cluster = find_cluster(where.coordinator, where.process_id, where.num_processes)

    def advice() -> str:
        """How to go on where another process is lost."""
        newest = None if where.out is None else _newest(where.out)
        if newest is None:
            return "there is no checkpoint yet; start all processes again"
        return f"the newest checkpoint is {newest}; start all processes again, this one with: {_again(where)}"

    with hosts.joined(cluster, where.join_timeout, advice):
        with hosts.agreed("the configuration"):
            default = Config() if where.config is None else load_config(where.config)
            if where.resume and where.config is None:
                default = stored_config(where.out, note)
            config = parse_config(Options, args, default, prog("train"))
        if where.out is None:
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.data.corpus}"
            where.out = Path("runs") / hosts.first_says("the run's name", name)

        # Imported only now: a mistyped option is found before the second that this takes.
        from transformer_jax import compile_cache
        from transformer_jax.training import loop

        counts = compile_cache.enable()
        try:
            loop.train(config, where.out, resume=where.resume, overwrite=where.overwrite, mesh=mesh)
        except loop.Interrupted as interrupted:
            if hosts.is_first():
                print(f"\n{interrupted}: saved; go on with: {_again(where)}", flush=True)
            return 128 + interrupted.signum
        if hosts.is_first():
            cache = "off" if counts is None else ", ".join(f"{counts[name]} {name}" for name in ("hits", "misses"))
            print(f"took       {time.monotonic() - started:.1f} s in all; compile cache: {cache}")
        return 0


def _again(where: Options) -> str:
    """The command that goes on with a run."""
    flags = ["--out", str(where.out), "--resume"]
    for name in ("mesh", "coordinator", "process_id", "num_processes"):
        if (value := getattr(where, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(["transformer-jax", "train", *flags])


def _newest(out: Path) -> int | None:
    from transformer_jax.training.runs import RunFolder

    return max(RunFolder(out).checkpoints.steps(), default=None)
