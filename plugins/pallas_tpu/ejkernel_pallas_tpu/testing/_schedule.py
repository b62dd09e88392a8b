"""How long a kernel may take, from the compiler's own schedule.

A TPU core issues one bundle of instructions a cycle, and the compiler decides what is in each. It does not decide which
way branches go, how long copies take, and whether a matrix unit is still busy. So the scalar half of the program is
executed here, with the values that the kernel gets in scalar memory, and the vector half is counted.

This gives a ranking, and shows when a program becomes slower. It is not a measurement: there is no contention for
memories, clocks and bandwidths are those of data sheets, and the latencies of the matrix and transcendental units are
hidden, as the schedule intends.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from ._listing import Instruction, Listing, Operand, read

WORD = 0xFFFFFFFF
#: How many products a matrix unit accepts before the first is done.
QUEUED = 2
#: Seconds from the start of a copy to its first byte.
LATENCY = 6e-7
#: Bytes in the unit of a copy's size.
GRANULE = 32


@attrs.frozen
class Chip:
    """A core, by its data sheet."""

    clock: float
    bandwidth: float
    #: Rows of a product that a matrix unit takes in a cycle.
    rows: int
    #: How many bundles are issued between a branch and the one it leads to; None where branches differ.
    delay: int | None


#: v4 is not here: operands may lie in memory that it shares between cores, for which there is no model.
CHIPS = {
    "v5e": Chip(1.5e9, 8.2e11, 1, 4),
    "v5p": Chip(1.75e9, 2.46e12, 1, 4),
    "v6e": Chip(1.75e9, 1.64e12, 2, 4),
    "v7x": Chip(2.2e9, 3.7e12, 2, None),
}


@attrs.frozen
class Estimate:
    """Of one kernel."""

    #: Cycles in which something is issued, and all cycles: with waits for copies and for matrix units.
    bundles: int
    cycles: float
    microseconds: float
    #: Moved between vector and main memory.
    bytes: int
    #: Bundles of the program in which a register is spilled.
    spills: int
    #: The share of each unit's slots that is used.
    units: Mapping[str, float]


def estimate(folder: Path, kernel: str, prefetched: Sequence[Sequence[int]], generation: str) -> Estimate:
    """The estimate of a kernel that has just been compiled, from the folder that the compiler wrote to."""
    chip = CHIPS[generation]
    return _Core(read(folder, kernel, chip.delay), chip, prefetched).run()


def _signed(x: int) -> int:
    return (x & WORD) - ((x & 0x80000000) << 1)


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda x, y: x << y if y < 32 else 0,
    "sshrl": lambda x, y: x >> y,
    "sshra": lambda x, y: _signed(x) >> min(y, 31),
    "scalar_lea": operator.add,
}
_EXTREMA: dict[str, Callable[[int, int], int]] = {"smin": min, "smax": max}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
_LOGIC: dict[str, Callable[[Sequence[int]], bool]] = {
    "pmov": any,
    "por": any,
    "pand": all,
    "pneg": lambda values: not values[0],
    "pnand": lambda values: not all(values),
    "pxor": lambda values: values[0] != values[1],
}
#: Division: what it puts into its queue.
_DIVISIONS: dict[str, Callable[[int, int], Sequence[int]]] = {
    "sdivrem": lambda x, y: (x // y, x % y),
    "sdiv": lambda x, y: (x // y,),
    "srem": lambda x, y: (x % y,),
}
Change = Callable[[], None]


class _Core:
    """The state of a core that runs a kernel."""

    def __init__(self, listing: Listing, chip: Chip, prefetched: Sequence[Sequence[int]]) -> None:
        self.listing, self.chip = listing, chip
        #: Scalar and predicate registers.
        self.registers = defaultdict[str, int](int)
        self.memory, self.flags = defaultdict[int, int](int), defaultdict[int, int](int)
        self.quotients: deque[int] = deque()
        #: By flag, when each copy arrives and by how much it raises the flag.
        self.copies = defaultdict[int, list[tuple[float, int]]](list)
        #: What the kernel itself copies into scalar memory, in order.
        self.scalars: deque[Sequence[int]] = deque()
        self.visits = Counter[tuple[int, int]]()
        #: Cycles of a run of bundles, and what is left for the matrix units behind it, by what was left before.
        self.durations: dict[tuple[int, int, tuple[float, ...]], tuple[float, tuple[float, ...]]] = {}
        self.clock, self.end_of_copies, self.bytes = 0.0, 0.0, 0
        #: When each matrix unit will be free.
        self.free: tuple[float, ...] = (0.0,) * 8
        #: The pending branches: the first bundle that is no longer issued, and the target.
        self.branches: deque[tuple[int, int]] = deque()
        self._load_arguments(prefetched)
        self.next = self._next_scalar_bundles()

    def _load_arguments(self, prefetched: Sequence[Sequence[int]]) -> None:
        """Arguments are in registers: addresses, but for single numbers."""
        address = 0x8000
        for index, register, space in self.listing.arguments:
            self.registers[register] = 0x100000 * (index + 1)
            if index < len(prefetched):
                values = [int(value) & WORD for value in prefetched[index]]
                if space == "<no memory space>":
                    self.registers[register] = values[0]
                elif space == "smem":
                    self.registers[register] = address
                    self._store(address, values)
                    address += len(values)
                else:
                    self.scalars.append(values)

    def _store(self, address: int, values: Sequence[int]) -> None:
        for offset, value in enumerate(values):
            self.memory[address + offset] = value

    def _next_scalar_bundles(self) -> list[int]:
        """For each bundle, the first one from there on with scalar instructions."""
        end = len(self.listing.instructions)
        following = [end] * (end + 1)
        for place in range(end - 1, -1, -1):
            following[place] = place if self.listing.instructions[place] else following[place + 1]
        return following

    def run(self) -> Estimate:
        place, end = 0, len(self.listing.instructions)
        while place < end:
            stop = place + 1 if self.branches else max(self.next[place], place + 1)
            self._issue(place, stop)
            for target, delay in self._execute(place):
                self.branches.append((place + 1 + delay, target))
            place = stop
            if self.branches and self.branches[0][0] == place:
                place = self.branches.popleft()[1]
        return self._estimate()

    def _issue(self, place: int, stop: int) -> None:
        """Issue bundles, and wait for a matrix unit that has too much to do."""
        self.visits[place, stop] += 1
        work = tuple(max(0.0, free - self.clock) for free in self.free)
        key = place, stop, work
        if key not in self.durations:
            self.durations[key] = self._duration(place, stop, work)
        cycles, work = self.durations[key]
        self.clock += cycles
        self.free = tuple(self.clock + rest for rest in work)

    def _duration(self, place: int, stop: int, work: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
        clock, free = 0.0, list(work)
        for products in self.listing.products[place:stop]:
            clock += 1
            for product in products:
                cycles = product.rows / self.chip.rows
                clock = max(clock, free[product.unit] - QUEUED * cycles)
                free[product.unit] = max(free[product.unit], clock) + cycles
        return clock, tuple(max(0.0, time - clock) for time in free)

    def _execute(self, place: int) -> list[tuple[int, int]]:
        """Execute the scalar instructions of a bundle, all at once; return target and delay of each branch."""
        changes: list[Change] = []
        branches: list[tuple[int, int]] = []
        for instruction in self.listing.instructions[place]:
            predicate = instruction.predicate
            if predicate is not None and bool(self.registers[predicate[0]]) != predicate[1]:
                continue
            if instruction.base == "sbr":
                target, delay = map(self._value, instruction.operands)
                branches.append((target, delay))
            else:
                changes.append(self._change(instruction))
        for change in changes:
            change()
        return branches

    def _change(self, instruction: Instruction) -> Change:
        """What an instruction changes, computed from the registers as they are before its bundle."""
        base = instruction.base
        if base == "sst":
            address, value = map(self._value, instruction.operands)
            return lambda: self._store(address, [value])
        if base == "dma":
            return self._copy(instruction)
        if base.startswith("v"):
            return self._synchronize(instruction)
        if base in _DIVISIONS:
            x, y = map(self._value, instruction.operands)
            self.quotients.extend(_DIVISIONS[base](x, max(y, 1)))
            return lambda: None
        value = self._result(instruction) & WORD
        return lambda: self.registers.__setitem__(instruction.result, value)

    def _result(self, instruction: Instruction) -> int:
        base = instruction.base
        values = [self._value(operand) for operand in instruction.operands]
        if base in _ARITHMETIC:
            return _ARITHMETIC[base](*values)
        if base in _LOGIC:
            return _LOGIC[base](values)
        if base in _EXTREMA:
            return _EXTREMA[base](*self._numbers(instruction, values))
        if base == "scmp":
            return _COMPARISONS[instruction.name.split(".")[1]](*self._numbers(instruction, values))
        if base == "scalar_select":
            return values[1] if values[0] else values[2]
        if base == "smov":
            return values[0]
        if base == "sld":
            return self.memory[values[0]]
        if base == "spop":
            # What the vector half sends is not modelled. Two cores check each other by it.
            return self.quotients.popleft() if self.quotients else 0
        raise NotImplementedError(f"the instruction {instruction.name} is not known")

    def _numbers(self, instruction: Instruction, values: Sequence[int]) -> Sequence[int]:
        return [_signed(value) for value in values] if ".s32" in instruction.name else values

    def _value(self, operand: Operand) -> int:
        return sum(map(self._term, operand)) & WORD

    def _term(self, term: int | str) -> int:
        if isinstance(term, int):
            return term
        return int(not self.registers[term[1:]]) if term.startswith("!") else self.registers[term]

    # Copies are in order, and there is one bandwidth for all.

    def _copy(self, instruction: Instruction) -> Change:
        spaces = instruction.name.removeprefix("dma.").split("_to_")
        if len(spaces) != 2:  # dma.done.wait
            flag, amount = (self._value(operand) for operand in instruction.operands[:2])
            return lambda: self._wait(flag, _signed(amount))
        _, size, target, flag = (self._value(operand) for operand in instruction.operands[:4])
        self.end_of_copies = (
            max(self.end_of_copies, self.clock) + GRANULE * size * self.chip.clock / self.chip.bandwidth
        )
        self.copies[flag].append((max(self.end_of_copies, self.clock + LATENCY * self.chip.clock), size))
        if set(spaces) == {"hbm", "vmem"}:
            self.bytes += GRANULE * size
        if spaces[1] == "smem" and self.scalars:
            self._store(target, self.scalars.popleft())
        return lambda: None

    def _wait(self, flag: int, amount: int) -> None:
        """Wait until a flag is raised by so much."""
        copies = sorted(self.copies[flag])
        while self.flags[flag] < amount and copies:
            arrival, size = copies.pop(0)
            self.flags[flag] += size
            self.clock = max(self.clock, arrival)
        self.copies[flag] = copies

    def _synchronize(self, instruction: Instruction) -> Change:
        flag, *values = (self._value(operand) for operand in instruction.operands[:2])
        if instruction.name == "vwait.ge":
            return lambda: self._wait(flag, _signed(values[0]))
        if instruction.base == "vsyncadd":
            self.flags[flag] += _signed(values[0])
        elif instruction.base in ("vsyncpa", "vsyncset"):
            self.flags[flag] = 0
        return lambda: None

    def _estimate(self) -> Estimate:
        units = self.listing.units
        bundles, totals = 0, [0] * len(units)
        before = [[0] * len(units)]
        for row in self.listing.uses:
            before.append([x + y for x, y in zip(before[-1], row, strict=True)])
        for (place, stop), times in self.visits.items():
            bundles += times * (stop - place)
            first, last = (before[min(at, len(before) - 1)] for at in (place, stop))
            totals = [total + times * (y - x) for total, x, y in zip(totals, first, last, strict=True)]
        spill = units.index("VSTORE:SPILL")
        return Estimate(
            bundles=bundles,
            cycles=self.clock,
            microseconds=1e6 * self.clock / self.chip.clock,
            bytes=self.bytes,
            spills=sum(row[spill] for row in self.listing.uses),
            units={
                unit: total / (bundles * count)
                for unit, total, count in zip(units, totals, self.listing.slots, strict=True)
            },
        )
