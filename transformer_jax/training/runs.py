"""A run is a folder: what is in it, how it begins, and how it is opened again."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from transformer_jax.config import Config, to_dict
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import CheckpointError, ConfigError, TransformerJaxError
from transformer_jax.training import hosts
from transformer_jax.training.checkpoint import Checkpoints, Metadata, like
from transformer_jax.training.metrics import write_whole
from transformer_jax.training.sharding import Placement, find_devices
from transformer_jax.training.step import TrainState, init_state

_OLD = "checkpoints.part"
"""Where the checkpoints of a run that is replaced are deleted."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of a run.

    Attributes:
      path: Of the folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config as JSON, for people and for `--config`; the checkpoints hold their own."""
        return self.path / "config.json"

    @property
    def vocab(self) -> Path:
        """The vocabulary as JSON, for people; the checkpoints hold their own."""
        return self.path / "vocab.json"

    @property
    def source_vocab(self) -> Path:
        """The vocabulary of the sources, where there are any."""
        return self.path / "source_vocab.json"

    @property
    def metrics(self) -> Path:
        """One JSON record for each logged step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The figures of a finished run."""
        return self.path / "summary.json"

    @property
    def samples(self) -> Path:
        """The text written at the end of the run."""
        return self.path / "samples.txt"

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints, also where `path` is the folder of checkpoints itself."""
        inside = self.path / "checkpoints"
        return Checkpoints(inside if inside.is_dir() or self.path.name != "checkpoints" else self.path)


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
      config: Resolved.
      vocab: Of its text, or of its targets.
      params: Its parameters, float32: the average of the weights where the run kept one.
      step: Updates they had.
      corpus: Name and SHA-256 of the data.
      source_vocab: Of the sources, for an encoder-decoder.
    """

    config: Config
    vocab: Vocab
    params: Any
    step: int
    corpus: Mapping[str, str]
    source_vocab: Vocab | None = None


def check_new(path: Path, *, overwrite: bool) -> None:
    """Looks whether a new run may stand at a path; nothing is written.

    Raises:
      ConfigError: If something is there that may not be replaced, or checkpoints could not be read there.
    """
    if "\\" in str(path.absolute()):
        raise ConfigError(
            f"{path.absolute()} has a backslash, which checkpoints cannot be read from; choose another --out"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; choose another --out")
    if _occupied(path):
        if not overwrite:
            raise ConfigError(f"{path} exists already; add --resume to go on, --overwrite to replace, or another --out")
        if not is_run(path):
            raise ConfigError(f"{path} holds more than a run, and is left as it is; choose another --out")


def create(
    path: Path, config: Config, vocab: Vocab, source_vocab: Vocab | None = None, *, overwrite: bool
) -> RunFolder:
    """Makes the folder of a new run.

    Raises:
      ConfigError: If there is one already and it may not be overwritten, or it cannot be written.
    """
    check_new(path, overwrite=overwrite)
    try:
        path.mkdir(parents=True, exist_ok=True)
        run = RunFolder(path)
        # A process that is killed here must leave no half of the old run: its checkpoints go at once, its config last.
        if (path / "checkpoints").exists():
            shutil.rmtree(path / _OLD, ignore_errors=True)
            (path / "checkpoints").rename(path / _OLD)
        for inside in sorted(path.iterdir(), key=lambda p: p == run.config):  # the folder itself stays: it is claimed
            shutil.rmtree(inside) if inside.is_dir() and not inside.is_symlink() else inside.unlink()
        write_json(run.config, to_dict(config))  # first: from now on this is a run, whatever happens
        (path / "checkpoints").mkdir()
        write_json(run.vocab, vocab.to_dict())
        if source_vocab is not None:
            write_json(run.source_vocab, source_vocab.to_dict())
    except OSError as error:
        raise _unusable(path, error) from error
    return run


def never_saved(path: Path) -> bool:
    """Whether a run that was begun at a path ended before its first checkpoint: there is nothing to go on with."""
    if not path.is_dir() or not is_run(path):
        return False
    checkpoints = RunFolder(path).checkpoints
    return not checkpoints.steps() and not any("aside" in name for name in checkpoints.others())


@contextlib.contextmanager
def claimed(path: Path, *, make: bool) -> Iterator[None]:
    """Keeps other trainers out of a run's folder for a block; where the disk has no locks, nothing is kept.

    Args:
      path: Of the folder.
      make: It where it is missing.

    Raises:
      ConfigError: If another trainer is at work there; on all processes.
    """
    with hosts.agreed("the run's folder"):
        lock = _lock(path, make) if hosts.is_first() else None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(path: Path, make: bool) -> int | None:
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        folder = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        import fcntl

        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed process leaves no lock behind
    except BlockingIOError:
        os.close(folder)
        raise ConfigError(
            f"another process trains in {path} at the moment; wait for it, stop it, or choose another --out"
        ) from None
    except (ImportError, OSError):
        pass
    return folder


def check_shared(run: RunFolder) -> None:
    """Looks whether all processes can write into the run's folder, and see there what the others write.

    Raises:
      ConfigError: If not; on all processes.
    """
    if hosts.alone():
        return
    folder = run.checkpoints.folder
    me, everyone = hosts.numbers()
    marks = [folder / f"here.{number}" for number in everyone]
    try:
        with hosts.agreed("the run's folder"):
            try:
                marks[me].touch()
            except FileNotFoundError as error:
                raise _not_shared(folder) from error
            except OSError as error:
                raise _unusable(folder, error) from error
        with hosts.agreed("the run's folder"):
            until = time.monotonic() + hosts.SEEN_WITHIN
            while not all(mark.exists() for mark in marks):
                if time.monotonic() > until:
                    raise _not_shared(folder)
                time.sleep(0.1)
    finally:
        with contextlib.suppress(OSError):
            marks[me].unlink()


def _not_shared(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder} on {socket.gethostname()} is not the folder that the other processes write to; "
        "choose an --out on a disk that all hosts share"
    )


def _occupied(path: Path) -> bool:
    try:
        return path.exists() and any(inside.name != "config.part" for inside in path.iterdir())
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror or error}; choose another --out")


def is_run(path: Path) -> bool:
    """Whether a folder holds a run, perhaps an unfinished one, and nothing else."""
    run = RunFolder(path)
    files = (run.config, run.vocab, run.source_vocab, run.metrics, run.summary, run.samples)
    ours = {p.name for p in files} | {"checkpoints"}
    left_overs = {p.with_suffix(".part").name for p in files} | {_OLD}
    return run.config.is_file() and {p.name for p in path.iterdir()} <= ours | left_overs


def abstract_state(config: Config) -> TrainState:
    """Shapes and types of a run's state."""
    return jax.eval_shape(partial(init_state, config))


