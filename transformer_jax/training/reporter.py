"""The figures of steps on their way from the device to the log."""

import math
from collections.abc import Callable
from typing import Any

import jax

from transformer_jax.config import TrainConfig
from transformer_jax.errors import TransformerJaxError
from transformer_jax.training.metrics import Clock, MetricLog, Terminal


class Reporter:
    """Fetches the metrics of steps late, logs those that are due, and stops a run whose numbers are lost.

    Args:
      settings: Of the run.
      symbols: In one step, for the speed.
      terminal: For people.
      log: For programs; None where another process writes it.
      clock: Runs while training does.
      step: Updates made so far.
      explain: Given the number of an update that is not finite, says what to do, in half a sentence.
    """

    def __init__(
        self,
        settings: TrainConfig,
        symbols: int,
        terminal: Terminal,
        log: MetricLog | None,
        clock: Clock,
        step: int,
        explain: Callable[[int], str],
    ) -> None:
        self._settings, self._symbols = settings, symbols
        self._terminal, self._log, self._clock = terminal, log, clock
        self._explain = explain
        self._mark = clock.read(), step
        self._pending: list[tuple[int, Any]] = []
        self._skipped = 0

    def add(self, step: int, metrics: Any) -> None:
        """Takes the metrics of a step, which may still be under way."""
        self._pending.append((step, metrics))

    def look(self) -> None:
        """Looks at the newest step before anything is done with its weights."""
        if self._pending and not all(map(math.isfinite, jax.device_get(self._pending[-1][1]).values())):
            self.flush()

    def flush(self, val_loss: float | None = None, leave: int = 0) -> dict[str, float]:
        """Handles all steps but the newest `leave`; val_loss belongs to the last of these.

        Returns:
          The finite figures of the last of these.

        Raises:
          TransformerJaxError: Naming the first step whose loss or gradient norm is not finite, where more than
            `max_skipped` in a row are.
        """
        count = len(self._pending) - leave
        items, self._pending = self._pending[:count], self._pending[count:]
        if not items:
            return {}
        fetched = jax.device_get([metrics for _, metrics in items])
        last = items[-1][0]
        (before, first), self._mark = self._mark, (self._clock.read(), last)
        seconds_per_step = max(self._mark[0] - before, 1e-9) / max(last - first, 1)
        for (step, _), metrics in zip(items, fetched, strict=True):
            figures = {name: float(metrics[name]) for name in ("loss", "learning_rate", "grad_norm")}
            lost = {name: value for name, value in figures.items() if not math.isfinite(value)}
            if lost:
                self._skip(step, figures["learning_rate"], lost)
                figures = {name: value for name, value in figures.items() if name not in lost}
            else:
                self._skipped = 0
            due = step == 1 or step % self._settings.log_every == 0
            record = {"step": step, **figures, "tokens_per_second": self._symbols / seconds_per_step}
            if val_loss is not None and step == last:
                record["val_loss"] = figures["val_loss"] = val_loss
            if lost:
                record["skipped"] = True
            if (due or lost or "val_loss" in record) and self._log is not None:
                self._log.write(record)
                if not lost:
                    self._terminal.step(record, self._settings.steps, (self._settings.steps - step) * seconds_per_step)
        return figures

    def _skip(self, step: int, learning_rate: float, lost: dict[str, float]) -> None:
        what = " and ".join(f"the {name.replace('grad_', 'gradient ')} is {value}" for name, value in lost.items())
        what = f"{what} at step {step} (learning rate {learning_rate:.3g})"
        self._skipped += 1
        if self._skipped > self._settings.max_skipped:
            row = f", after {self._skipped - 1} skipped ones" if self._skipped > 1 else ""
            raise TransformerJaxError(f"{what}{row}: {self._explain(step)}")
        self._terminal.say(f"skipped    {what}")
