"""A launch of a kernel as a primitive of JAX, which needs Triton only if the launch is not in the compile cache.

In a program for CUDA a launch is a custom call with one attribute: the bytes of a protocol buffer, with the PTX of the
kernel, its grid and its parameters. jax-triton makes these bytes, and the compile cache stores them. A process whose
launches are in the cache imports neither jax-triton nor Triton, which would take most of the time of its first call.

The custom call is the same as that of jax-triton, checked with 0.3.1 and 0.4.1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, use_abstract_mesh

from ejkernel_core.extend import Primitive
from ejkernel_triton.launch import _compile_cache, _jax_triton
from ejkernel_triton.launch._jax_triton import Launch

#: The names of the custom call in jax-triton 0.4 and 0.3.
TARGETS = ("triton_kernel_call_ffi", "triton_kernel_call")

launch_p = Primitive("triton_launch")
launch_p.multiple_results = True
launch_p.def_impl(functools.partial(dispatch.apply_primitive, launch_p))


@launch_p.def_abstract_eval
def _abstract_results(*arrays: Any, launch: Launch) -> list[Any]:
    return [jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in launch.outputs]


def _lower_for_cuda(ctx: Any, *operands: Any, launch: Launch) -> Any:
    if launch.compute_capability is None:  # jax-triton gets it from the device
        return lower_by_jax_triton(ctx, *operands, launch=launch)
    attribute = opaque(launch, ctx.avals_in)
    aliases = dict(launch.aliases)
    if _jax_triton.version() >= (0, 4):
        rule = jax.ffi.ffi_lowering(TARGETS[0], api_version=4, operand_output_aliases=aliases, has_side_effect=False)
        return rule(ctx, *operands, opaque=attribute)
    untyped: Any = attribute  # ffi_lowering is typed for text, and takes bytes
    rule = jax.ffi.ffi_lowering(TARGETS[1], api_version=2, backend_config=untyped, operand_output_aliases=aliases)
    return rule(ctx, *operands)


def _run_launch(*arrays: Any, launch: Launch) -> Any:
    return _jax_triton.call_jax_triton(launch, arrays)


#: For other platforms than CUDA: ROCm, and the CPU inside ``ejkernel_triton.interpreter.interpreted``.
lower_by_jax_triton = mlir.lower_fun(_run_launch, multiple_results=True)

mlir.register_lowering(launch_p, _lower_for_cuda, platform="cuda")
mlir.register_lowering(launch_p, lower_by_jax_triton, cacheable=False)


def opaque(launch: Launch, avals: Sequence[Any]) -> bytes:
    """The attribute of the custom call: from the compile cache, or compiled."""
    if _compile_cache.is_disabled():
        return _compile(launch, avals)
    package = launch.kernel.partition(".")[0]
    arrays = tuple((aval.shape, str(aval.dtype)) for aval in avals)
    name = _compile_cache.key(_sources(package), attrs.astuple(launch), arrays)
    content = _compile_cache.read(name)
    if content is None:
        content = _compile(launch, avals)
        # If the kernel's source has changed since this process began, it is not known which one was compiled.
        if _sources(package) == _compile_cache.sources(package):
            _compile_cache.write(name, content)
    return content


@functools.cache
def _sources(package: str) -> str:
    return _compile_cache.sources(package)


def _compile(launch: Launch, avals: Sequence[Any]) -> bytes:
    """Compile the launch with jax-triton, in a program of its own."""
    function = jax.jit(functools.partial(_run_launch, launch=launch))
    arrays = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with use_abstract_mesh(AbstractMesh((), ())):
        lowered = function.trace(*arrays).lower(lowering_platforms=("cuda",))
    (attribute,) = opaques(lowered.compiler_ir("stablehlo").operation)
    return attribute


def opaques(operation: Any) -> Iterator[bytes]:
    """The compressed bytes of each launch in a program."""
    from jaxlib.mlir import ir

    attributes = operation.attributes
    if operation.name == "stablehlo.custom_call" and ir.StringAttr(attributes["call_target_name"]).value in TARGETS:
        # They are an attribute of a typed call in jax-triton 0.4, and the text of an untyped one in 0.3.
        if "mhlo.backend_config" in attributes:
            yield ir.StringAttr(attributes["mhlo.backend_config"]["opaque"]).value_bytes
        else:
            yield ir.StringAttr(attributes["backend_config"]).value_bytes
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from opaques(inner.operation)
