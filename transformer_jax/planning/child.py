"""Plans in a process of its own.

Devices can only be simulated before JAX starts, and a compiler that dies takes its process with it.
"""

import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_jax.config import Config
from transformer_jax.errors import ConfigError, TransformerJaxError
from transformer_jax.planning import chips
from transformer_jax.training.mesh import check_mesh


def plan_elsewhere(
    config: Config, mesh: Mapping[str, int] | None, topology: str | None = None, *, compiles: bool = True
) -> Any:
    """The `Plan` of a config's training step.

    Args:
      config: Resolved.
      mesh: Sizes of the axes; None is data parallel, as in training.
      topology: A TPU slice such as "v5e:2x4"; None simulates as many CPU devices as the mesh has.
      compiles: Whether to compile the step; without it there are shapes alone.

    Raises:
      ConfigError: If config, mesh and devices do not fit together, or the compiler dies.
    """
    if topology is None:
        if mesh is None or -1 in mesh.values():
            raise ConfigError("a plan has to know the devices: give all sizes, as in data=4,fsdp=2, or a topology")
        check_mesh(mesh)
        count = math.prod(mesh.values())
        devices = {"JAX_NUM_CPU_DEVICES": str(count)}
    else:
        chips.chip_of(topology)
        devices = chips.ENVIRONMENT
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | devices | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "question", Path(folder) / "answer"
        question.write_bytes(pickle.dumps((config, mesh, topology, compiles)))
        command = [sys.executable, "-m", "transformer_jax.planning.child", question, answer]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if not answer.exists():
            last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise ConfigError(f"the compiler ended with status {done.returncode}: {last[:300]}")
        found = pickle.loads(answer.read_bytes())  # written just now, by ourselves
    if isinstance(found, TransformerJaxError):
        raise found
    return found


def main(question: str, answer: str) -> None:
    """What the other process does."""
    config, mesh, topology, compiles = pickle.loads(Path(question).read_bytes())
    from transformer_jax.planning.plan import make_plan
    from transformer_jax.training.sharding import find_placement

    try:
        devices = None if topology is None else chips.topology_devices(topology)
        chip = None if topology is None else chips.chip_of(topology)
        found: Any = make_plan(config, find_placement(config, mesh, devices=devices), chip, topology, compiles=compiles)
    except TransformerJaxError as error:
        found = error
    Path(answer).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
