"""Evaluation over a whole split: sums and counts, divided once."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import numpy as np

from transformer_jax.config import Config
from transformer_jax.data.batches import evaluation_batches, load_corpus
from transformer_jax.errors import DataError
from transformer_jax.training.runs import Run
from transformer_jax.training.sharding import Placement, default_placement
from transformer_jax.training.step import eval_step

BATCH_SIZE = 64
"""Windows evaluated at once; changes the speed only."""


class Evaluator:
    """Measures the loss of a model on texts; compiles once.

    Computes in float32, whatever the training: in bfloat16 the result would depend on the batch size.

    Args:
      config: Resolved.
      placement: The mesh.
    """

    def __init__(self, config: Config, placement: Placement) -> None:
        self._context = config.model.context
        self._placement = placement
        model = dataclasses.replace(config.model, compute_dtype="float32", attention_impl="auto")
        self._step = jax.jit(partial(eval_step, dataclasses.replace(config, model=model)))

    def loss(self, params: Any, ids: np.ndarray, batch_size: int = BATCH_SIZE) -> float:
        """Nats per character of a text, by windows that do not overlap; every target counts once.

        Args:
          params: The parameters.
          ids: [N], N >= 2.
          batch_size: Windows at once. The result is the same to rounding.

        Returns:
          The mean over N - 1 targets, added up in float64.
        """
        totals, counts = self.by_position(params, ids, batch_size)
        return float(totals.sum() / counts.sum())

    def by_position(self, params: Any, ids: np.ndarray, batch_size: int = BATCH_SIZE) -> tuple[np.ndarray, np.ndarray]:
        """The sums behind `loss` for each place in a window: how loss falls with the context that is seen.

        Returns:
          Nats and targets, both float64 [T]; the target at place t is predicted from t + 1 characters.
        """
        rows = batch_size + -batch_size % self._placement.mesh.size
        batches = evaluation_batches(ids, self._context, rows)
        parts = [self._step(params, self._placement.place(batch)) for batch in batches]
        totals, counts = zip(*jax.device_get(parts), strict=True)
        return np.sum(totals, axis=0, dtype=np.float64), np.sum(counts, axis=0, dtype=np.float64)


def evaluate_run(run: Run, split: str, batch_size: int = BATCH_SIZE) -> dict[str, Any]:
    """The loss of a trained model on one part of its text.

    Args:
      run: From `load_run`.
      split: A name of `data.batches.SPLITS`.
      batch_size: Windows at once.

    Returns:
      split, step, loss (nats per character), bits (per character), perplexity, targets, and loss_by_position: nats for
      each place in a window, None where there is no target.

    Raises:
      DataError: If the text is missing, or no longer the one the model was trained on.
    """
    corpus = load_corpus(run.config.data, run.config.model.context)
    if corpus.sha256 != run.corpus["sha256"]:
        raise DataError(
            f"the text {run.corpus['name']} has changed since the run was trained: its SHA-256 was "
            f"{run.corpus['sha256'][:12]} and is {corpus.sha256[:12]}; put the old text back"
        )
    ids = corpus.split(split)
    placement = default_placement(batch_size)
    with placement.use():
        params = jax.device_put(run.params, placement.replicated)
        totals, counts = Evaluator(run.config, placement).by_position(params, ids, batch_size)
    loss = float(totals.sum() / counts.sum())
    return {
        "split": split,
        "step": run.step,
        "loss": loss,
        "bits": bits(loss),
        "perplexity": math.exp(loss),
        "targets": len(ids) - 1,
        "loss_by_position": [total / count if count else None for total, count in zip(totals, counts, strict=True)],
    }


def bits(nats: float) -> float:
    """Nats as bits."""
    return nats / math.log(2)
