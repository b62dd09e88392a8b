"""How long a kernel may take, from the compiler's own schedule.

A TPU's core issues one bundle of instructions a cycle, and the compiler has decided what is in each. What it has not
decided is which way the branches go, how long copies take, and whether a matrix unit is still busy. So the scalar half
of the program is executed here, with the values that were prefetched, and the vector half is counted.

What this is: a ranking, and a signal that something became slower. What it is not: a measurement. The compiler's
schedule knows nothing of contention for memories, clocks and bandwidths are those of data sheets, and latencies of what
comes back from the matrix and transcendental units are taken to be hidden, as the schedule means them to be.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

WORD = 0xFFFFFFFF
#: Behind a branch that does not say how many, so many bundles are issued before it is taken.
DELAY = 4
#: How many products a matrix unit takes before it is done with the first.
QUEUED = 2
#: Seconds from the start of a copy to its first byte.
LATENCY = 6e-7


@attrs.frozen
class Chip:
    """A core, by its data sheet."""

    clock: float
    bandwidth: float
    #: Rows of a product that a matrix unit takes in a cycle.
    rows: int


#: Those whose copies are told apart in the assembly. In v4's they are not.
CHIPS = {
    "v5e": Chip(1.5e9, 8.2e11, 1),
    "v5p": Chip(1.75e9, 2.46e12, 1),
    "v6e": Chip(1.75e9, 1.64e12, 2),
    "v7x": Chip(2.2e9, 3.7e12, 2),
}


@attrs.frozen
class Estimate:
    """Of one kernel."""

    #: Cycles in which something is issued, and those in all: with waits for copies and for matrix units.
    bundles: int
    cycles: float
    microseconds: float
    #: Moved between vector and main memory.
    bytes: int
    #: Bundles of the program in which a register is put away.
    spills: int
    #: How much of each unit's slots was used.
    units: Mapping[str, float]


def estimate(folder: Path, kernel: str, prefetched: Sequence[Sequence[int]], generation: str) -> Estimate:
    """Of a kernel that has just been compiled, in the folder that the compiler wrote to."""
    program = _read(folder, kernel)
    return _Core(program, CHIPS[generation], prefetched).run()


# -- reading -------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Op:
    """One instruction: where it puts its result, what it is, and what it is done with."""

    to: str
    name: str
    when: tuple[int, bool] | None
    given: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]


@attrs.frozen(eq=False)
class _Program:
    start: int
    end: int
    #: The scalar instructions of each bundle, and the rows of products for each matrix unit.
    scalar: Mapping[int, list[_Op]]
    products: Mapping[int, list[tuple[int, int]]]
    #: Register and index of what the kernel is called with.
    operands: Sequence[tuple[int, int, str]]
    units: Sequence[str]
    slots: Sequence[int]
    use: Sequence[Sequence[int]]


_OP = re.compile(r"(.*?) = ([a-z][\w.]*)\s*(?:@(!?)p(\d+)\s*,?\s*)?(.*)$")
_BUNDLE = re.compile(r"\d+:0x([0-9a-f]+)\s*: \{(.*)\}")
_OPERAND = re.compile(r"%s\d+_s(\d+) = inlined_call_operand\.(<no memory space>|\w+) \[shape: [^\]]*\].*?index: (\d+),")
#: Vector instructions that the scalar half sees, and scalar ones that it need not.
_SEEN = ("vwait", "vsync")
_IDLE = ("vtrace", "strace", "sfence", "ssettag", "shalt", "scheck", "sdelay", "vpush", "sst.io")


def _read(folder: Path, kernel: str) -> _Program:
    start, end = _range(folder, kernel)
    scalar: dict[int, list[_Op]] = {}
    products: dict[int, list[tuple[int, int]]] = {}
    (assembly,) = folder.glob("*-TLP-*assembly-pre-overlay.txt")
    for line in assembly.read_text().splitlines():
        bundle = _BUNDLE.match(line)
        if bundle and start <= (place := int(bundle[1], 16)) < end:
            ops = [_op(text) for text in bundle[2].split("; ") if text.strip()]
            if seen := [op for op in ops if _is_scalar(op)]:
                scalar[place] = seen
            if found := [_product(op) for op in ops if op.base == "vmatmul"]:
                products[place] = found
    (bundles,) = folder.glob(f"*-{kernel}-*-final_bundles.txt")
    operands = sorted((int(m[3]), int(m[1]), m[2]) for m in _OPERAND.finditer(bundles.read_text()))
    (table,) = folder.glob(f"*-{kernel}-*static-per-bundle-utilization.txt")
    _, units, slots, _, *rows = table.read_text().splitlines()
    return _Program(
        start,
        end,
        scalar,
        products,
        operands,
        [unit.strip() for unit in units.split(",")],
        [int(slot) for slot in slots.split()],
        [[int(use) for use in row.split()] for row in rows if row.strip()],
    )


def _range(folder: Path, kernel: str) -> tuple[int, int]:
    """Where in the program it is."""
    details = min(folder.glob("*-TLP-*hlo-details.txt")).read_text()
    _, _, behind = details.partition(f"operation: %{kernel} = ")
    found = re.search(r"emitted bundle range: \[\w+:\d+:0x(\w+), \w+:\d+:0x(\w+)\)", behind)
    if found is None:
        raise LookupError(f"the compiler has not told where {kernel} is")
    return int(found[1], 16), int(found[2], 16)


def _op(text: str) -> _Op:
    found = _OP.match(text.strip())
    if found is None:
        raise ValueError(f"this is no instruction that is known: {text!r}")
    to, name, other, predicate, given = found.groups()
    when = (int(predicate), not other) if predicate else None
    return _Op(to.strip(), name, when, tuple(part.strip() for part in given.split(",") if part.strip()))


def _branch(op: _Op) -> tuple[int, int]:
    """As in "$+72, $6 (=0x7d)", where newer chips say how many bundles are issued before."""
    found = re.fullmatch(r"\$[+-]?\d+(?:, \$(\d+))? \(=0x([0-9a-f]+)\)", ", ".join(op.given))
    if found is None:
        raise ValueError(f"this is no branch that is known: {op}")
    return int(found[1] or DELAY), int(found[2], 16)


def _is_scalar(op: _Op) -> bool:
    return op.name.startswith(_SEEN) or not op.name.startswith(("v", *_IDLE))


def _product(op: _Op) -> tuple[int, int]:
    """Which matrix unit, and how many rows: registers hold more of them, the narrower they are."""
    unit = re.search(r"mr[a-z](\d)", op.to)
    rows = 16 if ".bf16" in op.name else 32 if re.search(r"\.[su]?[f8]?8", op.name.replace("8x128", "")) else 8
    return int(unit[1]) if unit else 0, rows


# -- executing -----------------------------------------------------------------------------------------------------


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
    "sshllo": lambda x, y: ((x + 1) << y) - 1,
}
_CHOICES: dict[str, Callable[[int, int], int]] = {"smin": min, "smax": max}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "slt": operator.lt,
    "sle": operator.le,
    "sgt": operator.gt,
    "sge": operator.ge,
    "seq": operator.eq,
    "sne": operator.ne,
}
_COMBINATIONS: dict[str, Callable[[Sequence[bool]], bool]] = {
    "pmov": any,
    "por": any,
    "pand": all,
    "pnand": lambda decided: not all(decided),
    "pxor": lambda decided: decided[0] != decided[1],
}
#: Division: what it leaves in its queue.
_DIVISIONS: dict[str, Callable[[int, int], Sequence[int]]] = {
    "sdivrem": lambda x, y: (x // y, x % y),
    "sdiv": lambda x, y: (x // y,),
    "srem": lambda x, y: (x % y,),
}


class _Core:
    """One run of a kernel."""

    def __init__(self, program: _Program, chip: Chip, prefetched: Sequence[Sequence[int]]) -> None:
        self.program, self.chip = program, chip
        self.registers, self.predicates = defaultdict[int, int](int), defaultdict[int, bool](bool)
        self.memory, self.flags = defaultdict[int, int](int), defaultdict[int, int](int)
        self.queues = defaultdict[str, deque[int]](deque)
        self.copies = defaultdict[int, list[tuple[float, int]]](list)
        self.wanted: deque[Sequence[int]] = deque()
        self.visits = Counter[tuple[int, int]]()
        #: What a run of bundles costs, by what the matrix units have to do still.
        self.spent: dict[Any, tuple[float, tuple[float, ...]]] = {}
        self.clock, self.copied, self.bytes = 0.0, 0.0, 0
        self.busy: tuple[float, ...] = (0.0,) * 8
        self.branches: deque[tuple[int, int]] = deque()
        self._call(prefetched)
        self.next = self._scalar_from()

    def _call(self, prefetched: Sequence[Sequence[int]]) -> None:
        """Arguments in their registers: addresses, but for single numbers and what is in scalar memory already."""
        place = 0x8000
        for index, register, space in self.program.operands:
            self.registers[register] = 0x100000 * (index + 1)
            if index < len(prefetched):
                values = [int(value) & WORD for value in prefetched[index]]
                if space == "<no memory space>":
                    self.registers[register] = values[0]
                elif space == "smem":
                    self.registers[register] = place
                    self._put(place, values)
                    place += len(values)
                else:
                    self.wanted.append(values)

    def _put(self, place: int, values: Sequence[int]) -> None:
        for offset, value in enumerate(values):
            self.memory[place + offset] = value

    def _scalar_from(self) -> list[int]:
        """For each bundle, the next one with a scalar instruction."""
        start, end = self.program.start, self.program.end
        found = [end] * (end - start + 1)
        for place in range(end - 1, start - 1, -1):
            found[place - start] = place if place in self.program.scalar else found[place - start + 1]
        return found

    def run(self) -> Estimate:
        place, start = self.program.start, self.program.start
        while start <= place < self.program.end:
            upto = place + 1 if self.branches else max(self.next[place - start], place + 1)
            self._vectors(place, upto)
            for delay, branch in self._scalars(place):
                self.branches.append((place + 1 + delay, branch))
            place = upto
            if self.branches and self.branches[0][0] == place:
                place = self.branches.popleft()[1]
        return self._estimate()

    def _vectors(self, place: int, upto: int) -> None:
        """Issue bundles, waiting for a matrix unit that has too much to do."""
        self.visits[place, upto] += 1
        waiting = tuple(max(0.0, free - self.clock) for free in self.busy)
        key = place, upto, waiting
        if key not in self.spent:
            self.spent[key] = self._issue(place, upto, waiting)
        cycles, after = self.spent[key]
        self.clock += cycles
        self.busy = tuple(self.clock + left for left in after)

    def _issue(self, place: int, upto: int, waiting: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
        clock, busy = 0.0, list(waiting)
        for at in range(place, upto):
            clock += 1
            for unit, rows in self.program.products.get(at, ()):
                takes = rows / self.chip.rows
                clock = max(clock, busy[unit] - QUEUED * takes)
                busy[unit] = max(busy[unit], clock) + takes
        return clock, tuple(max(0.0, free - clock) for free in busy)

    def _scalars(self, place: int) -> list[tuple[int, int]]:
        """Do what a bundle says, all at once; and after how many more it branches, and where to."""
        changes: list[Callable[[], None]] = []
        branches: list[tuple[int, int]] = []
        for op in self.program.scalar.get(place, ()):
            if op.when is not None and self.predicates[op.when[0]] != op.when[1]:
                continue
            if op.base == "sbr":
                branches.append(_branch(op))
            else:
                changes.append(self._done(op))
        for change in changes:
            change()
        return branches

    def _done(self, op: _Op) -> Callable[[], None]:
        given, base = op.given, op.base
        if base in _ARITHMETIC:
            return self._set(op.to, _ARITHMETIC[base](*map(self._value, given)))
        if base in _CHOICES or base in _COMPARISONS:
            x, y = (_signed(value) if op.name.endswith("s32") else value for value in map(self._value, given))
            if base in _CHOICES:
                return self._set(op.to, _CHOICES[base](x, y))
            return self._decide(op.to, _COMPARISONS[base](x, y))
        if base in ("simm", "smov"):
            return self._set(op.to, self._value(given[0]))
        if base == "sld":
            return self._set(op.to, self.memory[self._address(given[0])])
        if base == "sst":
            address, value = self._address(op.to), self._value(given[0])
            return lambda: self._put(address, [value])
        if base in _COMBINATIONS:
            return self._decide(op.to, _COMBINATIONS[base]([self._decided(word) for word in given]))
        if base == "sc":
            return self._decide(op.to, sum(map(self._value, given)) > WORD)
        if base in _DIVISIONS:
            x, y = map(self._value, given)
            self.queues["drf"].extend(_DIVISIONS[base](x, max(y, 1)))
            return lambda: None
        if base == "spop":
            queue = self.queues[given[0].strip("()")]
            # What the vector half sends is not known here. It sends what two cores check each other by, and no more.
            return self._set(op.to, queue.popleft() if queue else 0)
        if base == "dma":
            return self._copy(op)
        if base.startswith("v"):
            return self._synchronised(op)
        raise NotImplementedError(f"{op.name} is not known")

    def _set(self, to: str, value: int) -> Callable[[], None]:
        return lambda: self.registers.__setitem__(int(to[1:]), value & WORD)

    def _decide(self, to: str, value: bool) -> Callable[[], None]:
        return lambda: self.predicates.__setitem__(int(to[1:]), value)

    def _value(self, word: str) -> int:
        return int(word[1:], 0) & WORD if word[0] == "$" else self.registers[int(word[1:])]

    def _decided(self, word: str) -> bool:
        return self.predicates[int(word.strip("!p"))] != word.startswith("!")

    def _address(self, text: str) -> int:
        """That of "[space:a+b]"."""
        return sum(map(self._value, text.strip("[]").partition(":")[2].split("@")[0].split("+"))) & WORD

    # Copies are in order, and there is one bandwidth for all.

    def _copy(self, op: _Op) -> Callable[[], None]:
        to, _, flag = op.to.partition(", ")
        source = op.given[0]
        (length,) = (self._value(word.partition(":")[2]) for word in op.given if word.startswith("length:"))
        spaces = {re.sub(r"^\[(?:self_)?", "", part).partition(":")[0] for part in (to, source)}
        self.copied = max(self.copied, self.clock) + 32 * length * self.chip.clock / self.chip.bandwidth
        arrival = max(self.copied, self.clock + LATENCY * self.chip.clock)
        self.copies[self._address(flag)].append((arrival, length))
        if "hbm" in spaces and "vmem" in spaces:
            self.bytes += 32 * length
        if to.startswith("[smem:") and self.wanted:
            self._put(self._address(to), self.wanted.popleft())
        return lambda: None

    def _synchronised(self, op: _Op) -> Callable[[], None]:
        if op.name == "vwait.ge":
            flag, wanted = self._address(op.given[0]), _signed(self._value(op.given[1]))
            coming = sorted(self.copies[flag])
            while self.flags[flag] < wanted and coming:
                arrival, length = coming.pop(0)
                self.flags[flag] += length
                self.clock = max(self.clock, arrival)
            self.copies[flag] = coming
        elif op.base == "vsyncadd":
            self.flags[self._address(op.to)] += _signed(self._value(op.given[0]))
        elif op.base in ("vsyncpa", "vsyncset"):
            self.flags[self._address(op.to)] = 0
        elif op.base == "vsyncmov":
            self.queues["sfrf"].append(self.flags[self._address(op.given[0])])
        return lambda: None

    def _estimate(self) -> Estimate:
        bundles, used = 0, [0] * len(self.program.units)
        before = [[0] * len(used)]
        for row in self.program.use:
            before.append([x + y for x, y in zip(before[-1], row, strict=True)])
        for (place, upto), times in self.visits.items():
            bundles += times * (upto - place)
            first, last = (before[min(at - self.program.start, len(before) - 1)] for at in (place, upto))
            used = [total + times * (y - x) for total, x, y in zip(used, first, last, strict=True)]
        spilling = self.program.units.index("VSTORE:SPILL")
        units = {
            unit: total / (bundles * slots)
            for unit, total, slots in zip(self.program.units, used, self.program.slots, strict=True)
        }
        return Estimate(
            bundles=bundles,
            cycles=self.clock,
            microseconds=1e6 * self.clock / self.chip.clock,
            bytes=self.bytes,
            spills=sum(row[spilling] for row in self.program.use),
            units=units,
        )
