"""Reads the text of a compiled program: what is sent between devices, and what the compiler thinks each part costs.

The text is HLO as `jax.stages.Compiled.as_text` gives it. XLA's own `cost_analysis` counts the body of a loop once,
counts what it does not know as minus one second, and says nothing about communication.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name: Such as "fusion.12".
      opcode: Such as "all-gather-start".
      result: The type of what it gives.
      text: All that follows the opcode.
    """

    name: str
    opcode: str
    result: str
    text: str

    @property
    def operands(self) -> list[str]:
        """Names of what it takes."""
        return re.findall(r"%([\w.\-]+)", self.text[: _end_of_group(self.text)])


@dataclasses.dataclass(frozen=True)
class Collective:
    """A communication between devices, with all its executions in one step.

    Attributes:
      kind: One of `KINDS`.
      bytes: Of the whole array, on one device: what an all-gather gives, a reduce-scatter takes, the others pass on.
      group: Devices that take part in it.
      times: Executions in one step.
      overlapped: Runs beside computations.
    """

    kind: str
    bytes: int
    group: int
    times: int
    overlapped: bool

    @property
    def sent(self) -> float:
        """Bytes that each device sends in one step, over a ring."""
        share = {"all-reduce": 2 * (self.group - 1) / self.group, "collective-permute": 1.0}
        return self.times * self.bytes * share.get(self.kind, (self.group - 1) / self.group)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A hand-written kernel, which the compiler does not see into.

    Attributes:
      name: Such as "splash_mha_fwd_segmented_residuals.3".
      operands: The shapes of what it takes.
      times: Executions in one step.
    """

    name: str
    operands: tuple[tuple[int, ...], ...]
    times: int


class Program:
    """A compiled program.

    Args:
      text: From `as_text`.
      devices: That it runs on: the group of a collective that names none.
    """

    def __init__(self, text: str, devices: int) -> None:
        self._devices = devices
        self._computations, self._entry = _parse(text)
        self.times: Counter[str] = Counter()
        """Executions of each computation in one step."""
        self.unknown_loops = 0
        """Loops whose number of turns is not in the text; they count as one turn."""
        self._visit(self._entry, 1)

    def _visit(self, computation: str, times: int) -> None:
        self.times[computation] += times
        for instruction in self._computations[computation]:
            turns = times * (self._turns(instruction) if instruction.opcode == "while" else 1)
            branches = [name.strip(" %") for found in _BRANCHES.findall(instruction.text) for name in found.split(",")]
            for called in [*_CALLED.findall(instruction.text), *branches]:
                if called in self._computations:
                    self._visit(called, turns)

    def _turns(self, loop: Instruction) -> int:
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text)
        if known:
            return int(known.group(1))
        condition, body = (re.search(rf"{part}=%?([\w.\-]+)", loop.text).group(1) for part in ("condition", "body"))
        limit = self._limit(condition)
        if limit is None:
            self.unknown_loops += 1
            return 1
        place, count = limit
        return -(-count // self._stride(body, place))

    def _limit(self, condition: str) -> tuple[int, int] | None:
        """Of a loop that counts from 0 to a constant: which value of the loop is the counter, and the constant."""
        lines = {i.name: i for i in self._computations[condition]}
        for line in lines.values():
            if line.opcode == "compare" and "direction=LT" in line.text:
                counter, limit = (lines.get(name) for name in line.operands)
                number = limit and re.match(r"\((\d+)\)", limit.text)
                place = counter and re.search(r"index=(\d+)", counter.text.partition(")")[2])
                if number and place:
                    return int(place.group(1)), int(number.group(1))
        return None

    def _stride(self, body: str, place: int) -> int:
        """What a turn adds to the counter. The partitioner's loops over parts of a product take two parts a turn."""
        lines = {i.name: i for i in self._computations[body]}
        last = next(reversed(lines.values()))
        counter = lines.get(last.operands[place]) if last.opcode == "tuple" else None
        if counter is not None and counter.opcode == "add":
            for name in counter.operands:
                number = name in lines and lines[name].opcode == "constant" and re.match(r"\((\d+)\)", lines[name].text)
                if number:
                    return int(number.group(1))
        return 1

    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """All instructions that are executed, each with the name of its computation."""
        for computation, instructions in self._computations.items():
            if self.times[computation]:
                for instruction in instructions:
                    yield computation, instruction

    def collectives(self) -> list[Collective]:
        """What is sent between devices, most bytes first; equal ones are added up."""
        found: dict[tuple[str, str], Collective] = {}
        for computation, instruction in self.instructions():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            channel = re.search(r"channel_id=(\d+)", instruction.text)
            key = kind, channel.group(1) if channel else instruction.name
            one = self._collective(computation, instruction, kind)
            if key not in found:
                found[key] = one
            elif one.overlapped:  # it stands in each of the computations that it runs beside
                found[key] = dataclasses.replace(found[key], overlapped=True)
        sums: Counter[Collective] = Counter()
        for one in found.values():
            sums[dataclasses.replace(one, times=0)] += one.times
        whole = [dataclasses.replace(one, times=times) for one, times in sums.items() if one.group > 1]
        return sorted(whole, key=lambda one: -one.sent)

    def _collective(self, computation: str, instruction: Instruction, kind: str) -> Collective:
        group, sizes = self._group(instruction), _sizes(instruction.result)
        started = instruction.opcode.endswith("-start")
        if started and len(sizes) > 1:  # what goes in, what comes out, and small counters
            size = sizes[1] if kind in ("all-gather", "collective-permute") else sizes[0]
        else:
            size = sum(sizes)
        if kind == "reduce-scatter":
            size *= group
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # as TPUs write it
        overlapped = started or "async_collective_fusion" in computation
        return Collective(kind, size, group, self.times[computation], overlapped)

    def _group(self, instruction: Instruction) -> int:
        """Devices of a group, in each of the three ways in which groups are written."""
        text = instruction.text.partition("replica_groups=")[2]
        if text.startswith("mesh["):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", text.partition("]")[0]))
            along = re.search(r"\{((?:'\w+',? ?)+)\}", text)
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", along.group(1) if along else ""))
        iota = re.match(r"\[\d+,(\d+)\]", text)
        listed = re.match(r"\{\{([\d,]*)\}", text)
        if iota:
            return int(iota.group(1))
        return len(listed.group(1).split(",")) if listed else self._devices

    def cycles(self) -> int:
        """The TPU compiler's estimate of all computations in one step, in clock cycles; 0 for other compilers."""
        return sum(
            self.times[computation] * int(cycles)
            for computation, instruction in self.instructions()
            for cycles in re.findall(r'estimated_cycles":"(\d+)"', instruction.text)
        )

    def kernels(self) -> list[Kernel]:
        """The kernels that are not the compiler's own."""
        found = []
        for computation, instruction in self.instructions():
            if 'custom_call_target="tpu_custom_call"' in instruction.text:
                operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", instruction.text)
                shapes = [tuple(dims) for _, dims in _shapes(operands.group(1) if operands else "")]
                found.append(Kernel(instruction.name, tuple(shapes), self.times[computation]))
        return found


def _parse(text: str) -> tuple[Mapping[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
            continue
        found = _INSTRUCTION.match(line) if current else None
        if found:
            name, rest = found.groups()
            result = rest[: _end_of_type(rest)]
            opcode, _, arguments = rest[len(result) :].strip().partition("(")
            computations[current].append(Instruction(name, opcode, result, "(" + arguments))
    return computations, entry


def _end_of_type(text: str) -> int:
    """Where the type at the beginning of a text ends."""
    return _end_of_group(text) if text.startswith("(") else text.index(" ")


def _end_of_group(text: str) -> int:
    """Where the parenthesis that a text begins with is closed."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place + 1
    return len(text)


def _shapes(text: str) -> Iterator[tuple[int, list[int]]]:
    """Bits of an element, and the sizes of the axes, of each array in a type."""
    for letters, bits, dims in _SHAPE.findall(text):
        if letters in ("f", "bf", "s", "u", "c", "pred"):
            yield 8 if letters == "pred" else int(bits or 32), [int(size) for size in dims.split(",") if size]


def _sizes(text: str) -> list[int]:
    """Bytes of each array in a type."""
    return [math.prod(dims) * bits // 8 for bits, dims in _shapes(text)]
