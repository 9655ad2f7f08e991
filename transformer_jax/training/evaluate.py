"""Evaluation over a whole split: sums and counts, divided once."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from transformer_jax.config import Config
from transformer_jax.data.batches import Batch, TextCorpus
from transformer_jax.data.pairs import PairCorpus
from transformer_jax.data.tasks import load_corpus
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.fetch import fetch
from transformer_jax.nn import create_model
from transformer_jax.training.error_rates import ErrorCounts, measure_errors
from transformer_jax.training.runs import Run
from transformer_jax.training.sharding import Placement, check_model, default_placement, mesh_placement
from transformer_jax.training.step import compiler_options, eval_step

BATCH_SIZE = 64
"""Windows or pairs evaluated at once; changes the speed only."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """What was measured, for each place in a window, each float64 [T].

    Attributes:
      totals: Nats.
      counts: Targets.
      right: Targets that were the most likely symbol.
    """

    totals: np.ndarray
    counts: np.ndarray
    right: np.ndarray

    @property
    def loss(self) -> float:
        """Nats per target."""
        return float(self.totals.sum() / self.counts.sum())

    @property
    def accuracy(self) -> float:
        """Share of the targets that were the most likely symbol."""
        return float(self.right.sum() / self.counts.sum())

    @property
    def by_position(self) -> list[float | None]:
        """Nats per target for each place in a window, where it has one."""
        return [total / count if count else None for total, count in zip(self.totals, self.counts, strict=True)]


class Evaluator:
    """Measures a model on batches; compiles once for each shape.

    Computes in float32, whatever the training: in bfloat16 the result would depend on the batch size.

    Args:
      config: Resolved.
      placement: The mesh.
      batch_size: Rows at once. The result is the same to rounding.
    """

    def __init__(self, config: Config, placement: Placement, batch_size: int = BATCH_SIZE) -> None:
        self.rows = batch_size + -batch_size % placement.parts("batch")
        self._placement = placement
        self._step = jax.jit(partial(eval_step, in_float32(config)), compiler_options=compiler_options(config))

    def measure(self, params: Any, batches: Iterable[Batch]) -> Sums:
        """The sums over batches of `rows` rows, added up in float64."""
        parts = fetch([self._step(params, self._placement.place(batch)) for batch in batches])
        longest = max(len(totals) for totals, _, _ in parts)
        wide = [[np.pad(sums, (0, longest - len(sums))) for sums in part] for part in parts]
        return Sums(*np.sum(wide, axis=0, dtype=np.float64))

    def loss(self, params: Any, batches: Iterable[Batch]) -> float:
        """Nats per target."""
        return self.measure(params, batches).loss


def in_float32(config: Config) -> Config:
    """The same model, computed in float32."""
    model = dataclasses.replace(config.model, compute_dtype="float32", attention_impl="auto")
    return dataclasses.replace(config, model=model)


def evaluate_run(
    run: Run, split: str, batch_size: int = BATCH_SIZE, beams: int | None = None, mesh: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The figures of a trained model on one part of its data.

    Args:
      run: From `load_run`.
      split: A name of `data.batches.SPLITS`.
      batch_size: Windows or pairs at once.
      beams: For an encoder-decoder, of a search beside the greedy answers; None is greedy only.
      mesh: As for `train`; None is data parallel over as many devices as divide the batch.

    Returns:
      split, step, unit ("character" or "symbol"), targets and what is counted as one, loss (nats per target), bits and
      perplexity. For a causal model loss_by_position: nats for each place in a window, None where there is no target.
      For an encoder masked_accuracy. For an encoder-decoder `error_figures`, and with beams the same under "beam".

    Raises:
      ConfigError: For beams where nothing is searched, or fewer than 1, and for a mesh that does not fit.
      DataError: If the data are missing, or no longer those the model was trained on.
    """
    paired = run.config.model.architecture == "encoder_decoder"
    if beams is not None and not paired:
        raise ConfigError(f"beams {beams} are for an encoder_decoder, and this run is {run.config.model.architecture}")
    if beams is not None and beams < 1:
        raise ConfigError(f"beams must be at least 1, got {beams}")
    placement = default_placement(batch_size) if mesh is None else mesh_placement(mesh)
    check_model(run.config.model, placement)
    corpus = load_corpus(run.config)
    if corpus.sha256 != run.corpus["sha256"]:
        raise DataError(
            f"the data {run.corpus['name']} have changed since the run was trained: their SHA-256 was "
            f"{run.corpus['sha256'][:12]} and is {corpus.sha256[:12]}; put the old ones back"
        )
    with placement.use():
        params = jax.device_put(run.params, placement.shardings(run.params))
        evaluator = Evaluator(run.config, placement, batch_size)
        sums = evaluator.measure(params, corpus.evaluation(split, evaluator.rows))
        figures = {
            "split": split,
            "step": run.step,
            "unit": corpus.unit,
            "counted": corpus.counts,
            "targets": int(sums.counts.sum()),
            "loss": sums.loss,
            "bits": bits(sums.loss),
            "perplexity": math.exp(sums.loss),
            **task_figures(run.config, params, corpus, split, sums, beams),
        }
    return figures


def task_figures(
    config: Config, params: Any, corpus: TextCorpus | PairCorpus, split: str, sums: Sums, beams: int | None = None
) -> dict[str, Any]:
    """What there is to say beyond the loss, which depends on what is learnt; see `evaluate_run`."""
    if isinstance(corpus, PairCorpus):
        model = create_model(in_float32(config).model)
        figures = error_figures(corpus, measure_errors(model, params, corpus, split))
        if beams is not None:
            found = measure_errors(model, params, corpus, split, beams=beams)
            figures["beam"] = {"beams": beams, **error_figures(corpus, found)}
        return figures
    if corpus.mask_rate is not None:
        return {"masked_accuracy": sums.accuracy}
    return {"loss_by_position": sums.by_position}


def error_figures(corpus: PairCorpus, errors: ErrorCounts) -> dict[str, Any]:
    """The error rates by the names of the task: phonemes and words for cmudict, else symbols and sequences."""
    symbol, sequence = ("phoneme", "word") if corpus.name == "cmudict" else ("symbol", "sequence")
    return {
        f"{symbol}_error_rate": errors.symbol_error_rate,
        f"{sequence}_error_rate": errors.sequence_error_rate,
        "sources": errors.sources,
    }


def bits(nats: float) -> float:
    """Nats as bits."""
    return nats / math.log(2)
