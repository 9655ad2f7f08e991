"""A whole run: orchestration, input and output. What is computed stands in `step`, `evaluate` and `generation`."""

import dataclasses
import math
import platform
import shlex
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from transformer_jax import __version__
from transformer_jax.config import Config, resolve, to_dict
from transformer_jax.data.batches import TextCorpus
from transformer_jax.data.pairs import PairCorpus
from transformer_jax.data.tasks import load_corpus
from transformer_jax.errors import TransformerJaxError
from transformer_jax.nn import kernels
from transformer_jax.training import hosts, runs, sharding
from transformer_jax.training.checkpoint import Metadata
from transformer_jax.training.evaluate import Evaluator, bits, task_figures
from transformer_jax.training.metrics import Clock, MetricLog, Terminal
from transformer_jax.training.optim import with_rates
from transformer_jax.training.resuming import check_resumable
from transformer_jax.training.samples import sample_text
from transformer_jax.training.step import TrainState, all_finite, compile_train_step, create_state
from transformer_jax.training.stopping import Interrupted, Stop, signals


@dataclasses.dataclass
class _Session:
    """What one call of `train` works with.

    Attributes:
      config: Resolved.
      corpus: The data.
      run: The folder.
      placement: The mesh.
      evaluator: Measures losses.
      terminal: For people.
    """

    config: Config
    corpus: TextCorpus | PairCorpus
    run: runs.RunFolder
    placement: sharding.Placement
    evaluator: Evaluator
    terminal: Terminal


def train(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    mesh: Mapping[str, int] | None = None,
    rules: sharding.Rules = (),
) -> dict[str, Any]:
    """Trains a model, from the start or from its newest good checkpoint.

    Args:
      config: What to train. When resuming, fields outside `MAY_CHANGE` must be those of the run.
      out: The run's folder.
      resume: Go on with the run that is there.
      overwrite: Replace the run that is there.
      mesh: Sizes of the axes data, fsdp and tensor over all devices; -1 is the rest. None is data parallel over as many
        devices as divide the rows of a step. No part of what the run means: it goes on with any other.
      rules: Which mesh axes split which named axes, in place of those in `sharding.RULES`.

    Returns:
      The summary that is also written to the run's folder.

    Raises:
      ConfigError, DataError: Before any long work.
      CheckpointError: If a checkpoint cannot be read or written.
      TransformerJaxError: If the loss or the gradients stop being finite.
      Interrupted: After SIGINT or SIGTERM, with the state saved.
    """
    if not hosts.alone():
        hosts.compare(_settings(config, out, mesh, rules, resume=resume, overwrite=overwrite))
    with hosts.agreed("the run's folder"):
        if hosts.is_first() and not resume:
            runs.check_new(out, overwrite=overwrite)
    terminal = Terminal(silent=not hosts.is_first())
    with hosts.agreed("the mesh"):
        placement = sharding.find_placement(config, mesh, rules)
    terminal.say(f"device     {sharding.describe(placement)}")
    with hosts.agreed("the data"):
        corpus = load_corpus(config)
    hosts.compare({"the SHA-256 of the data": corpus.sha256}, "all hosts need the same data")
    terminal.say(f"data       {corpus.name}: {corpus.size}, SHA-256 {corpus.sha256[:12]}")
    with placement.use():
        with hosts.agreed("the attention"):
            if kernels.attends(config.model):
                terminal.say(f"attention  {kernels.explain(config.model, length=corpus.shortest)}")
        if resume:
            run = runs.RunFolder(out)
            found = {f"the list of checkpoints in {out}": run.checkpoints.steps()}
            hosts.compare(found, "choose an --out on a disk that all hosts share")
            metadata, state, skipped = runs.open_newest(run, placement)
            for line in skipped:
                terminal.say(f"skipped    {line}")
            with hosts.agreed("what may change"):
                config = check_resumable(config, metadata, corpus)
            runs.check_shared(run)
            for step in run.checkpoints.discard_after(metadata.step):
                terminal.say(f"set aside  checkpoint {step}, newer than the one resumed from")
            state = state.replace(opt_state=with_rates(config.optim, state.opt_state))
            with hosts.agreed("the run's folder"):
                if hosts.is_first():
                    runs.write_json(run.config, to_dict(config))
            examples, seconds = metadata.examples, metadata.seconds
        else:
            with hosts.agreed("the run's folder"):
                config = _resolved(config, corpus)
                run = runs.RunFolder(out)
                if hosts.is_first():
                    run = runs.create(out, config, corpus.vocab, corpus.source_vocab, overwrite=overwrite)
            runs.check_shared(run)
            state = create_state(config, placement)
            examples, seconds = 0, 0.0
        session = _Session(config, corpus, run, placement, Evaluator(config, placement), terminal)
        terminal.say(f"model      {config.model.architecture}, {state.num_parameters:,} parameters")
        terminal.say(f"run        {out}" + (f", resumed at step {int(state.step)}" if resume else ""))
        state, examples, seconds = _train_steps(session, state, examples, seconds)
        return _finish(session, state, examples, seconds)


