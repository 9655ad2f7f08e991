"""How checkpoints are written; what they are stands in test_checkpoint."""

import os
import subprocess
import sys
import threading
import time
from functools import partial

import jax
import numpy as np
import pytest

from transformer_jax import Config, ModelConfig, TrainConfig
from transformer_jax.config import resolve
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import CheckpointError
from transformer_jax.training import saving
from transformer_jax.training.checkpoint import Checkpoints, Metadata, like
from transformer_jax.training.runs import abstract_state
from transformer_jax.training.saving import Saver
from transformer_jax.training.step import init_state

CONFIG = resolve(Config(model=ModelConfig(context=8, d_model=8, num_heads=2, num_layers=2)), vocab_size=3)
SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture
def state():
    return jax.jit(partial(init_state, CONFIG))()


def metadata(step, **metrics):
    return Metadata(step, 8 * step, 1.5, metrics, CONFIG, Vocab("abc"), {"name": "x", "sha256": "0"})


def check_for(saver, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        saver.check()


def test_a_state_may_be_donated_at_once(state, tmp_path):
    """What is written is the state as it was, whatever its buffers hold a moment later."""
    expected = jax.tree.map(np.array, state)
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Saver(Checkpoints(tmp_path), TrainConfig()) as saver:
        saver.save(state, metadata(0))
        for _ in range(5):
            state = spoil(state)
    checkpoints = Checkpoints(tmp_path)
    restored = checkpoints.restore(checkpoints.metadata(0), like(abstract_state(CONFIG), SHARDING))
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def test_older_ones_go_only_after_the_newer_one_was_read_back(state, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    reading, go_on = threading.Event(), threading.Event()
    original = Checkpoints.verify

    def verify(self, meta, *args):
        if meta.step == 3:
            reading.set()
            assert go_on.wait(60)
        original(self, meta, *args)

    monkeypatch.setattr(Checkpoints, "verify", verify)
    with Saver(checkpoints, TrainConfig(keep=1)) as saver:
        for step in (1, 2, 3):
            saver.save(state, metadata(step))
        assert reading.wait(60)
        assert checkpoints.steps() == [2, 3]  # 2 was read back, and 1 went; 3 is on disk and not looked at yet
        go_on.set()
    assert checkpoints.steps() == [3]


def test_a_save_that_reads_back_otherwise_ends_the_run(state, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    with Saver(checkpoints, TrainConfig(keep=1)) as saver:
        saver.save(state, metadata(1))
        saver.finish()
        monkeypatch.setattr(saving, "digests", lambda tree: dict.fromkeys(original(tree), "0"))
        original = sys.modules["transformer_jax.training.digests"].digests
        saver.save(state, metadata(2))
        with pytest.raises(
            CheckpointError,
            match=r"read back after saving, checkpoint 2 .* is not what was saved; the"
            r" run can be resumed from step 1",
        ):
            saver.finish()
    assert checkpoints.steps() == [1, 2]  # nothing went; a reader skips 2
    assert checkpoints.newest(lambda m: like(abstract_state(m.config), SHARDING))[0].step == 1


def test_an_error_in_the_background_is_raised_without_waiting(state, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    with Saver(Checkpoints(tmp_path), TrainConfig()) as saver:
        saver.save(state, metadata(1))
        saver.finish()
        saver.check()
        monkeypatch.setattr(Checkpoints, "verify", refuse)
        saver.save(state, metadata(2))
        with pytest.raises(
            CheckpointError, match="2 could not .*: no space is left there; the run can be resumed from s"
        ):
            check_for(saver, 60)
        saver.finish()  # is not raised twice


def test_a_block_that_fails_completes_its_save(state, tmp_path):
    def fail():
        with Saver(Checkpoints(tmp_path), TrainConfig()) as saver:
            saver.save(state, metadata(1))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert Checkpoints(tmp_path).steps() == [1]


@pytest.mark.parametrize("kind", ["file size", "path under a file", "no permission"])
def test_what_cannot_be_written_is_one_line(tmp_path, kind):
    """In a process of its own, that must end within seconds."""
    code = """
import os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_saving import CONFIG, Checkpoints, CheckpointError, Saver, TrainConfig, init_state, jax, metadata, partial
folder, kind = Path(sys.argv[1]), sys.argv[2]
state = jax.jit(partial(init_state, CONFIG))()
jax.block_until_ready(state)
with Saver(Checkpoints(folder), TrainConfig()) as saver:
    saver.save(state, metadata(1))
if kind == "file size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
elif kind == "path under a file":
    folder.rename(folder.with_name("away")); folder.write_text("in the way")
else:
    if os.getuid() == 0:
        folder.chmod(0o755); os.setuid(65534)
    else:
        folder.chmod(0o555)
try:
    with Saver(Checkpoints(folder), TrainConfig()) as saver:
        saver.save(state, metadata(2))
except CheckpointError as error:
    print("said:", error)
"""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    began = time.monotonic()
    command = [sys.executable, "-c", code, str(tmp_path / "c"), kind, os.path.dirname(__file__)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("said: checkpoint 2 could not be written to")
    assert len(said) < 500
    assert "Traceback" not in done.stdout + done.stderr
    assert time.monotonic() - began < 60
    left = Checkpoints(tmp_path / ("away" if kind == "path under a file" else "c"))
    assert left.steps() == [1]
    left.verify(left.metadata(1), abstract_state(CONFIG))
