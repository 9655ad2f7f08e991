"""What a run costs beside its steps: time to the first step, first and second start, and growth of memory.

    python benchmarks/resources.py

Needs psutil (in the `test` extra). Prints one line for each figure.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from transformer_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent


def start(out: Path, cache: Path, *flags: str) -> tuple[subprocess.Popen, float]:
    """Starts a training run; returns it and the time of its start."""
    environment = {**os.environ, "TRANSFORMER_JAX_COMPILE_CACHE": str(cache)}
    command = [sys.executable, "train.py", "--out", str(out), "--train.log-every", "1", *flags]
    began = time.monotonic()
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True), began


def wait_for(out: Path, step: int, process: subprocess.Popen) -> None:
    """Returns when a step is in the run's records."""
    while process.poll() is None and not any(r["step"] >= step for r in read_metrics(out / "metrics.jsonl")[-1:]):
        time.sleep(0.02)


def main() -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for number, name in enumerate(("first", "second")):
            out = work / str(number)
            process, began = start(out, work / "cache", "--train.steps", "2", "--optim.warmup-steps", "1")
            wait_for(out, 1, process)
            print(f"process start to first step, {name} start: {time.monotonic() - began:.1f} s", flush=True)
            print(f"  {process.communicate()[0].splitlines()[-1]}")

        out = work / "long"
        process, _ = start(out, work / "cache", "--config", "configs/smoke.py", "--train.steps", "3100")
        sizes = []
        for step in (300, 3_000):
            wait_for(out, step, process)
            sizes.append(psutil.Process(process.pid).memory_info().rss / 1e6)
        process.communicate()
        print(f"resident memory at step 300 and 3,000: {sizes[0]:.0f} and {sizes[1]:.0f} MB")


if __name__ == "__main__":
    main()
