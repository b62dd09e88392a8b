"""Both launches of a call: the sums of each split, and their combination, which is that of the portable kernel."""

from __future__ import annotations

from typing import Any

from ejkernel_core import Invocation
from ejkernel_triton.flash_attention._problem import operands
from ejkernel_triton.flash_attention_decode._launch import combined, constants, outputs
from ejkernel_triton.flash_attention_decode._tiling import rows
from ejkernel_triton.flash_attention_decode_sm90 import _tiling
from ejkernel_triton.flash_attention_sm90._launch import tiled, width
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors
from ejkernel_triton.split_keys.shapes import registers

KERNEL = "ejkernel_triton.flash_attention_decode_sm90._device:attend"


def attention(inv: Invocation, splits: int, block: int, stages: int, num_warps: int, programs: int) -> tuple[Any, Any]:
    """The output, and the lse if it is needed."""
    key, value, sinks = inv["key"], inv["value"], inv["softmax_aux"]
    problem = _tiling.problem(inv)
    together, parts = problem.together[programs - 1], splits * problem.parts[programs - 1]
    arrays = (
        *(inv["query"], *(tiled(x, block, width(x.shape[3])) for x in (key, value))),
        *(inv["q_start"], inv["kv_lengths"], sinks),
    )
    sums = _jax_triton.call(
        KERNEL,
        operands(inv, arrays),
        outputs(inv, splits),
        scalars=(key.shape[1],),
        grid=(min(parts, programs * multiprocessors(inv)),),
        constants={
            **constants(inv, splits),
            "TOGETHER": together,
            "TILES": -(-rows(inv)[1] // together),
            "PARTS": parts,
            "SINKS": 0 if sinks is None else sinks.shape[1],
            "BLOCK": block,
            "STAGES": stages,
            "WARPS": num_warps,
        },
        num_warps=num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name="flash_attention_decode_gluon_sm90",
        max_registers=registers(num_warps, programs) if programs > 1 else None,
    )
    return combined(inv, sums, splits)
