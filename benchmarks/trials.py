"""What `reliability` and its test do to real runs: kill them, take their disk away, and compare what comes out.

Each run is a process of its own, as a user starts it. What survived a fault is the run that ends as the one that was
left alone: the same arrays to the last bit, the same log but for the speed, the same losses and the same sample.
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformer_jax import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, cli
from transformer_jax.config import to_dict
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.runs import RunFolder

ROOT = Path(__file__).parent.parent
PATIENCE = 300.0
"""Seconds that a child may take: many times what it needs, also on a machine with other work."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One fault, and what came of it.

    Attributes:
      what: Was done.
      disk: What lay there afterwards, in words.
      lost: Steps that had been logged and were made again.
      seconds: From the start of the resuming process to its first new step; None where it made none.
      said: The line of the error, where one is expected.
      wrong: What was not as it should be; empty where the run survived.
    """

    what: str
    disk: str = ""
    said: str = ""
    lost: int = 0
    seconds: float | None = None
    wrong: str = ""


@dataclasses.dataclass(frozen=True)
class Lab:
    """A recipe, and how a run of it ends that nothing happens to.

    Attributes:
      folder: For runs.
      config: The recipe, as a file.
      save_every: Steps between its saves.
      expected: The `outcome` of a run that was left alone.
      life: Seconds which that took, with a filled compile cache.
    """

    folder: Path
    config: Path
    save_every: int
    expected: dict[str, Any]
    life: float

    def child(self, out: Path, *flags: str, plan: dict[str, Any] | None = None) -> subprocess.Popen:
        """Starts a training process: `train.py`, or `killed` with a plan."""
        return start(self.folder, self.config, out, *flags, plan=plan)


def write_config(folder: Path, **train: Any) -> Path:
    """Writes a text and a recipe: 2 layers, width 32, context 16, with dropout and accumulation; saves each 10 steps.

    Args:
      folder: For both.
      train: Fields of its TrainConfig.
    """
    draw = random.Random(0)
    words = [
        "the",
        "king",
        "and",
        "queen",
        "of",
        "hearts",
        "went",
        "out",
        "to",
        "sea",
        "in",
        "a",
        "pea",
        "green",
        "boat",
    ]
    text = "\n".join(" ".join(draw.choice(words) for _ in range(6)) for _ in range(300))[:6_000]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text, encoding="utf-8")
    fields = {"steps": 30, "log_every": 1, "eval_every": 10, "eval_chars": 256, "save_every": 10, "sample_chars": 40}
    config = Config(
        model=ModelConfig(context=16, d_model=32, num_heads=2, num_layers=2, dropout=0.1),
        data=DataConfig(corpus="file", path=(str((folder / "text.txt").absolute()),)),
        optim=OptimConfig(warmup_steps=15, decay_steps=40),
        train=TrainConfig(**{"batch_size": 8, "accumulate": 2, **fields, **train}),
    )
    path = folder / "config.json"
    path.write_text(json.dumps(to_dict(config)), encoding="utf-8")
    return path


def make_lab(folder: Path, **train: Any) -> Lab:
    """Trains the run to compare with, twice: the second start finds all programs compiled, and is timed."""
    config = write_config(folder, **train)
    for name in ("first", "reference"):
        began = time.monotonic()
        said, status = end(start(folder, config, folder / name))
        if status:
            raise RuntimeError(f"the run that nothing happens to failed: {said}")
    life = time.monotonic() - began
    expected = outcome(folder / "reference")
    if apart := different(outcome(folder / "first"), expected):
        raise RuntimeError(f"two runs that nothing happened to differ: {apart}")
    save_every = json.loads(config.read_text())["train"]["save_every"]
    return Lab(folder, config, save_every, expected, life)


def start(folder: Path, config: Path, out: Path, *flags: str, plan: dict[str, Any] | None = None) -> subprocess.Popen:
    """Starts a training process with the compile cache of `folder`."""
    program = ["train.py"] if plan is None else ["-m", "benchmarks.killed", json.dumps(plan)]
    environment = {
        **os.environ,
        "TRANSFORMER_JAX_COMPILE_CACHE": str(folder / "cache"),
        "JAX_PLATFORMS": "cpu",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, *program, "--config", str(config), "--out", str(out), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def end(process: subprocess.Popen, within: float = PATIENCE) -> tuple[str, int]:
    """What a process said, and its exit status. One that takes too long is killed, and its status is that of it."""
    try:
        said, _ = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    return said, process.returncode


def outcome(out: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on what happened to it."""
    run = RunFolder(out)
    steps = run.checkpoints.steps()
    last = run.checkpoints.metadata(steps[-1])
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    return {
        "checkpoints": steps,
        "step": last.step,
        "examples": last.examples,
        "metrics": dict(last.metrics),
        "digests": dict(last.digests),
        "log": [{k: v for k, v in record.items() if k != "tokens_per_second"} for record in read_metrics(run.metrics)],
        "losses": {k: v for k, v in summary.items() if k.endswith("loss") or k in ("best_step", "steps")},
        "sample": run.samples.read_text(encoding="utf-8"),
    }


