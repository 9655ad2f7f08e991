"""Several processes that train as one: how they join, agree, and leave together.

One process needs none of it: each question is answered at once. Loads JAX only where processes join.
"""

import atexit
import contextlib
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from transformer_jax.errors import ConfigError, LostProcessError, TransformerJaxError
from transformer_jax.training import native
from transformer_jax.training.cluster import Cluster

Value = TypeVar("Value")

HEARTBEAT_SECONDS = 30
"""After this long without a sign of life a process counts as ended. One that is killed is mostly noticed at once, by
the connections that break."""

WAIT_SECONDS = 1800
"""How long a process may keep the others waiting, for example because it downloads its data."""

SEEN_WITHIN = 10.0
"""Seconds after which what one host writes is seen on all: shared disks remember for a while what was missing."""

_BROKEN = re.compile(r"gloo|nccl|rccl|coordination|heartbeat|connection (closed|reset|refused)|socket closed", re.I)
"""What a connection that breaks says of itself."""

_KEYS = "transformer_jax"
_numbers = itertools.count()


@contextlib.contextmanager
def joined(cluster: Cluster | None, limit: int, advice: Callable[[], str]) -> Iterator[None]:
    """Joins the processes for a block.

    They part together at its end. Where one fails, the others are not waited for: they notice.

    Args:
      cluster: From `find_cluster`; None is one process alone.
      limit: Seconds to wait for the others.
      advice: How to go on, should one be lost.

    Raises:
      LostProcessError: Where another process has ended.
    """
    if cluster is None:
        yield
        return
    try:
        _join(cluster, limit, advice)
        yield
        import jax

        jax.distributed.shutdown()
    except BaseException as error:
        lost = is_lost(error)
        if lost and not is_first():
            time.sleep(2)  # where process 0 is lost, compiled code knows at once, and ends this process
        if not native.claim():
            time.sleep(HEARTBEAT_SECONDS)  # it is being said already
        atexit.register(_leave, LostProcessError.status if lost else _status(error))
        if lost:
            raise LostProcessError(f"another process has ended or cannot be reached{_missing()}; {advice()}") from error
        raise


def _join(cluster: Cluster, limit: int, advice: Callable[[], str]) -> None:
    me, others = cluster.process_id, cluster.num_processes - 1

    def explain(written: str) -> str | None:
        if "JAX distributed service detected fatal errors" not in written:
            return None
        if "RegisterTask" in written:
            return _not_joined(cluster, limit, written)
        gone = re.search(r"stopped sending heartbeats\):\s+((?:\S*\d+\s+)+)", written)
        if gone:
            who = f" ({_processes(sorted(int(number) for number in re.findall(r'[0-9]+', gone[1])))})"
        else:
            who = " (process 0)" if me else ""
        return f"another process has ended or cannot be reached{who}; {advice()}"

    native.intercept(explain, LostProcessError.status)
    started = time.monotonic()
    if me:
        _await_coordinator(cluster, limit)
    else:
        _check_port(cluster)
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which is ours
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        me,
        initialization_timeout=max(1, round(limit - (time.monotonic() - started))),
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        cluster_detection_method=None if cluster.launched else "deactivate",
    )
    said = exchange("start", cluster.num_processes)
    if len(set(said)) > 1:
        raise ConfigError(f"--num-processes is {_by_process(said)}; give all {others + 1} processes the same")


def _not_joined(cluster: Cluster, limit: int, written: str) -> str:
    where = f"process {cluster.process_id} of {cluster.num_processes} at {cluster.coordinator}"
    if "DEADLINE_EXCEEDED" in written:
        return f"{where} waited {limit} s, and not all others came; start all, or wait longer with --join-timeout"
    status = re.search(r"absl::Status: (.+)", written)
    reason = status[1] if status else "no reason given"
    return f"{where} could not join: {reason}; give each process an id of its own, and all the same --num-processes"


def _await_coordinator(cluster: Cluster, limit: int) -> None:
    """Waits until process 0 listens: the part of JAX that joins says less."""
    until = time.monotonic() + limit
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection(cluster.address, timeout=max(left, 0.1)).close()
            return
        except OSError as error:
            if left <= 0.5:
                raise LostProcessError(
                    f"process {cluster.process_id} of {cluster.num_processes} cannot reach process 0 at "
                    f"{cluster.coordinator} within {limit} s ({error.strerror or error}); start process 0, mend "
                    "--coordinator, or wait longer with --join-timeout"
                ) from error
            time.sleep(0.5)


def _check_port(cluster: Cluster) -> None:
    """Looks whether process 0 can listen at its port; two that share one would wait for each other's processes."""
    family = socket.AF_INET6 if ":" in cluster.address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", cluster.address[1]))
        except OSError as error:
            raise ConfigError(
                f"process 0 cannot listen at port {cluster.address[1]} of --coordinator {cluster.coordinator} "
                f"({error.strerror or error}); choose another port for all processes"
            ) from error


