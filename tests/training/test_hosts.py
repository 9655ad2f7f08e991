"""Training by several processes: real ones, on this machine, with one device each."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from transformer_jax.config import to_dict
from transformer_jax.data.tasks import load_corpus
from transformer_jax.errors import ConfigError
from transformer_jax.training import hosts, loop, runs
from transformer_jax.training.cluster import Cluster, find_cluster
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.sharding import held_rows

ROOT = Path(__file__).parent.parent.parent
LAUNCHERS = ("SLURM_", "OMPI_", "TPU_", "JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR")


def free_port():
    """One below those that the system gives to connections, of which other tests make many."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def joining(port, process, of=2):
    return ["--coordinator", f"127.0.0.1:{port}", "--process-id", process, "--num-processes", of]


@dataclasses.dataclass
class Started:
    """A process that trains; what it writes goes to files, so that it never waits for a reader."""

    process: subprocess.Popen
    out: Path
    err: Path

    def status(self, timeout=240):
        return self.process.wait(timeout)

    def said(self):
        return self.out.read_text(), self.err.read_text()


@pytest.fixture
def start(tmp_path):
    """Starts `train` with flags. Whatever is left of it is killed at the end of the test."""
    started = []

    def one(*flags, **environment):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        paths = [tmp_path / f"{len(started)}.{name}" for name in ("out", "err")]
        with paths[0].open("w") as out, paths[1].open("w") as err:
            command = [sys.executable, "train.py", *map(str, flags)]
            process = subprocess.Popen(command, cwd=ROOT, env=kept | environment, stdout=out, stderr=err)
        started.append(Started(process, *paths))
        return started[-1]

    yield one
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.fixture
def pair(start):
    """Starts two processes that train together, with flags for both, and others for each."""

    def both(*flags, first=(), second=()):
        port = free_port()
        return [start(*flags, *joining(port, number), *own) for number, own in enumerate((first, second))]

    return both


def succeed(pair):
    for one in pair:
        assert one.status() == 0, one.said()
    (out, err), others = (one.said() for one in pair)
    assert err == ""
    assert others == ("", "")  # one process speaks for all
    return out


@pytest.fixture(scope="module")
def config(tiny_config):
    model = dataclasses.replace(tiny_config.model, d_ff=64)
    train = dataclasses.replace(tiny_config.train, steps=40, eval_every=5, average_decay=0.9)
    return dataclasses.replace(tiny_config, model=model, train=train)


@pytest.fixture(scope="module")
def config_file(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("hosts") / "config.json"
    path.write_text(json.dumps(to_dict(config)))
    return path


LONG = ("--train.steps", 100_000, "--optim.decay-steps", 40)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """The folder of the same run by one process."""
    out = tmp_path_factory.mktemp("hosts") / "alone"
    loop.train(config, out)
    return out


def records(out):
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in read_metrics(out / "metrics.jsonl")]


def assert_same_curve(out, alone):
    """But for rounding."""
    here, there = records(out)[:40], records(alone)
    assert [r["step"] for r in here] == [r["step"] for r in there]
    for name in ("loss", "grad_norm", "val_loss"):
        a, b = ([r[name] for r in some if name in r] for some in (here, there))
        np.testing.assert_allclose(a, b, rtol=5e-6)


def assert_same_end(out, alone):
    a, b = (json.loads((some / "summary.json").read_text()) for some in (out, alone))
    for name in ("val_loss", "best_val_loss", "best_step", "steps", "parameters"):
        assert a[name] == pytest.approx(b[name], rel=5e-6)
    assert (out / "samples.txt").read_text() == (alone / "samples.txt").read_text()


def wait_for(path, *processes):
    until = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until
        assert all(one.process.poll() is None for one in processes), [one.said() for one in processes]
        time.sleep(0.01)


