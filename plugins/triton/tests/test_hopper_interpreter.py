"""The interpreter of Gluon kernels for Hopper: right numbers, and an error or a wrong number for each mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_triton.interpreter import interpreted
from ejkernel_triton.launch import _jax_triton

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with interpreted():
        yield


def launch(
    kernel: str,
    arrays: Sequence[Any],
    *shapes: tuple[int, ...],
    aliases: dict[int, int] | None = None,
    **constants: Any,
) -> Any:
    outputs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    (result,) = _jax_triton.call(
        f"plugins.triton.tests.gluon_kernels:{kernel}",
        arrays,
        outputs,
        grid=(1,),
        constants=constants,
        num_warps=4,
        num_stages=1,
        compute_capability=(9, 0),
        name=kernel,
        aliases=aliases,
    )
    return np.asarray(jax.block_until_ready(result))


def product(seed: int, mistake: str | None = None) -> tuple[Any, Any]:
    """What the kernel computes, and the product, of five steps in a ring of two."""
    x, y = (
        jax.random.normal(key, shape, "bfloat16")
        for key, shape in zip(jax.random.split(jax.random.key(seed)), ((64, 310), (310, 64)), strict=True)
    )
    with interpreted(seed=seed):
        arrays = [_jax_triton.describe(x, (64, 64)), _jax_triton.describe(y, (64, 64))]
        actual = launch("multiply", arrays, (64, 64), STEPS=5, MISTAKE=mistake)
    return actual, np.asarray(x, np.float64) @ np.asarray(y, np.float64)


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_warps_that_wait_for_each_other_compute_the_product(seed: int) -> None:
    np.testing.assert_allclose(*product(seed), atol=1e-4)


@pytest.mark.parametrize("mistake", ["reads before the copy", "releases before the wait"])
def test_a_tile_that_is_read_too_early_or_too_late_has_other_values(mistake: str) -> None:
    """In most orders, of which each seed draws one."""

    def is_right(seed: int) -> bool:
        try:
            return np.allclose(*product(seed, mistake), atol=1e-4)
        except jax.errors.JaxRuntimeError:  # the fetching warp is so late that it misses a phase: a deadlock
            return False

    assert sum(map(is_right, range(5))) <= 2


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("never releases", "waits at a barrier, as do all its other groups of warps: a deadlock"),
        ("releases twice", "arrives at a barrier|a deadlock"),
        ("stores without a fence", "multiplies shared memory that was stored without fence_async_shared after it"),
    ],
)
def test_mistakes_between_groups_of_warps_are_named(mistake: str, message: str) -> None:
    with pytest.raises(Exception, match=rf"KernelError: kernel 'multiply', program .*({message})"):
        product(0, mistake)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("use_before_wait", "unsupported operand"),
        ("wait_before_init", "uses a barrier that has not been initialised"),
        ("take_part_of_nothing", "takes part 2 of 2 in shared memory"),
        ("view_as_another_type", "reinterprets shared memory, whose order depends on its layout"),
        ("sine", "has the PTX operation sin.approx.f32, which the interpreter does not support"),
    ],
)
def test_mistakes_are_named_with_their_line(kernel: str, message: str) -> None:
    with pytest.raises(Exception, match=rf"(?s)KernelError: kernel '{kernel}', program .*{message}.*gluon_kernels.py"):
        launch(kernel, [jnp.zeros(128)], (128,))


def test_the_copy_engine_adds_to_memory() -> None:
    x, sums = jax.random.normal(jax.random.key(0), (2, 64, 64))
    described = _jax_triton.describe(sums, (64, 64))
    actual = launch("add", [x, described], (64, 64), aliases={1: 0}, COUNT=3)
    np.testing.assert_allclose(actual, sums + 6 * x, atol=1e-5)


def test_ptx_is_run() -> None:
    x = jax.random.normal(jax.random.key(0), (128,))
    np.testing.assert_allclose(launch("tanh", [x], (128,)), np.tanh(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_numbers_of_8_bits_become_float16(dtype: str) -> None:
    """All of them, as words of two in shared memory."""
    from ejkernel_triton.split_keys import pairs

    numbers = np.random.default_rng(0).permutation(np.tile(np.arange(256, dtype=np.uint8), 16)).reshape(64, 64)
    numbers = numbers.view(jnp.dtype(dtype))
    code = {"float8_e4m3fn": pairs.FROM_FLOAT8, "int8": pairs.FROM_INT8}[dtype].value
    actual = launch("numbers_of_words", [_jax_triton.describe(jnp.asarray(numbers), (64, 64))], (64, 64), CODE=code)
    np.testing.assert_array_equal(actual, np.concatenate([numbers[:, ::2], numbers[:, 1::2]], 1).astype(np.float32))
