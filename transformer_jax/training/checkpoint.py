"""Checkpoints: the state by Orbax, and beside it all that is needed to use it, as one unit.

A checkpoint is the folder `checkpoints/STEP`. It is written under another name and renamed when it is whole, so a save
that is cut off leaves a folder that no reader takes for a checkpoint. How one is written stands in `saving`.
"""

import dataclasses
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from transformer_jax.config import Config, from_dict, to_dict
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import CheckpointError, TransformerJaxError
from transformer_jax.reading import check_folder, read_json
from transformer_jax.training import hosts
from transformer_jax.training.digests import digests, numpy_digest, sha256_digest, sha256_digests
from transformer_jax.training.optim import leaf_name
from transformer_jax.training.quiet import quieten

FORMAT = 2
"""Of the metadata that is written. Format 1, without a digest of itself, is read too; any other is refused."""

_OURS = re.compile(r"(0|[1-9][0-9]*)(?:\.(?:(aside)-[0-9]+|(deleting)|(orbax-checkpoint-tmp)))?")
_KINDS = {
    "aside": "set aside: in the way of a newer one",
    "deleting": "was being deleted",
    "orbax-checkpoint-tmp": "a save that was cut off",
}


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a checkpoint says beside its arrays.

    Attributes:
      step: Updates made.
      examples: Training examples seen: the place in the data.
      seconds: Time spent training.
      metrics: Of this step, as in the run's log: "loss", "val_loss" and the like, those that were measured.
      config: Resolved.
      vocab: Of the text, or of the targets.
      corpus: Name and SHA-256 of the data.
      source_vocab: Of the sources, where there are any.
      mesh: Of the devices that wrote it, as text; for information.
      digests: Of each array of the state, by its path. Orbax has none, and restores a flipped bit in silence.
      format: Of the file.
    """

    step: int
    examples: int
    seconds: float
    metrics: Mapping[str, float]
    config: Config
    vocab: Vocab
    corpus: Mapping[str, str]
    source_vocab: Vocab | None = None
    mesh: str = ""
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    format: int = FORMAT

    @property
    def val_loss(self) -> float | None:
        """Nats per target on the fixed part of the validation data; None where it was not evaluated."""
        return self.metrics.get("val_loss")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, with a digest of the rest."""
        values = {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "metrics": dict(self.metrics),
            "config": to_dict(self.config),
            "vocab": self.vocab.to_dict(),
            "source_vocab": None if self.source_vocab is None else self.source_vocab.to_dict(),
            "corpus": dict(self.corpus),
            "digests": dict(self.digests),
        }
        return {**values, "sha256": _sha256(values)}

    @classmethod
    def from_dict(cls, values: Any) -> "Metadata":
        """Reads what `to_dict` made, or an older version of it.

        Raises:
          CheckpointError: If it is of another format.
          ValueError, KeyError, TypeError, AttributeError, ArithmeticError: If it is damaged.
        """
        written = values.get("format")
        if written not in (1, FORMAT):
            raise CheckpointError(
                f"it has format {written!r}, and this version reads 1 and {FORMAT}; use the version that wrote it"
            )
        if written == 1:
            loss = values["val_loss"]
            metrics = {} if loss is None else {"val_loss": float(loss)}
        else:
            if values.pop("sha256") != _sha256(values):
                raise ValueError("the metadata are not what was saved")
            metrics = {name: float(value) for name, value in values["metrics"].items()}
        source_vocab = values.get("source_vocab")  # the first runs have none
        return cls(
            step=int(values["step"]),
            examples=int(values["examples"]),
            seconds=float(values["seconds"]),
            metrics=metrics,
            config=from_dict(values["config"]),
            vocab=Vocab.from_dict(values["vocab"]),
            corpus=dict(values["corpus"]),
            source_vocab=None if source_vocab is None else Vocab.from_dict(source_vocab),
            mesh=str(values.get("mesh", "")),
            digests=dict(values["digests"]),
            format=written,
        )


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of a run, in a folder that all processes share.

    All processes must restore, prune and discard together: each reads its part of the state, and the first does what
    is to be done once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        quieten()

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first. Empty, foreign and half-written folders do not count."""
        if not self.folder.is_dir():
            return []
        whole = (p for p in self.folder.iterdir() if p.name.isdecimal() and (p / "metadata").is_dir())
        return sorted(int(p.name) for p in whole if _OURS.fullmatch(p.name))

    def others(self) -> dict[str, str]:
        """What else lies in the folder, and what it is."""
        if not self.folder.is_dir():
            return {}
        steps = set(map(str, self.steps()))
        return {p.name: _kind(p) for p in sorted(self.folder.iterdir()) if p.name not in steps}

    def size(self, step: int) -> int:
        """Bytes of a checkpoint's files."""
        files = (p for p in (self.folder / str(step)).rglob("*") if p.is_file() and not p.is_symlink())
        return sum(p.stat().st_size for p in files)

    def metadata(self, step: int) -> Metadata:
        """Reads what a checkpoint says of itself.

        Raises:
          CheckpointError: If it is missing, damaged or of another format.
        """
        if step not in self.steps():
            raise CheckpointError(f"no checkpoint {step} in {self.folder}; there are {self._listed()}")
        path = self.folder / str(step)
        try:
            check_folder(path)
            return Metadata.from_dict(read_json(path / "metadata" / "metadata"))
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {step} in {self.folder}: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise self._damaged(step, error) from error

    def restore(self, metadata: Metadata, like: Any) -> Any:
        """Reads a state and checks each array against its digest.

        Args:
          metadata: Of the checkpoint, from `metadata`.
          like: A tree of ShapeDtypeStructs with shardings. It may leave out parts of the state.

        Raises:
          CheckpointError: If it is damaged or does not fit.
        """
        step = metadata.step
        with hosts.agreed(f"reading checkpoint {step}"):
            state = self._read(metadata, like)
        found = sha256_digests(state) if metadata.format == 1 else digests(state)
        with hosts.agreed(f"checking checkpoint {step}"):
            self._compare(metadata, found)
        return state

    def verify(self, metadata: Metadata, like: Any, part: slice = slice(None)) -> None:
        """Reads the arrays of a checkpoint into the memory of this host, and looks whether they are what was saved.

        No other process is waited for.

        Args:
          metadata: Of the checkpoint, from `metadata`.
          like: The whole state as ShapeDtypeStructs.
          part: Which of the arrays: several processes share the work.

        Raises:
          CheckpointError: If it is damaged.
        """
        expected = {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(like)}
        if apart := expected.keys() ^ metadata.digests.keys():
            raise self._damaged(metadata.step, f"{min(apart)} is in one of its state and its metadata")
        chosen = set(list(expected)[part])
        wanted = jax.tree.map_with_path(lambda path, x: x if leaf_name(path) in chosen else ocp.PLACEHOLDER, like)
        digest = sha256_digest if metadata.format == 1 else numpy_digest
        found = jax.tree_util.tree_leaves_with_path(self._read(metadata, wanted, as_numpy=True)) if chosen else []
        self._compare(metadata, {leaf_name(path): digest(x) for path, x in found if leaf_name(path) in chosen})

    def _compare(self, metadata: Metadata, found: Mapping[str, str]) -> None:
        for name, digest in found.items():
            if metadata.digests.get(name) != digest:
                raise self._damaged(metadata.step, f"{name} is not what was saved")

    def _damaged(self, step: int, error: BaseException | str) -> CheckpointError:
        why = error if isinstance(error, str) else brief(error)
        return CheckpointError(f"checkpoint {step} in {self.folder} is damaged: {why}")

    def _stored(self, step: int) -> dict[str, Any]:
        """Orbax's metadata of each array on disk, by its path."""
        try:
            tree = ocp.PyTreeCheckpointHandler().metadata(self.folder / str(step) / "state").tree
            return {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        except Exception as error:  # anything, on a damaged file
            raise self._damaged(step, error) from error

    def _read(self, metadata: Metadata, like: Any, as_numpy: bool = False) -> Any:
        """What `restore` does without the others: where it fails on one process none must wait for it."""
        step, stored = metadata.step, self._stored(metadata.step)
        for path, x in jax.tree_util.tree_leaves_with_path(like):
            name = leaf_name(path)
            if name not in metadata.digests:
                raise CheckpointError(
                    f"checkpoint {step} in {self.folder} has no {name}: another version of this program wrote it; "
                    "read it with that version"
                )
            if name not in stored:
                raise self._damaged(step, f"{name} is missing")
            if x is not ocp.PLACEHOLDER and not _fits(stored[name], x):  # before anything is read, or memory taken
                found = f"{stored[name].dtype} {list(stored[name].shape)}"
                raise self._damaged(step, f"{name} is {found}, and {x.dtype} {list(x.shape)} is expected")
        if as_numpy:
            restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
        else:
            restore_args = ocp.checkpoint_utils.construct_restore_args(like)
        args = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True)
        try:
            return _reader().restore(self.folder / str(step), args=ocp.args.Composite(state=args))["state"]
        except Exception as error:
            # Orbax and TensorStore raise anything on a damaged file, with pages of text.
            raise self._damaged(step, error) from error

    def newest(self, like: Any) -> tuple[Metadata, Any, list[str]]:
        """The newest checkpoint that can be read, by all processes.

        Args:
          like: A function from Metadata to what `restore` takes.

        Returns:
          Its metadata, its state, and a line for each newer one that had to be skipped.

        Raises:
          CheckpointError: If there is none.
        """
        skipped = []
        for step in reversed(hosts.first_says("the checkpoints", self.steps())):
            try:
                with hosts.agreed(f"the metadata of checkpoint {step}"):
                    metadata = self.metadata(step)
                    wanted = like(metadata)
                return metadata, self.restore(metadata, wanted), skipped
            except TransformerJaxError as error:
                skipped.append(str(error))
        raise CheckpointError(f"no usable checkpoint in {self.folder}" + "".join(f"; {line}" for line in skipped))

    def best(self, report: Callable[[str], None] = lambda _: None) -> int | None:
        """The step with the lowest validation loss, or None where none was evaluated.

        Args:
          report: Told of checkpoints that cannot be read: any of them may have been the best.
        """
        return hosts.first_says("the best checkpoint", best_step(self._losses(report)) if hosts.is_first() else None)

    def prune(self, newest: int, best: int = 1, every: int | None = None) -> None:
        """Deletes all checkpoints but those of `kept_steps`, and what saves left that were cut off."""
        with hosts.agreed("old checkpoints"):
            if not hosts.is_first():
                return
            losses = self._losses()
            for step in set(losses) - kept_steps(losses, newest, best, every):
                # Renamed first: one that is half deleted must not look like a checkpoint.
                (self.folder / str(step)).rename(self.folder / f"{step}.deleting")
            for name, kind in self.others().items():
                if kind in (_KINDS["deleting"], _KINDS["orbax-checkpoint-tmp"]):
                    shutil.rmtree(self.folder / name)

    def discard_after(self, step: int) -> list[int]:
        """Moves checkpoints newer than a step out of the way, so that a resumed run can write them again."""
        newer = hosts.first_says("newer checkpoints", [s for s in self.steps() if s > step])
        with hosts.agreed("newer checkpoints"):
            for s in newer if hosts.is_first() else ():
                self.set_aside(s)
        return newer

    def set_aside(self, step: int) -> None:
        """Nothing is deleted that may be of use: what stands in the way is renamed."""
        path = self.folder / str(step)
        if path.exists():
            number = next(n for n in range(10**6) if not (self.folder / f"{step}.aside-{n}").exists())
            path.rename(self.folder / f"{step}.aside-{number}")

    def _losses(self, report: Callable[[str], None] = lambda _: None) -> dict[int, float | None]:
        losses = {}
        for step in self.steps():
            try:
                losses[step] = self.metadata(step).val_loss
            except TransformerJaxError as error:
                report(f"skipped: {error}")
                losses[step] = None
        return losses

    def _listed(self) -> str:
        return ", ".join(map(str, self.steps())) or "none"


