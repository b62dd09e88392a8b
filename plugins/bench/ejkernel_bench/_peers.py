"""Implementations by others: functions of JAX or PyTorch, each for the calls that it can do."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Example

from ._calls import PASSES, Function, Inputs, Pass, Results, Run, describe, jitted

#: From the arguments of an example (large arrays as shapes and dtypes) to a function of its arrays by name: of JAX, or
#: ``Prepared``, as ``TorchFunction`` is. None where the peer cannot do the call.
Peer = Callable[[Mapping[str, Any]], Any]


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    return importlib.util.find_spec(module) is not None


def optional(peer: Peer, *modules: str) -> Peer | None:
    """The peer, or None where one of its modules is not installed."""
    return peer if all(map(is_installed, modules)) else None


def program_of(peer: Peer, example: Example, inputs: Inputs, pass_name: str) -> Pass | Prepared | None:
    """One pass by a peer, for which inputs may be shapes; None where it cannot do the call."""
    function = peer(describe(example))
    if isinstance(function, Prepared):
        return function if function.has_gradients or pass_name == PASSES[0] else None
    if function is None:
        return None
    return jitted(function, pass_name, inputs)


def bound(program: Pass | Prepared, pass_name: str, inputs: Inputs) -> Run:
    """One pass with its arrays. The first run of what is prepared makes its own of them."""
    if isinstance(program, Prepared):
        prepared = cache(partial(program.prepared, inputs, pass_name))
        return lambda: prepared()()
    return attrs.evolve(program, arguments=inputs.of_pass(pass_name))


@attrs.frozen
class Prepared:
    """A function of arrays that are made of those of the call before anything is timed."""

    function: Function
    #: If not, it is measured forward alone.
    has_gradients: bool = True
    #: The relative error that is allowed, where it computes with fewer bits than the call.
    tolerance: float | None = None

    def prepared(self, inputs: Inputs, pass_name: str) -> Run:
        """One pass."""
        raise NotImplementedError


@attrs.frozen
class TorchFunction(Prepared):
    """A function of PyTorch tensors, by the names of the arrays. PyTorch differentiates it."""

    def prepared(self, inputs: Inputs, pass_name: str) -> Run:
        """One pass on copies of the inputs."""
        import torch

        def tensor(array: Any) -> Any:
            if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 1:  # DLPack may not know it
                bits = jax.lax.bitcast_convert_type(array, jnp.uint8)
                return torch.from_dlpack(bits).detach().clone().view(getattr(torch, str(array.dtype)))
            return torch.from_dlpack(array).detach().clone()

        is_forward = pass_name == PASSES[0]
        tensors = {name: tensor(array) for name, array in inputs.arrays.items()}
        cotangents = [tensor(cotangent) for cotangent in inputs.cotangents]
        differentiated = [] if is_forward else [tensors[name].requires_grad_() for name in inputs.wrt]

        def run() -> Results:
            results = self.function(**tensors)
            results = results if isinstance(results, tuple) else (results,)
            if not is_forward:
                results = tuple(result for result in results if result.is_floating_point())
                results += tuple(torch.autograd.grad(results, differentiated, cotangents))
            return tuple(map(TorchArray, results))

        return run


@attrs.frozen
class JaxFunction(Prepared):
    """A function of JAX that computes with fewer bits than the call."""

    def prepared(self, inputs: Inputs, pass_name: str) -> Run:
        """One pass, which its first run compiles."""
        return jitted(self.function, pass_name, inputs)


@attrs.frozen
class OnOtherArrays(Prepared):
    """A function of JAX, forward alone, on other arrays than the call has."""

    #: From the arrays of the call by name to those of the function.
    arrays: Function = attrs.field(kw_only=True)
    has_gradients: bool = False

    def prepared(self, inputs: Inputs, pass_name: str) -> Run:
        """One pass on the other arrays."""
        arrays = jax.block_until_ready(jax.jit(self.arrays)(**inputs.arrays))
        function = jax.jit(lambda arrays: tuple(jax.tree.leaves(self.function(**arrays))))
        return lambda: function(arrays)


@attrs.frozen(eq=False)
class TorchArray:
    """A tensor that JAX can wait for, and that NumPy can read."""

    tensor: Any

    def block_until_ready(self) -> TorchArray:
        import torch

        if self.tensor.is_cuda:
            torch.cuda.synchronize()
        return self

    def as_jax(self) -> Any:
        """The same memory as an array of JAX; the tensor itself where JAX does not use its device."""
        is_there = self.tensor.is_cuda and jax.default_backend() == "gpu"
        return jax.dlpack.from_dlpack(self.tensor.detach().contiguous()) if is_there else self

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        tensor = self.tensor.detach().cpu()
        array = (tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor).numpy()
        return array if dtype is None else array.astype(dtype)
