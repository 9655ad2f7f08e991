"""A whole run: orchestration, input and output. What is computed stands in `step`, `evaluate` and `generation`."""

import dataclasses
import platform
import shlex
import time
from collections.abc import Mapping
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
from transformer_jax.training.diagnosis import first_nonfinite
from transformer_jax.training.evaluate import Evaluator, bits, task_figures
from transformer_jax.training.memory import check_memory
from transformer_jax.training.mesh import mesh_text
from transformer_jax.training.metrics import Clock, MetricLog, Terminal
from transformer_jax.training.optim import with_rates
from transformer_jax.training.reporter import Reporter
from transformer_jax.training.resuming import check_resumable
from transformer_jax.training.samples import sample_text
from transformer_jax.training.saving import Saver
from transformer_jax.training.step import TrainState, all_finite, compile_train_step, create_state
from transformer_jax.training.stopping import Interrupted, Stop, signals

Corpus = TextCorpus | PairCorpus


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
    corpus: Corpus
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
    with hosts.agreed("the attention"), placement.use():
        if kernels.attends(config.model):
            terminal.say(f"attention  {kernels.explain(config.model, length=corpus.shortest)}")
    with hosts.agreed("the run's folder"):
        begins = resume and hosts.is_first() and runs.never_saved(out)
    if hosts.first_says("the run", begins):
        terminal.say("resumed    nothing: the run ended before its first checkpoint, and begins anew")
        resume, overwrite = False, True
    with placement.use(), runs.claimed(out, make=not resume):
        if resume:
            config, state, examples, seconds = _resumed(config, corpus, out, placement, terminal)
        else:
            config, state, examples, seconds = _begun(config, corpus, out, placement, overwrite)
        run = runs.RunFolder(out)
        session = _Session(config, corpus, run, placement, Evaluator(config, placement), terminal)
        terminal.say(f"model      {config.model.architecture}, {state.num_parameters:,} parameters")
        terminal.say(f"run        {out}" + (f", resumed at step {int(state.step)}" if resume else ""))
        state, examples, seconds = _train_steps(session, state, examples, seconds)
        return _finish(session, state, examples, seconds)


def _begun(
    config: Config, corpus: Corpus, out: Path, placement: sharding.Placement, overwrite: bool
) -> tuple[Config, TrainState, int, float]:
    """A new run: its resolved config, its first state, no examples and no seconds."""
    with hosts.agreed("the run's folder"):
        config = _resolved(config, corpus)
        check_memory(runs.abstract_state(config), placement)
        if hosts.is_first():
            runs.create(out, config, corpus.vocab, corpus.source_vocab, overwrite=overwrite)
    runs.check_shared(runs.RunFolder(out))
    return config, create_state(config, placement), 0, 0.0


def _resumed(
    config: Config, corpus: Corpus, out: Path, placement: sharding.Placement, terminal: Terminal
) -> tuple[Config, TrainState, int, float]:
    """The newest good state of a run, with the config it goes on with, and the examples and seconds so far."""
    run = runs.RunFolder(out)
    found = {f"the list of checkpoints in {out}": run.checkpoints.steps()}
    hosts.compare(found, "choose an --out on a disk that all hosts share")
    metadata, state, skipped = runs.open_newest(run, placement)
    for line in skipped:
        terminal.say(f"skipped    {line}")
    for name, kind in run.checkpoints.others().items():
        terminal.say(f"ignored    {run.checkpoints.folder / name}: {kind}")
    with hosts.agreed("what may change"):
        config, changed = check_resumable(config, metadata, corpus)
    mesh = mesh_text(placement.mesh.shape)
    if metadata.mesh not in ("", mesh):
        changed = [*changed, f"the mesh {metadata.mesh} -> {mesh}"]
    if changed:
        terminal.say(f"changed    {', '.join(changed)}")
    runs.check_shared(run)
    for step in run.checkpoints.discard_after(metadata.step):
        terminal.say(f"set aside  checkpoint {step}, newer than the one resumed from")
    with hosts.agreed("the run's folder"):
        if hosts.is_first():
            runs.write_json(run.config, to_dict(config))
    state = state.replace(opt_state=with_rates(config.optim, state.opt_state))
    return config, state, metadata.examples, metadata.seconds


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


def _resolved(config: Config, corpus: Corpus) -> Config:
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

    def explain(lost: int) -> str:
        """What to say of an update that is not finite: the parameters are mostly those it began with."""
        first = examples - (step - lost + 1) * settings.batch_size
        batch = placement.read(training, first, settings.batch_size)
        where = first_nonfinite(config, state.params, batch, lost - 1)
        saver.wait()
        newest = max(checkpoints.steps(), default=None)
        return (
            f"{f'{where} came first' if where else 'where it began is not to be found again'}; the newest checkpoint "
            f"is {newest}; lower --optim.learning-rate or set --optim.clip-norm"
        )

    def save(metrics: dict[str, float]) -> None:
        if not all_finite(state):
            raise TransformerJaxError(f"the state is not finite after step {step}, and is not saved: {explain(step)}")
        saver.save(
            state,
            Metadata(
                step,
                examples,
                clock.read(),
                metrics,
                config,
                vocab=corpus.vocab,
                source_vocab=corpus.source_vocab,
                corpus={"name": corpus.name, "sha256": corpus.sha256},
                mesh=mesh_text(placement.mesh.shape),
            ),
        )

    with Saver(checkpoints, settings) as saver, signals() as received:
        if not hosts.first_says("the checkpoints", checkpoints.steps()):
            with clock.paused():
                save({})
                saver.finish()  # before training: an unwritable folder is found now
        with session.terminal.progress(settings.steps, step):
            stopping = Stop(received)
            log = MetricLog(session.run.metrics, after=step) if hosts.is_first() else None
            symbols = settings.batch_size * corpus.symbols_per_example
            reporter = Reporter(settings, symbols, session.terminal, log, clock, step, explain)
            while step < settings.steps:
                batch = placement.read(training, examples, settings.batch_size)
                state, metrics = steps.of(state, batch)(state, batch)
                step, examples = step + 1, examples + settings.batch_size
                reporter.add(step, metrics)
                saver.check()
                due = step % settings.save_every == 0 or step == settings.steps
                # Never depends on a signal: the best is the same without.
                evaluates = due or step % settings.eval_every == 0
                # Looked at once: a signal that comes while this step is saved stops the next one.
                stop = stopping.after(step, pause=evaluates) is not None
                if evaluates or stop:
                    jax.block_until_ready(metrics)
                    with clock.paused():
                        reporter.look()
                        val_loss = None
                        if evaluates:
                            part = corpus.evaluation("tune", evaluator.rows, settings.eval_chars)
                            val_loss = evaluator.loss(state.eval_params, part)
                        figures = reporter.flush(val_loss)
                        if due or stop:
                            save(figures)
                elif (step - 1) % settings.log_every == 0:
                    # The step before is logged now that this one is under way: the device never waits for a log line.
                    reporter.flush(leave=1)
                if stop:
                    break
        saver.finish()
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
