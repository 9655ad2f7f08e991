"""Whether a run can be lost: real processes are killed, stopped and denied their disk, and go on.

    python benchmarks/reliability.py [SECTION ...]

Writes docs/reliability.md. Without a section it runs them all, for about an hour on two cores; the results of each are
kept in runs/reliability/SECTION.json, so that one can be repeated alone. It needs psutil (in the `test` extra), and
root for a disk of its own.
"""

import dataclasses
import datetime
import importlib
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import trials  # noqa: E402 (found through the line above)
from benchmarks.trials import Trial  # noqa: E402
from transformer_jax import Config  # noqa: E402
from transformer_jax.config import to_dict  # noqa: E402
from transformer_jax.config_files import load_config  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "runs" / "reliability"

Section = Callable[[Path], Any]


def saves(work: Path) -> Iterator[Trial]:
    """Kills at 25 points of saves: the first one, one that prunes, and moments that Python does not see."""
    lab = trials.make_lab(work)
    _, first = trials.watched(lab, 0)
    _, pruning = trials.watched(lab, 20)
    seconds, _ = trials.watched(lab, 10)
    plans = [
        *({"during": 0, "event": event} for event in trials.spread(len(first), 6)),
        *({"during": 20, "event": event} for event in _with_renames(pruning, 13)),
        *({"during": 10, "seconds": seconds * (part + 0.5) / 6} for part in range(6)),
    ]
    for number, plan in enumerate(plans):
        yield trials.killed(lab, work / f"run-{number}", [plan])


def _with_renames(events: list[str], points: int) -> list[int]:
    """Numbers of events: just before and after a checkpoint gets its name, or loses it, and others evenly."""
    named = [
        number
        for number, event in enumerate(events)
        if event.startswith("os.rename") and event.count("/") == 1  # of a whole checkpoint
    ]
    chosen = {number + more for number in named for more in (0, 1) if number + more < len(events)}
    for event in sorted(trials.spread(len(events), 4 * points), key=lambda e: e * 7919 % len(events)):
        if len(chosen) < points:
            chosen.add(event)
    return sorted(chosen)


def beginnings(work: Path) -> Iterator[Trial]:
    """Kills while the folder of a run is made: each event of a new one, and 8 of one that replaces another run."""
    lab = trials.make_lab(work)
    for event in range(len(trials.watched(lab, "create")[1])):
        yield trials.killed(lab, work / f"new-{event}", [{"during": "create", "event": event}])
    shutil.copytree(work / "reference", work / "old")
    _, events = trials.watched(lab, "create", work / "old", "--overwrite")
    for event in trials.spread(len(events), 8):
        out = work / f"old-{event}"
        shutil.copytree(work / "reference", out)
        yield trials.killed(lab, out, [{"during": "create", "event": event, "flags": ["--overwrite"]}])


def moments(work: Path) -> Iterator[Trial]:
    """Kills at 50 random moments of a process's life, its start included."""
    # Long enough for half of its life to be training, which is half saving.
    lab, draw = trials.make_lab(work, steps=240, save_every=40, eval_every=40), random.Random(0)
    for number in range(50):
        yield trials.killed_at_random(lab, work / f"run-{number}", draw.uniform(0, lab.life))


def rows_of_kills(work: Path) -> Iterator[Trial]:
    """Three kills in one run, 5 times: in a save, and in the first saves of the two processes that go on with it."""
    lab, draw = trials.make_lab(work), random.Random(1)
    count = len(trials.watched(lab, 10)[1])
    for number in range(5):
        plans = [{"during": during, "event": draw.randrange(count)} for during in (10, "first", "first")]
        yield trials.killed(lab, work / f"run-{number}", plans)


def signals(work: Path) -> Iterator[Trial]:
    """SIGTERM and SIGINT, 10 times each at a random step; and a second SIGINT while a save hangs."""
    lab, draw = trials.make_lab(work / "long", **LONG), random.Random(2)
    for signum in (signal.SIGTERM, signal.SIGINT):
        for number in range(10):
            out = work / f"{signal.Signals(signum).name}-{number}"
            yield trials.signalled(lab, out, signum, draw.randrange(1, 1_450))
    lab = trials.make_lab(work / "short")
    for at in ("os.rename", "os.scandir"):
        yield trials.interrupted_twice(lab, work / f"twice-{at}", at)


LONG = {"steps": 1_500, "save_every": 500, "eval_every": 250}
"""For what happens between two saves: they are far enough from each other."""


