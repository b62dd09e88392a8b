"""``run_triton`` under ``vmap``: one launch where that can be, else a loop that is told; interpreted on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_classes import Kernel, _bridge

pytest.importorskip("triton")

import triton
import triton.language as tl

from ejkernel_triton.interpreter import interpreted
from ejkernel_triton.launch import _jax_triton

if _jax_triton.missing():
    pytest.skip(_jax_triton.missing(), allow_module_level=True)

ROWS = jax.random.normal(jax.random.key(0), (3, 20))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(_bridge.METHODS, "triton", {"cpu": 40})
    with interpreted():
        yield


@triton.jit
def double(x, n, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)


#: The number of elements of each launch, as traced.
launches: list[int] = []


def doubled(x: Any) -> Any:
    launches.append(x.size)
    (out,) = _jax_triton.call(
        double,
        [x],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        scalars=(x.size,),
        grid=(-(-x.size // 16),),
        constants={"BLOCK": 16},
        num_warps=4,
        num_stages=2,
        compute_capability=(9, 0),
        name="double",
    )
    return out


@jax.custom_batching.custom_vmap
def batched(x: Any) -> Any:
    return doubled(x)


@batched.def_vmap
def _(size: int, mapped: Any, x: Any) -> Any:
    return batched(x), True


class Looping(Kernel[Any, jax.Array]):
    def run(self, x: Any, *, cfg: Any) -> Any:
        return 2 * x

    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        return doubled(x)

    def heuristic_cfg(self, inv: Any) -> Any:
        return None


class AtOnce(Looping):
    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        return batched(x)


class Plain(Looping):
    """What needs no launch at all."""

    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        return x * 2


class Unfinished(Looping):
    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        raise NotImplementedError("of the method's own")


class Backward(Looping):
    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        return (doubled(cotangents[0]),)


def loops(function: Any, x: Any) -> bool:
    return "stablehlo.while" in jax.jit(function).lower(x).as_text()


def test_alone() -> None:
    for kernel in (Looping(), AtOnce()):
        np.testing.assert_array_equal(kernel(ROWS[0]), 2 * ROWS[0])
        assert kernel.plan(ROWS[0]).kernel.backend == "triton"


@pytest.mark.parametrize("kernel", [AtOnce(), Plain()], ids=["custom_vmap", "plain"])
def test_one_launch_for_all_elements(kernel: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launches.clear()
        np.testing.assert_array_equal(jax.vmap(kernel)(ROWS), 2 * ROWS)
        assert {*launches} <= {20, 60}
        assert (60 in launches) == isinstance(kernel, AtOnce)
        assert not loops(jax.vmap(kernel), ROWS)
        rows = jnp.stack([ROWS, ROWS + 1])
        np.testing.assert_array_equal(jax.vmap(jax.vmap(kernel))(rows), 2 * rows)
        assert not loops(jax.vmap(jax.vmap(kernel)), rows)


def test_a_loop_is_told_with_what_to_do() -> None:
    kernel = Looping()
    told = (
        "Looping.run_triton runs 3 times, in a loop, for a mapped axis of 3: .*takes a jax.custom_batching.custom_vmap"
    )
    launches.clear()
    with pytest.warns(RuntimeWarning, match=told):
        np.testing.assert_array_equal(jax.vmap(kernel)(ROWS), 2 * ROWS)
    assert {*launches} == {20}
    with pytest.warns(RuntimeWarning, match=told):
        assert loops(jax.vmap(kernel), ROWS)
    rows = jnp.stack([ROWS, ROWS + 1])
    with pytest.warns(RuntimeWarning, match=told.replace("3", "2")):
        np.testing.assert_array_equal(jax.vmap(jax.vmap(kernel))(rows), 2 * rows)


def test_a_backward_that_launches_is_looped_over_too() -> None:
    gradient = jax.vmap(jax.grad(lambda x: (Backward()(x) ** 2).sum()))
    with pytest.warns(RuntimeWarning, match=r"Backward.custom_vjp runs 3 times, in a loop"):
        np.testing.assert_allclose(gradient(ROWS), 8 * ROWS, rtol=1e-6)


def test_an_error_of_the_methods_own_is_raised() -> None:
    with (
        pytest.warns(RuntimeWarning, match="of the method's own"),
        pytest.raises(NotImplementedError, match="of the method's own"),
    ):
        jax.vmap(Unfinished())(ROWS)


def test_a_callback_that_says_how_it_is_mapped_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def host(x: Any) -> Any:
        sizes.append(np.shape(x))
        return 2 * np.asarray(x)

    class Calling(Looping):
        method: str | None = None

        def run_triton(self, x: Any, *, cfg: Any) -> Any:
            return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method=self.method)

    class CallingAtOnce(Calling):
        method = "expand_dims"

    np.testing.assert_array_equal(jax.vmap(CallingAtOnce())(ROWS), 2 * ROWS)
    assert sizes == [(3, 20)]
    sizes.clear()
    with pytest.warns(RuntimeWarning, match="Calling.run_triton runs 3 times"):
        np.testing.assert_array_equal(jax.vmap(Calling())(ROWS), 2 * ROWS)
    assert sizes == [(20,)] * 3


def test_other_methods_are_never_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_bridge.METHODS, "pallas", {"cpu": 50})

    class Tpu(Looping):
        run_pallas = Looping.run

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not loops(jax.vmap(Tpu()), ROWS)
        np.testing.assert_array_equal(jax.vmap(Tpu())(ROWS), 2 * ROWS)
