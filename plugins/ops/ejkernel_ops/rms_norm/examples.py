"""The examples that every kernel of a normalization is tested on, and the calls that are measured."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import numpy as np

from ejkernel_core import Example
from ejkernel_testing import TRANSFORMS, pairwise

from .axes import FORMATS
from .operation import DIFFERENTIABLE

Arguments = dict[str, Any]
Row = Mapping[str, Any]
Call = Callable[[int], Arguments]

FACTORS: dict[str, Sequence[Any]] = {
    "shape": ((3, 5), (33,), (1,), (2, 0, 3), (2, 3, 67)),
    "dim": (64, 1, 130, 1000, 7, 2560),
    "weight": ("own", "float32", None),
    "bias": (None, "own", "float32"),
    "residual": (None, "own", "float32"),
    "epsilon": (1e-6, 1e-2),
    "offset": (0.0, 1.0),
}


def examples(op: str) -> Iterator[Example]:
    """The examples of ``rms_norm`` or ``layer_norm``."""
    yield from faults(op)
    yield from subjects(op)
    yield from plain_subjects(op)
    for number, row in enumerate(pairwise(FACTORS, is_possible)):
        for dtype_index, dtype in enumerate(("float32", "bfloat16", "float16", "float64")):
            name = f"grid{number:02}-{dtype}-{_label(row)}"
            arguments = partial(grid, row, is_float64=dtype == "float64")
            yield example(op, name, arguments, dtype=dtype, long=number % 3 != dtype_index % 3)
    yield from measured(op)


def quantized_examples(op: str) -> Iterator[Example]:
    """The examples of the quantized form of ``op``."""
    for number, row in enumerate(pairwise({**FACTORS, "quantize": tuple(FORMATS)}, is_possible)):
        for dtype_index, dtype in enumerate(("float32", "bfloat16", "float16")):
            name = f"grid{number:02}-{dtype}-{row['quantize']}-{_label(row)}"
            arguments = partial(grid, row, quantize=row["quantize"])
            yield quantized(op, name, arguments, dtype=dtype, long=number % 3 != dtype_index % 3)
    for word in FORMATS:
        yield quantized(op, f"rows-of-zeros-{word}", with_changes(zeros, {"quantize": word}))
        checks = {"values", "jit", "vmap"}
        yield quantized(op, f"mapped-{word}", with_changes(small, {"quantize": word}), checks=checks)
        for name, call in blocks().items():
            yield quantized(op, f"{name}-{word}", with_changes(call, {"quantize": word}), checks={"configurations"})
        yield quantized(op, f"plain-mapped-{word}", partial(plain, (2, 5), 24, quantize=word), checks=checks)
        yield large(f"{op}_quantized", 16384, 4096, uses={"vmem", "estimate", "resources"}, quantize=word)


# -- the grid --------------------------------------------------------------------------------------------------------


def is_possible(row: Row) -> bool:
    """An offset needs a weight."""
    return row.get("weight", "own") is not None or not row.get("offset")


def grid(row: Row, draw: int, *, is_float64: bool = False, **options: Any) -> Arguments:
    """The arguments of one row of the grid. With ``is_float64``, no array is float32."""
    shape = (*row["shape"], row["dim"])
    # The gradient of a single entry is epsilon's share in a difference of equal numbers. If epsilon is small, float64
    # has too few digits for a comparison of its last ones.
    epsilon = 1.0 if is_float64 and row["dim"] == 1 else row["epsilon"]
    arguments = {"x": normal("x", draw, shape), "epsilon": epsilon, "weight_offset": row["offset"]}
    for name, own_shape in (("weight", shape[-1:]), ("bias", shape[-1:]), ("residual", shape)):
        if row[name] is not None:
            array = normal(name, draw, own_shape)
            arguments[name] = array.astype(np.float32) if row[name] == "float32" and not is_float64 else array
    return arguments | options


def _label(row: Row) -> str:
    names = [name for name in ("weight", "bias", "residual", "offset") if row[name]]
    return "-".join(["x".join(map(str, (*row["shape"], row["dim"]))), *names])


# -- one example for each fault --------------------------------------------------------------------------------------


def faults(op: str) -> Iterator[Example]:
    """Known faults of normalizations, and the limits of what may be called."""
    calls: dict[str, Callable[[int], Arguments]] = {
        "plain": lambda draw: {"x": normal("x", draw, (70, 200)), "weight": normal("weight", draw, (200,))},
        "one-row-without-axes": lambda draw: {"x": normal("x", draw, (96,)), "weight": normal("weight", draw, (96,))},
        "rows-of-zeros": zeros,
        "small-numbers-beside-epsilon": lambda draw: small(draw) | {"x": 1e-3 * normal("x", draw, (2, 5, 24))},
        "without-epsilon": lambda draw: small(draw) | {"epsilon": 0.0},
        # A variance that is computed as the difference of two large numbers would be wrong.
        "far-from-zero": lambda draw: {
            "x": 100 + normal("x", draw, (9, 300)),
            "weight": normal("weight", draw, (300,)),
        },
        "large-numbers": lambda draw: small(draw) | {"x": 1e4 * normal("x", draw, (2, 5, 24))},
        # The sum of x and the residual is rounded before it is normalized, and cancels here.
        "a-residual-that-cancels": cancelling,
        "more-rows-than-programs": lambda draw: {
            "x": normal("x", draw, (3, 701, 40)),
            "weight": normal("weight", draw, (40,)),
            "bias": normal("bias", draw, (40,)),
        },
        "longer-than-a-block": lambda draw: everything(draw, (3,), 9001),
    }
    for name, arguments in calls.items():
        yield example(op, name, arguments)
    yield example(op, "a-residual-that-cancels-bfloat16", cancelling, dtype="bfloat16")
    yield example(op, "longer-than-a-block-bfloat16", calls["longer-than-a-block"], dtype="bfloat16")
    yield example(op, "the-longest", lambda draw: everything(draw, (2,), 65536), long=True)


def plain(shape: tuple[int, ...], dim: int, draw: int, **options: Any) -> Arguments:
    """A call with a weight, and without anything that a kernel may refuse."""
    return {"x": normal("x", draw, (*shape, dim)), "weight": normal("weight", draw, (dim,)), **options}


def small(draw: int, shape: tuple[int, ...] = (2, 5)) -> Arguments:
    return {name: array for name, array in everything(draw, shape, 24).items() if name != "residual"}


def everything(draw: int, shape: tuple[int, ...], dim: int) -> Arguments:
    return {
        "x": normal("x", draw, (*shape, dim)),
        "weight": normal("weight", draw, (dim,)),
        "bias": normal("bias", draw, (dim,)),
        "residual": normal("residual", draw, (*shape, dim)),
        "weight_offset": 1.0,
    }


def with_changes(call: Call, changes: Arguments) -> Call:
    return lambda draw: call(draw) | changes


def zeros(draw: int) -> Arguments:
    arguments = small(draw)
    arguments["x"][:, ::2] = 0
    return {name: value for name, value in arguments.items() if name != "bias"}


def cancelling(draw: int) -> Arguments:
    arguments = everything(draw, (5,), 48)
    arguments["residual"] = 1e-2 * arguments["residual"] - 8 * arguments["x"]
    arguments["x"] = 8 * arguments["x"]
    return arguments


# -- subjects for transformations, sensitivity and accumulation ------------------------------------------------------


def subjects(op: str) -> Iterator[Example]:
    checks_of_folding = {
        "values",
        "jit",
        "vmap",
        "vmap_of_other_axes",
        "vmap_of_grad",
        "grad_of_vmap",
        "checkpoint",
        "scan",
    }
    all_arguments = partial(everything, shape=(2, 5), dim=24)
    yield example(op, "everything", all_arguments, checks={"values", "needed", *checks_of_folding})
    yield example(op, "everything-shared", all_arguments, checks={"vmap_with_shared"}, long=True)
    yield example(op, "without-a-residual", small, checks={"values", "vmap", "vmap_of_grad"})
    yield example(op, "sharded", partial(everything, shape=(8, 3), dim=24), checks={"values", "shard_map", "sharding"})
    twice = lambda draw: {"x": normal("x", draw, (4, 2, 6)), "weight": normal("weight", draw, (6,))}
    yield example(op, "sharded-twice", twice, checks={"sharded_derivatives"})
    checks_of_derivatives = {"values", "forward_mode", "jacrev_of_jacrev"}
    yield example(op, "tiny", partial(everything, shape=(2,), dim=5), checks=checks_of_derivatives)
    yield example(op, "two-calls", partial(everything, shape=(3,), dim=24), checks={"values", "programs"})
    long_axis = {"x": (8192, 32), "weight": (32,), "bias": (32,)}
    yield example(
        op,
        "sums-over-8192-rows",
        lambda draw: {name: normal(name, draw, shape) for name, shape in long_axis.items()},
        dtype="bfloat16",
        checks={"accumulation"},
    )
    base = everything(0, (2, 5), 24)
    changes: dict[str, Arguments] = {
        "without-weight": {"weight": None, "weight_offset": 0.0},
        "other-weight": {"weight": -base["weight"]},
        "without-bias": {"bias": None},
        "without-residual": {"residual": None},
        "other-residual": {"residual": 3 * base["residual"]},
        "epsilon": {"epsilon": 0.5},
        "weight_offset": {"weight_offset": 0.0},
    }
    variations = tuple(example(op, name, with_changes(all_arguments, change)) for name, change in changes.items())
    yield example(op, "one-at-a-time", all_arguments, checks={"values", "sensitivity"}, variations=variations)


def plain_subjects(op: str) -> Iterator[Example]:
    """Each check on a call with a weight alone, for kernels that refuse a bias, a residual or an offset."""
    transforms = {*TRANSFORMS} - {"shard_map", "sharding", "sharded_derivatives", "forward_mode", "jacrev_of_jacrev"}
    yield example(op, "plain-transformed", partial(plain, (2, 5), 24), checks={"values", *transforms})
    yield example(op, "plain-sharded", partial(plain, (8, 3), 24), checks={"values", "shard_map", "sharding"})
    checks_of_derivatives = {"values", "forward_mode", "jacrev_of_jacrev"}
    yield example(op, "plain-tiny", partial(plain, (2,), 5), checks=checks_of_derivatives)
    yield example(op, "plain-two-calls", partial(plain, (3,), 24), checks={"values", "programs"})
    yield example(op, "plain-long-rows", partial(plain, (3,), 40_000), checks={"needed"})
    rows = partial(plain, (8192,), 32)
    yield example(op, "plain-sums-over-8192-rows", rows, dtype="bfloat16", checks={"accumulation"})
    base = partial(plain, (2, 5), 24)
    changes: dict[str, Arguments] = {"other-weight": {"weight": -base(0)["weight"]}, "epsilon": {"epsilon": 0.5}}
    variations = tuple(example(op, name, with_changes(base, change)) for name, change in changes.items())
    yield example(op, "plain-one-at-a-time", base, checks={"values", "sensitivity"}, variations=variations)
    for name, arguments in blocks().items():
        yield example(op, name, arguments, checks={"configurations"})
    for dtype in ("bfloat16", "float16"):
        yield example(op, f"plain-weight-in-float32-{dtype}", weight_in_float32, dtype=dtype)
    yield example(op, "plain-one-row", partial(plain, (1,), 64))
    yield example(op, "plain-one-row-of-one-batch", partial(plain, (1, 1), 130))
    yield example(op, "plain-large-numbers", lambda draw: base(draw) | {"x": 1e5 * base(draw)["x"]})
    yield attrs.evolve(example(op, "plain-a-row-with-nan", nan_in_a_row), wrt=())


def weight_in_float32(draw: int) -> Arguments:
    arguments = plain((2, 5), 24, draw)
    return arguments | {"weight": arguments["weight"].astype(np.float32)}


def nan_in_a_row(draw: int) -> Arguments:
    """All of the row is NaN then, and no other row."""
    arguments = plain((2, 5), 24, draw)
    arguments["x"][1, 2, 7] = np.nan
    return arguments


def blocks() -> dict[str, Call]:
    """Calls of which blocks of most sizes have a part: of rows, with a tail, and of the entries of long rows."""
    shapes = {"plain-blocks": (64, 64), "plain-blocks-and-a-tail": (300, 40), "plain-blocks-of-long-rows": (5, 2100)}
    return {name: partial(plain, (rows,), dim) for name, (rows, dim) in shapes.items()}


# -- the calls that are measured, or compiled without a device -------------------------------------------------------


def measured(op: str) -> Iterator[Example]:
    """Calls in bfloat16 with a weight, of many numbers of rows and dims, and a few with a residual too."""
    for rows, dim in sweep():
        yield large(op, rows, dim, uses={"benchmark"} | _uses_of_compilers(rows, dim))
    for rows, dim in ((16384, 4096), (8192, 8192), (4096, 2048), (64, 4096)):
        yield large(op, rows, dim, "residual", uses={"benchmark"} | _uses_of_compilers(rows, dim) - {"vmem"})
    # Rows that fill neither blocks nor registers, in two dtypes.
    yield large(op, 4100, 1000, "bias", "residual", residual_dtype="float32", uses={"vmem"})


def sweep() -> Iterator[tuple[int, int]]:
    """(rows, dim), from the smallest calls to those of half a GB in bfloat16."""
    for dim in (64, 256, 1024, 4096, 8192, 16384, 65536):
        for rows in (1, 64, 1024, 16384, 65536):
            if rows * dim <= 2**28:
                yield rows, dim


def _uses_of_compilers(rows: int, dim: int) -> set[str]:
    """The uses by compilers: for GPUs, rows that are held in registers, up to the longest of the backward, and rows
    that are read twice; for TPUs, memory for the longest rows, and time for a usual call.
    """
    uses = {(1024, 65536): {"resources", "vmem"}, (16384, 4096): {"resources", "estimate"}, (8192, 8192): {"resources"}}
    return uses.get((rows, dim), set())


def large(
    op: str, rows: int, dim: int, *names: str, residual_dtype: str = "bfloat16", uses: Iterable[str], **options: Any
) -> Example:
    """A call of ``rows`` rows with a weight and the arrays in ``names``, drawn by JAX."""
    shapes = {"x": (rows, dim), "weight": (dim,), "bias": (dim,), "residual": (rows, dim)}
    dtypes = {name: residual_dtype if name == "residual" else "bfloat16" for name in shapes}

    def arguments(draw: int) -> Arguments:
        keys = dict(zip(shapes, jax.random.split(jax.random.key(draw), len(shapes)), strict=True))
        arrays = {name: jax.random.normal(keys[name], shapes[name], dtypes[name]) for name in ("x", "weight", *names)}
        return {**arrays, **options}

    wrt = () if options else ("x", "weight", *names)
    name = ", ".join([f"{rows} x {dim} bfloat16", *names, *options.values()])
    return Example(name, op, arguments, "bfloat16", wrt, checks=frozenset(), uses=frozenset(uses))


# -- parts of examples ------------------------------------------------------------------------------------------------


def example(op: str, name: str, arguments: Call, *, checks: Iterable[str] = ("values",), **fields: Any) -> Example:
    call = arguments(0)
    wrt = tuple(array for array in DIFFERENTIABLE if call.get(array) is not None)
    features = _features(call, fields.get("dtype", "float32"))
    return Example(name, op, arguments, wrt=wrt, features=features, checks=frozenset(checks), **fields)


def quantized(op: str, name: str, arguments: Call, *, checks: Iterable[str] = ("values",), **fields: Any) -> Example:
    call = arguments(0)
    features = _features(call, fields.get("dtype", "float32")) | {call["quantize"]}
    return Example(name, f"{op}_quantized", arguments, features=features, checks=frozenset(checks), **fields)


def _features(call: Arguments, dtype: str) -> frozenset[str]:
    """The dtype, the arguments that the call has, and "empty" where it has no rows."""
    names = {name for name in DIFFERENTIABLE if call.get(name) is not None and name != "x"}
    names |= {"weight_offset"} if call.get("weight_offset") else set()
    return frozenset(names | {dtype} | ({"empty"} if math.prod(call["x"].shape) == 0 else set()))


def normal(name: str, draw: int, shape: tuple[int, ...]) -> Any:
    """Normally distributed numbers, which depend only on the name, the draw and the shape."""
    return np.random.default_rng([zlib.crc32(name.encode()), draw]).standard_normal(shape)
