"""The update of pages in Triton: every configuration, memory of more than 2 ** 31 entries, and what a card compiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core
from ejkernel_core import Unsupported
from ejkernel_ops import update_kv_pages
from ejkernel_triton import update_kv_pages as kernel
from ejkernel_triton.interpreter import _launch, _lowering, interpreted, interpreted_registry
from ejkernel_triton.interpreter._compiled import kernels_in
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.update_kv_pages import pair
from ejkernel_triton.update_kv_pages._launch import MOST_WIDTH, Config

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

RNG = np.random.default_rng(3)
Shape = jax.ShapeDtypeStruct
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module", name="registry")
def _registry() -> Iterator[Any]:
    with interpreted():
        yield interpreted_registry({"update_kv_pages.triton": kernel, "update_kv_page_pair.triton": pair})


def stored(pages: np.ndarray, tokens: np.ndarray, slots: np.ndarray) -> np.ndarray:
    flat = pages.reshape(-1, *pages.shape[2:]).copy()
    for token, slot in zip(tokens, slots, strict=True):
        if 0 <= slot < len(flat):
            flat[slot] = token
    return flat.reshape(pages.shape)


@pytest.mark.parametrize("cfg", [Config(1, 1), Config(2, 4), Config(4, 2), Config(16, 16)], ids=str)
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(1, 5, 5), (3, 40, 64), (9, 512, 480)])
def test_every_configuration(registry: Any, heads: int, dim: int, value_dim: int, cfg: Config) -> None:
    """Also where a program has a part of a token, and where values are shorter than it."""
    assert (heads * dim > MOST_WIDTH) == (heads == 9)
    key, value = (RNG.normal(size=(7, heads, size)).astype(np.float32) for size in (dim, value_dim))
    key_pages, value_pages = (RNG.normal(size=(5, 3, heads, size)).astype(np.float32) for size in (dim, value_dim))
    slots = np.array([3, -1, 14, 15, 0, 7, -15], np.int32)
    results = registry.call("update_kv_page_pair", key, value, key_pages, value_pages, slots, cfg=cfg)
    np.testing.assert_array_equal(results[0], stored(key_pages, key, slots))
    np.testing.assert_array_equal(results[1], stored(value_pages, value, slots))
    if dim == value_dim:
        joined, both = np.stack([key_pages, value_pages], 3), np.stack([key, value], 2)
        pages = joined.reshape(5, 3, 2 * heads, dim)
        result = registry.call("update_kv_pages", key, value, pages, slots, cfg=cfg)
        np.testing.assert_array_equal(result, stored(pages, both.reshape(7, 2 * heads, dim), slots))


@pytest.mark.parametrize("has_first_page", [False, True])
def test_a_cache_of_more_than_2_31_entries(
    registry: Any, has_first_page: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offset of its last token needs 64 bits. Memory that no program uses takes no room."""
    launches: list[Any] = []
    launch_of = _lowering.launch_of
    monkeypatch.setattr(_lowering, "launch_of", lambda *args: launches.append(launch_of(*args)) or launches[-1])
    monkeypatch.setattr(_launch.Launch, "_outputs", lambda launch, inputs: [inputs[-1]])
    cache = np.zeros((2**14 + 1, 64, 16, 128), np.int8)
    assert cache.size > 2**31
    tokens = np.ones((1, 8, 128), np.float16)
    slots, first_page = (
        np.array([slot], np.int32) for slot in ((63, 2**14) if has_first_page else (64 * 2**14 + 63, 0))
    )
    call = lambda *arrays, **options: registry.call("update_kv_pages", *arrays, **options)
    optional = {"first_page": first_page} if has_first_page else {}
    jax.jit(call).lower(tokens, tokens, Shape(cache.shape, cache.dtype), slots, **optional)
    (launch,) = launches
    (result,) = launch.run([tokens, 2 * tokens, slots, first_page, slots, slots, cache], _launch.Settings(races=False))
    np.testing.assert_array_equal(result[-1, -1], np.tile([[1], [2]], (8, 128)))
    assert not result[-1, :-1].any()


