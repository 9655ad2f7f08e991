"""A sample of `python benchmarks/reliability.py`, which writes docs/reliability.md: real processes, killed for real."""

import random
import shutil

import pytest

from benchmarks import trials

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Between two of its saves there is time to do harm."""
    return trials.make_lab(tmp_path_factory.mktemp("lab"), steps=400, save_every=100, eval_every=100)


def test_a_kill_in_a_save_loses_nothing(lab, tmp_path):
    """In the first save, around the rename by which a checkpoint gets its name, and in the deletion of an old one."""
    events = trials.watched(lab, 200)[1]
    named = events.index("os.rename checkpoints/200.orbax-checkpoint-tmp")
    deleted = events.index("os.rmdir checkpoints/0.deleting")
    left = []
    for during, event in ((0, 10), (200, named), (200, named + 2), (200, deleted - 5)):
        out = tmp_path / f"{during}-{event}"
        trial = trials.killed(lab, out, [{"during": during, "event": event}])
        assert not trial.wrong, trial
        left.append(trial.disk)
    assert left[0] == "a half-written first checkpoint"
    assert left[1] == "older checkpoints and a half-written one"
    assert left[3] == "a checkpoint half pruned"


def test_a_kill_at_any_moment_loses_nothing(lab, tmp_path):
    draw = random.Random(0)
    for number in range(3):
        trial = trials.killed_at_random(lab, tmp_path / str(number), lab.life * (number + draw.random()) / 3)
        assert not trial.wrong, trial


def test_a_kill_while_a_run_is_replaced(lab, tmp_path):
    """What is left is no half of the old run."""
    out = tmp_path / "run"
    shutil.copytree(lab.folder / "reference", out)
    trial = trials.killed(lab, out, [{"during": "create", "event": 20, "flags": ["--overwrite"]}])
    assert not trial.wrong, trial
    assert trial.disk == "no checkpoint"


def test_a_disk_that_fails(lab, tmp_path):
    trial = trials.full_quota(lab, tmp_path / "quota")
    assert not trial.wrong, trial
    assert "metrics.jsonl cannot be written: File too large; make room" in trial.said
    (tmp_path / "file").write_text("in the way")
    said, status = trials.end(lab.child(tmp_path / "file" / "run"))
    assert trials.refused(said, status) == ""
    assert said.strip().endswith("cannot be written: Not a directory; choose another --out")


def test_the_instrument_sees_what_differs(lab, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(lab.folder / "reference", out)
    assert trials.different(trials.outcome(out), lab.expected) == ""
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:-1]))
    (out / "samples.txt").write_text("another")
    shutil.rmtree(out / "checkpoints" / "400")
    found = trials.different(trials.outcome(out), lab.expected)
    assert found == "checkpoints, step, examples, metrics, digests, log, sample"
