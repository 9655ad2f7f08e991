"""What compiled code writes, and how it ends the process: JAX's part that joins processes knows no other way.

Where another process is lost it writes a page to standard error and aborts, past all of Python. Here this page is held
back, and the abort becomes one line and an exit status.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

_PARTING = re.compile(r"[WEF]\d{4} .*(coordination|preemption_sync_manager|/?client\.h:)")
"""Begins what the joining part writes when it is about to end the process; all that follows belongs to it."""

_GREETING = "[Gloo] Rank "
"""Begins a line of no interest that each process prints."""

_GRACE_SECONDS = 10.0

_kept: list[Callable] = []
_speaks = threading.Lock()


def claim() -> bool:
    """Whether the caller is the first who wants to say why the process ends: it is to be said once."""
    return _speaks.acquire(blocking=False)


def intercept(explain: Callable[[str], str | None], status: int) -> None:
    """From now on turns aborts of compiled code into a line and an exit status.

    Args:
      explain: From what was written to the line to say; None for what is to abort as it is.
      status: To exit with.
    """
    reader, writer = os.pipe()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        own = os.dup(stream.fileno())
        os.dup2(writer, stream.fileno())  # compiled code knows the number alone
        buffering = 1 if stream.line_buffering else -1
        setattr(sys, name, open(own, "w", buffering, stream.encoding, stream.errors))  # noqa: SIM115 (for good)
    os.close(writer)
    held = _Held(reader, sys.stderr.fileno())
    threading.Thread(target=held.read, name="native output", daemon=True).start()
    libc = ctypes.CDLL(None)

    def end(signum: int) -> None:
        message = explain(held.text())
        if message is None:
            os.write(sys.stderr.fileno(), held.text().encode())
            libc.signal(signum, 0)  # SIG_DFL: where this returns, the process aborts
            return
        if not claim():
            time.sleep(_GRACE_SECONDS)  # the main thread is on its way out
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # a line of progress hides the cursor
        os.write(sys.stderr.fileno(), f"error: {' '.join(message.split())}\n".encode())
        os._exit(status)

    def handle(signum: int) -> None:
        try:
            end(signum)
        except BaseException:
            os._exit(status)

    # Python's own handlers run in the main thread later, and an abort leaves no later.
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    _kept.append(handler)
    libc.signal(int(signal.SIGABRT), handler)


class _Held:
    """Reads what compiled code writes, passes it on, and holds back how it parts.

    Args:
      reader: File descriptor to read from.
      to: File descriptor to pass on to.
    """

    def __init__(self, reader: int, to: int) -> None:
        self._reader, self._to = reader, to
        self._lines: list[str] = []
        self._all_read = threading.Event()
        self._mark = f"all read {os.getpid()}\n"

    def read(self) -> None:
        """Runs for as long as the process does."""
        with open(self._reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.endswith(self._mark):
                    self._lines.append(line.removesuffix(self._mark))
                    self._all_read.set()
                elif self._lines or _PARTING.match(line):
                    self._lines.append(line)
                elif not line.startswith(_GREETING):
                    with contextlib.suppress(OSError):  # whoever read the output has enough
                        os.write(self._to, line.encode())

    def text(self) -> str:
        """All that is held back."""
        self._all_read.clear()
        os.write(2, self._mark.encode())
        self._all_read.wait(2.0)
        return "".join(self._lines)