def best_step(losses: Mapping[int, float | None]) -> int | None:
    """The step with the lowest finite loss; the earliest of equals. What is not a number is never best."""
    return next(iter(_ranked(losses)), None)


def _ranked(losses: Mapping[int, float | None]) -> list[int]:
    finite = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return sorted(finite, key=lambda step: (finite[step], step))


def kept_steps(losses: Mapping[int, float | None], newest: int, best: int = 1, every: int | None = None) -> set[int]:
    """The `newest` newest steps, the `best` best ones, and each that `every` divides."""
    kept = set(sorted(losses)[-newest:])
    if every is not None:
        kept |= {step for step in losses if step % every == 0}
    return kept | set(_ranked(losses)[:best])


def like(tree: Any, shardings: Any) -> Any:
    """Describes a tree of arrays for `Checkpoints.restore`, by a tree of shardings, or one for all."""
    shardings = jax.tree.broadcast(shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _reader() -> ocp.Checkpointer:
    """Reads as if there were no other process: Orbax waits for all, and for ever where one of them failed."""
    if hosts.alone():
        return ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=options)


def _fits(stored: Any, expected: jax.ShapeDtypeStruct) -> bool:
    """Whether an array on disk is of this shape and type, and its pieces are no larger than the whole."""
    pieces = stored.storage.chunk_shape if stored.storage else None
    small = pieces is None or all(a <= max(b, 1) for a, b in zip(pieces, stored.shape, strict=True))
    return (stored.shape, stored.dtype) == (expected.shape, expected.dtype) and small


def _kind(path: Path) -> str:
    found = _OURS.fullmatch(path.name)
    mark = next(filter(None, found.groups()[1:]), None) if found and path.is_dir() and not path.is_symlink() else None
    return _KINDS.get(mark, "not a checkpoint")


def brief(error: BaseException) -> str:
    """An error in one line: its beginning, and its end, where the cause often stands."""
    if "TensorStore" in str(error) and error.__cause__ is not None:
        error = error.__cause__  # what was wrong, and not what was being read
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 300 else f'{text[:150]} ... {text[-150:]}'}"
