"""Signals that ask a run to stop, and how all its processes stop at the same step."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformer_jax.training import hosts

_ASKED_EVERY = 1.0
"""Seconds between two questions to the other processes: each keeps all of them waiting for the slowest."""


class Interrupted(Exception):
    """A signal asked the run to stop; its state is saved.

    Attributes:
      signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Stop:
    """The signals that came, and whether to stop for them.

    Args:
      received: Filled by `signals`.
    """

    def __init__(self, received: list[int]) -> None:
        self._received = received
        self._next, self._steps, self._asked = 0, 1, 0.0

    def after(self, step: int, pause: bool) -> int | None:
        """The signal to stop for after this step, the same on all processes; None to go on.

        One process answers at once. Several ask each other about every second, after a number of steps that process 0
        chose the last time, and where a pause is due anyway.
        """
        if hosts.alone():
            return next(iter(self._received), None)
        if step < self._next and not pause:
            return None
        now = time.monotonic()
        slow = now - self._asked > _ASKED_EVERY
        stop, self._steps = self._ask(max(1, self._steps // 2) if slow else 2 * self._steps)
        self._next, self._asked = step + self._steps, now
        return stop

    def at_last(self) -> int | None:
        """The same, asked in any case."""
        return self._ask(1)[0]

    def _ask(self, steps: int) -> tuple[int | None, int]:
        """The first signal that came to any process, and what process 0 says of the steps until the next question."""
        said = hosts.exchange("the next step", [next(iter(self._received), None), steps])
        return next((signum for signum, _ in said if signum), None), said[0][1]


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the loop can save before it leaves; a second one leaves at once."""
    received: list[int] = []
    previous = {}

    def receive(signum: int, frame: Any) -> None:
        received.append(signum)
        if len(received) == 1:
            os.write(2, b"\nstopping: the state is saved first; once more leaves at once\n")
            return
        os.write(2, b"\nleft at once: what was not saved is lost\n")
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")  # a live line hides the cursor
        os._exit(128 + signum)  # in order, Python would wait for a save that is under way

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, receive)
    except ValueError:
        previous.clear()  # not in the main thread: signals are not ours to take
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
