"""The checks by the compiler for TPUs, with a substitute that lowers programs and reports sizes of its own."""

from __future__ import annotations

import doctest
from importlib.metadata import distribution
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ejkernel_core import Example, Operation, Registry, Unsupported, hookimpl
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.testing import Peer, _compiler, _memory, _time, interpreted_registry
from ejkernel_pallas_tpu.testing._kernels import Kernel, installed_kernels
from ejkernel_pallas_tpu.testing._prefetch import prefetched_scalars
from ejkernel_pallas_tpu.testing._schedule import Estimate

KERNELS = {kernel.name: kernel for kernel in installed_kernels()}


def test_doctests():
    for module in (_compiler, _memory):
        results = doctest.testmod(module)
        assert results.attempted
        assert not results.failed


# -- attention -------------------------------------------------------------------------------------------------------


def test_every_kernel_of_the_distribution_is_checked():
    entry_points = distribution("ejkernel-pallas-tpu").entry_points
    points = [point for point in entry_points if point.group == "ejkernel.kernels"]
    # One without a Config is made of calls of operations that have kernels of their own.
    names = {point.name for point in points if hasattr(point.load(), "Config")}
    assert names == {name for name in KERNELS if ".pallas_tpu" in name}
    for name in names:
        assert next(KERNELS[name].calls("vmem"), None) is not None, name


def test_a_backward_kernel_is_checked_on_the_gradients_of_the_examples():
    calls = list(KERNELS["flash_attention_bwd.pallas_tpu"].calls("vmem"))
    assert {call.options["wrt"] for call in calls} == {
        ("query", "key", "value"),
        ("query", "key", "value", "bias", "softmax_aux"),
    }
    assert all({"out", "lse", "d_out"} < {*call.arrays} for call in calls)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_offered_configuration_has_an_estimate(name):
    kernel = KERNELS[name]
    for call in kernel.calls("vmem"):
        inv = kernel.invocation(call, "TPU v5e")
        try:
            space = kernel.module.config_space(inv)
        except Unsupported:
            continue  # another kernel of the operation takes it
        for cfg in space:
            estimate = kernel.module.vmem(inv, cfg)
            assert min(estimate.values() if isinstance(estimate, dict) else [estimate]) > 0


def test_the_estimate_of_a_pass_is_that_of_its_blocks():
    kernel = KERNELS["flash_attention_bwd.pallas_tpu"]
    inv = kernel.invocation(next(kernel.calls("vmem")), "TPU v5e")
    first = next(iter(kernel.module.config_space(inv)))
    smaller = attrs.evolve(first, keys=kernel.module.Pass(128, 128))
    first_estimate, smaller_estimate = (kernel.module.vmem(inv, cfg) for cfg in (first, smaller))
    assert {name for name in first_estimate if first_estimate[name] != smaller_estimate[name]} == {
        "flash_attention_bwd_keys"
    }
    assert "flash_attention_bwd_fused" not in kernel.module.vmem(inv, attrs.evolve(first, fused=None))


def test_the_scalars_of_a_call_are_its_steps():
    """Of 4 blocks of 512 queries, ten pairs meet under causality."""
    registry = interpreted_registry({"flash_attention.pallas_tpu": flash_attention}, device_kind="TPU v5e")
    array = jax.ShapeDtypeStruct((1, 2048, 1, 128), jnp.bfloat16)
    scalars = prefetched_scalars(
        lambda arrays: registry.call("flash_attention", **arrays, causal=True, backend="pallas_tpu"),
        dict.fromkeys(("query", "key", "value"), array),
    )
    assert {name: [len(part) for part in parts] for name, parts in scalars.items()} == {"flash_attention": [10, 1]}
    assert jax.config.jax_disable_jit is False


# -- another operation, which this package does not have ---------------------------------------------------------------


@attrs.frozen
class Config:
    rows: int = 8


def halve(x: Any) -> Any:
    """The operation."""