def damage(work: Path) -> Iterator[Trial]:
    """Each file of the newest checkpoint cut, with a bit flipped, deleted and emptied."""
    lab = trials.make_lab(work)
    sys.unraisablehook = lambda _: None  # of coroutines that Orbax leaves behind where a file is damaged
    for kind, file, run in trials.damaged(work / "reference", work):
        yield trials.survived_damage(lab, kind, file, run)


def disks(work: Path) -> Iterator[Trial]:
    """A disk that is full, may not be written to, or is gone."""
    lab = trials.make_lab(work, **LONG)
    try:
        yield trials.full_disk(lab, work / "full")
        yield trials.read_only_disk(lab, work / "read-only")
    except PermissionError as error:
        print(f"left out: mounting is not allowed: {error}", flush=True)
    yield trials.full_quota(lab, work / "quota")
    if os.geteuid():
        yield trials.read_only_folder(lab, work / "folder")
    yield trials.vanished(lab, work / "moved", "checkpoints")
    yield trials.vanished(lab, work / "gone", "")
    yield trials.under_a_file(lab, work / "file")


def caches(work: Path) -> Iterator[Trial]:
    """5 kills while programs are compiled into an empty cache, which the resumed run then finds half filled."""
    lab, draw = trials.make_lab(work), random.Random(3)
    for number in range(5):
        shutil.rmtree(work / "cache")
        yield trials.killed_at_random(lab, work / f"run-{number}", lab.life * draw.uniform(0.5, 2))


def fuzz(work: Path) -> Iterator[Trial]:
    """Damage drawn from seeds to all that the program reads, where `tests/faults.py` is there to draw it."""
    try:
        faults = importlib.import_module("tests.faults")
    except ImportError:
        return
    for kind in faults.KINDS:
        for seed in range(FUZZED):
            case = faults.fuzz(kind, seed, work / kind)
            yield Trial(f"{kind} {seed}: {case.damage}", case.answer, wrong=case.fault)


FUZZED = 100
"""Cases of each kind."""


