"""PTX inside a kernel: the few operations that kernels use, on the numbers of all threads at once."""

from __future__ import annotations

import operator
import re
from typing import Any

import ml_dtypes
import numpy as np

from ._faults import Fault
from ._memory import Array

OPERATIONS: dict[str, Any] = {
    "abs.f32": abs,
    "max.f32": np.maximum,
    "mul.f32": operator.mul,
    "fma.rn.f32": lambda x, y, z: x * y + z,
    "ex2.approx.ftz.f32": np.exp2,
    "tanh.approx.f32": np.tanh,
    "setp.gt.f32": operator.gt,
    "vote.sync.any.pred": lambda p, lanes: np.full(p.shape, p.any()),
}


def _permuted(first: Array, second: Array, selector: Array) -> Array:
    """Four of the eight bytes of two words, by the digits of the selector."""
    words = first.astype(np.uint64) | (second.astype(np.uint64) << np.uint64(32))
    digits = [int(selector.flat[0]) >> 4 * i & 7 for i in range(4)]
    picked = (words >> np.uint64(8 * digit) & np.uint64(0xFF) for digit in digits)
    return sum(byte << np.uint64(8 * i) for i, byte in enumerate(picked)).astype(np.uint32)  # type: ignore[union-attr]


def _from_float8(pair: Array) -> Array:
    """Two numbers of 8 bits in the lower half of a word, as two of float16."""
    numbers = [(pair >> shift & 0xFF).astype(np.uint8).view(ml_dtypes.float8_e4m3fn) for shift in (0, 8)]
    return _word(*(number.astype(np.float16) for number in numbers))


def _word(first: Array, second: Array) -> Array:
    """Two numbers of 16 bits in one word."""
    return first.view(np.uint16).astype(np.uint32) | second.view(np.uint16).astype(np.uint32) << 16


def _halves(word: Array, dtype: Any) -> list[Array]:
    return [(word >> shift & 0xFFFF).astype(np.uint16).view(dtype) for shift in (0, 16)]


def _subtracted(first: Array, second: Array) -> Array:
    pairs = zip(_halves(first, np.float16), _halves(second, np.float16), strict=True)
    return _word(*(x - y for x, y in pairs))


#: Those on words of 32 bits. The names of halves are of what `mov.b32` takes apart.
WORD_OPERATIONS: dict[str, Any] = {
    "mov.b32": lambda x: x,
    "xor.b32": operator.xor,
    "prmt.b32": _permuted,
    "cvt.rn.f16x2.e4m3x2": _from_float8,
    "sub.rn.f16x2": _subtracted,
}


def run_on_words(code: str, numbers: Array, outputs: list[Any]) -> list[Array]:
    """The results in dtypes of 16 bits, for numbers of 16 bits, of which a word has two."""
    pairs = numbers.reshape(2, -1)
    registers: dict[str, Any] = {f"${len(outputs)}": _word(*pairs)}
    for line in code.strip("{} \n").split("\n"):
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name == ".reg":
            continue
        if name not in WORD_OPERATIONS:
            raise Fault(f"has the PTX operation {name}, which the interpreter does not support")
        parts = re.fullmatch(r"(\{.*\}|\S+), (.*)", rest)
        assert parts is not None, line
        targets, rest = parts.groups()
        operands = [_operand(registers, word, len(pairs[0])) for word in rest.split(", ")]
        result = WORD_OPERATIONS[name](*operands)
        if targets.startswith("{"):
            low, high = targets.strip("{}").split(", ")
            registers |= {low: result & 0xFFFF, high: result >> 16}
        else:
            registers[targets] = result
    return [
        np.concatenate(_halves(registers[f"${i}"], dtype)).reshape(numbers.shape) for i, dtype in enumerate(outputs)
    ]


def _operand(registers: dict[str, Any], word: str, count: int) -> Any:
    """A register, or a number in all threads."""
    return registers[word] if word in registers else np.full(count, int(word, 0), np.uint32)


def run(code: str, values: Array) -> tuple[Array, set[str]]:
    """The results, for numbers of (numbers of a thread, threads), and the operations that ran. All threads branch
    alike.
    """
    count = len(values)
    registers: dict[str, Any] = {f"${count + i}": x for i, x in enumerate(values)}
    lines = code.strip("{} \n").split("\n")
    statements = [statement.strip() for line in lines for statement in line.split(";") if statement.strip()]
    labels = {statement[:-1]: position for position, statement in enumerate(statements) if statement.endswith(":")}
    position, operations_run = 0, set[str]()
    while position < len(statements):
        words = statements[position].replace(",", "").split()
        position += 1
        if words[0].startswith("@"):
            position = labels[words[2]] if registers[words[0][1:]].all() else position
        elif words[0] == "bra.uni":
            position = labels[words[1]]
        elif words[0] in OPERATIONS:
            operations_run.add(words[0])
            operands = [
                registers[word] if word in registers else np.float32(float.fromhex(word) if "x" in word else word)
                for word in words[2:]
            ]
            registers[words[1]] = OPERATIONS[words[0]](*operands)
        elif words[0] != ".reg" and not words[0].endswith(":"):
            raise Fault(f"has the PTX operation {words[0]}, which the interpreter does not support")
    return np.stack([registers[f"${i}"] for i in range(count)]), operations_run
