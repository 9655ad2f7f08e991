"""What `transformer-jax plan` prints."""

import dataclasses
from collections.abc import Sequence
from math import isfinite

from transformer_jax.output import Output
from transformer_jax.planning.plan import KERNEL_EFFICIENCY, Plan
from transformer_jax.training.mesh import mesh_text

_SHOWN = 12
"""Collectives in the table; the rest are added up."""


def show(plan: Plan) -> None:
    """Prints a plan."""
    out = Output()
    out.say(f"{_devices(plan)}: {mesh_text(plan.mesh)}; {plan.rows:,} rows in a step")
    rows = [(leaf.path, str(list(leaf.shape)), f"[{leaf.split}]", leaf.bytes) for leaf in plan.leaves]
    out.table(["parameter", "shape", "split by", "bytes per device"], rows)
    totals = [
        ("parameters", plan.parameters),
        ("their average", plan.average),
        ("optimiser", plan.optimizer),
        ("gradients", plan.gradients),
        ("activations", plan.activations),
        ("logits", plan.logits),
    ]
    out.table(["in all", "bytes per device"], [row for row in totals if row[1]])
    if plan.attention:
        out.say(f"attention: {plan.attention}")
    for line in plan.warnings:
        out.say(f"warning: {line}")
    out.say("\n".join(_compiled(plan)))
    if plan.compiled is None:
        return
    shown, rest = plan.compiled.collectives[:_SHOWN], plan.compiled.collectives[_SHOWN:]
    lines = [
        (one.kind, "beside" if one.overlapped else "alone", str(one.group), one.times, one.bytes, one.sent)
        for one in shown
    ]
    if rest:
        lines.append((f"{len(rest)} more", "", "", sum(r.times for r in rest), 0, sum(r.sent for r in rest)))
    if lines:
        out.table(["sent", "computing", "devices", "times", "bytes of one", "bytes a device sends"], lines)
    else:
        out.say("nothing is sent between devices")
    if plan.seconds is not None:
        out.say("\n".join(_time(plan)))


def _compiled(plan: Plan) -> list[str]:
    if plan.compiled is None:
        return [_misfit(plan)]
    found = plan.compiled
    lines = [
        f"compiled: state and batch of {found.arguments:,} bytes, {_percent(found.arguments, plan.state)} of the state "
        f"above; temporaries of {found.temporaries:,}, {_percent(found.temporaries, plan.temporaries)} of the "
        "gradients, activations and twice the logits above"
    ]
    if not plan.fits:
        lines.append(_misfit(plan))
    elif plan.memory is not None:
        lines.append(f"fits: {_gib(found.total)} of {_gib(plan.memory)} on each device")
    if found.unknown_loops:
        lines.append(f"{found.unknown_loops} loops turn an unknown number of times and are counted as one turn")
    return lines


def _time(plan: Plan) -> list[str]:
    found = plan.compiled
    lines = [
        f"estimate: {plan.seconds:.4f} s a step, {plan.tokens / plan.seconds:,.0f} tokens/s, utilisation "
        f"{plan.utilisation:.1%}",
        f"  of it {found.compute_seconds:.4f} s by the compiler's own count of cycles, {found.kernel_seconds:.4f} s in "
        f"attention kernels, taken to reach {KERNEL_EFFICIENCY:.0%} of the peak, "
        "and the rest in sending that nothing hides",
    ]
    if found.unknown_kernels:
        lines.append(f"  not in it: the kernels {', '.join(found.unknown_kernels)}")
    return lines


def show_search(plans: Sequence[Plan]) -> None:
    """Prints what was tried, the best first."""
    out = Output()
    out.table(HEADERS, [row(plan) for plan in plans])
    best = plans[0]
    if not best.fits:
        out.say("nothing that was tried fits")
    else:
        out.say(
            f"best: --mesh {mesh_text(best.mesh)} --train.batch-size {best.rows} "
            f"{'--model.remat' if best.remat else '--model.no-remat'}"
        )


HEADERS = ("mesh", "rows", "remat", "memory", "seconds", "tokens/s", "utilisation")
"""Of `row`."""


def row(plan: Plan) -> tuple[str, ...]:
    """A plan in a line of a table."""
    start = mesh_text(plan.mesh), f"{plan.rows:,}", "yes" if plan.remat else "no"
    if not plan.fits:
        return (*start, _misfit(plan), "-", "-", "-")
    used = f"{_gib(plan.compiled.total)} of {_gib(plan.memory)}"
    return (*start, used, f"{plan.seconds:.3f}", f"{plan.tokens / plan.seconds:,.0f}", f"{plan.utilisation:.1%}")


def to_dict(plan: Plan) -> dict[str, object]:
    """A plan as plain values, with its sums."""
    sums = {name: getattr(plan, name) for name in ("devices", "state", "temporaries")}
    return dataclasses.asdict(plan) | sums | {"fits": plan.fits}


def _misfit(plan: Plan) -> str:
    needs = _gib(plan.needed) if isfinite(plan.needed) else "more than it has"
    return f"does not fit: needs {needs} of {_gib(plan.memory)}"


def _devices(plan: Plan) -> str:
    return f"{plan.devices} devices of {plan.topology}" if plan.topology else f"{plan.devices} simulated devices"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _percent(size: float, of: float) -> str:
    return f"{size / of:.1%}"