def different(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The parts of two outcomes that differ."""
    return ", ".join(name for name in expected if found[name] != expected[name])


def reached(out: Path) -> int:
    """The last step in a run's log."""
    return max((record["step"] for record in read_metrics(out / "metrics.jsonl")), default=0)


def on_disk(out: Path, phase: str = "") -> str:
    """What a dead process left, in words.

    Args:
      out: The run.
      phase: Of the save in which it died, where that is known.
    """
    checkpoints = RunFolder(out).checkpoints
    if not (out / "config.json").is_file():
        return "no run" if not out.is_dir() or not any(out.iterdir()) else "part of a new run's folder"
    kinds, steps = set(checkpoints.others().values()), checkpoints.steps()
    if "was being deleted" in kinds:
        return "a checkpoint half pruned"
    if "a save that was cut off" in kinds:
        return "older checkpoints and a half-written one" if steps else "a half-written first checkpoint"
    if steps and phase == "reading back":
        return "a finished checkpoint, not yet read back"
    return "whole checkpoints" if steps else "no checkpoint"


def resumed(lab: Lab, out: Path, what: str, disk: str, *, began_anew: bool = False, save_failed: bool = False) -> Trial:
    """Goes on with a run to its end, and compares it with the one that nothing happened to.

    Where there is no run yet, and `--resume` says so in one line, it is started as a launch script would.

    Args:
      lab: Of the run.
      out: The run.
      what: Was done to it.
      disk: What lay there.
      began_anew: Whether it has been started with `--overwrite` already.
      save_failed: Whether it ended because a checkpoint could not be written.
    """
    at, newest = reached(out), max(RunFolder(out).checkpoints.steps(), default=0)
    before = _inode(out / "metrics.jsonl")
    began, seconds = time.monotonic(), None
    process = lab.child(out, "--overwrite" if began_anew else "--resume")
    while process.poll() is None and time.monotonic() - began < PATIENCE and seconds is None:
        # The log is written anew before the first step.
        if _inode(out / "metrics.jsonl") != before and reached(out) > newest:
            seconds = time.monotonic() - began
        time.sleep(0.01)
    said, status = end(process)
    lines = said.strip().splitlines()
    if status == 2 and not began_anew and lines[-1].startswith("error: no usable checkpoint in"):
        if not disk.startswith(("no run", "part of a new run's folder")):
            return Trial(what, disk, lost=at, wrong=f"not resumed: {lines[-1]}")
        return resumed(lab, out, what, disk, began_anew=True)
    if status:
        return Trial(what, disk, lost=at, wrong=f"exit status {status}: {lines[-1] if lines else ''}")
    found = re.search(r"resumed at step (\d+)", said)
    lost = max(0, at - (int(found[1]) if found else 0))
    wrong = different(outcome(out), lab.expected)
    # One that was being written does not count yet, and the next save would have waited for it.
    if lost > lab.save_every * (2 if save_failed or "half-written" in disk else 1):
        wrong += f"; {lost} steps were lost"
    if (verified := verify(out)) != 0:
        wrong += f"; checkpoints --verify ended with {verified}"
    return Trial(what, disk, lost=lost, seconds=seconds, wrong=wrong.strip("; "))


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def verify(out: Path) -> int:
    """The exit status of `checkpoints --verify`."""
    with contextlib.redirect_stdout(io.StringIO()):
        return cli.main(["checkpoints", str(out), "--verify"])


def watched(lab: Lab, during: int | str, out: Path | None = None, *flags: str) -> tuple[float, list[str]]:
    """How long one save takes, and what happens in the run's folder meanwhile, in order."""
    said, _ = end(lab.child(out or lab.folder / f"watched-{during}", *flags, plan={"during": during}))
    seconds, events = json.loads(re.search(r"^watched (.*)$", said, re.MULTILINE)[1])
    return seconds, events


def spread(count: int, points: int) -> list[int]:
    """Some numbers below `count`, evenly, with the first and the last."""
    return sorted({round(i * (count - 1) / max(points - 1, 1)) for i in range(points)})


def killed(lab: Lab, out: Path, plans: list[dict[str, Any]]) -> Trial:
    """A run that is killed by each plan in turn, and then goes on."""
    phases = []
    for number, plan in enumerate(plans):
        flags = ["--resume"] if number else plan.get("flags", [])
        said, status = end(lab.child(out, *flags, plan=plan))
        found = re.search(r"killed (.+?): (.+)", said)
        if status != -signal.SIGKILL or not found:
            if "seconds" in plan and status == 0:  # the save was faster than usual: nothing was interrupted
                phases.append("over")
                continue
            return Trial(str(plan), wrong=f"was not killed: {said[-300:]}")
        phases.append(found[1])
    what = " and ".join(
        f"{plan['during']} {plan.get('event', plan.get('seconds'))} ({phase})"
        for plan, phase in zip(plans, phases, strict=True)
    )
    return resumed(lab, out, what, on_disk(out, phases[-1]))


def killed_at_random(lab: Lab, out: Path, after: float) -> Trial:
    """A run that is killed so many seconds after its process began."""
    process = lab.child(out)
    time.sleep(after)
    process.kill()
    end(process)
    return resumed(lab, out, f"after {after:.2f} s, step {reached(out)}", on_disk(out))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Returns when something holds, or a process has ended."""
    until = time.monotonic() + PATIENCE
    while not condition() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)


def signalled(lab: Lab, out: Path, signum: int, step: int) -> Trial:
    """A run that gets a signal at about a step: it saves, says so with its exit status, and goes on later."""
    process = lab.child(out)
    wait_for(lambda: reached(out) >= step, process)
    process.send_signal(signum)
    said, status = end(process)
    name = signal.Signals(signum).name
    newest, disk = max(RunFolder(out).checkpoints.steps(), default=None), on_disk(out)
    trial = resumed(lab, out, f"{name} at step {newest}", disk)
    if trial.wrong == "checkpoints" and newest in RunFolder(out).checkpoints.steps():
        trial = dataclasses.replace(trial, wrong="")  # the one that the signal asked for is one of those kept
    wrong = []
    if status != 128 + signum:
        wrong.append(f"exit status {status}: {said[-200:]}")
    if trial.lost:
        wrong.append("not saved where it stopped")
    return dataclasses.replace(trial, wrong="; ".join(filter(None, [*wrong, trial.wrong])))


def interrupted_twice(lab: Lab, out: Path, at: str, within: float = 2.0) -> Trial:
    """A second Ctrl-C while a save hangs at an event: the process leaves at once, and the run goes on later."""
    process = lab.child(out, plan={"during": lab.save_every, "at": at, "stall": 60})
    wait_for(lambda: reached(out) >= lab.save_every, process)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    said, status = end(process, within=90)
    took = time.monotonic() - began
    trial = resumed(lab, out, f"SIGINT twice while a save hangs at {at}", on_disk(out))
    wrong = []
    if status != 130 or took > within:
        wrong.append(f"exit status {status} after {took:.1f} s: {said[-200:]}")
    return dataclasses.replace(trial, wrong="; ".join(filter(None, [*wrong, trial.wrong])))


def damaged(original: Path, folder: Path, seed: int = 0) -> Iterator[tuple[str, Path, Path]]:
    """Copies of a run, each with one file of its newest checkpoint damaged in one way.

    Args:
      original: The run.
      folder: For the copies; each is deleted when the next is asked for.
      seed: Of the bits that are flipped.

    Yields:
      The kind of damage, the path of the file in the run, and the copy.
    """
    draw = random.Random(seed)
    newest = RunFolder(original).checkpoints.steps()[-1]
    files = [p for p in sorted((original / "checkpoints" / str(newest)).rglob("*")) if p.is_file()]
    for path in files:
        for kind in ("cut", "flip", "delete", "empty"):
            if path.stat().st_size == 0 and kind != "delete":
                continue
            copy = folder / "damaged"
            shutil.copytree(original, copy)
            spoil(copy / path.relative_to(original), kind, draw)
            yield kind, path.relative_to(original), copy
            shutil.rmtree(copy)


def survived_damage(lab: Lab, kind: str, file: Path, run: Path) -> Trial:
    """Reads a damaged run: the checkpoint before is used, and the run says why, or the state is the same."""
    from transformer_jax.training import runs
    from transformer_jax.training.digests import digests
    from transformer_jax.training.sharding import default_placement

    newest = lab.expected["step"]
    whole = RunFolder(lab.folder / "reference").checkpoints
    try:
        metadata, state, skipped = runs.open_newest(RunFolder(run), default_placement(1))
    except Exception as error:
        return Trial(f"{kind} {file}", wrong=f"{type(error).__name__}: {error}")
    same = digests(state) == dict(whole.metadata(metadata.step).digests)
    wrong = [] if same else ["another state was restored"]
    if metadata.step != newest and (len(skipped) != 1 or "\n" in skipped[0]):
        wrong.append(f"said {skipped}")
    disk = "the same state" if metadata.step == newest else "found, and the checkpoint before it used"
    return Trial(f"{kind} {file}", disk, said=" ".join(skipped), wrong="; ".join(wrong))


def spoil(path: Path, kind: str, draw: random.Random) -> None:
    """Damages one file: "cut", "flip" a bit, "delete" or "empty"."""
    content = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
        return
    if kind == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content[: {"cut": len(content) // 2, "empty": 0}.get(kind, len(content))])


def refused(said: str, status: int) -> str:
    """What is wrong with how a process ended that could not write: one line and exit status 2 are right."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    right = status == 2 and len(errors) == 1 and "Traceback" not in said
    return "" if right else f"exit status {status}: {said[-400:]}"


def denied(
    lab: Lab,
    out: Path,
    what: str,
    deny: Callable[[subprocess.Popen], Any],
    mend: Callable[[], Any],
    within: float = 30.0,
) -> Trial:
    """A run whose disk is taken away between two saves: it says so in one line, and goes on when it has one again.

    Args:
      lab: Of the run.
      out: The run.
      what: Is done, in words.
      deny: Takes the disk away from the process.
      mend: Gives it back.
      within: Seconds in which the process must have ended.
    """
    process = lab.child(out)
    steps = RunFolder(out).checkpoints.steps
    wait_for(lambda: lab.save_every in steps() and reached(out) > 1.1 * lab.save_every, process)
    deny(process)
    began = time.monotonic()
    said, status = end(process)
    took = time.monotonic() - began
    mend()
    wrong = [refused(said, status)]
    if took > within:
        wrong.append(f"ended after {took:.0f} s")
    if verify(out):
        wrong.append("older checkpoints were harmed")
    trial = resumed(lab, out, what, on_disk(out), save_failed=True)
    line = next((line for line in said.splitlines() if line.startswith("error: ")), "")
    return dataclasses.replace(trial, said=line, wrong="; ".join(filter(None, [*wrong, trial.wrong])))


def full_disk(lab: Lab, out: Path) -> Trial:
    """A disk with room for two checkpoints and a half; `out` is where it is mounted.

    Raises:
      PermissionError: Where mounting is not allowed.
    """
    checkpoints = RunFolder(lab.folder / "reference").checkpoints
    size = checkpoints.size(checkpoints.steps()[-1])
    with own_disk(out, f"size={5 * size // 2}") as remount:
        return denied(lab, out / "run", "a full disk", lambda _: None, lambda: remount(f"size={100 * size}"))


def read_only_disk(lab: Lab, out: Path) -> Trial:
    """A disk that from some moment may only be read, which holds for root too; `out` is where it is mounted.

    Raises:
      PermissionError: Where mounting is not allowed.
    """
    with own_disk(out, "size=1g") as remount:
        return denied(lab, out / "run", "a disk that may only be read", lambda _: remount("ro"), lambda: remount("rw"))


def full_quota(lab: Lab, out: Path) -> Trial:
    """No file may grow beyond 4 KiB: what can be done where mounting is not allowed."""

    def deny(process: subprocess.Popen) -> None:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))

    return denied(lab, out, "files that may not grow", deny, lambda: None)


