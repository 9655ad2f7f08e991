import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from transformer_jax import load_run
from transformer_jax.config import to_dict
from transformer_jax.data.batches import Windows
from transformer_jax.errors import CheckpointError, ConfigError, TransformerJaxError
from transformer_jax.training import loop, runs
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.resuming import MAY_CHANGE
from transformer_jax.training.sharding import default_placement

ROOT = Path(__file__).parent.parent.parent


def with_train(config, **fields):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


def full_state(out, config):
    return runs.open_newest(runs.RunFolder(out), default_placement(1))


def records(out):
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in read_metrics(out / "metrics.jsonl")]


def assert_same_run(out, other, config):
    meta, state, _ = full_state(out, config)
    other_meta, other_state, _ = full_state(other, config)
    assert (meta.step, meta.examples, meta.val_loss) == (other_meta.step, other_meta.examples, other_meta.val_loss)
    jax.tree.map(np.testing.assert_array_equal, state, other_state)
    assert records(out) == records(other)
    for name in ("val_loss", "best_val_loss", "best_step", "steps"):
        a, b = (json.loads((o / "summary.json").read_text())[name] for o in (out, other))
        assert a == b
    assert (out / "samples.txt").read_text() == (other / "samples.txt").read_text()


def test_a_runs_folder(trained, tiny_config):
    names = {p.name for p in trained.iterdir()}
    assert names == {"config.json", "vocab.json", "metrics.jsonl", "summary.json", "samples.txt", "checkpoints"}
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["steps"] == 20
    assert summary["val_bits"] == pytest.approx(summary["val_loss"] / math.log(2))
    assert summary["corpus"] == "file"
    needed = {
        "val_loss",
        "val_bits",
        "best_val_loss",
        "tokens_per_second",
        "seconds",
        "parameters",
        "device",
        "vocab_size",
    }
    assert needed <= set(summary)
    written = read_metrics(trained / "metrics.jsonl")
    assert [r["step"] for r in written] == list(range(1, 21))
    assert set(written[0]) == {"step", "loss", "learning_rate", "grad_norm", "tokens_per_second"}
    assert [r["step"] for r in written if "val_loss" in r] == [10, 20]
    assert written[0]["learning_rate"] == pytest.approx(tiny_config.optim.learning_rate / 15)
    assert written[-1]["loss"] < written[0]["loss"]
    assert runs.RunFolder(trained).checkpoints.steps() == [10, 20]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "optimizer"),
    [("decoder", "muon"), ("decoder", "adamw"), ("gru", "muon"), ("encoder", "muon"), ("encoder_decoder", "muon")],
)
def test_resume_is_exact(families, tmp_path, architecture, optimizer):
    """20 steps equal 10 + 10 and 7 + 7 + 6, bit for bit, with dropout, accumulation and a running warmup."""
    config = with_train(families[architecture], average_decay=0.9)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, optimizer=optimizer))
    loop.train(config, tmp_path / "whole")
    for name, stops in (("two", (10, 20)), ("three", (7, 14, 20))):
        for number, steps in enumerate(stops):
            loop.train(with_train(config, steps=steps), tmp_path / name, resume=number > 0)
    assert_same_run(tmp_path / "whole", tmp_path / "two", config)
    meta, state, _ = full_state(tmp_path / "whole", config)
    _, other, _ = full_state(tmp_path / "three", config)
    jax.tree.map(np.testing.assert_array_equal, state, other)
    assert meta.examples == 160


@pytest.mark.slow
def test_only_training_counts_as_training(tiny_config, tmp_path, monkeypatch):
    """Not compiling, evaluating or saving, which take 2 s each time here."""
    for kind, name in ((loop.Evaluator, "loss"), (loop.Saver, "save")):
        original = getattr(kind, name)

        def slow(*args, original=original):
            time.sleep(2)
            return original(*args)

        monkeypatch.setattr(kind, name, slow)
    summary = loop.train(with_train(tiny_config, steps=4, save_every=2, eval_every=1), tmp_path / "a")
    assert summary["seconds"] < 2
    assert all(r["tokens_per_second"] > 8 * 16 / 2 for r in read_metrics(tmp_path / "a" / "metrics.jsonl"))