def on_card(tokens: int, heads: int = 8, dim: int = 128, device_kind: str = H100, **dtypes: Any) -> Any:
    key = Shape((tokens, heads, dim), dtypes.get("key", jnp.bfloat16))
    pages = Shape((64, 64, 2 * heads, dim), dtypes.get("pages", jnp.bfloat16))
    inv = ejkernel_core.invocation("update_kv_pages", key, key, pages, Shape((tokens,), jnp.int32))
    return attrs.evolve(inv, platform="gpu", device_kind=device_kind, compute_capability=None)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "cfg"),
    [
        (8192, 8, 128, Config(2, 4)),
        (256, 8, 128, Config(1, 4)),
        (8192, 1, 64, Config(2, 1)),
        (9, 64, 256, Config(1, 16)),
    ],
)
def test_threads_have_a_few_loads_each(tokens: int, heads: int, dim: int, cfg: Config) -> None:
    inv = on_card(tokens, heads, dim)
    assert kernel.heuristic_cfg(inv) == cfg
    space = [*kernel.config_space(inv)]
    assert space[0] == cfg
    assert len({*space}) == len(space) >= 5


def test_what_is_refused() -> None:
    for key, pages in ((jnp.float32, jnp.float64), (jnp.float64, jnp.float32)):
        with jax.enable_x64(True), pytest.raises(Unsupported, match="takes float16, bfloat16, float32, and pages of"):
            kernel.heuristic_cfg(on_card(9, key=key, pages=pages))
    with pytest.raises(Unsupported, match=r"from compute capability 8.9 \(Ada\) on; this GPU has 8.0"):
        kernel.heuristic_cfg(on_card(9, pages=jnp.float8_e4m3fn, device_kind="NVIDIA A100-SXM4-80GB"))
    kernel.check_cfg(on_card(9, pages=jnp.float8_e4m3fn), Config())


@pytest.mark.parametrize("is_pair", [False, True])
def test_threads_move_16_bytes_at_once_and_nothing_else_is_launched(is_pair: bool) -> None:
    """Also where the pages of a layer are meant: its number goes to the kernel, and there is no other instruction.

    The pages have a barrier before the launch and after it: XLA would pass a part of a larger array as it is.
    """
    pages = Shape((64, 64, 8, 128), jnp.bfloat16)
    joined = Shape((64, 64, 16, 128), jnp.bfloat16)
    token = Shape((256, 8, 128), jnp.bfloat16)

    def step(key: Any, value: Any, slots: Any, first_page: Any, *cache: Any) -> Any:
        given = cache if is_pair else cache[0]
        return update_kv_pages(key, value, given, slots, first_page=first_page, backend="triton")

    arrays = [token, token, Shape((256,), jnp.int32), Shape((), jnp.int32), *([pages, pages] if is_pair else [joined])]
    with use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=AbstractDevice(H100, None, "gpu"))):
        lowered = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda",))
    text, count = lowered.as_text(), 2 if is_pair else 1
    names = re.findall(r"stablehlo\.(\w+)", text)
    assert {*names} == {"custom_call", "output_operand_alias", "reshape", "optimization_barrier"}
    assert names.count("optimization_barrier") == 2 * count
    barriers = re.findall(r"(%\w+) = stablehlo\.optimization_barrier (%[\w#]+)", text)
    (operands,) = re.findall(r"custom_call @\w+\((.*?)\)", text)
    assert [name for name, _ in barriers[:count]] == operands.split(", ")[-count:]
    (result,) = re.findall(r"(%\w+)(?::2)? = stablehlo\.custom_call", text)
    assert [name.partition("#")[0] for _, name in barriers[count:]] == [result] * count
    (compiled,) = kernels_in(lowered)
    assert compiled.ptx.count("ld.global.v4.b32") == compiled.ptx.count("st.global.v4.b32") == 2
    assert compiled.spilled == 0