def _settings(
    config: Config, out: Path, mesh: Mapping[str, int] | None, rules: sharding.Rules, **flags: bool
) -> dict[str, Any]:
    """What all processes of a run must have in common, by name. Data may lie elsewhere on each host."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {
        **{
            f"{section}.{name}": value
            for section, values in to_dict(config).items()
            for name, value in values.items()
            if f"{section}.{name}" != "data.path"
        },
        "--out": str(out.absolute()),
        "--mesh": None if mesh is None else dict(mesh),
        "the rules": [list(rule) for rule in rules],
        **{f"--{name}": value for name, value in flags.items()},
        "JAX_PLATFORMS": jax.config.jax_platforms,
        "the version of transformer-jax": __version__,
        **{f"the version of {name}": version(name) for name in packages},
    }


def _resolved(config: Config, corpus: TextCorpus | PairCorpus) -> Config:
    source_size = None if corpus.source_vocab is None else len(corpus.source_vocab)
    return resolve(config, len(corpus.vocab), source_size)


def _train_steps(session: _Session, state: TrainState, examples: int, seconds: float) -> tuple[TrainState, int, float]:
    """Makes the steps that are left. Returns the last state, and the examples and seconds of the whole run."""
    config, corpus, placement = session.config, session.corpus, session.placement
    settings, checkpoints = config.train, session.run.checkpoints
    training, evaluator = corpus.training(settings.seed), session.evaluator
    step = int(state.step)
    clock = Clock(seconds)
    steps = _CompiledSteps(session, clock, state)

    def save(val_loss: float | None) -> None:
        if not all_finite(state):
            raise TransformerJaxError(
                f"step {step}: the state is not finite and is not saved; the newest checkpoint is "
                f"{max(checkpoints.steps(), default=None)}; lower --optim.learning-rate"
            )
        data = {"name": corpus.name, "sha256": corpus.sha256}
        vocabs = {"vocab": corpus.vocab, "source_vocab": corpus.source_vocab}
        checkpoints.save(state, Metadata(step, examples, clock.read(), val_loss, config, corpus=data, **vocabs))
        checkpoints.prune(settings.keep)

    if not hosts.first_says("the checkpoints", checkpoints.steps()):
        with clock.paused():
            save(None)  # before training: an unwritable folder is found now
    with signals() as received, session.terminal.progress(settings.steps, step):
        stopping = Stop(received)
        reporter = _Reporter(session, clock, step)
        while step < settings.steps:
            batch = placement.read(training, examples, settings.batch_size)
            state, metrics = steps.of(state, batch)(state, batch)
            step, examples = step + 1, examples + settings.batch_size
            reporter.add(step, metrics)
            due = step % settings.save_every == 0 or step == settings.steps
            evaluates = due or step % settings.eval_every == 0  # never depends on a signal: best is the same without
            # Looked at once: a signal that comes while this step is saved stops the next one.
            stop = stopping.after(step, pause=evaluates) is not None
            if evaluates or stop:
                jax.block_until_ready(metrics)
                with clock.paused():
                    reporter.refuse_nonfinite()
                    val_loss = None
                    if evaluates:
                        part = corpus.evaluation("tune", evaluator.rows, settings.eval_chars)
                        val_loss = evaluator.loss(state.eval_params, part)
                    reporter.flush(val_loss)
                    if due or stop:
                        save(val_loss)
            elif (step - 1) % settings.log_every == 0:
                # The step before is logged now that this one is under way: the device never waits for a log line.
                reporter.flush(leave=1)
            if stop:
                break
        if (signum := stopping.at_last()) is not None:
            raise Interrupted(signum)
    return state, examples, clock.read()


class _CompiledSteps:
    """The training step for each shape of batch: texts have one, pairs a few. Compiling is not training time.

    Args:
      session: Of the run.
      clock: Runs while training does.
      state: Lies as all states of the run do.
    """

    def __init__(self, session: _Session, clock: Clock, state: TrainState) -> None:
        self._step = compile_train_step(session.config, state, session.placement)
        self._terminal, self._clock = session.terminal, clock
        self._compiled: dict[tuple[int, ...], Any] = {}

    def of(self, state: TrainState, batch: dict[str, jax.Array]) -> Any:
        """The step for a batch of this shape."""
        shape = batch["inputs"].shape
        if shape not in self._compiled:
            jax.block_until_ready(state)  # steps under way are training time
            with self._clock.paused():
                began = time.monotonic()
                self._compiled[shape] = self._step.lower(state, batch).compile()
                width = f" at length {shape[1]}" if "source" in batch else ""
                self._terminal.say(f"compiled   the training step{width} in {time.monotonic() - began:.1f} s")
        return self._compiled[shape]


class _Reporter:
    """Fetches the metrics of steps late, logs those that are due, and stops a run whose numbers are lost.

    Args:
      session: Of the run.
      clock: Runs while training does.
      step: Updates made so far.
    """

    def __init__(self, session: _Session, clock: Clock, step: int) -> None:
        self._session = session
        self._settings = session.config.train
        self._log = MetricLog(session.run.metrics, after=step) if hosts.is_first() else None
        self._clock = clock
        self._mark = clock.read(), step
        self._saved = session.run.checkpoints.steps
        self._pending: list[tuple[int, Any]] = []

    def add(self, step: int, metrics: Any) -> None:
        """Takes the metrics of a step, which may still be under way."""
        self._pending.append((step, metrics))

    def refuse_nonfinite(self) -> None:
        """Looks at the newest step before anything is done with its weights."""
        if self._pending and not all(math.isfinite(x) for x in jax.device_get(self._pending[-1][1]).values()):
            self.flush()

    def flush(self, val_loss: float | None = None, leave: int = 0) -> None:
        """Handles all steps but the newest `leave`; val_loss belongs to the last of these.

        Raises:
          TransformerJaxError: Naming the first step whose loss or gradient norm is not finite.
        """
        count = len(self._pending) - leave
        items, self._pending = self._pending[:count], self._pending[count:]
        if not items:
            return
        fetched = jax.device_get([metrics for _, metrics in items])
        records = [
            {"step": step, **{name: float(figures[name]) for name in ("loss", "learning_rate", "grad_norm")}}
            for (step, _), figures in zip(items, fetched, strict=True)
        ]
        last = records[-1]["step"]
        (before, first), self._mark = self._mark, (self._clock.read(), last)
        seconds_per_step = max(self._mark[0] - before, 1e-9) / max(last - first, 1)
        symbols = self._settings.batch_size * self._session.corpus.symbols_per_example
        for record in records:
            _refuse_nonfinite(record, self._saved)
            evaluated = val_loss is not None and record["step"] == last
            due = evaluated or record["step"] == 1 or record["step"] % self._settings.log_every == 0
            if due and self._log is not None:
                record["tokens_per_second"] = symbols / seconds_per_step
                if evaluated:
                    record["val_loss"] = val_loss
                self._log.write(record)
                left = (self._settings.steps - record["step"]) * seconds_per_step
                self._session.terminal.step(record, self._settings.steps, left)


def _refuse_nonfinite(record: dict[str, Any], saved: Callable[[], list[int]]) -> None:
    for name, what in (("loss", "the loss"), ("grad_norm", "the gradient norm")):
        if not math.isfinite(record[name]):
            raise TransformerJaxError(
                f"{what} became {record[name]} at step {record['step']} (learning rate {record['learning_rate']:.3g}); "
                f"the newest checkpoint is {max(saved(), default=None)}; "
                "lower --optim.learning-rate or set --optim.clip-norm"
            )


def _finish(session: _Session, state: TrainState, examples: int, seconds: float) -> dict[str, Any]:
    """Evaluates the last and the best weights on the whole validation part, writes a sample and the summary."""
    config, corpus, run, terminal = session.config, session.corpus, session.run, session.terminal
    evaluator, params = session.evaluator, state.eval_params
    sums = {
        split: evaluator.measure(params, corpus.evaluation(split, evaluator.rows))
        for split in ("validation", "tune", "test")
    }
    losses = {split: part.loss for split, part in sums.items()}
    step, best = int(state.step), run.checkpoints.best()
    best_loss = losses["validation"]
    if best not in (None, step):
        best_params = runs.load_run(run.path, best, terminal.say, session.placement).params
        best_loss = evaluator.loss(best_params, corpus.evaluation("validation", evaluator.rows))
    task = task_figures(config, params, corpus, "validation", sums["validation"])
    task.pop("loss_by_position", None)
    device = session.placement.mesh.devices.flatten()[0]
    summary = {
        "val_loss": losses["validation"],
        "val_bits": bits(losses["validation"]),
        "tune_loss": losses["tune"],
        "test_loss": losses["test"],
        "best_val_loss": best_loss,
        "best_step": step if best is None else best,
        **task,
        "steps": step,
        "tokens_per_second": examples * corpus.symbols_per_example / seconds if seconds else 0.0,
        "seconds": seconds,
        "parameters": state.num_parameters,
        "device": f"{session.placement.mesh.size} x {device.device_kind}",
        "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
        "vocab_size": len(corpus.vocab),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    if hosts.is_first():
        runs.write_json(run.summary, summary)
    terminal.say(
        f"validation {summary['val_loss']:.4f} nats per {corpus.unit}, {summary['val_bits']:.4f} bits "
        f"(first half {losses['tune']:.4f}, second half {losses['test']:.4f}, best checkpoint {best_loss:.4f})"
    )
    rates = [f"{name.replace('_', ' ')} {value:.2%}" for name, value in task.items() if isinstance(value, float)]
    if rates:
        terminal.say(f"           {', '.join(rates)}")
    if config.train.sample_chars:
        text = sample_text(config, params, corpus)
        if hosts.is_first():
            run.samples.write_text(text + "\n", encoding="utf-8")
        terminal.say(f"sample{text if text.startswith(chr(10)) else chr(10) + text}\n")
    terminal.say(f'more       transformer-jax sample {shlex.quote(str(run.path))} --prompt "..."')
    return summary