def soak(work: Path) -> dict[str, Any]:
    """30,000 steps of the smallest recipe with log lines, evaluations and saves: what grows?"""
    config = load_config(ROOT / "configs" / "smoke.py")
    text = json.loads(trials.write_config(work).read_text(encoding="utf-8"))["data"]
    train = dataclasses.replace(config.train, steps=30_000, log_every=50, eval_every=500, save_every=1_000)
    values = to_dict(dataclasses.replace(config, train=train)) | {"data": text}
    short = values | {"train": values["train"] | {"steps": 20, "eval_every": 10, "save_every": 10}}
    said = {}
    for name, recipe in (("cold", short), ("short", short), ("long", values)):
        (work / f"{name}.json").write_text(json.dumps(recipe), encoding="utf-8")
        out = work / name
        process = trials.start(work, work / f"{name}.json", out)
        seen = []
        child = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                with child.oneshot():
                    seen.append((trials.reached(out), child.memory_info().rss, child.num_fds(), child.num_threads()))
            except psutil.Error:
                break
            time.sleep(1 if name == "long" else 0.1)
        said[name], _ = trials.end(process)
    late = [one for one in seen if 3_000 <= one[0] < 30_000]
    quarter = max(1, len(late) // 4)
    programs = {name: _programs(text) for name, text in said.items()}
    return {
        "memory at step 3,000": late[0][1] / 1e6,
        "most memory after it": max(one[1] for one in late) / 1e6,
        "memory at the end": late[-1][1] / 1e6,
        **{
            f"{name}, {when} quarter": statistics.median(one[place] for one in part)
            for name, place in (("open files", 2), ("threads", 3))
            for when, part in (("first", late[:quarter]), ("last", late[-quarter:]))
        },
        "compilations of the step": said["long"].count("compiled   the training step"),
        "programs in 20 steps": programs["short"],
        "programs in 30,000 steps": programs["long"],
    }


def _programs(said: str) -> int:
    """Programs that a process compiled or found compiled, from the last line it says."""
    words = said.rsplit("compile cache: ", 1)[1].replace(",", "").split()
    return int(words[0]) + int(words[2])


def cost(work: Path) -> dict[str, Any]:
    """What saving costs the default recipe: the time that training waits, and how much slower steps beside it are."""
    from transformer_jax.data.batches import Windows
    from transformer_jax.training import loop
    from transformer_jax.training.checkpoint import Checkpoints
    from transformer_jax.training.saving import Saver

    default = Config().train.save_every
    train = dataclasses.replace(Config().train, steps=240, log_every=1, eval_every=40, save_every=40)
    begun: dict[int, float] = {}
    blocked: dict[int, float] = {}
    saved: dict[int, tuple[float, float]] = {}
    batch, save, verify = Windows.batch, Saver.save, Checkpoints.verify

    def timed_batch(windows: Windows, first: int, size: int) -> Any:
        if size == train.batch_size:
            begun.setdefault(first // size, time.monotonic())
        return batch(windows, first, size)

    def timed_save(saver: Saver, state: Any, about: Any) -> None:
        began = time.monotonic()
        save(saver, state, about)
        blocked[about.step] = time.monotonic() - began
        saved[about.step] = began, began

    def timed_verify(checkpoints: Checkpoints, about: Any, *args: Any) -> None:
        verify(checkpoints, about, *args)
        saved[about.step] = saved[about.step][0], time.monotonic()

    Windows.batch, Saver.save, Checkpoints.verify = timed_batch, timed_save, timed_verify
    try:
        loop.train(dataclasses.replace(Config(), train=train), work / "run")
    finally:
        Windows.batch, Saver.save, Checkpoints.verify = batch, save, verify
    every = train.save_every
    # A step that ends with a save also evaluates; the first ones compile.
    lengths = {i: begun[i + 1] - begun[i] for i in begun if i + 1 in begun and (i + 1) % every and i > 5}
    middle = {step: span for step, span in saved.items() if 0 < step < train.steps}
    beside = {step: [i for i in lengths if i >= step and begun[i] < until] for step, (_, until) in middle.items()}
    near = {i for steps in beside.values() for i in steps}
    usual = statistics.median(length for i, length in lengths.items() if i not in near)
    slower = [sum(lengths[i] - usual for i in steps) for steps in beside.values()]
    waits = [blocked[step] for step in middle]
    whole = statistics.median(wait + slow for wait, slow in zip(waits, slower, strict=True))
    return {
        "seconds of a step": usual,
        "seconds that training waits for a save": statistics.median(waits),
        "seconds from its beginning until it is read back": statistics.median(b - a for a, b in middle.values()),
        "steps beside it": statistics.median(len(steps) for steps in beside.values()),
        "seconds that these take longer in all": statistics.median(slower),
        "share of the time of a run": whole / (whole + default * usual),
        "save_every": default,
    }


SECTIONS: dict[str, Section] = {
    "saves": saves,
    "beginnings": beginnings,
    "moments": moments,
    "caches": caches,
    "rows": rows_of_kills,
    "signals": signals,
    "damage": damage,
    "disks": disks,
    "fuzz": fuzz,
    "soak": soak,
    "cost": cost,
}


def run(name: str) -> None:
    """Runs one section, and keeps its results, also of one that is cut off."""
    began, kept = time.monotonic(), []

    def keep(found: Any) -> None:
        values = {"date": str(datetime.date.today()), "seconds": time.monotonic() - began, "found": found}
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(values, indent=1), encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        found = SECTIONS[name](Path(folder))
        if isinstance(found, dict):
            print(f"{name}: {found}", flush=True)
            keep(found)
            return
        for trial in found:
            kept.append(dataclasses.asdict(trial))
            print(f"{name} {len(kept)}: {trial}", flush=True)
            keep(kept)


KILLS = {
    "saves": "in a save, from its beginning to the end of pruning",
    "beginnings": "while a run's folder is made or replaced",
    "moments": "at a random moment, start-up included",
    "caches": "while programs are compiled into an empty cache",
    "rows": "three times in one run",
}
OTHERS = {
    "signals": "SIGTERM or SIGINT, 20 at a random step, 2 twice while a save hangs",
    "damage": "a file of the newest checkpoint cut, flipped, deleted or emptied",
    "disks": "a full, read-only or lost disk",
    "fuzz": "configs, files and runs damaged at random",
}


def write_page(results: dict[str, dict[str, Any]]) -> None:
    """Writes docs/reliability.md from what is kept."""
    rows, failed = [], []
    for name, what in (KILLS | OTHERS).items():
        if name not in results or not results[name]["found"]:
            continue
        found = [Trial(**one) for one in results[name]["found"]]
        bad = [trial for trial in found if trial.wrong]
        failed += bad
        seconds = [trial.seconds for trial in found if trial.seconds is not None]
        rows.append(
            [
                f"`kill -9` {what}" if name in KILLS else what,
                str(len(found)),
                str(len(found) - len(bad)),
                "-" if name in ("damage", "fuzz") else str(max(trial.lost for trial in found)),
                f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-",
            ]
        )
    killed = [Trial(**one) for name in KILLS if name in results for one in results[name]["found"]]
    disk = Counter(trial.disk for trial in killed)
    errors = [Trial(**one) for one in results.get("disks", {"found": []})["found"]]
    read = Counter(Trial(**one).disk for one in results.get("damage", {"found": []})["found"])
    text = TEXT.format(
        dates=" and ".join(sorted({result["date"] for result in results.values()})),
        machine=platform.machine(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        jax=metadata.version("jax"),
        orbax=metadata.version("orbax-checkpoint"),
        hours=sum(result["seconds"] for result in results.values()) / 3600,
        trials=_table(["what was done", "times", "survived", "steps lost, most", "s to resume, median and most"], rows),
        failed="".join(f"\nNot survived: {trial.what}: differs in {trial.wrong}\n" for trial in failed),
        disk=_table(["what the process left", "times"], [[k, str(n)] for k, n in disk.most_common()]),
        errors=_table(["what was done", "what the run said"], [[t.what, _short(t.said)] for t in errors]),
        read=", ".join(f"{state or 'not read'} {count} times" for state, count in read.most_common()),
        soak=_figures(results.get("soak")),
        cost=_figures(results.get("cost")),
    )
    PAGE.write_text(text, encoding="utf-8")


def _short(line: str) -> str:
    """A line without the paths of this machine, and its middle where it is long."""
    line = re.sub(r"/[\w./-]*/", "", line).replace("|", "")
    return line if len(line) < 240 else f"{line[:140]} ... {line[-80:]}"


def _table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _figures(result: dict[str, Any] | None) -> str:
    if result is None:
        return "Not measured yet."
    shown = {
        name: f"{value:.2%}" if "share" in name else f"{value:,.0f} MB" if "memory" in name else f"{value:,.4g}"
        for name, value in result["found"].items()
    }
    return _table(["what", "measured"], [[name, value] for name, value in shown.items()])


TEXT = """# Can a run be lost?

Each trial is a process of its own that trains a small model (2 layers, with dropout and accumulation), and to which
something happens. Runs have 30 steps with a save each 10; 240 and each 40 for random moments, 1,500 and each 500 for
signals and disks. A run survived if `--resume` then ends as the run that was left alone: the same checkpoints with
the same digest of each array, the same log but for the speed, the same losses and the same sample; if `checkpoints
--verify` finds nothing; and if no more steps were lost than `save_every`, or twice as many where a save was under
way: what is not yet written does not count, and the next save waits for it. A run that had not begun to exist says so
in one line, and is started again.

Written by `python benchmarks/reliability.py` on {dates}, {cores} cores of an {machine} CPU, Python {python}, jax {jax},
orbax-checkpoint {orbax}, in {hours:.1f} hours. The machine had other work: times are longer than they need be.

{trials}
{failed}
Times to resume are from the start of the process to its first new step, with a filled compile cache; where there was
nothing to go on with, to the first step of the run that was begun anew.

## What kills left

Points in a save are file operations that Python sees, the renames among them by which a checkpoint gets its name and
loses it, and moments for what compiled code writes.

{disk}

## Damaged files

Of each kind of damage to each file: {read}. What Orbax writes and does not read may be damaged
without harm.

## Disks

{errors}

## A long run

30,000 steps of the model of `configs/smoke.py`, with a log line each 50 steps, an evaluation each 500 and a save each
1,000; memory, open files and threads of the process each second.

{soak}

## What saving costs

The recipe of `python train.py` with a save each 40 of 240 steps. The length of a step is the median of those without a
save under way; evaluations, which come with each save, do not count. The share is that of the time that training waits
and of what steps beside a save take longer, at one save in `save_every` steps.

{cost}
"""


def main(names: list[str]) -> None:
    """Runs the sections that were asked for, and writes the page from all that are kept."""
    if unknown := [name for name in names if name not in SECTIONS]:
        sys.exit(f"unknown section {unknown[0]}; choose from {', '.join(SECTIONS)}")
    for name in names or SECTIONS:
        run(name)
        write_page({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))})


if __name__ == "__main__":
    main(sys.argv[1:])
