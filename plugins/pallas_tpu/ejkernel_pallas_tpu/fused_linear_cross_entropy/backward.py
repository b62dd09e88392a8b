"""``fused_linear_cross_entropy_bwd`` on TPUs, in Pallas: the logits of each tile once more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_, instance_of

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy.definition import arithmetic_dtype, labels_of
from ejkernel_pallas_tpu.fused_linear_cross_entropy import _tuning
from ejkernel_pallas_tpu.grouped_matmul._tiles import Tile
from ejkernel_pallas_tpu.grouped_matmul._tuning import SIZE

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Behind plain JAX, which makes the logits once and not three times: this needs less memory, and more products.
PLATFORMS = {"tpu": 5}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@attrs.frozen
class Config:
    """The sizes of a tile: rows, and words of the vocabulary. It has all entries of a hidden state."""

    rows: int = attrs.field(default=512, validator=in_(_tuning.ROWS))
    columns: int = attrs.field(default=512, validator=SIZE)
    #: How many rows are multiplied at a time.
    chunk: int = attrs.field(default=_tuning.CHUNK, validator=in_(_tuning.CHUNKS))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The tile that takes the least time, by the bytes that it moves and the products that it makes."""
    return next(iter(config_space(inv)))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The tiles that fit into vector memory."""
    _tuning.check(inv)
    whole = _tuning.configs(inv, _tuning.gradient_memory, depths=(None,))
    return [Config(cfg.rows, cfg.columns, cfg.chunk) for cfg in whole]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    _tuning.check_config(inv, _whole(cfg), _tuning.gradient_memory)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The gradients of the arrays that ``wrt`` names."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array | None, ...]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    wrt = inv["wrt"]
    needs = {name: name in wrt and inv.needs(name) for name in ("hidden", "weight", "bias")}
    dtypes = {name: _dtype(inv, name) for name in wrt}
    by_name: dict[str, Any] = {}
    if "token_weights" in wrt and inv.needs("token_weights"):
        d_loss = inv["d_loss"]
        of_weights = inv["row_losses"] * (0 if d_loss is None else d_loss)
        by_name["token_weights"] = of_weights.astype(dtypes["token_weights"])
    if not _tuning.has_rows(inv):
        by_name |= {name: jnp.zeros(inv[name].shape, dtypes[name]) for name, is_needed in needs.items() if is_needed}
    elif any(needs.values()):
        deep = _with_two_entries(inv)
        gradients = _gradients(deep, _tuning.tile_of(deep, _whole(cfg)), needs, dtypes, interpret)
        by_name |= {name: _first_entries(array, inv[name].shape) for name, array in gradients.items()}
    return tuple(by_name.get(name) for name in wrt)


def _with_two_entries(inv: Invocation) -> Invocation:
    """A call whose hidden states have one entry, with another one of 0: JAX 0.10 lowers no product of one column."""
    if inv["hidden"].shape[-1] > 1:
        return inv
    arrays = {name: value for name, value in inv.items() if isinstance(value, jax.Array)}
    hidden, weight = inv["hidden"], inv["weight"]
    of_hidden = [(0, 0)] * (hidden.ndim - 1) + [(0, 1)]
    of_weight = [(0, 0), (0, 1)] if inv["transpose_weight"] else [(0, 1), (0, 0)]
    return inv.with_arrays({**arrays, "hidden": jnp.pad(hidden, of_hidden), "weight": jnp.pad(weight, of_weight)})


def _first_entries(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return array if array.shape == shape else array[tuple(map(slice, shape))]


def _gradients(
    inv: Invocation, tile: Tile, needs: dict[str, bool], dtypes: dict[str, Any], interpret: Any
) -> dict[str, jax.Array]:
    from ejkernel_pallas_tpu.fused_linear_cross_entropy._gradients import over_rows, over_words
    from ejkernel_pallas_tpu.fused_linear_cross_entropy._operands import filled_up, in_rows, without_filling
    from ejkernel_pallas_tpu.fused_linear_cross_entropy._rows import numbers_of

    numbers = numbers_of(inv, tile, labels_of(inv), interpret)
    arguments, limit = filled_up(in_rows(inv), tile), _tuning.vmem_limit(inv)
    by_name = {}
    if needs["hidden"]:
        (out,) = over_words(arguments, tile, numbers, dtypes["hidden"])((), interpret, limit)
        by_name["hidden"] = out.reshape(inv["hidden"].shape)
    if needs["weight"] or needs["bias"]:
        dtype = dtypes["weight"] if needs["weight"] else None
        bias, *weight = over_rows(arguments, tile, numbers, dtype, needs["weight"])((), interpret, limit)
        if needs["bias"]:
            by_name["bias"] = bias[0, : tile.all_columns].astype(dtypes["bias"])
        if weight:
            by_name["weight"] = without_filling(weight[0], inv["weight"].shape)
    return by_name


def vmem(inv: Invocation, cfg: Config) -> dict[str, int]:
    """At most how many bytes of vector memory each kernel takes."""
    tile = _tuning.tile_of(inv, _whole(cfg))
    most = _tuning.gradient_memory(inv, tile)
    of_statistics = _tuning.statistics_memory(inv, tile)
    return {"fold_logits": of_statistics, "gradient_of_rows": most, "gradient_of_words": most}


def _whole(cfg: Config) -> _tuning.Config:
    return _tuning.Config(cfg.rows, cfg.columns, None, cfg.chunk, cfg.interpret)


def _dtype(inv: Invocation, name: str) -> Any:
    """That of the array, or a wider one if the gradient is a partial sum on one device of several."""
    return arithmetic_dtype(inv[name]) if name in (inv["partial_sums"] or ()) else inv[name].dtype
