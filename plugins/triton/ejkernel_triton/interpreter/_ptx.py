"""PTX inside a kernel: the few operations that kernels use, on the numbers of all threads at once."""

from __future__ import annotations

import operator
from typing import Any

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
