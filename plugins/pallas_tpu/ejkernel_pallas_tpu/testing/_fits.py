"""Every configuration that is offered, through the compiler: does it fit, and was the estimate of its memory right?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import Invocation
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.flash_attention import _tuning
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd

from ._compiler import Compiler, in_main_memory

FORWARD, BACKWARD = "flash_attention", "flash_attention_bwd"


@attrs.frozen
class Call:
    """A causal call of four query heads and two of keys; with ``everything``, of all that the operation has."""

    name: str
    length: int = 4096
    dim: int = 128
    dtype: str = "bfloat16"
    everything: bool = False

    def arrays(self) -> dict[str, Any]:
        made = {"query": _array(1, self.length, 4, self.dim, dtype=self.dtype)}
        made |= dict.fromkeys(("key", "value"), _array(1, self.length, 2, self.dim, dtype=self.dtype))
        if self.everything:
            square = (self.length, self.length)
            ids = _array(1, self.length, dtype="int32")
            made |= {"q_segment_ids": ids, "kv_segment_ids": ids, "dropout_seed": _array(dtype="int32")}
            made |= {"bias": _array(1, 4, *square, dtype="float32"), "softmax_aux": _array(4, 2, dtype=self.dtype)}
            made |= {"attention_mask": _array(1, 1, *square, dtype="bool")}
        return made

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": True} | ({"dropout_prob": 0.1, "logits_soft_cap": 30.0} if self.everything else {})

    def of_backward(self) -> dict[str, Any]:
        """What the backward gets besides."""
        out, sums = self.arrays()["query"], _array(1, 4, self.length, dtype="float32")
        return {"out": out, "lse": sums, "d_out": out, "d_lse": sums}


def _array(*sizes: int, dtype: str) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


CALLS = (
    Call("D 128"),
    Call("D 64", dim=64),
    Call("D 256", dim=256),
    Call("float32", 2048, dtype="float32"),
    Call("everything", 2048, everything=True),
)
#: How a configuration of one pass is asked for, and what for.
PASSES = {
    "forward": (FORWARD, ()),
    "queries": (BACKWARD, ("query",)),
    "keys": (BACKWARD, ("key", "value")),
    "fused": (BACKWARD, ("query", "key", "value")),
    "bias": (BACKWARD, ("bias",)),
}


@attrs.frozen
class Use:
    """A pass in one shape: what the compiler says it takes, None where it does not fit; and what was reckoned with."""

    generation: str
    call: str
    which: str
    blocks: tuple[int, int]
    bytes: int | None
    estimate: int

    @property
    def right(self) -> bool:
        return self.bytes is not None and self.bytes <= self.estimate


def uses(compiler: Compiler, generation: str, calls: Sequence[Call] = CALLS) -> Iterator[Use]:
    for call in calls:
        for which in PASSES:
            if which != "bias" or call.everything:
                asked = _Asked(compiler, generation, call, which)
                yield from (asked.use(blocks) for blocks in _tuning.fitting(asked.invocation, which))


@attrs.frozen(eq=False)
class _Asked:
    """One pass of a call on chips of one generation."""

    compiler: Compiler
    generation: str
    call: Call
    which: str

    @property
    def arrays(self) -> dict[str, Any]:
        return self.call.arrays() | (self.call.of_backward() if self._op == BACKWARD else {})

    @property
    def options(self) -> dict[str, Any]:
        return self.call.options | ({"wrt": PASSES[self.which][1]} if self._op == BACKWARD else {})

    @property
    def _op(self) -> str:
        return PASSES[self.which][0]

    @property
    def invocation(self) -> Invocation:
        kind = self.compiler.mesh(self.generation).devices.flat[0].device_kind
        plan = ejkernel_core.plan(self._op, **self.arrays, **self.options, backend="reference")
        return attrs.evolve(plan.invocation, platform="tpu", device_kind=kind)

    def use(self, blocks: tuple[int, int]) -> Use:
        return Use(
            self.generation,
            self.call.name,
            self.which,
            blocks,
            self._taken(blocks),
            _tuning.needed(self.invocation, self.which, blocks),
        )

    def _taken(self, blocks: tuple[int, int]) -> int | None:
        cfg = self._config(blocks)

        def called(arrays: Any) -> Any:
            return ejkernel_core.call(self._op, **arrays, **self.options, backend="pallas_tpu", cfg=cfg)

        mesh, options = self.compiler.mesh(self.generation), in_main_memory(self.generation)
        try:
            program = self.compiler.compile(called, self.arrays, mesh=mesh, options=options)
        except jax.errors.JaxRuntimeError as refusal:
            if "vmem" not in str(refusal).lower():
                raise
            return None
        (kernel,) = program.kernels
        return program.vmem(kernel)

    def _config(self, blocks: tuple[int, int]) -> Any:
        if self._op == FORWARD:
            return flash_attention.Config(*blocks)
        first = flash_attention_bwd.heuristic_cfg(self.invocation)
        changes: Any = {self.which: flash_attention_bwd.Pass(*blocks)}
        return attrs.evolve(first, **changes)