def _leave(status: int) -> None:
    """Ends a process that failed. In order it would wait for the others, who may be waiting for it."""
    with contextlib.suppress(Exception):
        client, me, count = _service()
        client.key_value_set(f"{_KEYS}/left/{me}", "")
        # Process 0 takes the service with it, and the others may have something of their own to say first.
        until = time.monotonic() + (5 if me == 0 else 0)
        expected = count - 1 if status == LostProcessError.status else count
        while time.monotonic() < until and len(client.key_value_dir_get(f"{_KEYS}/left/")) < expected:
            time.sleep(0.05)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _status(error: BaseException) -> int:
    """What the command line exits with."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(error, "status", 2 if isinstance(error, OSError) else 1)


def is_lost(error: BaseException) -> bool:
    """Whether an error is what remains of a connection to another process."""
    # JAX raises one or the other, by where it notices.
    kinds = isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, TransformerJaxError)
    return kinds and not alone() and bool(_BROKEN.search(str(error)))


def _missing() -> str:
    """Which processes do not answer, as far as those that are left find out within two seconds."""
    try:
        client, me, count = _service()
        client.key_value_set(f"{_KEYS}/alive/{me}", "")
        until = time.monotonic() + 2
        while True:
            alive = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(f"{_KEYS}/alive/")}
            if time.monotonic() > until or len(alive) == count:
                break
            time.sleep(0.1)
    except Exception:
        return " (process 0)"  # it runs the service that was asked
    gone = [i for i in range(count) if i not in alive]
    return f" ({_processes(gone)})" if gone else ""


def _service() -> tuple[Any, int, int]:
    """The client of the service through which processes find each other, which of them this is, and of how many."""
    from jax._src import distributed  # JAX offers no other way to exchange text; Orbax goes this way too

    state = distributed.global_state
    return state.client, state.process_id, state.num_processes


def alone() -> bool:
    """Whether this is one process without others."""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or _service()[2] == 1


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return alone() or _service()[1] == 0


def numbers() -> tuple[int, range]:
    """The number of this process, and those of all."""
    return (0, range(1)) if alone() else (_service()[1], range(_service()[2]))


def exchange(what: str, value: Value) -> list[Value]:
    """What each process has to say, in their order; each waits for all.

    All processes must ask for the same things in the same order.

    Args:
      what: For messages.
      value: Of JSON.

    Raises:
      TransformerJaxError: Naming a process that does not come.
    """
    if alone():
        return [value]
    client, me, count = _service()
    number = next(_numbers)
    client.key_value_set(f"{_KEYS}/{number}/{me}", json.dumps(value))
    if me == 0:
        values = [json.loads(_get(client, f"{_KEYS}/{number}/{i}", what, i)) for i in range(count)]
        client.key_value_set(f"{_KEYS}/{number}/all", json.dumps(values))
        if number:
            client.key_value_delete(f"{_KEYS}/{number - 1}/")  # all have come further: all have read it
        return values
    return json.loads(_get(client, f"{_KEYS}/{number}/all", what, 0))


def _get(client: Any, key: str, what: str, who: int) -> str:
    """Waits a second at a time, so that signals are heard."""
    for _ in range(WAIT_SECONDS):
        try:
            return client.blocking_key_value_get(key, 1000)
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    raise TransformerJaxError(f"process {who} did not come to {what} within {WAIT_SECONDS} s; look at its output")


def first_says(what: str, value: Value) -> Value:
    """The value of process 0, for all."""
    return exchange(what, value)[0]


@contextlib.contextmanager
def agreed(what: str) -> Iterator[None]:
    """A block that succeeds on all processes or on none.

    Raises:
      TransformerJaxError: Where it failed on others, with what they say. Where it failed here, its own error.
    """
    if alone():
        yield
        return
    try:
        yield
    except (Exception, SystemExit) as error:
        if not is_lost(error):
            refused = f"{what} was refused, see its output" if isinstance(error, SystemExit) else ""
            exchange(what, refused or str(error) or type(error).__name__)
        raise
    said = exchange(what, None)
    failed = {text: [i for i, other in enumerate(said) if other == text] for text in said if text is not None}
    if failed:
        raise TransformerJaxError("; ".join(f"{_processes(who)}: {text}" for text, who in failed.items()))


def compare(fields: Mapping[str, Any], way_out: str = "give all the same") -> None:
    """Holds all processes to the same settings.

    Args:
      fields: Values of JSON, by the names that people know.
      way_out: What to do where they differ.

    Raises:
      ConfigError: Naming each field that differs, its values, and the processes.
    """
    said = exchange("the settings", dict(fields))
    names = dict.fromkeys(name for one in said for name in one)
    apart = {name: values for name in names if len(set(values := [json.dumps(one.get(name)) for one in said])) > 1}
    if apart:
        listed = "; ".join(f"{name} is {_by_process(values)}" for name, values in apart.items())
        raise ConfigError(f"the processes differ: {listed}; {way_out}")


def _by_process(values: list[Any]) -> str:
    """Such as "2 (process 0), 3 (processes 1, 2)"."""
    who = {value: [i for i, other in enumerate(values) if other == value] for value in values}
    return ", ".join(f"{value} ({_processes(where)})" for value, where in who.items())


def _processes(numbers: list[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
