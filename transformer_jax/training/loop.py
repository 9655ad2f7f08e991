"""A whole run: orchestration, input and output. What is computed stands in `step`, `evaluate` and `generation`."""

import dataclasses
import math
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax.config import Config, differences, resolve, to_dict
from transformer_jax.data.batches import Corpus, Windows, load_corpus
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import ConfigError, TransformerJaxError
from transformer_jax.generation import generate
from transformer_jax.nn import create_model
from transformer_jax.training import runs, sharding
from transformer_jax.training.checkpoint import Metadata
from transformer_jax.training.evaluate import Evaluator, bits
from transformer_jax.training.metrics import MetricLog, Terminal
from transformer_jax.training.step import TrainState, all_finite, compile_train_step, init_state

MAY_CHANGE = (
    "data.path",
    "model.attention_dropout",
    "model.dropout",
    "model.remat",
    "model.unroll",
    "optim.clip_norm",
    "optim.learning_rate",
    "optim.muon_learning_rate",
    "optim.weight_decay",
    *(
        f"train.{name}"
        for name in (
            "accumulate",
            "batch_size",
            "eval_chars",
            "eval_every",
            "keep",
            "label_smoothing",
            "log_every",
            "sample_chars",
            "save_every",
            "steps",
            "z_loss",
        )
    ),
)
"""Fields that a resumed run may set anew. All others decide what the stored state means."""


class Interrupted(Exception):
    """A signal asked the run to stop; its state is saved.

    Attributes:
      signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclasses.dataclass
class _Session:
    """What one call of `train` works with.

    Attributes:
      config: Resolved.
      corpus: The text.
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


