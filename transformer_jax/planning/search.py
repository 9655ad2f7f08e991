"""Tries meshes, batches and remat for a slice, and puts what fits in order."""

import dataclasses
from collections.abc import Callable, Iterator

from transformer_jax.config import Config
from transformer_jax.errors import ConfigError, TransformerJaxError
from transformer_jax.planning import chips
from transformer_jax.planning.child import plan_elsewhere
from transformer_jax.planning.plan import Plan
from transformer_jax.training.mesh import mesh_text

MARGIN = 1.1
"""What a compiled step is taken to need over what its shapes say, before it is known."""

_MOST_TENSOR = 8
_ROWS = sorted({2**power * odd for power in range(11) for odd in (1, 3)})


def search(config: Config, topology: str, report: Callable[[Plan | str], None]) -> list[Plan]:
    """Looks for the setting with the highest estimated utilisation.

    For each mesh, with and without remat, it compiles the largest batch that should fit, and smaller or larger ones as
    the compiler answers. The batch of the config is not kept.

    Args:
      config: Resolved.
      topology: Of the slice.
      report: Told of each plan as it is made, and why a mesh has none.

    Returns:
      All plans, the best first; those that do not fit at the end.

    Raises:
      ConfigError: If nothing divides, with what the first mesh said.
    """
    found: list[Plan] = []
    for mesh in meshes(chips.count_devices(topology)):
        for remat in (False, True):
            if remat and config.model.recurrent:
                continue
            try:
                for plan in _largest(_with(config, remat=remat), mesh, topology):
                    report(plan)
                    found.append(plan)
            except TransformerJaxError as error:  # it does not divide, or the compiler died
                refused = f"{mesh_text(mesh)}: {error}"
                report(refused)
    if not found:
        raise ConfigError(f"no mesh of {topology} works; the last was {refused}")
    return sorted(found, key=lambda plan: (not plan.fits, -(plan.utilisation or 0.0)))


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
    likely = [place for place, rows in enumerate(_ROWS) if MARGIN * (fixed + rows * each) <= one.memory]
    place, tried = max(likely, default=0), set()
    while 0 <= place < len(_ROWS) and place not in tried:
        tried.add(place)
        plan = plan_elsewhere(_with(config, rows=_ROWS[place] * groups), mesh, topology)
        yield plan
        if plan.fits:
            each = (plan.compiled.total - fixed) / _ROWS[place]
            place += 1
            if place < len(_ROWS) and fixed + each * _ROWS[place] > plan.memory:
                return
        else:
            place -= 1


def _with(config: Config, *, rows: int | None = None, remat: bool | None = None) -> Config:
    if rows is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=rows))
    if remat is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
    return config
