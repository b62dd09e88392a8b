"""``run_triton`` under ``vmap``: one launch if possible, else a loop with a warning. Interpreted on the CPU."""

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

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

ROWS = jax.random.normal(jax.random.key(0), (3, 20))


@pytest.fixture(autouse=True)
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(_bridge.METHODS, "triton", {"cpu": 40})
    with interpreted():
        yield


@triton.jit
def double(x, n, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, 2.0 * tl.load(x + index, mask=index < n), mask=index < n)


#: The number of elements of each traced launch.
launches: list[int] = []


def launch_double(x: Any) -> Any:
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
def batchable_double(x: Any) -> Any:
    return launch_double(x)


@batchable_double.def_vmap
def _(size: int, mapped: Any, x: Any) -> Any:
    return batchable_double(x), True


class Looping(Kernel[Any, jax.Array]):
    def run(self, x: Any, *, cfg: Any) -> Any:
        return 2 * x

    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        return launch_double(x)

    def heuristic_cfg(self, inv: Any) -> Any:
        return None


class Batched(Looping):
    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        return batchable_double(x)


class WithoutLaunch(Looping):
    """A kernel without a launch."""

    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        return x * 2


class Unfinished(Looping):
    def run_triton(self, x: Any, *, cfg: Any) -> Any:
        raise NotImplementedError("of the method's own")


class Backward(Looping):
    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        return (launch_double(cotangents[0]),)


def has_loop(function: Any, x: Any) -> bool:
    return "stablehlo.while" in jax.jit(function).lower(x).as_text()


def test_a_call_without_vmap() -> None:
    for kernel in (Looping(), Batched()):
        np.testing.assert_array_equal(kernel(ROWS[0]), 2 * ROWS[0])
        assert kernel.plan(ROWS[0]).kernel.backend == "triton"


@pytest.mark.parametrize("kernel", [Batched(), WithoutLaunch()], ids=["custom_vmap", "plain"])
def test_one_launch_for_all_elements(kernel: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launches.clear()
        np.testing.assert_array_equal(jax.vmap(kernel)(ROWS), 2 * ROWS)
        assert {*launches} <= {20, 60}
        assert (60 in launches) == isinstance(kernel, Batched)
        assert not has_loop(jax.vmap(kernel), ROWS)
        rows = jnp.stack([ROWS, ROWS + 1])
        np.testing.assert_array_equal(jax.vmap(jax.vmap(kernel))(rows), 2 * rows)
        assert not has_loop(jax.vmap(jax.vmap(kernel)), rows)


def test_a_loop_causes_a_warning_with_advice() -> None:
    kernel = Looping()
    message = (
        "Looping.run_triton runs 3 times, in a loop, for a mapped axis of 3: .*takes a jax.custom_batching.custom_vmap"
    )
    launches.clear()
    with pytest.warns(RuntimeWarning, match=message):
        np.testing.assert_array_equal(jax.vmap(kernel)(ROWS), 2 * ROWS)
    assert {*launches} == {20}
    with pytest.warns(RuntimeWarning, match=message):
        assert has_loop(jax.vmap(kernel), ROWS)
    rows = jnp.stack([ROWS, ROWS + 1])
    with pytest.warns(RuntimeWarning, match=message.replace("3", "2")):
        np.testing.assert_array_equal(jax.vmap(jax.vmap(kernel))(rows), 2 * rows)


def test_a_backward_that_launches_is_looped_over() -> None:
    gradient = jax.vmap(jax.grad(lambda x: (Backward()(x) ** 2).sum()))
    with pytest.warns(RuntimeWarning, match=r"Backward.custom_vjp runs 3 times, in a loop"):
        np.testing.assert_allclose(gradient(ROWS), 8 * ROWS, rtol=1e-6)


def test_an_error_of_the_method_is_raised() -> None:
    with (
        pytest.warns(RuntimeWarning, match="of the method's own"),
        pytest.raises(NotImplementedError, match="of the method's own"),
    ):
        jax.vmap(Unfinished())(ROWS)


def test_a_callback_with_a_vmap_method_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert not has_loop(jax.vmap(Tpu()), ROWS)
        np.testing.assert_array_equal(jax.vmap(Tpu())(ROWS), 2 * ROWS)
