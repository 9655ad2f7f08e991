"""Trains as `train.py` does, and kills itself at a chosen point: the child that `trials` starts.

    python -m benchmarks.killed PLAN [options of train]

PLAN is a JSON object. `during` is the step whose save is watched, "first" for that of the first save of the process,
or "create" for the making of the run's folder. A save begins when the trainer asks for it and ends when older
checkpoints are pruned. In between, each event that Python sees in the run's folder is counted: files opened, folders
made, listed, renamed and removed. Then one of:

    event     kill at this event, from 0, before it happens
    seconds   kill so long after the beginning, which also reaches what compiled code writes
    stall     wait so many seconds at the event named `at`, each time: a slow disk
    nothing   print the events

Before it dies it prints the phase of the save: writing, reading back, read back, pruning.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from transformer_jax.cli import main

_SEEN = {
    "open",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "shutil.rmtree",
}


class Watch:
    """Counts what happens in a folder from `begin` to `end`, and kills the process.

    Args:
      plan: As above.
      folder: Of the run.
    """

    def __init__(self, plan: dict[str, Any], folder: str) -> None:
        self._plan, self._folder = plan, folder
        self.phase, self.on = "writing", False
        self._events: list[str] = []
        self._began = 0.0
        self._lock = threading.RLock()  # events come from several threads
        sys.addaudithook(self._event)

    def begin(self) -> None:
        """Starts to count."""
        self.on, self.phase, self._began = True, "writing", time.monotonic()
        if "seconds" in self._plan:
            timer = threading.Timer(self._plan["seconds"], self._kill, [f"after {self._plan['seconds']:.3f} s"])
            timer.daemon = True
            timer.start()

    def end(self) -> None:
        """Stops, and says what was counted."""
        self.on = False
        os.write(2, f"watched {json.dumps([time.monotonic() - self._began, self._events])}\n".encode())

    def _event(self, name: str, args: tuple[Any, ...]) -> None:
        if not self.on or name not in _SEEN or not isinstance(args[0], str):
            return
        folder = args[-1] if name in ("os.remove", "os.rmdir", "shutil.rmtree") else None
        path = args[0]
        if isinstance(folder, int) and folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        if not path.startswith(self._folder) or path.endswith("metrics.jsonl"):  # steps are beside the save
            return
        with self._lock:
            text = f"{name} {os.path.relpath(path, self._folder)}"
            if self._plan.get("event") == len(self._events):
                self._kill(f"at event {len(self._events)}, {text}")
            self._events.append(text)
        if self._plan.get("at") == name:
            os.write(2, b"stalled\n")
            time.sleep(self._plan["stall"])

    def _kill(self, why: str) -> None:
        os.write(2, f"killed {self.phase}: {why}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal may be handled by another thread


def watch(plan: dict[str, Any], out: str) -> None:
    """Has the trainer tell a `Watch` when saves begin and end."""
    from transformer_jax.training import runs
    from transformer_jax.training.checkpoint import Checkpoints
    from transformer_jax.training.saving import Saver

    seen, during = Watch(plan, os.path.abspath(out)), plan["during"]
    save, verify, prune, create = Saver.save, Checkpoints.verify, Checkpoints.prune, runs.create
    started: list[int] = []

    def watched_save(saver: Saver, state: Any, metadata: Any) -> None:
        saver.finish()  # what the save before leaves to do is not part of this one
        started.append(metadata.step)
        if metadata.step == during or (during == "first" and len(started) == 1):
            seen.begin()
        save(saver, state, metadata)

    def watched_verify(*args: Any) -> None:
        seen.phase = "reading back"
        verify(*args)
        seen.phase = "read back"

    def watched_prune(*args: Any) -> None:
        seen.phase = "pruning"
        prune(*args)
        if seen.on:
            seen.end()

    def watched_create(*args: Any, **kwargs: Any) -> Any:
        if during == "create":
            seen.begin()
        made = create(*args, **kwargs)
        if seen.on:
            seen.end()
        return made

    Saver.save, Checkpoints.verify, Checkpoints.prune = watched_save, watched_verify, watched_prune
    runs.create = watched_create


if __name__ == "__main__":
    options = sys.argv[2:]
    watch(json.loads(sys.argv[1]), options[options.index("--out") + 1])
    sys.exit(main(["train", *options]))
