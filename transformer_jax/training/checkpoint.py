"""Checkpoints: the state by Orbax, and beside it all that is needed to use it, as one unit.

A checkpoint is the folder `checkpoints/STEP`. Orbax writes it under another name and renames it when it is whole, so
a save that is cut off leaves a folder that no reader takes for a checkpoint.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from transformer_jax.config import Config, from_dict, to_dict
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import CheckpointError, TransformerJaxError
from transformer_jax.fetch import fetch
from transformer_jax.training import hosts
from transformer_jax.training.optim import leaf_name

FORMAT = 1
"""Of the metadata. A reader refuses any other."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a checkpoint says beside its arrays.

    Attributes:
      step: Updates made.
      examples: Training examples seen: the place in the data.
      seconds: Time spent training.
      val_loss: Nats per target on the fixed part of the validation data; None where it was not evaluated.
      config: Resolved.
      vocab: Of the text, or of the targets.
      corpus: Name and SHA-256 of the data.
      source_vocab: Of the sources, where there are any.
      digests: SHA-256 of each array of the state, by its path; filled in by `Checkpoints.save`. Orbax has none, and
        restores a flipped bit in silence.
    """

    step: int
    examples: int
    seconds: float
    val_loss: float | None
    config: Config
    vocab: Vocab
    corpus: Mapping[str, str]
    source_vocab: Vocab | None = None
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)


class Checkpoints:
    """The checkpoints of a run, in a folder that all processes share.

    All processes must save, restore, prune and discard together: each writes and reads its part of the state, and the
    first does what is to be done once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler())

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first. Empty, foreign and half-written folders do not count."""
        if not self.folder.is_dir():
            return []
        whole = (p for p in self.folder.iterdir() if p.name.isdecimal() and (p / "metadata").is_dir())
        return sorted(int(p.name) for p in whole if str(int(p.name)) == p.name)

    def save(self, state: Any, metadata: Metadata) -> None:
        """Writes one checkpoint and returns when it is on disk. One that is there for this step is kept as it is.

        Raises:
          CheckpointError: If it cannot be written; those before it are untouched.
        """
        with hosts.agreed(f"checkpoint {metadata.step}"):
            there = hosts.is_first() and metadata.step in self.steps()
            if hosts.is_first() and not there:
                self._set_aside(metadata.step)
        if hosts.first_says("the checkpoints", there):
            return
        values = {
            "format": FORMAT,
            **{f.name: getattr(metadata, f.name) for f in dataclasses.fields(Metadata)},
            "config": to_dict(metadata.config),
            "vocab": metadata.vocab.to_dict(),
            "source_vocab": None if metadata.source_vocab is None else metadata.source_vocab.to_dict(),
            "corpus": dict(metadata.corpus),
            "digests": digests(state),
        }
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), metadata=ocp.args.JsonSave(values))
        try:
            self._orbax.save(self.folder / str(metadata.step), args=items)
        except Exception as error:  # a full disk shows as almost anything
            if hosts.is_lost(error):
                raise
            newest = max(self.steps(), default=None)
            way_out = "there is no checkpoint yet" if newest is None else f"the run can be resumed from step {newest}"
            raise CheckpointError(
                f"checkpoint {metadata.step} could not be written to {self.folder}: {_brief(error)}; {way_out}"
            ) from error

    def metadata(self, step: int) -> Metadata:
        """Reads what a checkpoint says of itself.

        Raises:
          CheckpointError: If it is missing, damaged or of another format.
        """
        if step not in self.steps():
            raise CheckpointError(f"no checkpoint {step} in {self.folder}; there are {self._listed()}")
        try:
            values = json.loads((self.folder / str(step) / "metadata" / "metadata").read_text(encoding="utf-8"))
            if values.get("format") != FORMAT:
                raise CheckpointError(
                    f"checkpoint {step} in {self.folder} has format {values.get('format')!r}, and this version reads "
                    f"{FORMAT}; use the version that wrote it"
                )
            source_vocab = values.get("source_vocab")  # the first runs have none
            return Metadata(
                step=int(values["step"]),
                examples=int(values["examples"]),
                seconds=float(values["seconds"]),
                val_loss=None if values["val_loss"] is None else float(values["val_loss"]),
                config=from_dict(values["config"]),
                vocab=Vocab.from_dict(values["vocab"]),
                corpus=dict(values["corpus"]),
                source_vocab=None if source_vocab is None else Vocab.from_dict(source_vocab),
                digests=dict(values["digests"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"checkpoint {step} in {self.folder} is damaged: {_brief(error)}") from error

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
        found = digests(state)
        with hosts.agreed(f"checking checkpoint {step}"):
            wrong = [name for name, digest in found.items() if metadata.digests.get(name) != digest]
            if wrong:
                raise CheckpointError(
                    f"checkpoint {step} in {self.folder} is damaged: {wrong[0]} is not what was saved"
                )
        return state

    def _read(self, metadata: Metadata, like: Any) -> Any:
        """What `restore` does without the others: where it fails on one process none must wait for it."""
        step = metadata.step
        names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
        lacking = [name for name in names if name not in metadata.digests]
        if lacking:
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} has no {lacking[0]}: another version of this program wrote it; "
                "read it with that version"
            )
        restore_args = ocp.checkpoint_utils.construct_restore_args(like)
        args = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True)
        try:
            return self._reader.restore(self.folder / str(step), args=ocp.args.Composite(state=args))["state"]
        except Exception as error:
            # Orbax and TensorStore raise anything on a damaged file, with pages of text.
            raise CheckpointError(f"checkpoint {step} in {self.folder} is damaged: {_brief(error)}") from error

    @property
    def _reader(self) -> ocp.Checkpointer:
        """Reads as if there were no other process: Orbax waits for all, and for ever where one of them failed."""
        if hosts.alone():
            return self._orbax
        me = jax.process_index()
        options = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
        return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=options)

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

    def best(self) -> int | None:
        """The step with the lowest validation loss, or None where none was evaluated."""
        return hosts.first_says("the best checkpoint", best_step(self._losses()) if hosts.is_first() else None)

    def prune(self, keep: int) -> None:
        """Deletes all but the newest `keep` and the best."""
        with hosts.agreed("old checkpoints"):
            losses = self._losses() if hosts.is_first() else {}
            for step in set(losses) - kept_steps(losses, keep):
                # Renamed first: one that is half deleted must not look like a checkpoint.
                doomed = (self.folder / str(step)).rename(self.folder / f"{step}.deleting")
                shutil.rmtree(doomed)

    def discard_after(self, step: int) -> list[int]:
        """Moves checkpoints newer than a step out of the way, so that a resumed run can write them again."""
        newer = hosts.first_says("newer checkpoints", [s for s in self.steps() if s > step])
        with hosts.agreed("newer checkpoints"):
            for s in newer if hosts.is_first() else ():
                self._set_aside(s)
        return newer

    def _set_aside(self, step: int) -> None:
        """Nothing is deleted that may be of use: what stands in the way is renamed."""
        path = self.folder / str(step)
        if path.exists():
            number = next(n for n in range(10**6) if not (self.folder / f"{step}.aside-{n}").exists())
            path.rename(self.folder / f"{step}.aside-{number}")

    def _losses(self) -> dict[int, float | None]:
        losses = {}
        for step in self.steps():
            try:
                losses[step] = self.metadata(step).val_loss
            except TransformerJaxError:
                losses[step] = None
        return losses

    def _listed(self) -> str:
        return ", ".join(map(str, self.steps())) or "none"


def best_step(losses: Mapping[int, float | None]) -> int | None:
    """The step with the lowest finite loss; the earliest of equals. What is not a number is never best."""
    finite = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(finite, key=lambda step: (finite[step], step), default=None)


def kept_steps(losses: Mapping[int, float | None], keep: int) -> set[int]:
    """The newest `keep` steps and the best one."""
    kept = set(sorted(losses)[-keep:])
    best = best_step(losses)
    return kept if best is None else kept | {best}


def like(tree: Any, shardings: Any) -> Any:
    """Describes a tree of arrays for `Checkpoints.restore`, by a tree of shardings, or one for all."""
    shardings = jax.tree.broadcast(shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def digests(tree: Any) -> dict[str, str]:
    """The SHA-256 of each array of a tree, as a whole, by its path; one is gathered at a time."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path): hashlib.sha256(fetch(x).tobytes()).hexdigest() for path, x in leaves}


def _brief(error: BaseException) -> str:
    """An error in one line: its beginning, and its end, where the cause often stands."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 300 else f'{text[:150]} ... {text[-150:]}'}"
