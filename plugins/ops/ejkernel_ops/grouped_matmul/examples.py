"""The examples that every kernel of ``grouped_matmul`` and its parts is tested on, and the calls that are measured."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example
from ejkernel_testing import pairwise

from .activations import ACTIVATIONS
from .samples import group_sizes
from .sizes import LAYERS, Layer

Arguments = dict[str, Any]
Row = Mapping[str, Any]
Call = Callable[[int], Arguments]

#: The sizes of the groups. They are not multiples of a block, some are empty, and some leave rows without a group.
SIZES: dict[str, tuple[int, ...]] = {
    "one-group": (75,),
    "uneven": (1, 70, 0, 33, 129, 2),
    "small": (3, 1, 15, 7, 0, 8, 2, 13, 5, 9),
    "one-has-all": (0, 0, 150, 0),
    "half": (11, 90, 40, 40),
    "rest-without-group": (17, 0, 64, 30),
    "no-rows": (0, 0),
}
FACTORS: dict[str, Sequence[Any]] = {
    "sizes": tuple(SIZES),
    "k": (64, 40, 1, 130, 257),
    "n": (32, 2, 74, 144, 300),
    "transpose": (False, True),
    "bias": (None, "own", "float32"),
    "activation": (None, *ACTIVATIONS),
    "part": (False, True),
    "preferred": (None, "float32"),
}
DIFFERENTIABLE = ("lhs", "rhs", "rhs_bias")
#: Each row of the grid has one of them, so that a pair of other values meets several.
DTYPES = ("float32", "bfloat16", "float16", "float64")


def examples() -> Iterator[Example]:
    """The examples of ``grouped_matmul``."""
    yield from faults()
    yield from subjects()
    yield from plain_subjects()
    for number, row in enumerate(pairwise(FACTORS)):
        dtype = DTYPES[number % len(DTYPES)]
        name = f"grid{number:02}-{dtype}-{_label(row)}"
        yield example(name, partial(grid, row, is_float64=dtype == "float64"), dtype=dtype)
    yield from (layer_call(layer) for layer in LAYERS)
    yield from (layer_call(layer, transpose=True) for layer in LAYERS)


def d_rhs_examples() -> Iterator[Example]:
    """The examples of ``grouped_matmul_d_rhs``."""
    factors = {name: FACTORS[name] for name in ("sizes", "k", "n", "transpose", "part", "preferred")}
    for number, row in enumerate(pairwise(factors)):
        dtype = DTYPES[number % len(DTYPES)]
        name = f"grid{number:02}-{dtype}-{_label(row)}"
        yield d_rhs_example(name, partial(d_rhs_grid, row, is_float64=dtype == "float64"), dtype=dtype)
    for name, sizes, k, n in (("plain-blocks", (64, 64), 64, 64), ("plain-blocks-and-a-tail", (170, 0, 119), 40, 72)):
        yield d_rhs_example(name, partial(_d_rhs_call, sizes, k, n), checks=frozenset({"values", "configurations"}))
    yield from (layer_d_rhs_call(layer) for layer in LAYERS)


# -- the grid --------------------------------------------------------------------------------------------------------


def grid(row: Row, draw: int, *, is_float64: bool = False) -> Arguments:
    """The arguments of one row of the grid. With ``is_float64``, no array is float32."""
    sizes = SIZES[row["sizes"]]
    arguments = call(draw, sizes, row["k"], row["n"], rest=9 if row["sizes"].startswith("rest") else 0)
    rhs = arguments["rhs"]
    if row["part"]:  # the last groups, but for one where there are several
        first, last = len(sizes) // 2, max(len(sizes) - 1, len(sizes) // 2 + 1)
        rhs, arguments["group_offset"] = rhs[first:last], np.array([first], np.int32)
    if row["bias"] is not None:
        bias = normal("rhs_bias", draw, (rhs.shape[0], row["n"]))
        arguments["rhs_bias"] = bias.astype(np.float32) if row["bias"] == "float32" and not is_float64 else bias
    if row["preferred"] is not None and not is_float64:
        arguments["preferred_element_type"] = row["preferred"]
    transposed = np.ascontiguousarray(rhs.swapaxes(1, 2)) if row["transpose"] else rhs
    return arguments | {"rhs": transposed, "transpose_rhs": row["transpose"], "activation": row["activation"]}


def _d_rhs_call(sizes: Sequence[int], k: int, n: int, draw: int) -> Arguments:
    """The gradient of the matrices of groups with these sizes."""
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    arrays = {"lhs": normal("lhs", draw, (sum(sizes), k)), "d_out": normal("d_out", draw, (sum(sizes), n))}
    return {**arrays, "boundaries": ends}


def d_rhs_grid(row: Row, draw: int, *, is_float64: bool = False) -> Arguments:
    sizes = SIZES[row["sizes"]]
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    rows = int(ends[-1]) + (9 if row["sizes"].startswith("rest") else 0)
    arguments = {
        "lhs": normal("lhs", draw, (rows, row["k"])),
        "d_out": normal("d_out", draw, (rows, row["n"])),
        "boundaries": ends[len(sizes) // 2 :] if row["part"] else ends,
        "transpose_rhs": row["transpose"],
    }
    if row["preferred"] is not None and not is_float64:
        arguments["preferred_element_type"] = row["preferred"]
    return arguments


def _label(row: Row) -> str:
    words = [name for name in ("transpose", "bias", "part", "preferred") if row.get(name)]
    return "-".join([row["sizes"], f"{row['k']}x{row['n']}", *words, *filter(None, [row.get("activation")])])


def call(draw: int, sizes: Sequence[int], k: int, n: int, rest: int = 0) -> Arguments:
    """A call of groups with these sizes, and ``rest`` rows that belong to none."""
    return {
        "lhs": normal("lhs", draw, (sum(sizes) + rest, k)),
        "rhs": normal("rhs", draw, (len(sizes), k, n)),
        "group_sizes": np.array(sizes, np.int32),
    }


# -- one example for each fault --------------------------------------------------------------------------------------

#: The arrays with a finite gradient, for calls with numbers that are not.
FINITE = {"infinite-without-group": ("lhs", "rhs"), "a-group-with-infinities": ("lhs",)}


def faults() -> Iterator[Example]:
    """Known faults of grouped products, and the limits of what may be called."""
    calls: dict[str, Call] = {
        "aligned": lambda draw: call(draw, (128, 256, 128), 128, 256),
        "more-groups-than-rows": lambda draw: call(draw, (1, 0) * 20, 24, 40),
        "without-columns": lambda draw: call(draw, (5, 9), 16, 0),
        "nothing-to-contract": lambda draw: call(draw, (5, 9), 0, 16) | {"rhs_bias": normal("rhs_bias", draw, (2, 16))},
        "sizes-of-other-integers": lambda draw: _with_sizes(call(draw, (30, 1, 50), 33, 47), np.uint8),
        # What stands in rows without a group, and in matrices of others, must not matter: 0 * inf is NaN.
        "infinite-without-group": _infinite_without_group,
        "a-group-with-infinities": _infinite_group,
        "swiglu-beyond-its-limits": lambda draw: (
            _scaled(call(draw, (40, 25), 48, 64), "lhs", 3.0) | {"activation": "swiglu_oai"}
        ),
        "aligned-part": lambda draw: (
            call(draw, (70, 0, 81), 64, 128)
            | {"group_sizes": np.array([31, 70, 0, 81, 9], np.int32)}
            | {"group_offset": _one(), "lhs": normal("lhs", draw, (191, 64))}
        ),
        # The second matrix is that of a group which there is not.
        "part-beyond-the-last-group": lambda draw: (
            call(draw, (7, 0), 24, 40)
            | {"group_sizes": np.array([20, 7], np.int32), "group_offset": _one()}
            | {"lhs": normal("lhs", draw, (30, 24))}
        ),
        "part-without-rows": lambda draw: (
            call(draw, (0, 0), 20, 36)
            | {"group_sizes": np.array([31, 0, 0, 9], np.int32), "group_offset": _one()}
            | {"lhs": normal("lhs", draw, (40, 20))}
        ),
    }
    for name, arguments in calls.items():
        yield example(name, arguments, **({"wrt": FINITE[name]} if name in FINITE else {}))
    yield example("aligned-bfloat16", calls["aligned"], dtype="bfloat16")
    yield example("many-groups", lambda draw: call(draw, tuple(range(1, 65)), 72, 136), dtype="bfloat16", long=True)
    for precision in ("high", "default"):
        # Less exact on devices that have faster products, where it is not a fault.
        yield example(
            f"precision-{precision}",
            _with(lambda draw: call(draw, (33, 40), 64, 48), {"precision": precision}),
            dtype="bfloat16",
        )


def _with(arguments: Call, changes: Arguments) -> Call:
    return lambda draw: arguments(draw) | changes


def _one() -> np.ndarray:
    return np.array([1], np.int32)


def _with_sizes(arguments: Arguments, dtype: Any) -> Arguments:
    return arguments | {"group_sizes": arguments["group_sizes"].astype(dtype)}


def _scaled(arguments: Arguments, name: str, factor: float) -> Arguments:
    return arguments | {name: factor * arguments[name]}


def _infinite_without_group(draw: int) -> Arguments:
    arguments = call(draw, (30, 0, 21), 40, 48, rest=14)
    arguments["lhs"][51:] = np.inf
    arguments["rhs"][1] = np.nan  # of an empty group
    return arguments


def _infinite_group(draw: int) -> Arguments:
    arguments = call(draw, (30, 9, 21), 40, 48)
    arguments["lhs"][30:39], arguments["rhs"][1] = np.inf, 1.0
    return arguments


# -- subjects for transformations, sensitivity and accumulation ------------------------------------------------------


def everything(draw: int, sizes: Sequence[int] = (9, 0, 14), activation: str | None = "silu_gated") -> Arguments:
    arguments = call(draw, sizes, 24, 32, rest=2) | {"activation": activation}
    return arguments | {"rhs_bias": normal("rhs_bias", draw, (len(sizes), 32))}


def subjects() -> Iterator[Example]:
    transforms = {"jit", "vmap", "vmap_of_grad", "grad_of_vmap", "vmap_with_shared", "checkpoint", "scan"}
    yield example("everything", everything, checks={"values", *transforms})
    without_activation = partial(everything, activation=None)
    yield example("without-activation", without_activation, checks={"values", "jit", "checkpoint", "scan"})
    yield example("two-calls", everything, checks={"values", "programs"})
    yield example("sharded", without_activation, checks={"values", "sharding"})
    twice = lambda draw: call(draw, (5, 3), 4, 6) | {"rhs_bias": normal("rhs_bias", draw, (2, 6))}
    yield example("sharded-twice", twice, checks={"sharded_derivatives"}, long=True)
    yield example(
        "tiny",
        lambda draw: call(draw, (2, 1), 3, 4) | {"activation": "gelu_gated"},
        checks={"values", "forward_mode", "jacrev_of_jacrev"},
    )
    yield example(
        "sums-over-4096",
        lambda draw: call(draw, (5, 4096), 33, 16) | {"rhs_bias": normal("rhs_bias", draw, (2, 16))},
        dtype="bfloat16",
        checks={"accumulation"},
    )
    yield example("sums-of-4096", lambda draw: call(draw, (5, 40), 4096, 16), dtype="bfloat16", checks={"accumulation"})
    base = everything(0)
    changes: dict[str, Arguments] = {
        "without-bias": {"rhs_bias": None},
        "other-bias": {"rhs_bias": -base["rhs_bias"]},
        "other-rhs": {"rhs": -base["rhs"]},
        "other-sizes": {"group_sizes": np.array([1, 12, 8], np.int32)},
        "without-activation": {"activation": "gelu_gated"},
        "interleaved": {"activation": "swiglu_oai"},
        "offset": {"group_sizes": np.array([3, 9, 0, 10], np.int32), "group_offset": _one()},
    }
    variations = tuple(example(name, _with(everything, change)) for name, change in changes.items())
    yield example("one-at-a-time", everything, checks={"values", "sensitivity"}, variations=variations)


def plain_subjects() -> Iterator[Example]:
    """Each check on a call without a bias, an activation, an offset and rows of no group."""

    def small(draw: int) -> Arguments:
        return call(draw, (4, 0, 5), 16, 24)

    transforms = {"jit", "vmap", "vmap_of_grad", "grad_of_vmap", "vmap_with_shared", "checkpoint", "scan"}
    yield example("plain-transformed", small, checks={"values", *transforms})
    yield example("plain-two-calls", small, checks={"values", "programs"})
    tiny = lambda draw: call(draw, (2, 1), 3, 4)
    yield example("plain-tiny", tiny, checks={"values", "forward_mode", "jacrev_of_jacrev"})
    yield example(
        "plain-sums-over-4096",
        lambda draw: call(draw, (5, 4096), 33, 16),
        dtype="bfloat16",
        checks={"accumulation"},
    )
    changes: dict[str, Arguments] = {
        "other-rhs": {"rhs": -small(0)["rhs"]},
        "other-sizes": {"group_sizes": np.array([1, 6, 2], np.int32)},
    }
    variations = tuple(example(name, _with(small, change)) for name, change in changes.items())
    yield example("plain-one-at-a-time", small, checks={"values", "sensitivity"}, variations=variations)
    yield example("plain-blocks", lambda draw: call(draw, (64, 64), 64, 64), checks={"configurations"})
    tail = lambda draw: call(draw, (170, 0, 119), 40, 72)
    yield example("plain-blocks-and-a-tail", tail, checks={"configurations"})


# -- the calls that are measured, or compiled without a device -------------------------------------------------------


def layer_call(layer: Layer, *, transpose: bool = False) -> Example:
    """The product of a layer, or that of its gradient for ``lhs``, in bfloat16."""
    k = layer.n if transpose else layer.k

    def arguments(draw: int) -> Arguments:
        keys = jax.random.split(jax.random.key(draw), 3)
        return {
            "lhs": jax.random.normal(keys[0], (layer.rows, k), jnp.bfloat16),
            "rhs": jax.random.normal(keys[1], (layer.groups, layer.k, layer.n), jnp.bfloat16),
            "group_sizes": group_sizes(keys[2], layer.rows, layer.groups),
            "transpose_rhs": transpose,
        }

    name = f"{layer.name}, transposed" if transpose else layer.name
    return Example(
        name,
        "grouped_matmul",
        arguments,
        "bfloat16",
        () if transpose else ("lhs", "rhs"),
        checks=frozenset(),
        uses=frozenset(layer.uses),
    )


def layer_d_rhs_call(layer: Layer) -> Example:
    """The product of the gradient of a layer for ``rhs``, in bfloat16."""

    def arguments(draw: int) -> Arguments:
        keys = jax.random.split(jax.random.key(draw), 3)
        ends = jnp.cumsum(group_sizes(keys[2], layer.rows, layer.groups), dtype=jnp.int32)
        return {
            "lhs": jax.random.normal(keys[0], (layer.rows, layer.k), jnp.bfloat16),
            "d_out": jax.random.normal(keys[1], (layer.rows, layer.n), jnp.bfloat16),
            "boundaries": jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        }

    return Example(
        layer.name,
        "grouped_matmul_d_rhs",
        arguments,
        "bfloat16",
        checks=frozenset(),
        uses=frozenset(layer.uses),
    )


# -- parts of examples ------------------------------------------------------------------------------------------------


def example(name: str, arguments: Call, *, checks: Iterable[str] = ("values",), **fields: Any) -> Example:
    values = arguments(0)
    fields.setdefault("wrt", tuple(array for array in DIFFERENTIABLE if values.get(array) is not None))
    words = features(values, fields.get("dtype", "float32"), "rhs_bias", "group_offset")
    return Example(name, "grouped_matmul", arguments, features=words, checks=frozenset(checks), **fields)


def d_rhs_example(name: str, arguments: Call, **fields: Any) -> Example:
    words = features(arguments(0), fields.get("dtype", "float32"))
    return Example(name, "grouped_matmul_d_rhs", arguments, features=words, **fields)


def features(arguments: Arguments, dtype: str, *names: str) -> frozenset[str]:
    """The dtype, the activation, and the arguments that the call has."""
    words = {name for name in (*names, "transpose_rhs", "preferred_element_type", "precision") if _has(arguments, name)}
    return frozenset({dtype, *words, *filter(None, [arguments.get("activation")])})


def _has(arguments: Arguments, name: str) -> bool:
    value = arguments.get(name)
    return value is not None and value is not False


def normal(name: str, draw: int, shape: tuple[int, ...]) -> Any:
    """Normally distributed numbers, which depend only on the name, the draw and the shape."""
    return np.random.default_rng([zlib.crc32(name.encode()), draw]).standard_normal(shape)