def kill_one(processes, killed, out, after):
    """Kills one of two after a checkpoint. Returns the newest checkpoint, which the other must name, and leave."""
    wait_for(out / "checkpoints" / str(after), *processes)
    processes[killed].process.kill()
    since = time.monotonic()
    left = processes[1 - killed]
    assert left.status(timeout=60) == 75
    assert time.monotonic() - since < 30
    _, err = left.said()
    newest = max(runs.RunFolder(out).checkpoints.steps())
    assert err.count("\n") == 1
    assert err.startswith(f"error: another process has ended or cannot be reached (process {killed}); the newest check")
    assert f"the newest checkpoint is {newest}; start all processes again, this one with: transformer-jax train" in err
    assert f"--out {out} --resume" in err
    return newest


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(pair, config_file, alone, tmp_path):
    """Two processes give the curve of one; a run of which one was killed, the records of one that went through."""
    said = succeed(pair("--config", config_file, "--out", tmp_path / "whole"))
    assert "device     2 x cpu (cpu), data=2, 2 processes\n" in said
    assert_same_curve(tmp_path / "whole", alone)
    assert_same_end(tmp_path / "whole", alone)
    out = tmp_path / "run"
    newest = kill_one(pair("--config", config_file, "--out", out, *LONG), 1, out, after=10)
    assert newest < 40
    said = succeed(pair("--config", config_file, "--out", out, "--resume", "--train.sample-chars", 0))
    assert f"resumed at step {newest}\n" in said
    assert records(out) == records(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_one_and_two(pair, config, config_file, alone, tmp_path):
    """A signal to one stops both, with the state saved; the run goes on by one process, and by two again.

    Of these the first is killed: it runs the service by which the others find each other, and which ends them unasked.
    """
    out = tmp_path / "run"
    flags = ("--config", config_file, "--out", out)
    first, second = pair(*flags, "--mesh", "fsdp=2", *LONG, "--train.save-every", 1000)
    wait_for(out / "metrics.jsonl", first, second)
    second.process.send_signal(signal.SIGTERM)
    assert [first.status(), second.status()] == [143, 143]
    assert "SIGTERM: saved; go on with: transformer-jax train" in first.said()[0]
    assert "stopping: the state is saved first" in second.said()[1]
    (stopped,) = {max(runs.RunFolder(out).checkpoints.steps())}
    assert 0 < stopped < 30
    train = dataclasses.replace(config.train, steps=30, sample_chars=0)
    loop.train(dataclasses.replace(config, train=train), out, resume=True)
    again = pair(*flags, *LONG, "--resume", "--mesh", "tensor=2")
    kill_one(again, 0, out, after=40)
    assert "resumed at step 30\n" in again[0].said()[0]
    assert_same_curve(out, alone)


def refuse(processes, *said, status=2):
    statuses = [one.status() for one in processes]
    errors = [one.said()[1] for one in processes]
    assert statuses == [status] * len(processes), errors
    for err in errors:
        assert err.startswith("error: "), errors
        assert err.count("\n") == 1, errors
        assert all(text in err for text in said), errors


def test_other_settings_are_named(start, config_file, tmp_path):
    """Here SLURM says how the processes join."""
    port = free_port()
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "JAX_COORDINATOR_PORT": str(port),
    }
    flags = ("--config", config_file, "--out", tmp_path / "run")
    refuse(
        [
            start(*flags, *own, **slurm, SLURM_PROCID=str(number), SLURM_LOCALID=str(number))
            for number, own in enumerate(((), ("--train.seed", 3, "--mesh", "data=2")))
        ],
        "the processes differ: train.seed is 0 (process 0), 3 (process 1); --mesh is null (process 0)",
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_fails_on_one_ends_all(pair, start, config_file, tmp_path):
    (tmp_path / "other.txt").write_text("the queen " * 600)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    flags = ("--config", config_file, "--out", tmp_path / "run")
    refuse(pair(*flags, second=("--data.path", tmp_path / "no.txt")), "no.txt does not exist")
    refuse(pair(*flags, second=("--data.path", tmp_path / "other.txt")), "the SHA-256 of the data is", "(process 1)")
    refuse(pair("--config", config_file, "--out", tmp_path / "there"), "exists already")
    refuse(pair(*flags, "--train.batch-size", 3, "--train.accumulate", 1), "3 rows at a time do not divide among 2 pro")
    port = free_port()
    mixed = [start(*flags, *joining(port, 0)), start(*flags, *joining(port, 1, of=3))]
    refuse(mixed, "--num-processes is 2 (process 0), 3 (process 1)")
    assert not (tmp_path / "run").exists()


def test_nobody_there(start, config_file):
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        flags = ("--config", config_file, "--join-timeout", 1)
        other = start(*flags, *joining(taken.getsockname()[1], 0))
        lonely = [start(*flags, *joining(port, 0)), start(*flags, *joining(free_port(), 1))]
        refuse([other], "cannot listen at port", "choose another port")
        refuse(lonely[:1], f"process 0 of 2 at 127.0.0.1:{port} waited 1 s, and not all others came", status=75)
        refuse(lonely[1:], "process 1 of 2 cannot reach process 0 at", "within 1 s", status=75)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("a:1", None, None), "--coordinator a:1 needs --process-id and --num-processes too"),
        ((None, 0, 2), "--process-id 0 --num-processes 2 needs --coordinator too"),
        (("a:1", 2, 2), "--process-id 2 of --num-processes 2: ids go from 0 to 1"),
        (("a:1", -1, 2), "ids go from 0 to 1"),
        (("a:1", 0, 0), "--num-processes must be at least 1, got 0"),
        (("a", 0, 2), "'a' is not HOST:PORT"),
        (("a:b", 0, 2), "'a:b' is not HOST:PORT"),
        (("a:65536", 0, 2), "port from 1 to 65535"),
        (("::1:80", 0, 2), "is not HOST:PORT"),
    ],
)
def test_flags_that_cannot_be(flags, said):
    with pytest.raises(ConfigError) as error:
        find_cluster(*flags)
    assert said in str(error.value)