def read_only_folder(lab: Lab, out: Path) -> Trial:
    """The folder of checkpoints may no longer be written to. Root may write anywhere, so not for root."""
    folder = out / "checkpoints"
    return denied(
        lab, out, "a folder that may only be read", lambda _: folder.chmod(0o555), lambda: folder.chmod(0o755)
    )


def vanished(lab: Lab, out: Path, name: str) -> Trial:
    """A folder is moved away, and back later: "checkpoints", or "" for the whole run."""
    folder, away = out / name, out.parent / f"{out.name}-{name}-away"

    def mend() -> None:
        if folder.exists():  # whatever was written meanwhile
            folder.rename(away.with_name(f"{away.name}-new"))
        away.rename(folder)

    return denied(lab, out, f"{name or 'the run'} moved away", lambda _: folder.rename(away), mend)


def under_a_file(lab: Lab, out: Path) -> Trial:
    """A path that goes through a file: refused in seconds; without the file the run is as any other."""
    out.write_text("in the way")
    began = time.monotonic()
    said, status = end(lab.child(out / "run"))
    took = time.monotonic() - began
    out.unlink()
    wrong = [refused(said, status), f"ended after {took:.0f} s" if took > 30 else ""]
    end(lab.child(out / "run"))
    wrong.append(different(outcome(out / "run"), lab.expected))
    return Trial("a path under a file", said=said.strip().splitlines()[-1], wrong="; ".join(filter(None, wrong)))


@contextlib.contextmanager
def own_disk(folder: Path, options: str) -> Iterator[Callable[[str], None]]:
    """A disk in memory at a folder. Yields what mounts it again with other options.

    Raises:
      PermissionError: Where mounting is not allowed.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def mount(options: str) -> None:
        until = time.monotonic() + 5
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        while (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            if "busy" not in done.stderr or time.monotonic() > until:  # a file is being written
                raise PermissionError(done.stderr)

    if shutil.which("mount") is None:
        raise PermissionError("there is no mount")
    mount(options)
    try:
        yield lambda more: mount(f"remount,{more}")
    finally:
        subprocess.run(["umount", str(folder)], check=False)