def test_seed_decides(trained, tiny_config, tmp_path):
    loop.train(tiny_config, tmp_path / "again")
    assert_same_run(trained, tmp_path / "again", tiny_config)
    loop.train(with_train(tiny_config, seed=1, steps=2), tmp_path / "other")
    assert records(tmp_path / "other")[1]["loss"] != records(trained)[1]["loss"]  # the first is log V for all


@pytest.mark.slow
def test_two_processes_agree(tiny_config, tmp_path):
    """Also where Python's hashes differ."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(with_train(tiny_config, steps=6))))
    outs = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        command = [sys.executable, "train.py", "--config", str(config), "--out", str(out)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=200)
        outs.append(records(out))
    assert outs[0] == outs[1]
    assert len(outs[0]) == 6


def test_schedules_do_not_move(tiny_config, tmp_path):
    config = dataclasses.replace(tiny_config, optim=dataclasses.replace(tiny_config.optim, decay_steps=None))
    loop.train(with_train(config, steps=16), tmp_path / "a")
    loop.train(with_train(config, steps=20), tmp_path / "a", resume=True)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["optim"]["decay_steps"] == 16
    rates = [r["learning_rate"] for r in records(tmp_path / "a")]
    assert rates[15:] == pytest.approx([rates[15]] * 5)


def test_batch_size_and_rates_may_change(tiny_config, tmp_path):
    loop.train(with_train(tiny_config, steps=4), tmp_path / "a")
    faster = dataclasses.replace(tiny_config, optim=dataclasses.replace(tiny_config.optim, learning_rate=6e-3))
    loop.train(with_train(faster, steps=6, batch_size=4), tmp_path / "a", resume=True)
    meta, _, _ = full_state(tmp_path / "a", tiny_config)
    assert meta.examples == 4 * 8 + 2 * 4
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["tokens_per_second"] == pytest.approx(meta.examples * 16 / summary["seconds"], rel=0.2)
    assert records(tmp_path / "a")[4]["learning_rate"] == pytest.approx(6e-3 * 5 / 15)


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("model", {"d_model": 64}, "model.d_model 32 -> 64"),
        ("train", {"seed": 5}, "train.seed 0 -> 5"),
        ("optim", {"optimizer": "adamw"}, "optim.optimizer 'muon' -> 'adamw'"),
        ("optim", {"decay_steps": 50}, "optim.decay_steps 40 -> 50"),
        ("train", {"steps": 15}, "has made 20 steps already, and train.steps is 15"),
    ],
)
def test_what_must_not_change(trained, tiny_config, section, fields, said):
    changed = dataclasses.replace(
        tiny_config, **{section: dataclasses.replace(getattr(tiny_config, section), **fields)}
    )
    with pytest.raises(ConfigError, match=said):
        loop.train(changed, trained, resume=True)


def test_another_text_is_refused(trained, tiny_config, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(Path(tiny_config.data.path[0]).read_text() + "x")
    changed = dataclasses.replace(tiny_config, data=dataclasses.replace(tiny_config.data, path=(str(other),)))
    with pytest.raises(ConfigError, match="trained on other data"):
        loop.train(changed, trained, resume=True)


def test_checkpoint_alone_is_enough(trained, tmp_path):
    import shutil

    whole = load_run(trained)
    for name, source in (("run/checkpoints", "checkpoints"), ("bare", "checkpoints")):
        shutil.copytree(trained / source, tmp_path / name)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        run = load_run(path, "last")
        assert (run.config, run.vocab, run.step) == (whole.config, whole.vocab, 20)
    assert load_run(trained, 10).step == 10
    assert load_run(trained, "10").step == 10


def test_load_run_errors(trained, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path, said in (
        (tmp_path / "no", "does not exist"),
        (tmp_path / "empty", "no checkpoint in"),
        (tmp_path / "file", "file"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load_run(path)
    with pytest.raises(CheckpointError, match="no checkpoint 11 .* there are 10, 20"):
        load_run(trained, 11)
    with pytest.raises(CheckpointError, match="unknown step 'newest'"):
        load_run(trained, "newest")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("damages")
def test_resume_goes_back_to_a_good_checkpoint(tiny_config, tmp_path, trained, capsys):
    loop.train(tiny_config, tmp_path / "a")
    for path in (tmp_path / "a" / "checkpoints" / "20" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 200:
            path.write_bytes(path.read_bytes()[:50])
    loop.train(tiny_config, tmp_path / "a", resume=True)
    said = capsys.readouterr().out
    assert "skipped" in said
    assert "resumed at step 10" in said
    assert_same_run(tmp_path / "a", trained, tiny_config)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("damages")
def test_divergence_stops_the_run(tiny_config, tmp_path):
    wild = dataclasses.replace(tiny_config.optim, optimizer="adamw", learning_rate=1e30, warmup_steps=0, clip_norm=None)
    config = with_train(dataclasses.replace(tiny_config, optim=wild), save_every=1, steps=10)
    with pytest.raises(TransformerJaxError, match=r"at step \d+ \(.*: the .* came first; the newest checkpoint is \d"):
        loop.train(config, tmp_path / "a")
    meta, state, _ = full_state(tmp_path / "a", config)
    assert meta.step < 5
    good = records(tmp_path / "a")
    assert len(good) >= 1
    assert all(math.isfinite(r["loss"]) for r in good)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def with_lost(monkeypatch, *steps, size=8):
    """Has the batches of some steps teach what is not a number."""
    original = Windows.batch

    def batch(windows, first, count, *rest):
        found = original(windows, first, count, *rest)
        if first // size + 1 in steps:
            found["weights"] = found["weights"] * np.float32("nan")
        return found

    monkeypatch.setattr(Windows, "batch", batch)


@pytest.mark.slow
def test_lost_updates_are_skipped_up_to_a_limit(trained, tiny_config, tmp_path, monkeypatch, capsys):
    """They are counted, shown and in the log; the rates of the others are those of a straight run."""
    with_lost(monkeypatch, 5, 6, 12, 18, 19, 20)
    config = with_train(tiny_config, max_skipped=2)
    with pytest.raises(
        TransformerJaxError, match=r"loss is nan and the gradient norm is nan at step 20 .*, after 2 skip"
    ):
        loop.train(config, tmp_path / "a")
    said = capsys.readouterr().out
    assert "skipped    the loss is nan and the gradient norm is nan at step 12 (learning rate" in said
    found = records(tmp_path / "a")
    assert [r["step"] for r in found if r.get("skipped")] == [5, 6, 12, 18, 19]
    assert [r["step"] for r in found if "loss" in r] == [s for s in range(1, 18) if s not in (5, 6, 12)]
    rates = {r["step"]: r["learning_rate"] for r in records(trained)}
    assert all(r["learning_rate"] == rates[r["step"]] for r in found)
    meta, state, _ = full_state(tmp_path / "a", config)
    assert meta.step == 10
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    loop.train(with_train(config, max_skipped=3), tmp_path / "a", resume=True)
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["steps"] == 20


def test_where_numbers_were_lost_is_said(tiny_config, tmp_path, monkeypatch):
    with_lost(monkeypatch, 13)
    with pytest.raises(
        TransformerJaxError,
        match=r"nan at step 13 \(learning rate 0.0026\): the loss came first; the newest"
        r" checkpoint is 10; lower --optim.learning-rate or set --optim.clip-norm",
    ):
        loop.train(tiny_config, tmp_path / "a")


@pytest.mark.slow
def test_what_changes_on_resuming_is_said(tiny_config, tmp_path, capsys):
    loop.train(with_train(tiny_config, steps=4), tmp_path / "a")
    folder = tmp_path / "a" / "checkpoints"
    (folder / "3.orbax-checkpoint-tmp").mkdir()
    (folder / "notes").write_text("mine")
    capsys.readouterr()
    loop.train(with_train(tiny_config, steps=6, batch_size=4, keep_every=2), tmp_path / "a", resume=True)
    said = capsys.readouterr().out
    assert "changed    train.steps 4 -> 6, train.batch_size 8 -> 4, train.keep_every None -> 2\n" in said
    assert f"ignored    {folder / 'notes'}: not a checkpoint\n" in said
    assert f"ignored    {folder / '3.orbax-checkpoint-tmp'}: a save that was cut off\n" in said
    assert sorted(p.name for p in folder.iterdir()) == ["0", "4", "6", "notes"]


def test_a_run_that_never_saved_begins_anew(tiny_config, tmp_path, trained, capsys):
    runs.create(tmp_path / "a", tiny_config, load_run(trained).vocab, overwrite=False)
    loop.train(tiny_config, tmp_path / "a", resume=True)
    assert "resumed    nothing: the run ended before its first checkpoint, and begins anew" in capsys.readouterr().out
    assert_same_run(tmp_path / "a", trained, tiny_config)


@pytest.mark.slow
def test_one_trainer_at_a_time(tiny_config, tmp_path):
    loop.train(with_train(tiny_config, steps=2), tmp_path / "a")
    with runs.claimed(tmp_path / "a", make=False):
        for flags in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ConfigError, match="another process trains in .*/a at the moment; wait for it"):
                loop.train(with_train(tiny_config, steps=3), tmp_path / "a", **flags)
    loop.train(with_train(tiny_config, steps=3), tmp_path / "a", resume=True)
    assert full_state(tmp_path / "a", tiny_config)[0].step == 3


def test_a_run_says_how_its_attention_is_computed(tiny_config, tmp_path, capsys):
    """And a kernel that cannot be is refused before anything is written, like data of another kind."""
    for fields, said in (
        ({"architecture": "encoder_decoder"}, "'encoder_decoder' learns from pairs, and data.corpus is 'file'; choose"),
        ({"attention_impl": "tpu"}, "attention_impl 'tpu' cannot be used here: tpu runs on tpu, and this is for cpu"),
    ):
        config = dataclasses.replace(tiny_config, model=dataclasses.replace(tiny_config.model, **fields))
        with pytest.raises(ConfigError, match=said):
            loop.train(config, tmp_path / "a")
        assert not (tmp_path / "a").exists()
    loop.train(with_train(tiny_config, steps=1), tmp_path / "a")
    assert "attention  xla (no fused kernel for cpu)\n" in capsys.readouterr().out


def test_out_is_respected(trained, tiny_config, tmp_path):
    with pytest.raises(ConfigError, match="exists already; add --resume"):
        loop.train(tiny_config, trained)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    with pytest.raises(ConfigError, match="holds more than a run, and is left as it is"):
        loop.train(tiny_config, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "words"
    with pytest.raises(ConfigError, match="is a file"):
        loop.train(tiny_config, tmp_path / "mine" / "thesis.txt", overwrite=True)
    with pytest.raises(ConfigError, match="cannot be written"):
        loop.train(tiny_config, tmp_path / "mine" / "thesis.txt" / "below")
    with pytest.raises(ConfigError, match="has a backslash"):
        loop.train(tiny_config, tmp_path / "back\\slash")
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        loop.train(tiny_config, tmp_path / "nowhere", resume=True)


def test_one_symbol(tiny_config, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a" * 500)
    config = dataclasses.replace(
        tiny_config, data=dataclasses.replace(tiny_config.data, path=(str(tmp_path / "a.txt"),))
    )
    summary = loop.train(with_train(config, steps=2), tmp_path / "a")
    assert summary["val_loss"] == 0
    assert set((tmp_path / "a" / "samples.txt").read_text().strip()) == {"a"}


@pytest.mark.parametrize("step", [7, 10, 20])
def test_a_signal_changes_nothing(trained, tiny_config, tmp_path, monkeypatch, step):
    """At any step, at one that is saved anyway, and at the last: records and best are those of the straight run."""
    original = Windows.batch

    def batch(windows, first, size):
        if first == (step - 1) * size and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(windows, first, size)

    sent = [] if step > 1 else None
    monkeypatch.setattr(Windows, "batch", batch)
    with pytest.raises(loop.Interrupted, match="SIGTERM"):
        loop.train(tiny_config, tmp_path / "a")
    assert full_state(tmp_path / "a", tiny_config)[0].step == step
    loop.train(tiny_config, tmp_path / "a", resume=True)
    assert_same_run(tmp_path / "a", trained, tiny_config)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_save(tiny_config, tmp_path, signum):
    long = with_train(tiny_config, steps=100_000, eval_every=100_000, save_every=100_000, log_every=10)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(long)))
    out = tmp_path / "run"
    command = [sys.executable, "train.py", "--config", str(tmp_path / "config.json"), "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(read_metrics(out / "metrics.jsonl")) < 3:
        time.sleep(0.1)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert f"{signum.name}: saved; go on with" in said
    meta, state, _ = full_state(out, long)
    assert meta.step == int(state.step) > 20
    # The continued run is the one that was never interrupted.
    end = meta.step + 10
    for folder, resume in ((out, True), (tmp_path / "straight", False)):
        loop.train(with_train(long, steps=end, log_every=10), folder, resume=resume)
    a, b = full_state(out, long)[1], full_state(tmp_path / "straight", long)[1]
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_compiles_once_and_holds_its_memory(tiny_config, tmp_path, monkeypatch):
    """3,000 steps with log lines, evaluations with a last batch that is not full, and saves."""
    config = with_train(tiny_config, steps=3_000, accumulate=1, log_every=5, eval_every=100, save_every=500)
    process, compiled, seen = psutil.Process(), [], {}
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    original = Windows.batch

    def batch(windows, first, size):
        step = first // size
        if step in (300, 2_999):
            seen[step] = (process.memory_info().rss, len(jax.live_arrays()), len(compiled))
        return original(windows, first, size)

    monkeypatch.setattr(Windows, "batch", batch)
    loop.train(config, tmp_path / "a")
    (early_size, early_arrays, early_compiled), (size, arrays, count) = seen[300], seen[2_999]
    assert early_compiled > 0
    assert count == early_compiled
    assert size - early_size < 50e6
    assert abs(arrays - early_arrays) <= 30  # the metrics of at most a few steps wait to be logged


MEMORY = """
import resource, sys
from transformer_jax import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from transformer_jax.training.loop import train
train(
    Config(
        model=ModelConfig(context=256, d_model=8, num_heads=1, num_layers=1),
        data=DataConfig(corpus="file", path=(sys.argv[1],)),
        optim=OptimConfig(warmup_steps=0),
        train=TrainConfig(steps=1, batch_size=2, sample_chars=0),
    ),
    __import__("pathlib").Path(sys.argv[2]),
)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_memory_of_a_long_text(tmp_path):
    """Below 10 bytes for each character of a text of one line."""
    peaks = []
    for size in (20_000, 30_000_000):
        path = tmp_path / f"{size}.txt"
        path.write_text("the quick brown fox " * (size // 20), encoding="utf-8")
        command = [sys.executable, "-c", MEMORY, str(path), str(tmp_path / f"run-{size}")]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert (peaks[1] - peaks[0]) / 30_000_000 < 10


def test_the_docs_list_what_may_change():
    """Each field of MAY_CHANGE, in the table of its section, and no other."""
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    table = text[text.index("### What may change") : text.index("## What stops a run")]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    listed = {f"{section.strip(' `')}.{name.strip(' `')}" for section, names in rows for name in names.split(",")}
    assert listed == set(MAY_CHANGE)
