"""Tries meshes, batches and remat for a slice, and puts what fits in order."""

import dataclasses
from collections.abc import Callable, Iterator

from transformer_jax.config import Config
from transformer_jax.errors import ConfigError, TransformerJaxError
from transformer_jax.planning import chips
from transformer_jax.planning.child import plan_elsewhere
from transformer_jax.planning.plan import Plan

MARGIN = 1.1
"""What a compiled step is taken to need over what its shapes say, before it is known."""

_MOST_TENSOR = 8
_ROWS = sorted({2**power * odd for power in range(11) for odd in (1, 3)})


def search(config: Config, topology: str, report: Callable[[Plan], None]) -> list[Plan]:
    """Looks for the setting with the highest estimated utilisation.

    For each mesh, with and without remat, it compiles the largest batch that should fit, and smaller or larger ones as
    the compiler answers. The batch of the config is not kept.

    Args:
      config: Resolved.
      topology: Of the slice.
      report: Told of each plan as it is made.

    Returns:
      All plans, the best first; those that do not fit at the end.

    Raises:
      ConfigError: If nothing divides, with what the first mesh said.
    """
    found: list[Plan] = []
    refused: list[str] = []
    for mesh in meshes(chips.count_devices(topology)):
        for remat in (False, True):
            if remat and config.model.recurrent:
                continue
            try:
                for plan in _largest(_with(config, remat=remat), mesh, topology):
                    report(plan)
                    found.append(plan)
            except TransformerJaxError as error:  # it does not divide, or the compiler died
                refused.append(str(error))
    if not found:
        raise ConfigError(f"no mesh of {topology} works: {refused[0]}")
    return sorted(found, key=lambda plan: (plan.compiled is None, -(plan.utilisation or 0.0)))


def meshes(devices: int) -> Iterator[dict[str, int]]:
    """All meshes of powers of two, and of all devices along one axis; those that send least are likely the first."""
    powers = [2**power for power in range(devices.bit_length()) if devices % 2**power == 0]
    for tensor in (size for size in powers if size <= _MOST_TENSOR):
        for fsdp in (size for size in powers if devices % (size * tensor) == 0):
            yield {"data": devices // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}


def _largest(config: Config, mesh: dict[str, int], topology: str) -> Iterator[Plan]:
    """Plans of the largest batch that fits, and of those that were tried on the way."""
    groups = mesh["data"] * mesh["fsdp"] * config.train.accumulate
    one = plan_elsewhere(_with(config, rows=groups), mesh, topology, compiles=False)
    fixed, each = one.state + one.gradients, one.activations + 2 * one.logits
    if one.state > one.memory:
        yield dataclasses.replace(one, needed=one.state)
        return
    fits = [rows for rows in _ROWS if MARGIN * (fixed + rows * each) <= one.memory]
    rows = fits[-1] if fits else 1
    best = worst = None
    while True:
        plan = plan_elsewhere(_with(config, rows=rows * groups), mesh, topology)
        yield plan
        place = _ROWS.index(rows)
        if plan.compiled is None:
            worst = rows
            place -= 1
        else:
            best = rows
            place += 1
            slope = (plan.compiled.total - fixed) / rows
            if fixed + _ROWS[place] * slope > plan.memory:
                return
        if place < 0 or place == len(_ROWS) or _ROWS[place] in (best, worst):
            return
        rows = _ROWS[place]


def _with(config: Config, *, rows: int | None = None, remat: bool | None = None) -> Config:
    if rows is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=rows))
    if remat is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
    return config