def open_newest(run: RunFolder, placement: Placement) -> tuple[Metadata, TrainState, list[str]]:
    """The newest checkpoint that can be read, for going on, wherever it was written; see `Checkpoints.newest`."""

    def whole(metadata: Metadata) -> TrainState:
        state = abstract_state(metadata.config)
        return like(state, placement.shardings(state))

    return run.checkpoints.newest(whole)


@dataclasses.dataclass(frozen=True)
class Survey:
    """What can be said of a checkpoint.

    Attributes:
      step: Updates made.
      bytes: Of its files.
      metrics: Of its step.
      good: Whether it can be used, as far as it was looked at.
      state: In words.
    """

    step: int
    bytes: int
    metrics: Mapping[str, float]
    good: bool
    state: str


def survey(run: RunFolder, *, verify: bool) -> list[Survey]:
    """Looks at all checkpoints of a run; with `verify` at every array."""
    checkpoints, found = run.checkpoints, []
    steps, best = checkpoints.steps(), checkpoints.best()
    for step in steps:
        words = ["newest"] * (step == steps[-1]) + ["best"] * (step == best)
        metrics: Mapping[str, float] = {}
        try:
            metadata = checkpoints.metadata(step)
            metrics = metadata.metrics
            if verify:
                checkpoints.verify(metadata, abstract_state(metadata.config))
                words.append("verified")
            good = True
        except TransformerJaxError as error:
            words, good = [str(error).removeprefix(f"checkpoint {step} in {checkpoints.folder} is ")], False
        found.append(Survey(step, checkpoints.size(step), metrics, good, ", ".join(words)))
    return found


def find_run(path: Path) -> RunFolder:
    """The run at a path.

    Raises:
      CheckpointError: If there is none, or it has no checkpoint.
    """
    run = RunFolder(path)
    if not path.is_dir():
        raise CheckpointError(f"no run at {path}: {'it is a file' if path.exists() else 'it does not exist'}")
    if not run.checkpoints.steps():
        raise CheckpointError(f"no checkpoint in {path}: it holds no run, or the run wrote nothing yet")
    return run


def load_run(
    path: str | os.PathLike[str],
    step: int | str = "best",
    report: Callable[[str], None] = print,
    placement: Placement | None = None,
) -> Run:
    """Loads a model for use; a folder with checkpoints alone is enough.

    Args:
      path: Of the run.
      step: "best" (lowest validation loss), "last", or a number.
      report: Told of checkpoints that had to be skipped.
      placement: Where the parameters are to lie; None is one device. It need not be where they were trained.

    Raises:
      CheckpointError: If there is no such run or step, or it is damaged.
    """
    checkpoints = find_run(Path(path)).checkpoints
    device = jax.sharding.SingleDeviceSharding(find_devices()[0])

    def part(metadata: Metadata) -> dict[str, Any]:
        state = abstract_state(metadata.config)
        name, params = "params" if state.average is None else "average", state.eval_params
        return {name: like(params, device if placement is None else placement.shardings(params))}

    if step == "best":
        best = checkpoints.best(report)
        step = "last" if best is None else best
    if step == "last":
        metadata, state, skipped = checkpoints.newest(part)
        for line in skipped:
            report(f"skipped: {line}")
    else:
        if not isinstance(step, int) and not str(step).isdecimal():
            raise CheckpointError(f"unknown step {step!r}; it is best, last or a number")
        with hosts.agreed("the metadata of a checkpoint"):
            metadata = checkpoints.metadata(int(step))
        state = checkpoints.restore(metadata, part(metadata))
    (params,) = state.values()
    return Run(metadata.config, metadata.vocab, params, metadata.step, metadata.corpus, metadata.source_vocab)


def write_json(path: Path, values: Any) -> None:
    """Writes a JSON file as a whole or not at all."""
    write_whole(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