def _body(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = 0.5 * x_ref[...]


def _compute(inv: Any, cfg: Config, interpret: Any) -> tuple[Any, ...]:
    x = inv["x"]
    block = pl.BlockSpec((cfg.rows, 128), lambda i: (i, 0))
    run = pl.pallas_call(
        _body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // cfg.rows,),
        in_specs=[block],
        out_specs=block,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="halve",
    )
    return (run(x),)


@hookimpl
def heuristic_cfg(inv: Any) -> Config:
    return Config()


@hookimpl
def config_space(inv: Any) -> list[Config]:
    return [Config(8), Config(16), Config(32)]


@hookimpl
def run_backend(inv: Any, cfg: Config) -> tuple[Any, ...]:
    return _compute(inv, cfg, False)


def vmem(inv: Any, cfg: Config) -> int:
    return 2 * 2 * cfg.rows * 128 * 4


@pytest.fixture
def kernel():
    """A kernel of an operation with one example."""
    example = Example("64 rows", "halve", lambda draw: {"x": jnp.ones((64, 128))}, uses={"vmem", "estimate"})
    registry = Registry()
    operation = Operation(
        name="halve",
        signature=halve,
        outputs=lambda a: (jax.ShapeDtypeStruct(a["x"].shape, a["x"].dtype),),
        examples=lambda: [example],
    )
    module = SimpleNamespace(
        heuristic_cfg=heuristic_cfg,
        config_space=config_space,
        run_backend=run_backend,
        compute=_compute,
        vmem=vmem,
        peers=lambda example: [
            Peer("same", {"of x": lambda arrays: _compute(arrays, Config(64), False)}),
            Peer("quicker", {"": lambda arrays: _compute(arrays, Config(64), False)}, minimum_ratio=2.0),
        ],
        Config=Config,
        PLATFORMS={"tpu": 50},
    )
    registry.register(operation, "halve")
    registry.register(module, "halve.pallas_tpu")
    return Kernel("halve.pallas_tpu", module, registry)


class Substitute:
    """Lowers for an absent TPU, and reports these sizes, one for each program; None for a program that does not fit."""

    def __init__(self, *sizes: int | None) -> None:
        self.sizes = list(sizes)

    def mesh(self, generation: str) -> AbstractMesh:
        return AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(self.device_kind(generation), 1, "tpu"))

    def device_kind(self, generation: str) -> str:
        return f"TPU {generation}"

    def lower(self, function: Any, *arguments: Any, mesh: AbstractMesh) -> Any:
        with use_abstract_mesh(mesh):
            return jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))

    def compile(self, lowered: Any, options: Any) -> Any:
        size = self.sizes.pop(0)
        if size is None:
            raise jax.errors.JaxRuntimeError("Ran out of memory in memory space vmem")
        return SimpleNamespace(kernels=["halve.1"], vmem=lambda kernel: size, folder=None)


def test_the_memory_of_a_new_operation_is_checked(kernel):
    uses = list(_memory.uses(Substitute(8192, 40000, None), "v5e", [kernel]))
    assert [(use.call, use.kernel, use.bytes, use.estimate, use.is_right) for use in uses] == [
        ("64 rows", "halve", 8192, 16384, True),
        ("64 rows", "halve", 40000, 32768, False),
        ("64 rows", "halve", None, 65536, False),
    ]
    assert [use.cfg for use in uses] == ["Config(rows=8)", "rows=16", "rows=32"]


def test_the_examples_of_a_kernel_are_checked_too(kernel):
    shape = (32, 128)
    further = Example("32 rows", "halve", lambda draw: {"x": jnp.ones(shape)}, uses={"vmem"})
    kernel.module.examples = lambda: [further]
    assert [call.name for call in kernel.calls("vmem")] == ["64 rows", "32 rows"]
    assert [example.name for example in kernel.examples("estimate")] == ["64 rows"]


def test_the_same_code_is_compiled_once(kernel):
    kernel.module.config_space = lambda inv: [Config(8), Config(8), Config(16)]
    assert len(list(_memory.uses(Substitute(1, 1), "v5e", [kernel]))) == 2


def test_calls_are_picked_by_their_names(kernel):
    assert list(_memory.uses(Substitute(), "v5e", [kernel], "65 rows")) == []


def test_another_error_of_the_compiler_is_not_a_matter_of_memory(kernel):
    compiler = Substitute()
    compiler.compile = lambda lowered, options: (_ for _ in ()).throw(jax.errors.JaxRuntimeError("broken"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        list(_memory.uses(compiler, "v5e", [kernel]))


def test_the_time_of_a_new_operation_is_compared_with_its_peers(kernel, monkeypatch):
    part = Estimate(bundles=5, cycles=9.0, microseconds=3.0, bytes=7, spills=0, units={})
    monkeypatch.setattr(_time, "estimate", lambda folder, name, scalars, generation: part)
    monkeypatch.setattr(_time, "interpreted_registry", lambda modules, device_kind: kernel.registry)
    monkeypatch.setattr(_time, "prefetched_scalars", lambda function, arrays: {})
    (comparison,) = _time.comparisons(Substitute(1, 1, 1), "v5e", [kernel])
    assert (comparison.call, comparison.direction, comparison.ours.microseconds) == ("64 rows", "forward", 3.0)
    assert [(row.name, row.variant) for row in comparison.peers] == [("same", "of x"), ("quicker", "")]
    assert [comparison.is_too_slow(row) for row in comparison.peers] == [False, True]


def test_the_time_of_a_call_that_a_kernel_refuses_is_not_estimated(kernel):
    def refuse(inv: Any) -> Any:
        raise Unsupported("never")

    kernel.module.heuristic_cfg = refuse
    assert list(_time.comparisons(Substitute(), "v5e", [kernel])) == []
