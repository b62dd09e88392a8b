"""Kernels address arrays of more than 2 ** 31 elements, whose offsets take 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_triton import flash_attention, update_kv_pages
from ejkernel_triton.flash_attention import backward as flash_attention_bwd
from ejkernel_triton.interpreter import _launch, _lowering, interpreted, interpreted_registry
from ejkernel_triton.norms import BackwardConfig as Backward
from ejkernel_triton.norms import Config as Forward
from ejkernel_triton.norms import kernels as norms

REGISTRY = interpreted_registry(
    {
        "flash_attention.triton": flash_attention,
        "flash_attention_bwd.triton": flash_attention_bwd,
        "rms_norm.triton": norms.forward,
        "rms_norm_bwd.triton": norms.backward,
        "rms_norm_quantized.triton": norms.quantized,
        "update_kv_pages.triton": update_kv_pages,
    }
)
Shape = tuple[int, ...]
#: At the end of an input, in its last row.
ONES = 256


@pytest.fixture(name="launches")
def lowered_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The launches that a test lowers, with the shapes of their inputs. Memory that no program uses takes no room."""
    launches: list[Any] = []
    launch_of = _lowering.launch_of

    def recorded(params: Any, inputs: Any, outputs: Any) -> Any:
        launches.append((launch_of(params, inputs, outputs), inputs))
        return launches[-1][0]

    monkeypatch.setattr(_lowering, "launch_of", recorded)
    monkeypatch.setattr(_launch, "poison", np.zeros)
    with interpreted():
        yield launches


def lower(op: str, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], **options: Any) -> None:
    call = lambda **arrays: REGISTRY.call(op, **arrays, **options)
    jax.jit(call).lower(**structs(shapes, dtypes))


def structs(shapes: Mapping[str, Shape], dtypes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.bfloat16)) for name, shape in shapes.items()}


