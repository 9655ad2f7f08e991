"""Where a config is read from: a Python file, the config.json of a run, its checkpoints, or a preset's name."""

import dataclasses
import runpy
from collections.abc import Callable
from pathlib import Path

from transformer_jax.checks import unknown
from transformer_jax.config import Config, field_names, from_dict, unresolve
from transformer_jax.errors import CheckpointError, ConfigError, TransformerJaxError
from transformer_jax.presets import PRESETS
from transformer_jax.reading import read_json

_LARGEST = 1 << 20
"""Bytes of a config.json."""


def load_config(path: Path, *, resolved: bool = False) -> Config:
    """Reads a config: a Python file that sets CONFIG, the config.json of a run, or a preset's name.

    Args:
      path: Of the file; a file goes before a preset of the same name.
      resolved: Keep what the run filled in; otherwise the config can begin another run.

    Raises:
      ConfigError: Naming the file and what is wrong with it.
    """
    if not path.is_file():
        if str(path) in PRESETS:
            return PRESETS[str(path)].config
        raise ConfigError(
            f"no config file at {path}; it is a Python file that sets CONFIG, a run's config.json, "
            f"or one of {', '.join(PRESETS)}"
        )
    if path.suffix not in (".py", ".json"):
        raise ConfigError(f"{path} is no config: it is a Python file (.py) that sets CONFIG, or a run's config.json")
    try:
        if path.suffix == ".json":
            config = from_dict(read_json(path, largest=_LARGEST))
            return config if resolved else unresolve(config)
        found = runpy.run_path(str(path)).get("CONFIG")
    except TypeError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, Config):
        raise ConfigError(f"{path} must set CONFIG = Config(...), and sets {type(found).__name__}")
    return found


def find_config(what: str, report: Callable[[str], None]) -> Config:
    """The config of a preset, of a run as it was resolved, or in a file.

    Args:
      what: A name or a path.
      report: Told of checkpoints that had to be skipped.

    Raises:
      ConfigError: If there is nothing of that name.
      CheckpointError: If there is a folder without a run.
    """
    path = Path(what)
    if not path.exists() and what not in PRESETS:
        raise ConfigError(unknown("preset, run or config file", what, PRESETS))
    inside = path / "config.json"
    if path.is_dir() and not inside.is_file():
        return stored_config(path, report)
    return load_config(inside if path.is_dir() else path, resolved=True)


def stored_config(out: Path, report: Callable[[str], None]) -> Config:
    """The config of the newest checkpoint of a run that says what it is; of its folder where it never saved one.

    Args:
      out: The run's folder.
      report: Told of checkpoints that had to be skipped.

    Raises:
      CheckpointError: If there is none.
    """
    from transformer_jax.training.runs import RunFolder, never_saved

    if never_saved(out):
        return load_config(RunFolder(out).config)
    checkpoints = RunFolder(out).checkpoints
    for step in reversed(checkpoints.steps()):
        try:
            return checkpoints.metadata(step).config
        except TransformerJaxError as error:
            report(str(error))
    raise CheckpointError(f"no checkpoint in {out}: it holds no run, or the run wrote nothing yet")


def _explain(error: TypeError) -> str:
    """A wrong field name in a config file, with the nearest right one."""
    words = str(error).split("'")
    kind = next(
        (k for k in (Config, *(f.type for f in dataclasses.fields(Config))) if words[0].startswith(k.__name__)), None
    )
    if kind is None or "unexpected keyword" not in words[0]:
        return str(error)
    return unknown(f"field of {kind.__name__}", words[1], field_names(kind))
