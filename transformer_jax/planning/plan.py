"""The plan of a training step on a mesh: what each device holds, what is sent, and how long it may take.

Shapes come from the model, without any device. The rest is read from the step itself, compiled for devices that are
only described or simulated.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.config import Config, ModelConfig
from transformer_jax.errors import ConfigError
from transformer_jax.flops import model_flops
from transformer_jax.nn import kernels
from transformer_jax.nn.layers import feed_forward_width
from transformer_jax.planning.chips import Chip, links
from transformer_jax.planning.hlo import Collective, Kernel, Program
from transformer_jax.training.losses import cross_entropy
from transformer_jax.training.optim import leaf_name
from transformer_jax.training.sharding import Placement
from transformer_jax.training.step import compile_train_step, init_state, predict

LARGE = 0.01
"""Share of all parameters from which on it is worth a warning that one of them is not split."""

KERNEL_EFFICIENCY = 0.5
"""Share of a chip's peak that hand-written kernels are taken to reach: an assumption, since no compiler sees into them.
It was not measured."""

_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""Products of the size B H T S K in each kernel of the TPU attention."""

_BLOCK = 512
"""Side of the squares of scores that this attention computes or leaves out."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter.

    Attributes:
      path: Such as "decoder/layers/ffn/up/kernel".
      shape: Of the whole.
      split: The mesh axes that split each of its axes, such as "-, fsdp, tensor".
      bytes: On each device.
      parts: Devices that hold different parts of it.
    """

    path: str
    shape: tuple[int, ...]
    split: str
    bytes: int
    parts: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of the step, on each device.

    Attributes:
      arguments: Bytes of state and batch.
      temporaries: Bytes of all that lives while the step runs.
      total: Bytes at the peak, with the program itself.
      collectives: What is sent.
      unknown_loops: Loops that were counted as one turn.
      compute_seconds: Of all that is not sent and not in kernels; None for other compilers than the TPU's.
      kernel_seconds: In kernels, at `KERNEL_EFFICIENCY`; None likewise.
      unknown_kernels: Kernels that are not in the seconds.
    """

    arguments: int
    temporaries: int
    total: int
    collectives: list[Collective]
    unknown_loops: int
    compute_seconds: float | None
    kernel_seconds: float | None
    unknown_kernels: list[str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step on a mesh; bytes are those of one device.

    Attributes:
      mesh: Sizes of the axes.
      topology: Of the TPU slice it was compiled for; None is simulated CPU devices.
      rows: Rows of a step, over all devices and pieces.
      leaves: The parameters, largest first.
      parameters, average, optimizer, gradients: Bytes of float32 numbers, as they are split.
      activations: Bytes of what the forward pass keeps for the backward pass, beside the logits.
      logits: Bytes of the logits of one piece.
      flops: Products that one step needs, over all devices, from `needed_flops`.
      warnings: What a rule leaves whole, and costs.
      compiled: None where it was not compiled, or the compiler found no room.
      memory: Bytes that a device has; None where that is not known.
      needed: Bytes that it takes, where it does not fit; infinite where the compiler did not say.
      seconds: Of one step, as `estimate_seconds` has it.
      utilisation: `flops` over what all devices could have done in that time.
      attention: How it is computed, and why; empty where there is none.
      remat: Whether the backward pass computes layers again.
      tokens: Of one step.
    """

    mesh: dict[str, int]
    topology: str | None
    rows: int
    leaves: list[Leaf]
    parameters: int
    average: int
    optimizer: int
    gradients: int
    activations: int
    logits: int
    flops: float
    warnings: list[str]
    compiled: Compiled | None
    memory: float | None
    needed: float | None
    seconds: float | None = None
    utilisation: float | None = None
    attention: str = ""
    remat: bool = False
    tokens: int = 0

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool:
        """Whether the compiler made a program, and all of it has room. It looks at temporaries alone."""
        return self.compiled is not None and self.needed is None

    @property
    def state(self) -> int:
        """Bytes of all that training changes."""
        return self.parameters + self.average + self.optimizer

    @property
    def temporaries(self) -> int:
        """Bytes that a step is expected to need beside the state: gradients, activations, logits and their gradient."""
        return self.gradients + self.activations + 2 * self.logits