def test_who_trains_together(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    assert find_cluster(None, None, None) is None
    assert find_cluster("[::1]:80", 1, 2) == Cluster("[::1]:80", 1, 2)
    assert Cluster("[::1]:80", 1, 2).address == ("::1", 80)
    slurm = {"JOB_ID": "5", "STEP_NODELIST": "node[07-09],x", "NTASKS": "4", "PROCID": "3", "LOCALID": "1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert find_cluster(None, None, None) == Cluster("node07:61445", 3, 4, launched=True)
    assert find_cluster("a:1", 0, 2) == Cluster("a:1", 0, 2)  # what is asked for comes first
    assert find_cluster(None, None, 1) is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # a shell in an allocation of several
    assert find_cluster(None, None, None) is None
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    for name, value in {"SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert find_cluster(None, None, None) is None
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    cluster = find_cluster(None, None, None)
    assert (cluster.address[0], cluster.process_id, cluster.num_processes) == ("10.96.0.1", 0, 2)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    with pytest.raises(ConfigError, match="environment of ompi does not say .*RANK.* or --num-processes 1"):
        find_cluster(None, None, None)


class Held:
    """Stands for the sharding of rows as one process sees it."""

    def __init__(self, *spans):
        self._spans = spans

    def addressable_devices_indices_map(self, shape):
        return dict(enumerate((slice(*span),) for span in self._spans))


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder_decoder"])
def test_the_rows_of_processes_make_up_the_batch(families, name):
    """Each is read once, from those that one process would read."""
    examples, size = load_corpus(families[name]).training(seed=1), 12
    whole = examples.batch(100, size)
    spans = [held_rows(Held((0, 2), (2, 4)), size), held_rows(Held((4, 8)), size), held_rows(Held((8, None)), size)]
    assert [row for span in spans for row in span] == list(range(size))
    parts = [examples.batch(100, size, span) for span in spans]
    for field, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[field] for part in parts]), array)
    assert len(np.unique(whole.get("source", whole["inputs"]), axis=0)) > size // 2
    # Where only a model is split between hosts, both read the same rows.
    assert held_rows(Held((None, None), (None, None)), size) == range(size)


def test_a_folder_that_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "SEEN_WITHIN", 0.1)
    for name, stub in (
        ("alone", lambda: False),
        ("numbers", lambda: (1, range(2))),
        ("agreed", lambda what: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(hosts, name, stub)
    run = runs.RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="not the folder that the other processes write to; choose an --out"):
        runs.check_shared(run)
    run.checkpoints.folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="not the folder that the other processes write to"):
        runs.check_shared(run)
    (run.checkpoints.folder / "here.0").touch()
    runs.check_shared(run)
    assert [path.name for path in run.checkpoints.folder.iterdir()] == ["here.0"]  # of the other, who removes it
