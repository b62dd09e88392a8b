"""A layer with a mixture of experts on one device and on several: the programs of the guide."""

from __future__ import annotations

import math
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_ops import grouped_matmul, moe_combine, moe_order, moe_permute, moe_permute_matmul, moe_route

from ._devices import AXIS


@attrs.frozen
class Layer:
    """The sizes of a layer, by default of Qwen3-30B-A3B, and how many tokens there are on all devices."""

    tokens: int = 16384
    dim: int = 2048
    inner: int = 768
    experts: int = 128
    chosen: int = 8
    #: How many rows a device takes of each other one, relative to the average.
    room: float = 1.25
    dtype: str = "bfloat16"
    calls: int = 10

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The shape of each."""
        return {
            "router": (self.dim, self.experts),
            "up": (self.experts, self.dim, 2 * self.inner),
            "down": (self.experts, self.inner, self.dim),
        }

    def on_one(self, x: Any, router: Any, up: Any, down: Any) -> Any:
        """The whole layer."""
        routes = self._routes(x, router)
        hidden = moe_permute_matmul(x, routes.token_order, up, routes.group_sizes, self.chosen)
        out = grouped_matmul(_gated(hidden), down, routes.group_sizes)
        return moe_combine(out, routes.token_order, routes.weights)

    def of_all_tokens(self, x: Any, router: Any, up: Any, down: Any) -> Any:
        """In ``shard_map``: each device has all tokens and some experts."""
        routes = self._routes(x, router)
        first = jax.lax.axis_index(AXIS) * up.shape[0]
        hidden = moe_permute_matmul(x, routes.token_order, up, routes.group_sizes, self.chosen, group_offset=first)
        out = grouped_matmul(_gated(hidden), down, routes.group_sizes, group_offset=first)
        return jax.lax.psum(moe_combine(out, routes.token_order, routes.weights), AXIS)

    def with_exchange(self, x: Any, router: Any, up: Any, down: Any) -> Any:
        """In ``shard_map``: each device has some tokens and some experts. Rows without room are dropped."""
        routes = self._routes(x, router)
        rows = moe_permute(x, routes.token_order, self.chosen)
        sizes = routes.group_sizes.reshape(-1, up.shape[0])  # of each expert, by device
        devices, counts = sizes.shape[0], sizes.sum(1)
        firsts = jnp.cumsum(counts) - counts
        room = math.ceil(self.room * rows.shape[0] / devices)

        # row[d, i]: the number of the row that is sent to device d at place i. slot[r]: the place at which row r comes
        # back, all devices in one sequence. A place without a row, and a row without room, have a number that is too
        # large, for which _taken gives 0. All numbers differ, so that the gradient of _taken needs no atomic sums.
        place, number = jnp.arange(room), jnp.arange(rows.shape[0])
        beyond = rows.shape[0] + jnp.arange(devices * room).reshape(devices, room)
        row = jnp.where(place < counts[:, None], firsts[:, None] + place, beyond)
        device = (number[:, None] >= firsts + counts).sum(1)
        place_of_row = number - firsts[device]
        slot = jnp.where(place_of_row < room, device * room + place_of_row, devices * room + number)

        received = jax.lax.all_to_all(_taken(rows, row), AXIS, 0, 0).reshape(devices * room, -1)
        ends = jnp.minimum(jnp.cumsum(jax.lax.all_to_all(sizes, AXIS, 0, 0), 1), room)
        expert = (place[:, None] >= ends[:, None, :]).sum(-1).reshape(-1, 1)
        group_sizes, order = moe_order(expert, up.shape[0])  # empty places come behind the last group
        out = grouped_matmul(_gated(moe_permute_matmul(received, order, up, group_sizes, 1)), down, group_sizes)

        back = moe_combine(out, order, jnp.ones((devices * room, 1), out.dtype)).reshape(devices, room, -1)
        returned = jax.lax.all_to_all(back, AXIS, 0, 0).reshape(devices * room, -1)
        return moe_combine(_taken(returned, slot), routes.token_order, routes.weights)

    def _routes(self, x: Any, router: Any) -> Any:
        # In float32: with the rounding of bfloat16, the experts of many tokens would depend on how many a device has.
        return moe_route(jnp.matmul(x, router, preferred_element_type=jnp.float32), self.chosen)


def _gated(hidden: Any) -> Any:
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _taken(rows: Any, numbers: Any) -> Any:
    """The rows of these numbers, which are unique; 0 beyond the last one."""
    return rows.at[numbers].get(mode="fill", fill_value=0, unique_indices=True)