def make_plan(
    config: Config,
    placement: Placement,
    chip: Chip | None = None,
    topology: str | None = None,
    *,
    compiles: bool = True,
) -> Plan:
    """Plans the training step of a config.

    Args:
      config: Resolved.
      placement: The mesh, of devices that are real, simulated or described.
      chip: Of a TPU topology; None leaves time and capacity out.
      topology: Its name.
      compiles: Whether to compile the step; without it there are shapes alone.
    """
    attention = ""
    if kernels.attends(config.model):
        attention = kernels.explain(config.model, platform="cpu" if chip is None else "tpu")
    activations, logits = _activations(config, placement, fused=not attention.startswith("xla"))
    state, batch = abstract_inputs(config, placement)
    leaves = sorted(_leaves(state.params), key=lambda leaf: -leaf.bytes)
    parameters = _bytes(state.params)
    plan = Plan(
        mesh=dict(placement.mesh.shape),
        topology=topology,
        rows=config.train.batch_size,
        leaves=leaves,
        parameters=parameters,
        average=_bytes(state.average),
        optimizer=_bytes(state.opt_state),
        # Where a batch is cut into pieces, there are their sum and those of the piece under way.
        gradients=parameters * (1 if config.train.accumulate == 1 else 2),
        activations=activations,
        logits=logits,
        flops=needed_flops(config),
        warnings=_warnings(leaves, placement),
        compiled=None,
        memory=None if chip is None else chip.memory,
        needed=None,
        attention=attention,
        remat=config.model.remat,
        tokens=config.train.batch_size * config.model.context,
    )
    if not compiles:
        return plan
    try:
        with placement.use():
            compiled = compile_train_step(config, state, placement).lower(state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        needed = _needed_bytes(str(error))
        if needed is None:
            raise ConfigError(f"the compiler gave up: {' '.join(str(error).split())[:300]}") from error
        return dataclasses.replace(plan, needed=needed)
    found = read_compiled(config, compiled, placement.mesh.size, chip)
    plan = dataclasses.replace(plan, compiled=found)
    if chip is None:
        return plan
    if found.total > chip.memory:
        plan = dataclasses.replace(plan, needed=found.total)
    seconds = estimate_seconds(found, chip, topology)
    return dataclasses.replace(
        plan, seconds=seconds, utilisation=plan.flops / (seconds * chip.flops * placement.mesh.size)
    )


def abstract_inputs(config: Config, placement: Placement) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """The state and a batch of full length as shapes, types and shardings."""
    state = jax.eval_shape(partial(init_state, config))
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placement.shardings(state)
    )
    types = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if config.model.architecture == "encoder_decoder":
        types |= {"source": jnp.int32, "source_valid": jnp.bool_}
    shape = config.train.batch_size, config.model.context
    return state, {name: jax.ShapeDtypeStruct(shape, kind, sharding=placement.rows) for name, kind in types.items()}


def needed_flops(config: Config) -> float:
    """The products of one step that no way to compute it can leave out: without what remat makes again.

    Causal attention needs the scores of each position with those before it, as far as a window reaches.
    """
    model = dataclasses.replace(config.model, remat=False)
    flops = float(model_flops(model).training)
    if model.architecture == "decoder" and model.attention != "none":
        reach = min(model.window or model.context, model.context)
        scores = reach * model.context - reach * (reach - 1) // 2
        # Forward 2 products of 2 D operations for each score, backward twice that.
        flops -= 3 * 4 * model.d_model * model.num_layers * (model.context**2 - scores)
    return flops * config.train.batch_size


def read_compiled(config: Config, compiled: Any, devices: int, chip: Chip | None) -> Compiled:
    """What a compiled step says of itself."""
    memory, program = compiled.memory_analysis(), Program(compiled.as_text(), devices)
    kernels = [(kernel, kernel_flops(config, kernel)) for kernel in program.kernels()]
    known = sum(flops for _, flops in kernels if flops is not None)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        total=held + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        collectives=program.collectives(),
        unknown_loops=program.unknown_loops,
        compute_seconds=None if chip is None else program.cycles() / chip.clock,
        kernel_seconds=None if chip is None else known / (chip.flops * KERNEL_EFFICIENCY),
        unknown_kernels=[kernel.name for kernel, flops in kernels if flops is None],
    )


def kernel_flops(config: Config, kernel: Kernel) -> float | None:
    """The products of a kernel on one device in one step, head widths filled up as it has them; None if unknown."""
    products = next((count for name, count in _PRODUCTS.items() if kernel.name.startswith(name)), None)
    wide = [shape for shape in kernel.operands if len(shape) == 4]
    if products is None or len(wide) < 2:
        return None
    (rows, heads, length, head_dim), (_, _, keys, _) = wide[:2]
    share = _computed_share(length, keys, config.model.architecture == "decoder", config.model.window)
    return kernel.times * products * 2.0 * rows * heads * length * keys * head_dim * share


def _computed_share(length: int, keys: int, causal: bool, window: int | None) -> float:
    """The share of the squares of scores in which anything may be attended to."""
    side = min(_BLOCK, length, keys)

    def any_seen(query: int, key: int) -> bool:
        newest, oldest = (
            query + side - 1 - key,
            query - (key + side - 1),
        )  # how far back a key can lie, at most and least
        if causal and newest < 0:
            return False
        return window is None or (oldest < window and (causal or newest > -window))

    squares = [any_seen(query, key) for query in range(0, length, side) for key in range(0, keys, side)]
    return sum(squares) / len(squares)