def last_elements(launch: Any, inputs: Any, places: Collection[int], rows: int = 1) -> list[float]:
    """The last elements of the outputs. The inputs at these places end with ones, and all else is 0.

    The programs of the last elements run: the first and the last one of the last of ``rows`` parts of the grid.
    """
    arrays = [np.zeros(array.shape, array.dtype) for array in inputs]
    for place in places:
        arrays[place].reshape(-1)[-min(ONES, inputs[place].shape[-1]) :] = 1
    count = math.prod(launch.grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "_ordered", lambda *_: (count - count // rows, count - 1))
        outputs = launch.run(arrays, _launch.Settings(races=False))
    return [float(output.flat[-1]) for output in outputs]


# -- attention -------------------------------------------------------------------------------------------------------

#: By the offsets that are large: the shape of queries, keys and values, and that of a bias and a mask.
ATTENTION: dict[str, tuple[Shape, Shape | None]] = {
    "tokens": ((1, 2**19 + 64, 32, 128), None),
    "batches": ((3, 2**18 + 64, 32, 128), None),
    "heads of a bias": ((1, 8192, 33, 16), (1, 33, 8192, 8192)),
    "tokens of a bias": ((1, 46400, 1, 16), (1, 1, 46400, 46400)),
}
#: By kernel: the inputs that are not zero, and the last elements of the results, for a head dim.
RESULTS: dict[str, tuple[tuple[int, ...], Callable[[int], list[float]]]] = {
    "attend": ((2, 4), lambda dim: [1 / 32, math.log(32)]),  # value and mask
    "exact_lse": ((2, 4), lambda dim: [math.log2(math.e), 1]),  # lse and mask
    "sum_over_keys": ((1, 2, 3, 7), lambda dim: [math.sqrt(dim)]),  # key, value, d_out and mask
    "sum_over_queries": ((0, 2, 3, 7), lambda dim: [math.sqrt(dim), 1, 0]),  # query, value, d_out and mask
    "sum_into_bias": ((2, 3, 7), lambda dim: [dim]),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(launches: list[Any], name: str) -> None:
    shape, bias = ATTENTION[name]
    shapes = dict.fromkeys(("query", "key", "value"), shape) | ({} if bias is None else {"bias": bias})
    wrt, dtypes = tuple(shapes), {"attention_mask": jnp.bool_, "lse": jnp.float32}
    options = {"sliding_window": (31, 0), "backend": "triton"}
    shapes |= {} if bias is None else {"attention_mask": bias}
    lower("flash_attention", shapes, dtypes, return_lse=True, **options)
    shapes |= {"out": shape, "d_out": shape, "lse": (shape[0], shape[2], shape[1])}
    lower("flash_attention_bwd", shapes, dtypes, wrt=wrt, **options)
    assert len(launches) == (3 if bias is None else 5)
    for launch, inputs in launches:
        kernel = launch.kernel.fn.__name__
        places, expected = RESULTS[kernel]
        rows = 1 if kernel == "sum_into_bias" else shape[0] * shape[2]
        assert last_elements(launch, inputs, places, rows) == pytest.approx(expected(shape[3]), rel=4e-3), kernel


# -- normalizations --------------------------------------------------------------------------------------------------

ROWS = (2**16 + 8, 2**15)
#: As long as a program of the backward can hold.
SHORT_ROWS = (2**17 + 8, 2**14)
#: Of a row that ends with ones, and is 0 before.
RSTD = (ROWS[1] / ONES) ** 0.5


@pytest.mark.parametrize("cfg", [Forward(1, 16), Forward(1, 4, 0, 4096)])
def test_normalization(launches: list[Any], cfg: Any) -> None:
    call = lambda arrays: REGISTRY.call("rms_norm", **arrays, cfg=cfg)
    # What is saved for the gradients is a result too, so the statistics are needed.
    jax.jit(lambda arrays: jax.vjp(call, arrays)).lower(structs({"x": ROWS, "residual": ROWS}, {}))
    ((launch, inputs),) = launches
    out, total, _, rstd = last_elements(launch, inputs, [0])
    assert (out, total, rstd) == pytest.approx((RSTD, 1, RSTD), rel=4e-3)


@pytest.mark.parametrize("cfg", [Forward(1, 16), Forward(1, 4, 0, 4096)])
def test_quantized_normalization(launches: list[Any], cfg: Any) -> None:
    lower("rms_norm_quantized", {"x": ROWS}, {}, quantize="int8_row", cfg=cfg)
    ((launch, inputs),) = launches
    value, scale, _ = last_elements(launch, inputs, [0])
    assert (value, scale) == pytest.approx((127, RSTD / 127), rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "wrt", "cfg"),
    [
        (SHORT_ROWS, ("x", "weight"), Backward(1, 16, 1024)),
        (SHORT_ROWS, ("x", "weight"), Backward(1, 16, 1024, 4096)),
        ((17, 2**27), ("weight",), Backward(1, 4, 1, 4096, 256)),
    ],
)
def test_gradients_of_a_normalization(launches: list[Any], shape: Shape, wrt: tuple[str, ...], cfg: Any) -> None:
    shapes = dict.fromkeys(("x", "out", "sum", "d_out", "d_sum"), shape) | {"weight": shape[1:], "rstd": shape[:1]}
    lower("rms_norm_bwd", shapes, {"rstd": jnp.float32}, wrt=wrt, cfg=cfg)
    ((launch, inputs),) = launches
    d_x, _, d_weight, _ = last_elements(launch, inputs, [0, 1, 2, 5 if "x" in wrt else 3, 7 if "x" in wrt else 5])
    assert (d_x, d_weight) == pytest.approx((2 - ONES / shape[1] if "x" in wrt else 0, 1), rel=4e-3)


# -- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_first_page", [False, True])
def test_the_last_token_of_a_cache(launches: list[Any], monkeypatch: pytest.MonkeyPatch, has_first_page: bool) -> None:
    monkeypatch.setattr(_launch.Launch, "_outputs", lambda launch, inputs: [inputs[-1]])
    cache = np.zeros((2**14 + 1, 64, 16, 128), np.int8)
    assert cache.size > 2**31
    tokens = np.ones((1, 8, 128), np.float16)
    slots, first_page = (
        np.array([slot], np.int32) for slot in ((63, 2**14) if has_first_page else (64 * 2**14 + 63, 0))
    )
    optional = {"first_page": jax.ShapeDtypeStruct((1,), jnp.int32)} if has_first_page else {}
    call = lambda *arrays, **options: REGISTRY.call("update_kv_pages", *arrays, **options)
    jax.jit(call).lower(tokens, tokens, jax.ShapeDtypeStruct(cache.shape, cache.dtype), slots, **optional)
    ((launch, _),) = launches
    (result,) = launch.run([tokens, 2 * tokens, slots, first_page, slots, slots, cache], _launch.Settings(races=False))
    np.testing.assert_array_equal(result[-1, -1], np.tile([[1], [2]], (8, 128)))
    assert not result[-1, :-1].any()
