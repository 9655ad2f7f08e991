"""How checkpoints are written: beside training, read back, and only then do older ones go."""

import contextlib
import dataclasses
import shutil
import threading
import time
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from transformer_jax.config import TrainConfig
from transformer_jax.errors import CheckpointError
from transformer_jax.training import hosts
from transformer_jax.training.checkpoint import Checkpoints, Metadata, brief
from transformer_jax.training.digests import digests
from transformer_jax.training.quiet import quieten


class Saver:
    """Writes the checkpoints of a run. All processes must call it together, but for `check`.

    A save copies the state and returns; a thread waits until it is on disk, and reads it back. `finish` waits for
    that thread, and deletes what the run no longer keeps. Each save begins with a `finish`: there is one at a time.
    As a context it finishes at the end of a block, also where the block fails.

    Args:
      checkpoints: Where to.
      settings: `keep`, `keep_best` and `keep_every` say which stay.
    """

    def __init__(self, checkpoints: Checkpoints, settings: TrainConfig) -> None:
        self._checkpoints = checkpoints
        self._settings = settings
        # Folders that are made asynchronously keep a process alive for minutes where they cannot be made.
        options = ocp.options.AsyncOptions(hosts.WAIT_SECONDS, create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        quieten()

    def save(self, state: Any, metadata: Metadata) -> None:
        """Begins to write one checkpoint. One that is there for this step is kept as it is.

        The state may be donated as soon as this returns.

        Raises:
          CheckpointError: If it, or the one before it, cannot be written; those before are untouched.
        """
        self.finish()
        step, folder = metadata.step, self._checkpoints.folder
        with hosts.agreed(f"checkpoint {step}"):
            there = hosts.is_first() and step in self._checkpoints.steps()
            if hosts.is_first() and not there:
                self._checkpoints.set_aside(step)
        if hosts.first_says("the checkpoints", there):
            return
        metadata = dataclasses.replace(metadata, digests=digests(state))
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), metadata=ocp.args.JsonSave(metadata.to_dict()))
        try:
            self._orbax.save(folder / str(step), args=items)
        except Exception as error:
            raise self._failed(step, error) from error
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._thread = threading.Thread(target=self._complete, args=(metadata, like), name="read_back", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises the error of a save that has failed, without waiting for one that is under way."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Waits until the save that is under way has succeeded or failed, and asks no other process."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Waits until the save that is under way is on disk and read back, and deletes what is not to be kept.

        Raises:
          CheckpointError: If it could not be written, or is not what was saved.
        """
        if self._thread is None:
            return
        self.wait()
        self._thread = None
        with hosts.agreed("a checkpoint"):
            self.check()
        self._prune()

    def __enter__(self) -> "Saver":
        self._prune()  # what a process that was killed left to do, also where there is nothing more to save
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif hosts.is_lost(error):
            return  # the save waits for a process that does not come
        self.wait()  # where something else failed, the save is completed
        with contextlib.suppress(Exception):
            self._orbax.close()

    def _prune(self) -> None:
        self._checkpoints.prune(self._settings.keep, self._settings.keep_best, self._settings.keep_every)

    def _complete(self, metadata: Metadata, like: Any) -> None:
        """In the thread: waits for the save, and reads this process's share of it back."""
        try:
            self._orbax.wait_until_finished()
            me, everyone = hosts.numbers()
            until = time.monotonic() + (0 if hosts.alone() else hosts.SEEN_WITHIN)
            while metadata.step not in self._checkpoints.steps() and time.monotonic() < until:
                time.sleep(0.1)
            self._checkpoints.verify(self._checkpoints.metadata(metadata.step), like, slice(me, None, len(everyone)))
        except CheckpointError as error:
            self._error = CheckpointError(f"read back after saving, {error}; {self._way_out(metadata.step)}")
        except Exception as error:
            self._error = self._failed(metadata.step, error)

    def _failed(self, step: int, error: Exception) -> Exception:
        """What to raise for an error of Orbax, which shows a full disk as almost anything."""
        if lost := next((e for e in (error, error.__cause__) if e is not None and hosts.is_lost(e)), None):
            return lost
        folder = self._checkpoints.folder
        if hosts.is_first():  # half of a checkpoint is of no use, and may be what fills the disk
            shutil.rmtree(folder / f"{step}.orbax-checkpoint-tmp", ignore_errors=True)
        full = "No space left" in str(error) or "quota exceeded" in str(error).lower()
        why = "no space is left there" if full else brief(error)
        return CheckpointError(f"checkpoint {step} could not be written to {folder}: {why}; {self._way_out(step)}")

    def _way_out(self, step: int) -> str:
        older = [s for s in self._checkpoints.steps() if s < step]
        return f"the run can be resumed from step {older[-1]}" if older else "there is no checkpoint yet"
