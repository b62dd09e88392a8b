"""An error names the line of the user's program: this file is the user's."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_core
import ejkernel_ops
from ejkernel_core import NoConfig, NoKernel, Registry, Unsupported, hookimpl, policy_override
from ejkernel_ops import flash_attention
from ejkernel_ops.jax_nn import dot_product_attention

X = jnp.ones((8, 4, 2, 8))
OURS = tuple(str(Path(package.__file__ or "").parent) for package in (ejkernel_core, ejkernel_ops, jax))


def one_layer(x: Any) -> Any:
    return ejkernel_core.call("flash_attention", x, x, x, backend="cudnn")


def other_layer(x: Any) -> Any:
    return flash_attention(x, x, x, backend="cudnn")


def right_layer(x: Any) -> Any:
    return ejkernel_core.call("flash_attention", x, x, x, backend="xla")


def wrong_layer(x: Any) -> Any:
    return flash_attention(x, x[..., :4], x)


def wrong_drop_in(x: Any) -> Any:
    return dot_product_attention(x, x[..., :4], x)


def in_shard_map(layer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    return jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("x"), out_specs=P("x")))


def on_sharded_arrays(layer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    return lambda x: jax.jit(layer)(jax.device_put(x, NamedSharding(mesh, P("x"))))


PROGRAMS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "eager": lambda layer: layer,
    "jit": jax.jit,
    "grad": lambda layer: jax.grad(lambda x: layer(x).sum()),
    "jit of grad": lambda layer: jax.jit(jax.grad(lambda x: layer(x).sum())),
    "vmap": lambda layer: lambda x: jax.vmap(layer)(x[None]),
    "jit of vmap": lambda layer: jax.jit(lambda x: jax.vmap(layer)(x[None])),
    "scan": lambda layer: lambda x: jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=2),
    "checkpoint": lambda layer: jax.jit(jax.grad(lambda x: jax.checkpoint(layer)(x).sum())),
    "eager checkpoint": lambda layer: jax.grad(lambda x: jax.checkpoint(layer)(x).sum()),
    "shard_map": in_shard_map,
    "sharded arrays": on_sharded_arrays,
}


def line_of(layer: Any) -> str:
    """The line after the first of a function."""
    return f"{__file__}:{inspect.getsourcelines(layer)[1] + 1}, in {layer.__qualname__}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_error_of_the_choice_names_the_line_of_the_call(program: str) -> None:
    # Both make the same call, which JAX traces once.
    for layer in (one_layer, other_layer, one_layer):
        with pytest.raises(NoKernel) as caught:
            PROGRAMS[program](layer)(X)
        assert caught.value.line == line_of(layer)
        *_, last = str(caught.value).splitlines()
        assert last == f"called at {line_of(layer)}"
        assert str(caught.value).count("called at") == 1
    with pytest.raises(NoConfig, match="error_on_miss") as caught_config, policy_override(mode="error_on_miss"):
        PROGRAMS[program](right_layer)(X)
    assert str(caught_config.value).endswith(f"\ncalled at {line_of(right_layer)}")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("layer", [wrong_layer, wrong_drop_in])
def test_the_traceback_of_a_wrong_argument_ends_at_the_line_of_the_call(layer: Any, program: str) -> None:
    with pytest.raises(ValueError, match=r"^(flash_attention: key|value): ") as caught:
        PROGRAMS[program](layer)(X)
    *_, last = traceback.extract_tb(caught.value.__traceback__)
    assert f"{last.filename}:{last.lineno}, in {last.name}" == line_of(layer)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_frame_of_ours_is_shown(program: str) -> None:
    for layer in (one_layer, wrong_layer):
        with pytest.raises((NoKernel, ValueError)) as caught:
            PROGRAMS[program](layer)(X)
        fault: BaseException | None = caught.value
        while fault is not None:
            files = [frame.filename for frame in traceback.extract_tb(fault.__traceback__)]
            assert not [file for file in files if file.startswith(OURS)]
            fault = fault.__cause__


@pytest.mark.parametrize("method", [ejkernel_core.plan, ejkernel_core.explain, ejkernel_core.invocation])
def test_a_question_shows_no_frame_of_ours(method: Any) -> None:
    with pytest.raises(ValueError, match="^flash_attention: key") as caught:
        method("flash_attention", X, X[..., :4], X)
    *_, last = traceback.extract_tb(caught.value.__traceback__)
    assert last.filename == __file__


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_exception_of_a_kernel_has_a_note_with_the_line(program: str) -> None:
    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        raise ZeroDivisionError("no blocks")

    registry = Registry()
    registry.register(SimpleNamespace(run_backend=run_backend), "flash_attention.broken")

    def layer(x: Any) -> Any:
        return registry.call("flash_attention", x, x, x, backend="broken")

    with pytest.raises(ZeroDivisionError) as caught:
        PROGRAMS[program](layer)(X)
    assert caught.value.__notes__.count(f"called at {line_of(layer)}") == 1


def test_all_frames_are_shown_where_jax_shows_its_own() -> None:
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(ValueError, match="head_dim") as caught:
            wrong_layer(X)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert all(any(file.startswith(folder) for file in files) for folder in OURS)


def backward_that_refuses() -> Registry:
    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        raise AssertionError

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        raise Unsupported("gradients are for others")

    registry = Registry()
    for backend in registry.backends("flash_attention_bwd"):
        kernel = SimpleNamespace(run_backend=run_backend, heuristic_cfg=heuristic_cfg)
        registry.register(kernel, f"flash_attention_bwd.{backend}")
    return registry


@pytest.mark.parametrize("program", ["grad", "jit of grad", "checkpoint"])
def test_a_gradient_without_a_kernel_names_the_line_of_the_call(program: str) -> None:
    registry = backward_that_refuses()

    def layer(x: Any) -> Any:
        return registry.call("flash_attention", x, x, x)

    with pytest.raises(NoKernel, match="gradients are for others") as caught:
        PROGRAMS[program](layer)(X)
    if program == "grad":  # it is computed when the call has been made, so the line is that of jax.grad
        assert caught.value.line is not None
        assert caught.value.line.startswith(f"{__file__}:")
    else:
        assert caught.value.line == line_of(layer)
