"""Implementations by others: functions of JAX or PyTorch, each for the calls that it can do."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import attrs

from ejkernel_core import Example

from ._calls import PASSES, Function, Inputs, Pass, Results, Run, describe, jitted

#: From the arguments of an example (large arrays as shapes and dtypes) to a function of its arrays by name: of JAX, or
#: ``TorchFunction``. None where the peer cannot do the call.
Peer = Callable[[Mapping[str, Any]], Any]


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    return importlib.util.find_spec(module) is not None


def optional(peer: Peer, *modules: str) -> Peer | None:
    """The peer, or None where one of its modules is not installed."""
    return peer if all(map(is_installed, modules)) else None


def program_of(peer: Peer, example: Example, inputs: Inputs, pass_name: str) -> Pass | TorchFunction | None:
    """One pass by a peer, for which inputs may be shapes; None where it cannot do the call."""
    function = peer(describe(example))
    if isinstance(function, TorchFunction):
        return function if function.has_gradients or pass_name == PASSES[0] else None
    if function is None:
        return None
    return jitted(function, pass_name, inputs)


def bound(program: Pass | TorchFunction, pass_name: str, inputs: Inputs) -> Run:
    """One pass with its arrays. The first run of PyTorch copies them."""
    if isinstance(program, TorchFunction):
        prepared = cache(partial(program.prepared, inputs, pass_name))
        return lambda: prepared()()
    return attrs.evolve(program, arguments=inputs.of_pass(pass_name))


def pass_of(peer: Peer, example: Example, inputs: Inputs, pass_name: str) -> Run | None:
    """One pass by a peer with its arrays; None where it cannot do the call."""
    program = program_of(peer, example, inputs, pass_name)
    return None if program is None else bound(program, pass_name, inputs)


@attrs.frozen
class TorchFunction:
    """A function of PyTorch tensors, by the names of the arrays. PyTorch differentiates it."""

    function: Function
    #: Whether PyTorch can. If not, it is measured forward alone.
    has_gradients: bool = True

    def prepared(self, inputs: Inputs, pass_name: str) -> Run:
        """One pass on copies of the inputs."""
        import torch

        def tensor(array: Any) -> Any:
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
        import jax

        is_there = self.tensor.is_cuda and jax.default_backend() == "gpu"
        return jax.dlpack.from_dlpack(self.tensor.detach().contiguous()) if is_there else self

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        tensor = self.tensor.detach().cpu()
        array = (tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor).numpy()
        return array if dtype is None else array.astype(dtype)
