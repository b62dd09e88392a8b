"""A result of tuning as the ``cfg`` of a call: its fastest configuration, on the backend that won."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_classes import (
    Executor,
    Kernel,
    autotune,
    find_labels_in_lowered,
    labels_to_configs,
    pmap_with_config,
    vmap_with_config,
)
from ejkernel_classes._tuned import cfg_and_backend
from ejkernel_classes.modules import flash_attention, rms_norm
from ejkernel_core import Key, Record, Registry
from ejkernel_tuning import Entry, Tuned, TuningResult
from ejkernel_xla.flash_attention import Config as Blocks

X = jnp.arange(4.0)


@attrs.frozen
class Config:
    factor: int = 1


class Scale(Kernel[Config, jax.Array]):
    """Multiplies by its configuration, and adds 100 by ``run_xla``, so that the result shows what was used."""

    def run(self, x: Any, *, cfg: Config) -> Any:
        return x * cfg.factor

    def run_xla(self, x: Any, *, cfg: Config) -> Any:
        return x * cfg.factor + 100


class OwnGradient(Scale):
    def custom_vjp(self, primals: Any, cfg: Config, kwargs: Any, cotangents: Any) -> Any:
        return (cfg.factor * cotangents[0],)


def result_of(op: str, *winners: tuple[str, Any]) -> TuningResult:
    """A result in which these are the records, the fastest first."""
    entries = tuple(Entry(backend, cfg, 1.0 + n) for n, (backend, cfg) in enumerate(winners))
    records = tuple(Record(cfg, backend) for backend, cfg in winners)
    return TuningResult((Tuned((Key(op, "cpu", "problem"),), op, entries, records),))


RUN_IS_FASTEST = result_of("Scale", ("run", Config(3)), ("xla", Config(5)))
XLA_IS_FASTEST = result_of("Scale", ("xla", Config(5)), ("run", Config(3)))


def configs_of(attend: Callable[..., Any], query: Any) -> dict[str, Any]:
    """The configurations of attention in the program by operation."""
    lowered = jax.jit(lambda q: attend(q, q, q)).lower(query)
    return {label.name: cfg for label, cfg in labels_to_configs(find_labels_in_lowered(lowered)).items()}


@pytest.mark.parametrize(
    ("result", "backend", "expected"),
    [
        (RUN_IS_FASTEST, None, 3 * X),
        (XLA_IS_FASTEST, None, 5 * X + 100),
        (RUN_IS_FASTEST, "xla", 5 * X + 100),
        (XLA_IS_FASTEST, "run", 3 * X),
    ],
)
def test_the_fastest_configuration_is_used_on_its_backend(result: Any, backend: str | None, expected: Any) -> None:
    kernel, options = Scale(), {"cfg": result, "backend": backend}
    pair = jnp.stack([X, X])
    np.testing.assert_allclose(kernel(X, **options), expected)
    np.testing.assert_allclose(Executor()(kernel, X, **options), expected)
    np.testing.assert_allclose(jax.jit(lambda x: kernel(x, **options))(X), expected)
    np.testing.assert_allclose(vmap_with_config(kernel, **options)(pair), jnp.stack([expected] * 2))
    np.testing.assert_allclose(pmap_with_config(kernel, **options)(X[None]), expected[None])
    plan = kernel.plan(X, **options)
    assert plan.origin == "explicit cfg"
    assert kernel.plan(X).origin == "heuristic"  # for that call only


def test_the_backward_pass_has_the_configuration_too() -> None:
    result = result_of("OwnGradient", ("run", Config(7)))
    assert jax.grad(lambda x: OwnGradient()(x, cfg=result).sum())(X).tolist() == [7, 7, 7, 7]


def test_the_example_of_the_document_works_as_written() -> None:
    class Blocked(Kernel[Config, jax.Array]):
        def run(self, x: Any, *, cfg: Config) -> Any:
            traced.append(cfg)
            return x + 0 * cfg.factor

        def config_space(self, inv: Any) -> list[Config]:
            return [Config(2), Config(4)]

    traced: list[Config] = []
    kernel, executor = Blocked(), Executor()
    inv = kernel.invocation(X)
    best_config = autotune(kernel, X, configs=kernel.config_space(inv), num_warmup=3, num_iters=10)
    traced.clear()
    assert executor(kernel, X, cfg=best_config).tolist() == [0, 1, 2, 3]
    assert traced[-1] == best_config.cfg in (Config(2), Config(4))


def test_an_operation_by_name_takes_a_result() -> None:
    query = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))
    expected = flash_attention(query, query, query, causal=True)
    result = result_of("flash_attention", ("xla", Blocks(q_block=4, kv_block=2)))
    for call in (flash_attention, functools.partial(Executor(), "flash_attention")):
        attend = functools.partial(call, causal=True, cfg=result)
        np.testing.assert_allclose(attend(query, query, query), expected, atol=1e-6)
        assert configs_of(attend, query) == {"flash_attention": Blocks(q_block=4, kv_block=2)}


def test_the_backend_is_named_where_kernels_of_an_operation_share_their_configurations(use_registry: Any) -> None:
    registry = Registry(plugins="")
    registry.register(Scale())
    use_registry(registry)
    executor = Executor()
    np.testing.assert_allclose(executor("Scale", X, cfg=RUN_IS_FASTEST), 3 * X)
    np.testing.assert_allclose(executor("Scale", X, cfg=XLA_IS_FASTEST), 5 * X + 100)
    np.testing.assert_allclose(executor("Scale", X, cfg=RUN_IS_FASTEST, backend="xla"), 5 * X + 100)


def test_the_backend_is_not_named_where_one_kernel_has_such_configurations() -> None:
    """Because a backend that is named holds for the backward pass, which was not tuned."""
    assert cfg_and_backend("flash_attention", result_of("flash_attention", ("xla", Blocks())), None) == (Blocks(), None)


def test_a_winner_without_a_configuration_is_its_backend() -> None:
    result = result_of("rms_norm", ("reference", None))
    assert cfg_and_backend("rms_norm", result, None) == (None, "reference")
    np.testing.assert_allclose(rms_norm(X, cfg=result), X / jnp.sqrt((X * X).mean() + 1e-6), rtol=1e-5)


@pytest.mark.parametrize(
    ("result", "backend", "message"),
    [
        (
            TuningResult(),
            None,
            "Scale: takes a TuningResult of Scale alone as cfg; this is of no call: use 'with result:'",
        ),
        (result_of("Other", ("run", Config())), None, "this is of Other: use 'with result:'"),
        (RUN_IS_FASTEST | result_of("Scale_bwd", ("run", Config())), None, "this is of Scale, Scale_bwd: use"),
        (RUN_IS_FASTEST, "pallas", "cfg is a TuningResult of the backends 'run', 'xla'; it has none of 'pallas'"),
    ],
)
def test_another_result_is_refused(result: Any, backend: str | None, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Scale()(X, cfg=result, backend=backend)


def test_a_result_without_a_winner_is_refused() -> None:
    with pytest.raises(LookupError, match="nothing could be measured"):
        Scale()(X, cfg=result_of("Scale"))