def estimate_seconds(compiled: Compiled, chip: Chip, topology: str) -> float:
    """Seconds of a step: computation and kernels, and what is sent as far as it does not run beside them.

    Arrays go around rings along the sides of the slice, in both directions, without waiting.
    """
    busy = compiled.compute_seconds + compiled.kernel_seconds
    sent: dict[bool, float] = defaultdict(float)
    for one in compiled.collectives:
        ways = 2 if one.kind == "collective-permute" else links(topology, one.group)
        sent[one.overlapped] += one.sent / (ways * chip.link)
    return busy + sent[False] + max(0.0, sent[True] - busy)


def _leaves(params: Any) -> Iterator[Leaf]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sizes = leaf.sharding.mesh.shape
        spec = [(axes,) if isinstance(axes, str) else axes or () for axes in leaf.sharding.spec]
        by = ["+".join(axis for axis in axes if sizes[axis] > 1) or "-" for axes in spec]
        size = _bytes(leaf)
        parts = leaf.size * leaf.dtype.itemsize // size
        yield Leaf(leaf_name(path), tuple(leaf.shape), ", ".join(by), size, parts)


def _bytes(tree: Any) -> int:
    """Bytes on each device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _warnings(leaves: list[Leaf], placement: Placement) -> list[str]:
    """Large parameters that lie whole along an axis that splits parameters."""
    total = sum(leaf.bytes * leaf.parts for leaf in leaves)
    sizes = dict(placement.mesh.shape)
    found = []
    for leaf in leaves:
        whole = [axis for axis in ("fsdp", "tensor") if sizes[axis] > 1 and axis not in re.split(r"[,+ ]+", leaf.split)]
        copies = math.prod(sizes[axis] for axis in whole)
        if copies > 1 and leaf.bytes * leaf.parts >= LARGE * total:
            found.append(
                f"{leaf.path} {list(leaf.shape)} is not split by {' and '.join(whole)}: "
                f"{copies} devices hold the same {leaf.bytes:,} bytes"
            )
    return found


def _activations(config: Config, placement: Placement, *, fused: bool) -> tuple[int, int]:
    """Bytes on each device of what one piece keeps for the backward pass, and of its logits.

    Read off the gradient's program as what grows with the rows. Fused kernels keep no scores.
    """
    model, parts = config.model, placement.parts
    rows = config.train.batch_size // config.train.accumulate // parts("batch")
    total = 0
    for one, two in zip(_kept(config, 1), _kept(config, 2), strict=True):
        shape = one.shape
        scores, logits = shape[-2:] == (model.context,) * 2, shape[-1:] == (model.vocab_size,)
        if shape != two.shape and not logits and not (scores and fused):
            total += one.size * one.dtype.itemsize // _split(model, shape, parts)
    vocab = model.vocab_size
    divides = vocab % parts("vocab") == 0
    return total * rows, rows * model.context * (vocab // parts("vocab") if divides else vocab) * 4


def _split(model: ModelConfig, shape: tuple[int, ...], parts: Callable[[str], int]) -> int:
    """Into how many parts an activation is split beside its rows, told by its sizes."""
    if model.recurrent:
        return 1
    heads = {model.num_heads: parts("heads"), model.num_kv_heads or model.num_heads: parts("kv_heads")}
    if shape[-1] == feed_forward_width(model.feed_forward, model.d_model, model.d_ff) and shape[-1] != model.d_model:
        return parts("d_ff")
    by_head = shape[-2:-1] if shape[-1] == model.head_dim else shape[-3:-2]  # [T, H, K] and [H, T, S]
    return next((heads[size] for size in by_head if size in heads), 1)


def _kept(config: Config, rows: int) -> list[jax.ShapeDtypeStruct]:
    """What the forward pass of some rows keeps for the backward pass."""
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention_impl="xla"))
    params = jax.eval_shape(partial(init_state, config)).params
    shape = rows, config.model.context
    ids, weights, valid = (jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.int32, jnp.float32, jnp.bool_))
    batch = {"inputs": ids, "targets": ids, "weights": weights, "source": ids, "source_valid": valid}

    def backward(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = predict(config, params, batch, deterministic=False, rngs={"dropout": jax.random.key(0)})
            return cross_entropy(logits, batch["targets"], batch["weights"])[0]

        return jax.vjp(loss, params)[1]

    return jax.tree.leaves(jax.eval_shape(backward, params, batch))


def _needed_bytes(message: str) -> float | None:
    """What a compiler that ran out of memory had asked for."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    found = re.search(r"(?:Used|required for HLO temporaries \(?)\s*([\d.]+)([KMGT]?)", message)
    return float(found.group(1)) * units[found.group(2)] if found else math.inf
