"""`transformer-jax plan`."""

import dataclasses
import json
from pathlib import Path

from transformer_jax.commands.overrides import parse_config, parse_options
from transformer_jax.commands.terminal import note, prog
from transformer_jax.config import Config, resolve
from transformer_jax.config_files import load_config
from transformer_jax.errors import ConfigError
from transformer_jax.presets import TINY_SHAKESPEARE
from transformer_jax.training.mesh import parse_mesh


@dataclasses.dataclass
class Options:
    """Show what training on a mesh takes, without its devices: memory, communication, and for TPUs time.

    Attributes:
      config: As for train; other flags change single fields of it.
      mesh: As for train. Without --topology all sizes are given, and as many CPU devices are simulated.
      topology: Compile for this TPU slice instead, such as v5e:2x4 or v5p:4x4x4, with the TPU's own compiler.
      search: Try meshes, batches and remat on the slice, and show what fits, the best first; takes minutes to an hour.
      json: Print one JSON object, or with --search one for each plan.
    """

    config: Path | None = None
    mesh: str | None = None
    topology: str | None = None
    search: bool = False
    json: bool = False


def run(args: list[str]) -> int:
    """Shows what a mesh takes. Returns the exit status: 1 where it does not fit."""
    options = parse_options(Options, args, prog("plan"))
    default = Config() if options.config is None else load_config(options.config)
    config = parse_config(Options, args, default, prog("plan"))
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    if options.search and options.topology is None:
        raise ConfigError("--search needs the slice to search for: --topology v5p:4x4x4")
    if options.search and mesh is not None:
        raise ConfigError(f"--search tries all meshes, and --mesh {options.mesh} asks for one; leave one of them out")
    if mesh is None and options.topology is None:
        raise ConfigError("plan needs the devices: --mesh data=4,fsdp=2, or --topology v5e:2x4")
    config = _with_symbols(config)
    from transformer_jax.planning.child import plan_elsewhere

    if not options.search:
        plan = plan_elsewhere(config, mesh, options.topology)
        from transformer_jax.planning.show import show, to_dict

        print(json.dumps(to_dict(plan))) if options.json else show(plan)
        return 0 if plan.fits else 1
    from transformer_jax.planning.search import search
    from transformer_jax.planning.show import row, show_search, to_dict

    plans = search(
        config, options.topology, lambda found: note(found if isinstance(found, str) else "  ".join(row(found)))
    )
    if options.json:
        print("\n".join(json.dumps(to_dict(plan)) for plan in plans))
    else:
        show_search(plans)
    return 0 if plans[0].fits else 1


def _with_symbols(config: Config) -> Config:
    """The config with a vocabulary, which training would take from the data."""
    pairs = config.model.architecture == "encoder_decoder"
    sizes = {"vocab_size": config.model.vocab_size, "source_vocab_size": config.model.source_vocab_size}
    lacking = [name for name, size in sizes.items() if size is None and (pairs or name == "vocab_size")]
    if lacking:
        flags = " and ".join(f"--model.{name.replace('_', '-')} N" for name in lacking)
        note(f"taking {TINY_SHAKESPEARE} symbols, as in tiny Shakespeare; {flags} for others")
    found = {name: size or (TINY_SHAKESPEARE if name in lacking else None) for name, size in sizes.items()}
    return resolve(config, **found)
