import signal
import subprocess
import sys
import time

TWICE = """
import os, signal, threading, time
from transformer_jax.training.stopping import signals
with signals() as received:
    threading.Thread(target=time.sleep, args=(60,)).start()  # as a save that is under way
    os.kill(os.getpid(), signal.SIGINT)
    print(received, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_a_second_signal_leaves_at_once():
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=120)
    assert time.monotonic() - began < 40
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "[2]\n"
    said = [line for line in done.stderr.splitlines() if line]
    assert said == [
        "stopping: the state is saved first; once more leaves at once",
        "left at once: what was not saved is lost",
    ]
