"""Which processes train together: what flags or a launcher say. Loads JAX only where there is a launcher."""

import dataclasses
import importlib.util
import os

from transformer_jax.errors import ConfigError

_LAUNCHERS = ("ompi", "slurm", "gcetpu", "gketpu")
"""Environments in which processes find each other by themselves, by the names that JAX gives them."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes that train together.

    Attributes:
      coordinator: HOST:PORT at which process 0 waits for the others.
      process_id: Of this process, from 0.
      num_processes: Of all.
      launched: Whether a launcher said so, and each process may be meant to use one device of its host alone.
    """

    coordinator: str
    process_id: int
    num_processes: int
    launched: bool = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_cluster(coordinator: str | None, process_id: int | None, num_processes: int | None) -> Cluster | None:
    """From what was asked for, or from the environment; None for one process alone.

    Raises:
      ConfigError: For values that cannot be, or some of them without the others.
    """
    given = {"--coordinator": coordinator, "--process-id": process_id, "--num-processes": num_processes}
    lacking = [name for name, value in given.items() if value is None]
    if len(lacking) == len(given):
        return _launched()
    if num_processes is not None and num_processes < 1:
        raise ConfigError(f"--num-processes must be at least 1, got {num_processes}")
    if num_processes == 1 and len(lacking) == 2:
        return None  # alone, whatever the environment says
    if lacking:
        has = " ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise ConfigError(
            f"{has} needs {' and '.join(lacking)} too; each process is told where 0 waits, its id, of how many"
        )
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process-id {process_id} of --num-processes {num_processes}: ids go from 0 to {num_processes - 1}"
        )
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536) or (":" in host and host[0] != "["):
        raise ConfigError(
            f"--coordinator {coordinator!r} is not HOST:PORT with a port from 1 to 65535, as in 10.0.0.1:12345"
        )
    return None if num_processes == 1 else Cluster(coordinator, process_id, num_processes)


def _launched() -> Cluster | None:
    """What a launcher's environment says, where it has started more than one process."""
    hints = ("SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
    if not any(name in os.environ for name in hints) and importlib.util.find_spec("libtpu") is None:
        return None
    # A shell inside an allocation knows the size of the job, and is one task.
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":
        return None
    # JAX itself offers these only together with joining, which waits for ever where a process is alone.
    from jax._src import clusters

    platforms = os.environ.get("JAX_PLATFORMS", "")
    for kind in clusters.ClusterEnv._cluster_types:
        if kind.name not in _LAUNCHERS or ("tpu" in kind.name and platforms and "tpu" not in platforms):
            continue
        try:
            if kind.is_env_present() and (count := kind.get_process_count()) > 1:
                at = kind.get_coordinator_address(60, os.environ.get("JAX_COORDINATOR_PORT"))
                return Cluster(at, kind.get_process_id(), count, launched=True)
        except (KeyError, ValueError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"the environment of {kind.name} does not say how processes join ({type(error).__name__}: {error}); "
                "give --coordinator, --process-id and --num-processes, or --num-processes 1 to train alone"
            ) from error
    return None
