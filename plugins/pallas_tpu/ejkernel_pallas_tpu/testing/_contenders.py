"""Ours beside JAX's own attention for TPUs, each as a function of queries, keys and values with heads first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import ejkernel_core
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd

from ._registry import interpreted_registry

Attention = Callable[[Any, Any, Any], Any]
FUSED = "fused"
KERNELS = {"flash_attention.pallas_tpu": flash_attention, "flash_attention_bwd.pallas_tpu": flash_attention_bwd}


@attrs.frozen
class Shape:
    """A causal call in bfloat16."""

    name: str
    length: int
    heads: int = 8
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None

    @property
    def blocks(self) -> tuple[int, ...]:
        """What is worth trying for others: small ones lose where there are many of them."""
        return (512, 1024) if self.length <= 4096 else (1024,)

    def arrays(self, repeated: bool) -> list[Any]:
        """Heads first; keys and values repeated for those who know no groups."""
        kv_heads = self.heads if repeated else self.kv_heads
        sizes = [(1, heads, self.length, self.dim) for heads in (self.heads, kv_heads, kv_heads)]
        return [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]


SHAPES = (
    Shape("S 4096", 4096),
    Shape("GQA 4:1", 4096, kv_heads=2),
    Shape("S 16384", 16384),
    Shape("D 64", 4096, dim=64),
    Shape("D 256", 4096, dim=256),
    Shape("window 1024", 4096, window=1024),
)


@attrs.frozen(eq=False)
class Contender:
    """An attention, in the blocks that are worth trying: the best of them counts."""

    name: str
    repeated: bool
    variants: Mapping[str, Callable[[Any], Attention]]

    def in_direction(self, direction: str) -> list[str]:
        """Those that differ in it: a fused backward has the same forward."""
        return [variant for variant in self.variants if direction != "forward" or FUSED not in variant]


def ours(shape: Shape) -> Contender:
    def attention(registry: Any) -> Attention:
        def attend(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
            window = None if shape.window is None else (shape.window - 1, 0)
            out = registry.call("flash_attention", q, k, v, causal=True, sliding_window=window, backend="pallas_tpu")
            return jnp.swapaxes(out, 1, 2)

        return attend

    return Contender("ours", False, {"": attention})


def jax_flash(shape: Shape) -> Contender:
    from jax.experimental.pallas.ops.tpu import flash_attention as theirs

    def attention(block: int) -> Callable[[Any], Attention]:
        names = [name for name in theirs.BlockSizes.__dataclass_fields__ if name != "block_b"]
        sizes = theirs.BlockSizes(block_b=1, **dict.fromkeys(names, block))
        return lambda registry: (
            lambda q, k, v: theirs.flash_attention(q, k, v, causal=True, sm_scale=0.1, block_sizes=sizes)
        )

    return Contender("flash", True, {str(block): attention(block) for block in shape.blocks})


def jax_splash(shape: Shape) -> Contender:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def attention(block: int, fused: bool) -> Callable[[Any], Attention]:
        every = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
        parts: dict[str, Any] = dict.fromkeys(every[:4] if fused else every, block)
        sizes = kernels.BlockSizes(use_fused_bwd_kernel=fused, **parts)
        square = (shape.length, shape.length)
        mask = masks.CausalMask(square) if shape.window is None else masks.LocalMask(square, (shape.window - 1, 0), 0)
        made = kernels.make_splash_mha(
            masks.MultiHeadMask([mask] * shape.heads), block_sizes=sizes, head_shards=1, q_seq_shards=1
        )
        return lambda registry: lambda q, k, v: made(q[0], k[0], v[0])[None]

    choices = [(block, fused) for block in shape.blocks for fused in (False, True)]
    return Contender(
        "splash", False, {f"{block}{f', {FUSED}' * fused}": attention(block, fused) for block, fused in choices}
    )


def with_gradients(attention: Attention) -> Callable[..., Any]:
    """The gradients of a weighted sum, which need the output, too."""

    def both(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(jnp.ones_like(out))

    return both


def prefetched(function: Callable[..., Any], given: Sequence[Any]) -> dict[str, list[list[int]]]:
    """What each kernel of a call gets into scalar memory, in words of 32 bits, by its name; nothing is computed."""
    found: dict[str, list[list[int]]] = {}

    def recorded(kernel: Any, out_shape: Any, *, grid_spec: Any = None, name: str | None = None, **more: Any) -> Any:
        def called(*operands: Any) -> Any:
            count = getattr(grid_spec, "num_scalar_prefetch", 0)
            scalars = [np.asarray(operand) for operand in jax.tree.leaves(operands[:count])]
            found[str(name)] = [words(scalar) for scalar in scalars]
            return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_shape)

        return called

    with _replaced(recorded), jax.disable_jit():
        function(*(jnp.zeros(x.shape, x.dtype) for x in given))
    return found


@contextlib.contextmanager
def _replaced(recorded: Any) -> Iterator[None]:
    real = pl.pallas_call
    pl.pallas_call = recorded
    try:
        yield
    finally:
        pl.pallas_call = real


def words(scalars: np.ndarray) -> list[int]:
    """Numbers as they lie in scalar memory: of bytes, four rows side by side share the words of 128 columns."""
    if scalars.dtype.itemsize == 4:
        return [int(x) for x in scalars.ravel()]
    rows, columns = scalars.shape[-2:]
    high, wide = -(-rows // 4), -(-columns // 128)
    padded = np.zeros((*scalars.shape[:-2], 4 * high, 128 * wide), np.uint8)
    padded[..., :rows, :columns] = scalars.view(np.uint8)
    parts = padded.reshape(-1, high, 4, wide, 128).transpose(0, 1, 3, 4, 2)
    return [int(x) for x in np.ascontiguousarray(parts).view("<u4").ravel()]


def registry_of(device_kind: str) -> ejkernel_core.Registry:
    return interpreted_registry(KERNELS, device_kind=device_kind)
