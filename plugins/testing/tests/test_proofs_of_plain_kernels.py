"""Kernels that refuse all that they can, each wrong in one way: the quick proofs of every operation find it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

from ejkernel_core import PluginError, Registry, Unsupported, hookimpl
from ejkernel_ops.grouped_matmul.activations import ACTIVATIONS
from ejkernel_testing import KernelProofs

Names = tuple[str, ...]
Gradients = tuple[Any, ...]
#: What a backward returns, from a function that computes the right gradients of any arrays, the names of those that are
#: asked for, and the names of all that it could be asked for.
Backward = Callable[[Callable[[Names], Gradients], Names, Names], Gradients]

PRODUCT = ("rhs_bias", "group_offset")
#: The arguments that the kernels refuse, by operation.
REFUSED: dict[str, Names] = {
    "flash_attention": (
        *("bias", "attention_mask", "q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "softmax_aux"),
        *("sliding_window", "logits_soft_cap", "dropout_seed"),
    ),
    "rms_norm": ("bias", "residual"),
    "layer_norm": ("bias", "residual"),
    "grouped_matmul": PRODUCT,
    "moe_permute_matmul": PRODUCT,
    "moe_route": ("expert_bias", "num_groups"),
    "moe_permute": (),
    "moe_combine": (),
}
#: Words for options that they refuse too.
REFUSED_WORDS: dict[str, frozenset[str]] = {
    "grouped_matmul": frozenset(ACTIVATIONS),
    "moe_permute_matmul": frozenset(ACTIVATIONS),
}
#: The operations whose plain calls have several differentiable arrays.
OF_SEVERAL = tuple(op for op in REFUSED if op not in ("moe_route", "moe_permute"))


@attrs.frozen
class Config:
    block: int = 64


SPACE = [Config(64), Config(128), Config(512)]


class WrongWhere(Registry):
    """A registry in which gradients of the kernel "mine" are twice too large under one transformation alone."""

    def __init__(self, tracer: str) -> None:
        super().__init__()
        self.tracer = tracer

    def call(self, op: str, /, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend == "mine" and any(self.tracer in tracers(value) for value in kwargs.values()):
            kwargs = {name: with_doubled_gradient(value) for name, value in kwargs.items()}
        return super().call(op, *args, backend=backend, **kwargs)


def tracers(value: Any) -> list[str]:
    """The types of the tracers around a value, down to that of a jitted function."""
    names = []
    while isinstance(value, jax.core.Tracer):
        names.append(type(value).__name__)
        value = None if names[-1] == "DynamicJaxprTracer" else getattr(value, "val", getattr(value, "primal", None))
    return names


def with_doubled_gradient(value: Any) -> Any:
    if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return value + (value - jax.lax.stop_gradient(value))


def kernel(
    run: Callable[[Any, Any], Any], space: Sequence[Config], refused: Names = (), words: Collection[str] = ()
) -> SimpleNamespace:
    """A kernel that refuses these arguments, and otherwise runs ``run(inv, cfg)``."""

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        for name in (*refused, *(("activation",) if words else ())):
            if inv[name] is not None:
                raise Unsupported(f"no {name} here")
        return Config(64)

    @hookimpl
    def config_space(inv: Any) -> Any:
        return space

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return run(inv, cfg)

    hooks = {"heuristic_cfg": heuristic_cfg, "config_space": config_space, "run_backend": run_backend}
    return SimpleNamespace(PLATFORMS={"cpu": 60}, Config=Config, **hooks)


def right(gradients: Callable[[Names], Gradients], wrt: Names, every: Names) -> Gradients:
    return gradients(wrt)


def doubled(gradients: Gradients) -> Gradients:
    return tuple(2 * gradient for gradient in gradients)


def proofs(
    op: str,
    compute: Backward = right,
    registry: Registry | None = None,
    wrong_block: int | None = None,
    wrong_backward_block: int | None = None,
    space: Sequence[Config] = SPACE,
) -> type[KernelProofs]:
    """The proofs of a kernel that computes as the reference does, but for one fault."""
    registry = registry or Registry()
    reference, of_gradients = (registry.kernel(name, "reference") for name in (op, f"{op}_bwd"))
    differentiable = registry.operation(op).differentiable

    def forward(inv: Any, cfg: Config) -> Any:
        assert 512 // cfg.block
        results = reference.run_backend(inv, None)
        return doubled(results) if cfg.block == wrong_block else results

    def backward(inv: Any, cfg: Config) -> Any:
        every = tuple(name for name in differentiable if inv[name] is not None)
        gradients = compute(
            lambda names: of_gradients.run_backend(inv.with_arrays({"wrt": names}), None), inv["wrt"], every
        )
        return doubled(gradients) if cfg.block == wrong_backward_block else gradients

    words = REFUSED_WORDS.get(op, frozenset())
    registry.register(kernel(forward, space, REFUSED[op], words), f"{op}.mine")
    registry.register(kernel(backward, space), f"{op}_bwd.mine")
    fields = {"kernel": f"{op}.mine", "backward": f"{op}_bwd.mine", "refuses": frozenset(REFUSED[op]) | words}
    return type("Proofs", (KernelProofs,), {**fields, "registry": registry})


def quick(proofs: type[KernelProofs], test: str, *words: str) -> Iterator[Callable[[], None]]:
    """The quick cases of a test with these words among its parameters, to be run."""
    for parameters in proofs.parameters(test):
        if not parameters.marks and {*words} <= {part for part in parameters.values if isinstance(part, str)}:
            request = {"request": None} if test in ("test_transforms", "test_configuration_values") else {}
            yield partial(getattr(proofs(), test), *parameters.values, **request)


def found(proofs: type[KernelProofs], test: str, *words: str) -> str:
    """The message of the quick cases of a test, one of which has to fail."""
    with pytest.raises((AssertionError, PluginError)) as error:
        run_all(quick(proofs, test, *words))
    return str(error.value)


def run_all(cases: Iterable[Callable[[], None]]) -> None:
    """Run them. If there are none, no fault is found."""
    for case in cases:
        case()


# -- gradients that are wrong for some sets of arrays ------------------------------------------------------------------


def twice_unless_all(gradients: Callable[[Names], Gradients], wrt: Names, every: Names) -> Gradients:
    return gradients(wrt) if {*wrt} == {*every} else doubled(gradients(wrt))


def ignoring_wrt(gradients: Callable[[Names], Gradients], wrt: Names, every: Names) -> Gradients:
    """Those of the first arrays, whichever are asked for."""
    return gradients(every)[: len(wrt)]


def twice_for_the_last_alone(gradients: Callable[[Names], Gradients], wrt: Names, every: Names) -> Gradients:
    return doubled(gradients(wrt)) if wrt == every[-1:] else gradients(wrt)


@pytest.mark.parametrize("fault", [twice_unless_all, ignoring_wrt, twice_for_the_last_alone])
@pytest.mark.parametrize("op", OF_SEVERAL)
def test_gradients_that_are_wrong_for_some_arrays_are_found(op: str, fault: Backward) -> None:
    """They are right where all arrays are differentiated, as in ``test_example``."""
    proofs_of_fault = proofs(op, fault)
    assert f"{op}" in found(proofs_of_fault, "test_programs")
    for (example,) in (parameters.values for parameters in proofs_of_fault.parameters("test_example")):
        if "programs" in example.checks:
            proofs_of_fault().test_example(example)


# -- gradients that are wrong under one transformation -----------------------------------------------------------------


@pytest.mark.parametrize("op", REFUSED)
def test_gradients_that_are_wrong_under_jit_alone_are_found(op: str) -> None:
    proofs_of_fault = proofs(op, registry=WrongWhere("DynamicJaxprTracer"))
    assert found(proofs_of_fault, "test_programs", "jit").startswith("gradients are wrong for 1 pairs")
    run_all(quick(proofs_of_fault, "test_programs", "eager"))


@pytest.mark.parametrize("op", REFUSED)
def test_gradients_that_are_wrong_under_vmap_alone_are_found(op: str) -> None:
    proofs_of_fault = proofs(op, registry=WrongWhere("BatchTracer"))
    assert f"transforms: vmap_of_grad: {op}.mine on" in found(proofs_of_fault, "test_transforms", "vmap_of_grad")
    assert found(proofs_of_fault, "test_programs", "vmap").startswith("gradients are wrong for 1 pairs")
    run_all(quick(proofs_of_fault, "test_programs", "jit"))


# -- configurations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", REFUSED)
@pytest.mark.parametrize("fault", ["wrong_block", "wrong_backward_block"])
def test_a_wrong_configuration_is_found(op: str, fault: str) -> None:
    message = found(proofs(op, **{fault: 512}), "test_configuration_values")  # type: ignore[arg-type]
    name = op if fault == "wrong_block" else f"{op}_bwd"
    assert message.startswith(f"configurations: {op}.mine on")
    assert f"{name}.mine with Config(block=512)" in message


@pytest.mark.parametrize("op", REFUSED)
def test_a_right_kernel_passes(op: str) -> None:
    right_proofs = proofs(op)
    for test, words in (
        ("test_programs", ("jit",)),
        ("test_transforms", ("vmap_of_grad",)),
        ("test_configuration_values", ()),
    ):
        cases = list(quick(right_proofs, test, *words))
        assert cases
        run_all(cases)


def test_a_configuration_with_which_the_kernel_raises_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        run_all(quick(proofs("rms_norm", space=[Config(64), Config(0)]), "test_configuration_values"))
    assert any("rms_norm.mine with Config(block=0)" in note for note in error.value.__notes__)


def test_a_space_that_is_not_valid_is_found() -> None:
    message = found(proofs("rms_norm", space=[Config(64), Config(128), Config(64)]), "test_configuration_values")
    assert message == "configurations: rms_norm.mine on plain-blocks: gives Config(block=64) twice"