def train(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Trains a model, from the start or from its newest good checkpoint.

    Args:
      config: What to train. When resuming, fields outside `MAY_CHANGE` must be those of the run.
      out: The run's folder.
      resume: Go on with the run that is there.
      overwrite: Replace the run that is there.

    Returns:
      The summary that is also written to the run's folder.

    Raises:
      ConfigError, DataError: Before any long work.
      CheckpointError: If a checkpoint cannot be read or written.
      TransformerJaxError: If the loss or the gradients stop being finite.
      Interrupted: After SIGINT or SIGTERM, with the state saved.
    """
    terminal = Terminal()
    placement = sharding.default_placement(config.train.batch_size // config.train.accumulate)
    terminal.say(f"device     {sharding.describe(placement)}")
    corpus = load_corpus(config.data, config.model.context)
    terminal.say(
        f"text       {corpus.name}: {len(corpus.ids):,} characters, {len(corpus.vocab)} symbols, "
        f"SHA-256 {corpus.sha256[:12]}"
    )
    with placement.use():
        if resume:
            run = runs.RunFolder(out)
            metadata, state, skipped = runs.open_newest(run, placement.replicated)
            for line in skipped:
                terminal.say(f"skipped    {line}")
            config = check_resumable(config, metadata, corpus)
            for step in run.checkpoints.discard_after(metadata.step):
                terminal.say(f"set aside  checkpoint {step}, newer than the one resumed from")
            state = _with_rates(config, state)
            runs.write_json(run.config, to_dict(config))
            examples, seconds = metadata.examples, metadata.seconds
        else:
            config = resolve(config, len(corpus.vocab))
            run = runs.create(out, config, corpus.vocab, overwrite=overwrite)
            state = jax.jit(partial(init_state, config), out_shardings=placement.replicated)()
            examples, seconds = 0, 0.0
        session = _Session(config, corpus, run, placement, Evaluator(config, placement), terminal)
        count = sum(x.size for x in jax.tree.leaves(state.params))
        terminal.say(f"model      {config.model.architecture}, {count:,} parameters")
        terminal.say(f"run        {out}" + (f", resumed at step {int(state.step)}" if resume else ""))
        state, examples, seconds = _train_steps(session, state, examples, seconds)
        return _finish(session, state, seconds)


def check_resumable(config: Config, metadata: Metadata, corpus: Corpus) -> Config:
    """The config with which a run goes on.

    Raises:
      ConfigError: If the text or a field that may not change differs, with both values.
    """
    if corpus.sha256 != metadata.corpus["sha256"]:
        raise ConfigError(
            f"the run was trained on another text: {metadata.corpus['name']} with SHA-256 "
            f"{metadata.corpus['sha256'][:12]}, and this one is {corpus.name} with {corpus.sha256[:12]}"
        )
    # The schedule does not move: what was resolved at the start stays.
    optim = dataclasses.replace(config.optim, decay_steps=config.optim.decay_steps or metadata.config.optim.decay_steps)
    config = resolve(dataclasses.replace(config, optim=optim), len(corpus.vocab))
    changed = differences(metadata.config, config)
    fixed = [f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items() if name not in MAY_CHANGE]
    if fixed:
        raise ConfigError(f"a resumed run must keep {', '.join(fixed)}; start a new run with another --out")
    if config.train.steps < metadata.step:
        raise ConfigError(f"the run has made {metadata.step} steps already, and train.steps is {config.train.steps}")
    return config


def _with_rates(config: Config, state: TrainState) -> TrainState:
    """Puts the config's peak rates into the optimiser's state: on resuming they may have changed."""
    hyperparams = {
        name: jax.device_put(np.float32(getattr(config.optim, name)), value.sharding)
        for name, value in state.opt_state[1].hyperparams.items()
    }
    clip, injected, schedule = state.opt_state
    return state.replace(opt_state=(clip, injected._replace(hyperparams=hyperparams), schedule))


def _train_steps(session: _Session, state: TrainState, examples: int, seconds: float) -> tuple[TrainState, int, float]:
    """The loop. Returns the last state, the examples seen and the seconds spent, all runs of it together."""
    config, corpus, run, placement = session.config, session.corpus, session.run, session.placement
    settings = config.train
    windows = Windows(corpus.split("train"), config.model.context, settings.seed)
    eval_ids = corpus.split("tune")[: settings.eval_chars + 1]
    rows = placement.rows
    step_fn = compile_train_step(
        config,
        in_shardings=(placement.replicated, {"inputs": rows, "targets": rows, "weights": rows}),
        out_shardings=(placement.replicated, placement.replicated),
    )
    checkpoints = run.checkpoints
    step = int(state.step)
    log = MetricLog(run.metrics, after=step)
    pending: list[tuple[int, Any]] = []
    started = time.monotonic()
    paused = 0.0
    mark_time, mark_step = started, step

    def flush(items: list[tuple[int, Any]], val_loss: float | None = None) -> None:
        """Fetches the metrics of finished steps, stops the run where they are not finite, and logs those due."""
        nonlocal mark_time, mark_step
        values = jax.device_get([metrics for _, metrics in items])
        for (number, _), figures in zip(items, values, strict=True):
            _refuse_nonfinite(number, figures, checkpoints.steps())
        if not items:
            return
        now, last = time.monotonic(), items[-1][0]
        per_step = (now - mark_time) / max(last - mark_step, 1)
        mark_time, mark_step = now, last
        for (number, _), figures in zip(items, values, strict=True):
            evaluated = val_loss is not None and number == last
            if evaluated or number == 1 or number % settings.log_every == 0:
                record = {
                    "step": number,
                    **{name: float(figures[name]) for name in ("loss", "learning_rate", "grad_norm")},
                    "tokens_per_second": settings.batch_size * config.model.context / max(per_step, 1e-9),
                }
                if evaluated:
                    record["val_loss"] = val_loss
                log.write(record)
                session.terminal.step({**record, "seconds_per_step": per_step}, settings.steps)

    def spent() -> float:
        return seconds + time.monotonic() - started - paused

    def save(val_loss: float | None) -> None:
        if not all_finite(state):
            raise TransformerJaxError(
                f"step {step}: the state is not finite and is not saved; the newest checkpoint is "
                f"{max(checkpoints.steps(), default=None)}; lower --optim.learning-rate"
            )
        source = {"name": corpus.name, "sha256": corpus.sha256}
        checkpoints.save(state, Metadata(step, examples, spent(), val_loss, config, corpus.vocab, source))
        checkpoints.prune(settings.keep)

    if not checkpoints.steps():
        save(None)  # before training: an unwritable folder is found now
    first = True
    with _signals() as received, session.terminal.progress(settings.steps, step):
        mark_time = time.monotonic()
        while step < settings.steps:
            batch = placement.place(windows.batch(examples, settings.batch_size))
            state, metrics = step_fn(state, batch)
            step, examples = step + 1, examples + settings.batch_size
            pending.append((step, metrics))
            if first:
                jax.block_until_ready(metrics)
                session.terminal.say(f"started    first step done {time.monotonic() - started:.1f} s after set-up")
                mark_time, mark_step, first = time.monotonic(), step, False
            stop = bool(received)  # looked at once: a signal that comes while this step is saved stops the next one
            at_end = step == settings.steps or stop
            evaluates = step % settings.eval_every == 0 or step % settings.save_every == 0 or step == settings.steps
            if evaluates or at_end:
                pause = time.monotonic()
                flush(pending[:-1])
                val_loss = session.evaluator.loss(state.eval_params, eval_ids) if evaluates else None
                flush(pending[-1:], val_loss)
                pending.clear()
                if at_end or step % settings.save_every == 0:
                    save(val_loss)
                now = time.monotonic()
                paused += now - pause
                mark_time, mark_step = now, step
            elif (step - 1) % settings.log_every == 0:
                # The step before is logged now that this one is under way: the device never waits for a log line.
                flush(pending[:-1])
                del pending[:-1]
            if stop:
                raise Interrupted(received[0])
    return state, examples, spent()


def _refuse_nonfinite(step: int, figures: dict[str, Any], saved: list[int]) -> None:
    for name in ("loss", "grad_norm"):
        if not math.isfinite(figures[name]):
            what = {"loss": "the loss", "grad_norm": "the gradient norm"}[name]
            raise TransformerJaxError(
                f"{what} became {float(figures[name])} at step {step} (learning rate "
                f"{float(figures['learning_rate']):.3g}); the newest checkpoint is {max(saved, default=None)}; "
                "lower --optim.learning-rate or set --optim.clip-norm"
            )


def _finish(session: _Session, state: TrainState, seconds: float) -> dict[str, Any]:
    """Evaluates the last and the best weights on the whole validation text, writes a sample and the summary."""
    config, corpus, run, terminal = session.config, session.corpus, session.run, session.terminal
    losses = {
        split: session.evaluator.loss(state.eval_params, corpus.split(split))
        for split in ("validation", "tune", "test")
    }
    step, best = int(state.step), run.checkpoints.best()
    best_loss = losses["validation"]
    if best not in (None, step):
        params = runs.load_run(run.path, best, terminal.say).params
        best_loss = session.evaluator.loss(
            jax.device_put(params, session.placement.replicated), corpus.split("validation")
        )
    characters = step * config.train.batch_size * config.model.context
    device = session.placement.mesh.devices.flatten()[0]
    summary = {
        "val_loss": losses["validation"],
        "val_bits": bits(losses["validation"]),
        "tune_loss": losses["tune"],
        "test_loss": losses["test"],
        "best_val_loss": best_loss,
        "best_step": step if best is None else best,
        "steps": step,
        "tokens_per_second": characters / seconds if seconds else 0.0,
        "seconds": seconds,
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "device": f"{session.placement.mesh.size} x {device.device_kind}",
        "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
        "vocab_size": len(corpus.vocab),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    runs.write_json(run.summary, summary)
    terminal.say(
        f"validation {summary['val_loss']:.4f} nats per character, {summary['val_bits']:.4f} bits "
        f"(first half {losses['tune']:.4f}, second half {losses['test']:.4f}, best checkpoint {best_loss:.4f})"
    )
    if config.train.sample_chars:
        prompt = default_prompt(corpus.vocab)
        ids = generate(
            create_model(config.model),
            jax.device_put(state.eval_params, device),
            [corpus.vocab.encode(prompt)],
            config.train.sample_chars,
            context=config.model.context,
            temperature=0.8,
            seed=config.train.seed,
        )
        text = prompt + corpus.vocab.decode(ids[0])
        run.samples.write_text(text + "\n", encoding="utf-8")
        terminal.say(f"sample{text if text.startswith(chr(10)) else chr(10) + text}\n")
    terminal.say(f'more       transformer-jax sample {run.path} --prompt "..."')
    return summary


def default_prompt(vocab: Vocab) -> str:
    """Where a text begins when nobody says: a line end, or the vocabulary's first symbol."""
    return "\n" if "\n" in vocab.symbols else vocab.symbols[0]


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that the loop can save before it leaves; a second one acts at once."""
    received: list[int] = []
    previous = {}

    def receive(signum: int, frame: Any) -> None:
        received.append(signum)
        for number, handler in previous.items():
            signal.signal(number, handler)

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
