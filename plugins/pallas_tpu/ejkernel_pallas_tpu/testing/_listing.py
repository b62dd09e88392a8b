"""The compiler's listing of a kernel: its final bundles of instructions, and the slots of each unit that they use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

#: Register names as the hardware has them ("s7", "p3"), and numbers. Addresses are sums, so each operand is one.
Operand = tuple[int | str, ...]


@attrs.frozen
class Instruction:
    """A scalar instruction, or a vector instruction by which the scalar half waits."""

    name: str
    result: str
    operands: tuple[Operand, ...]
    #: The predicate register and the value that it must have, else the instruction does nothing.
    predicate: tuple[str, bool] | None = None

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]


@attrs.frozen
class Product:
    """A vector instruction that sends rows to a matrix unit."""

    unit: int
    rows: int


@attrs.frozen(eq=False)
class Listing:
    """A kernel, bundle by bundle."""

    #: A branch ("sbr.rel") has two operands: the bundle that it leads to, and how many bundles are issued before.
    instructions: Sequence[Sequence[Instruction]]
    products: Sequence[Sequence[Product]]
    #: Index, register and memory space of each argument of the kernel.
    arguments: Sequence[tuple[int, str, str]]
    units: Sequence[str]
    slots: Sequence[int]
    #: For each bundle, how many slots of each unit it uses.
    uses: Sequence[Sequence[int]]


def read(folder: Path, kernel: str, delay: int | None) -> Listing:
    """The listing of a kernel, from the folder that the compiler wrote to.

    ``delay`` is how many bundles are issued between a branch and the one it leads to; None where branches differ.
    """
    bundles = [_bundle(*parts) for parts in _split(_file(folder, kernel, "-final_bundles.txt").read_text())]
    units, slots, uses = _utilization(_file(folder, kernel, "static-per-bundle-utilization.txt"))
    return Listing(
        instructions=_instructions(bundles, delay),
        products=[[_product(text) for text in bundle.texts if _is_product(text)] for bundle in bundles],
        arguments=sorted(argument for bundle in bundles for argument in bundle.arguments),
        units=units,
        slots=slots,
        uses=uses,
    )


def _file(folder: Path, kernel: str, end: str) -> Path:
    path = next(folder.glob(f"*-{kernel}-[0-9]*{end}"), None)
    if path is None:
        raise LookupError(f"the compiler wrote no file *{end} for the kernel {kernel}")
    return path


def _utilization(path: Path) -> tuple[list[str], list[int], list[list[int]]]:
    _, units, slots, _, *rows = path.read_text().splitlines()
    counts = [[int(count) for count in row.split()] for row in (slots, *rows) if row.strip()]
    return [unit.strip() for unit in units.split(",")], counts[0], counts[1:]


# -- bundles -------------------------------------------------------------------------------------------------------

#: An address, perhaps a word for its place in a loop, and ">" for each loop around it.
_HEADER = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?:[A-Z]{2})? *:[ >]*(?=\{)", re.MULTILINE)
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_ARGUMENT = re.compile(
    r"%s\d+_(s\d+) = inlined_call_operand\.(<no memory space>|\w+) \[shape: [^\]]*\].*?index: (\d+),"
)


@attrs.frozen
class _Bundle:
    texts: Sequence[str]
    #: The regions of the program that start and end here.
    starts: Sequence[str]
    ends: Sequence[str]
    arguments: Sequence[tuple[int, str, str]]


def _split(text: str) -> Iterator[tuple[str, str]]:
    """The code and the comments of each bundle. A comment may have several lines, and comments in it."""
    for bundle in _HEADER.split(text)[1:]:
        depth = 0
        code: list[str] = []
        comments: list[str] = []
        for part in re.split(r"(/\*|\*/)", bundle):
            if part in ("/*", "*/"):
                depth += 1 if part == "/*" else -1
            else:
                (comments if depth else code).append(part)
        yield "".join(code), "".join(comments)


def _bundle(code: str, comments: str) -> _Bundle:
    texts = [text.strip() for text in code.strip().strip("{}").split(";;")]
    regions = _REGION.findall(comments)
    return _Bundle(
        texts=[text for text in texts if text and "inlined_call_operand" not in text],
        starts=[region for kind, region in regions if kind != "End"],
        ends=[region for kind, region in regions if kind == "End"],
        arguments=[(int(match[3]), match[1], match[2]) for text in texts if (match := _ARGUMENT.search(text))],
    )


# -- instructions --------------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"%(\S+) = ([a-z][\w.]*)\s*(.*)", re.DOTALL)
#: "(!%p51_p0)", or with the value that the result keeps otherwise: it is in the same register.
_PREDICATE = re.compile(r"\((!?)%p\d+_(p\d+)(?:, %\w+)?\),?")
_REGISTER = re.compile(r"!?%[a-z]+\d+_([sp]\d+)")
_BRANCH = "sbr.rel"
#: Vector instructions by which the scalar half waits.
_WAITS = ("vwait", "vsync")
#: The most bundles that are issued after a branch, where branches differ.
MAX_DELAY = 6
#: Scalar instructions without an effect on a schedule, and those that only rename what is in a register.
_IDLE = ("sfence", "shalt", "strace", "ssettag", "scheck", "sdelay", "sphi", "int_to_ptr", "custom")


def _parts(text: str) -> tuple[str, str, str]:
    """The name of the result, that of the instruction, and the rest."""
    match = _INSTRUCTION.match(text)
    if match is None:
        raise ValueError(f"this instruction has an unknown form: {text!r}")
    return match[1], match[2], match[3]


def _is_scalar(text: str) -> bool:
    _, name, _ = _parts(text)
    return name.startswith(_WAITS) or not (name.startswith("v") or name.partition(".")[0] in _IDLE)


def _is_product(text: str) -> bool:
    return _parts(text)[1].startswith("vmatmul.")


def _product(text: str) -> Product:
    """A register holds more rows, the narrower their numbers are."""
    name = _parts(text)[1]
    unit = re.search(r"\.mxu(\d)", text)
    rows = 16 if ".bf16" in name else 32 if re.search(r"\.[su]?[f8]?8", name) else 8
    return Product(int(unit[1]) if unit else 0, rows)


def _instructions(bundles: Sequence[_Bundle], delay: int | None) -> list[list[Instruction]]:
    starts = {region: place for place, bundle in enumerate(bundles) for region in bundle.starts}
    addresses: dict[str, int] = {}

    def instruction(place: int, text: str) -> Instruction:
        if _parts(text)[1] != _BRANCH:
            return _instruction(text, addresses)
        target = re.search(r"target = \$region(\d+)", text)
        if target is None:
            raise ValueError(f"this branch has an unknown form: {text!r}")
        # A region without a start is behind the last bundle.
        operands = starts.get(target[1], len(bundles)), _delay(bundles, place) if delay is None else delay
        return Instruction(_BRANCH, "", tuple((operand,) for operand in operands), _predicate(text))

    return [
        [instruction(place, text) for text in bundle.texts if _is_scalar(text)] for place, bundle in enumerate(bundles)
    ]


def _delay(bundles: Sequence[_Bundle], branch: int) -> int:
    """The bundles that are issued after a branch: its region ends with the last of them, and where there are fewer than
    the most, an empty bundle follows.
    """
    for delay in range(1, MAX_DELAY + 1):
        place = branch + delay
        if place < len(bundles) and bundles[place].ends and (delay == MAX_DELAY or not bundles[place + 1].texts):
            return delay
    return 0


def _instruction(text: str, addresses: dict[str, int]) -> Instruction:
    result, name, rest = _parts(text)
    rest = _PREDICATE.sub("", rest)
    if name == "sst":  # [address] value
        rest = rest.replace("]] ", "]], ", 1)
    rest = re.sub(r"\[(?:thread|resolvable):\S*\]|(?<=\d) \[#\w+\]", "", rest)  # notes
    operands = tuple(_operand(part, addresses) for part in rest.split(",") if part.strip())
    return Instruction(name, result.rpartition("_")[2], operands, _predicate(text))


def _predicate(text: str) -> tuple[str, bool] | None:
    match = _PREDICATE.search(text)
    return (match[2], not match[1]) if match else None


def _operand(text: str, addresses: dict[str, int]) -> Operand:
    """The terms of "5", "%s279_s7", "!%p51_p0" or "[smem:[#allocation6 + %s16137_s16]]"."""
    return tuple(_term(term.strip(), addresses) for term in re.sub(r"[\[\]]|[sc]mem:", "", text).split("+"))


def _term(text: str, addresses: dict[str, int]) -> int | str:
    """A number or a register. An allocation gets an address that is far from those of all others."""
    register = _REGISTER.fullmatch(text)
    if register:
        return "!" * text.startswith("!") + register[1]
    if text.startswith("#"):
        return addresses.setdefault(text, (len(addresses) + 1) << 20)
    if re.fullmatch(r"%\d+", text):  # what the vector half has sent
        return 0
    return int(text.lstrip("$"), 0)
