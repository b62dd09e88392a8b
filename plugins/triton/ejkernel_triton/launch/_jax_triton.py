"""All that depends on the versions of jax-triton and Triton, and one way to call a kernel through all of them.

============  ==================  =====================================================================================
jax-triton    with                what is corrected here
============  ==================  =====================================================================================
all           -                   importing it deletes TRITON_CACHE_DIR from the environment, or sets it to ""
0.3           no CUDA plugin      it cannot be imported: two names are missing in ``jaxlib.gpu_triton``
0.4           triton 3.6          a name is missing in Triton's driver, so jax-triton takes CUDA for not available
0.4.0, 0.4.1  jax 0.12 and later  its rule for dead code takes two arguments, and JAX passes three
to 0.4.1      all                 warp-specialized kernels are launched with fewer threads than they are compiled for
to 0.4.1      all                 Gluon kernels go through Triton's passes, which rewrite them or fail
to 0.4.1      all                 compiled kernels are stored in memory alone: see `_compile_cache` and `_launch`
0.4 to 0.4.1  all                 parameters get wrong results if that of an updated array is not behind the others
all           jax 0.11 and later  XLA passes parts of arrays to kernels that are not compiled for them
to 0.4.1      triton 3.6          it requires a key in descriptors of the copy engine that Triton does not write
all           triton 3.6, 3.7     they import torch where it is installed, which takes 2.5 s
to 0.4.1      triton 3.8, 3.9     their PTX needs CUDA 12.9 and 13.4: an older CUDA of JAX cannot read it
all           no CUDA plugin      lowering for CUDA needs classes of the plugin: `_protocol` has them in Python
============  ==================  =====================================================================================

Checked with jax-triton 0.3.1 and 0.4.1 and with Triton 3.6, 3.7, 3.8 and 3.9. Nothing is imported before a kernel is
compiled: ``unavailable_reason`` reads the metadata of what is installed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core.extend import absent_target
from ejkernel_triton.launch import _compile_cache
from ejkernel_triton.launch._cards import capability_by_name

#: The newest jax-triton that is known to need the corrections for 0.4.
_NEWEST_JAX_TRITON = (0, 4, 1)
_OLDEST_TRITON, _OLDEST_JAX_TRITON = (3, 6), (0, 3, 1)
#: The compute capabilities that CUDA 12.8 compiles for.
_CUDA_12_8_CAPABILITIES = (*range(70, 91), 100, 101, 120)
#: Parts of a compilation that no launch needs, and that are many times as large as the others.
_UNUSED_RESULTS = {"ttgir": "", "llir": ""}
#: The dtypes that Gluon has by another name.
_GLUON_NAMES = {"float8_e4m3fn": "float8e4nv"}
_LOCK = threading.RLock()
_ABSENT = object()


@functools.cache
def unavailable_reason() -> str | None:
    """Why Triton kernels cannot be used here, with the command that helps; None where they can be used."""
    # jax-triton 0.4 is written in the syntax of Python 3.12.
    requirement = '"jax-triton>=0.3.1"' if sys.version_info >= (3, 12) else '"jax-triton==0.3.*"'
    command = f'pip install {requirement} "triton>=3.6"'
    if not sys.platform.startswith("linux"):
        return f"Triton runs on Linux only; this is {sys.platform}"
    for name, oldest in (("triton", _OLDEST_TRITON), ("jax-triton", _OLDEST_JAX_TRITON)):
        installed = _version(name)
        if installed is None:
            return f"{name} is not installed: {command}"
        if installed < oldest:
            return f"{name} {_format_version(installed)} is older than {_format_version(oldest)}: {command}"
    if sys.version_info < (3, 12) and (_version("jax-triton") or ()) >= (0, 4):
        return f"jax-triton 0.4 does not run on Python {_format_version(sys.version_info[:2])}: {command}"
    return None


@attrs.frozen
class Descriptor:
    """How Hopper's copy engine reads and writes blocks of an array."""

    block: tuple[int, ...]
    #: The bytes within which it permutes a block in shared memory; None for Gluon's default.
    swizzle: int | None

    def layout(self, dtype: Any) -> Any:
        """The layout of a block in shared memory, as Gluon has it."""
        with import_lock():
            from triton.experimental.gluon import language as gl

        name = _GLUON_NAMES.get(jnp.dtype(dtype).name, jnp.dtype(dtype).name)
        if self.swizzle is None:
            return gl.NVMMASharedLayout.get_default_for(self.block, getattr(gl, name))
        return gl.NVMMASharedLayout(self.swizzle, 8 * jnp.dtype(dtype).itemsize, len(self.block))


@attrs.frozen(eq=False)
class DescribedArray:
    """An array with a descriptor."""

    array: jax.Array
    descriptor: Descriptor


def describe(array: jax.Array, block: Sequence[int], swizzle: int | None = None) -> DescribedArray:
    """An array that Hopper's copy engine reads and writes in blocks of this shape.

    A kernel could make the descriptor itself, but in memory that jaxlib allocates at every launch. XLA cannot put a
    launch that allocates into a graph of several launches.
    """
    return DescribedArray(array, Descriptor(tuple(block), swizzle))


@attrs.frozen
class Launch:
    """A launch of a kernel without its arrays. If the kernel is a name, the ``repr`` is the same in every process."""

    #: "module:function", or the function.
    kernel: Any
    #: One for each array; None where the copy engine does not use it.
    descriptors: tuple[Descriptor | None, ...]
    scalars: tuple[int, ...]
    #: Shapes and dtypes.
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    grid: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    #: 90 for 9.0.
    compute_capability: int | None
    name: str
    zeroed_outputs: tuple[int, ...]
    #: Pairs of the position of an array and that of an output.
    aliases: tuple[tuple[int, int], ...]
    #: Of a thread, on average over all warps; None for as many as the card has.
    max_registers: int | None = None


def call(
    kernel: Any,
    arrays: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    scalars: Sequence[int] = (),
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
    compute_capability: tuple[int, int] | None,
    name: str = "",
    zeroed_outputs: Sequence[int] = (),
    aliases: Mapping[int, int] | None = None,
    max_registers: int | None = None,
) -> tuple[jax.Array, ...]:
    """Launch a kernel whose parameters are the arrays, the scalars, the outputs, and then the constants by name.

    ``kernel`` is "module:function", which is imported only if the compile cache does not have the launch; or the
    function. ``zeroed_outputs`` are the positions of the outputs that contain zeros when the kernel starts.
    ``aliases`` is from the position of an array to that of an output: the kernel updates the array in place, and has no
    parameter for the output; with jax-triton 0.3 it has one all the same. An array may be a result of ``describe``.
    ``max_registers``, which Gluon kernels may have, leaves room for more programs on a multiprocessor.
    """
    aliases = aliases or {}
    order = _order_of_outputs(len(outputs), aliases)
    places = {output: place for place, output in enumerate(order)}
    launch = Launch(
        kernel,
        tuple(array.descriptor if isinstance(array, DescribedArray) else None for array in arrays),
        # The native code refuses subclasses of int, which JAX's numbers are.
        tuple(int(scalar) for scalar in scalars),
        tuple((tuple(outputs[output].shape), jnp.dtype(outputs[output].dtype).name) for output in order),
        tuple(grid),
        tuple(constants.items()),
        num_warps,
        num_stages,
        None if compute_capability is None else _capability_number(compute_capability),
        name,
        tuple(places[output] for output in zeroed_outputs),
        tuple((array, places[output]) for array, output in aliases.items()),
        max_registers,
    )
    operands = [array.array if isinstance(array, DescribedArray) else array for array in arrays]
    results = _with_barriers(_launched(launch, _with_barriers(operands)))
    return tuple(results[places[output]] for output in range(len(outputs)))


def _order_of_outputs(count: int, aliases: Mapping[int, int]) -> list[int]:
    """The outputs as jax-triton gets them: since 0.4, those of updated arrays last.

    A kernel has no parameter for them then. The native code does not know, and gives each parameter for an array the
    next buffer of all arguments and results.
    """
    if version() < (0, 4):
        return [*range(count)]
    return sorted(range(count), key=lambda output: output in aliases.values())


def _launched(launch: Launch, operands: Sequence[Any]) -> Sequence[Any]:
    if not isinstance(launch.kernel, str):
        return call_jax_triton(launch, operands)
    from ejkernel_triton.launch._launch import launch_p

    results: Sequence[Any] = launch_p.bind(*operands, launch=launch)
    return results


def _with_barriers(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, behind barriers that keep a kernel from getting parts of others.

    XLA passes a part of a larger array to a custom call without a copy, also in another shape, and has it write its
    result into a part (seen with jaxlib 0.11.2 on an H100 and an H200). Behind a barrier it copies parts, and passes
    all other arrays as they are.

    - It does not look whether the call updates the part: the larger array changed, which may be the caller's, and the
      result was never written.
    - A part may begin anywhere. Kernels are compiled for arrays that begin at a multiple of 16 bytes, and the launch
      fails otherwise.
    """
    return [jax.lax.optimization_barrier(array) for array in arrays]


def call_jax_triton(launch: Launch, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The results of a launch by jax-triton."""
    module, kernel = load(), import_kernel(launch.kernel)
    if "gluon" in type(kernel).__module__ and version() < (0, 4):
        raise NotImplementedError(f"Gluon kernels need jax-triton 0.4; {_format_version(version())} is installed")
    outputs = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in launch.outputs)
    # Triton announces that it will not fuse products and sums by default.
    options: Any = {"out_shape": outputs, "enable_fp_fusion": True}
    if version() >= (0, 4):
        options = {"out_type": outputs, "backend_options": {"enable_fp_fusion": True}}
        if launch.max_registers is not None:
            options["backend_options"]["maxnreg"] = launch.max_registers
    if launch.aliases:
        options["input_output_aliases"] = dict(launch.aliases)
    operands = [
        array
        if descriptor is None
        else module.TensorDescriptor.from_array(array, descriptor.block, descriptor.layout(array.dtype))
        for array, descriptor in zip(arrays, launch.descriptors, strict=True)
    ]
    with warnings.catch_warnings():
        # jax-triton 0.4 recommends references of JAX instead, which 0.3 does not take.
        warnings.filterwarnings("ignore", "zeroed_outputs is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        results = module.triton_call(
            *operands,
            *launch.scalars,
            kernel=kernel,
            grid=launch.grid,
            name=launch.name,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            compute_capability=launch.compute_capability,
            zeroed_outputs=launch.zeroed_outputs,
            **options,
            **dict(launch.constants),
        )
    return tuple(results)


def import_kernel(kernel: Any) -> Any:
    """The function that a kernel's name, "module:function", stands for. A function is returned as it is."""
    if not isinstance(kernel, str):
        return kernel
    module, _, name = kernel.partition(":")
    with import_lock():
        return getattr(importlib.import_module(module), name)


def no_descriptors_reason() -> str | None:
    """Why descriptors for the copy engine cannot be used here; None where they can be used."""
    from jaxlib import gpu_triton

    newest = _format_version(_NEWEST_JAX_TRITON)
    if version() > _NEWEST_JAX_TRITON:
        return f'jax-triton {_format_version(version())} is newer than {newest}: pip install "jax-triton=={newest}"'
    if hasattr(gpu_triton, "TritonKernel") and not hasattr(gpu_triton, "create_tma_descriptor_parameter"):
        return f'jaxlib {_format_version(_version("jaxlib") or ())} does not write them: pip install "jax>=0.11.2"'
    return None


def load() -> ModuleType:
    """The package ``jax_triton``, imported and corrected."""
    # The variable is set after all corrections: no thread gets the module before.
    return _loaded or _load()


def version() -> tuple[int, ...]:
    """The version of jax-triton."""
    installed = _version("jax-triton")
    assert installed is not None, unavailable_reason()
    return installed


def triton_version() -> tuple[int, ...]:
    installed = _version("triton")
    assert installed is not None, unavailable_reason()
    return installed


@contextmanager
def import_lock() -> Iterator[None]:
    """For imports of kernels: one thread at a time. Triton's modules import one another in circles. If two threads
    import them from different sides, one finds a module that is not complete, and the failed import leaves modules
    behind that do not work.
    """
    with _LOCK:
        load()
        yield


_loaded: ModuleType | None = None


def _load() -> ModuleType:
    global _loaded
    with _LOCK:
        if _loaded is None:
            with _RestoredCacheFolder(), _SubstituteNames():
                import jax_triton
            import jax_triton.triton_lib as library

            if triton_version() < (3, 8):
                _initialize_without_torch(library)
            _wrap_native_library(library)
            if version() >= (0, 4):
                _restore_cuda(library)
            if (0, 4) <= version() <= _NEWEST_JAX_TRITON:
                _replace_dce_rule(library)
                _make_im2col_optional(library)
            if version() <= _NEWEST_JAX_TRITON:
                _replace_compilation(library)
            _loaded = jax_triton
        return _loaded


def _initialize_without_torch(library: Any) -> None:
    """The native code of Triton 3.6 and 3.7 imports torch when it first looks at an argument of a kernel, to recognize
    torch's tensors by their type. If it cannot import torch then, it recognizes them by their attributes.
    """
    if "torch" not in sys.modules:
        with _TorchBlocker():
            library._triton.native_specialize_impl(None, 0, False, False, False)


class _TorchBlocker:
    """Inside, this thread cannot import torch. Other threads can."""

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        sys.meta_path.insert(0, self)

    def __exit__(self, *fault: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch" and threading.get_ident() == self.thread:
            raise ModuleNotFoundError("torch is blocked while Triton is initialized", name=name)


class _RestoredCacheFolder:
    """Afterwards, TRITON_CACHE_DIR is as it was: Triton's own compilations in this process use it."""

    def __enter__(self) -> None:
        self.before = os.environ.get("TRITON_CACHE_DIR")

    def __exit__(self, *fault: object) -> None:
        if self.before is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = self.before


class _SubstituteNames:
    """Inside, ``jaxlib.gpu_triton`` has the two functions that jax-triton 0.3 imports and only a CUDA plugin brings."""

    def __enter__(self) -> None:
        from jaxlib import gpu_triton

        from ejkernel_triton.launch import _protocol

        self.module: Any = gpu_triton
        self.names: list[str] = []
        if version() < (0, 4):
            for name in ("get_compute_capability", "get_serialized_metadata"):
                if not hasattr(gpu_triton, name):
                    setattr(gpu_triton, name, getattr(_protocol, name))
                    self.names.append(name)

    def __exit__(self, *fault: object) -> None:
        # jax-triton has its own references now. For everybody else jaxlib is as it was.
        for name in self.names:
            delattr(self.module, name)


def _restore_cuda(library: Any) -> None:
    """Triton 3.6 has no name for the number of tf32 in CUDA's tensor descriptors.

    jax-triton imports that name and Triton's compiler in one ``try``, and without the name has substitutes for both.
    The compiler is put in its place here, so that it does not matter who has imported jax-triton first.
    """
    if not isinstance(library.cb, SimpleNamespace):
        return
    try:
        from triton.backends.nvidia import compiler, driver
    except ImportError:  # a Triton without CUDA
        return
    library.cb = compiler
    library._TMA_DTYPE_DEVICE_TO_HOST = driver.TMA_DTYPE_DEVICE_TO_HOST
    library._TMA_TF32 = getattr(driver, "TMA_TF32", 11)


class _Library:
    """``jaxlib.gpu_triton`` for jax-triton: corrected, and without a CUDA plugin with the functions of `_protocol`."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._native, name, _ABSENT)
        if value is _ABSENT:
            from ejkernel_triton.launch import _protocol

            value = getattr(_protocol, name)
        if name == "TritonKernel" and version() <= _NEWEST_JAX_TRITON:
            return functools.partial(_kernel_with_all_warps, value)
        if name == "get_compute_capability":
            return functools.partial(_target_capability, value)
        return value


def _wrap_native_library(library: Any) -> None:
    """jax-triton looks each name of the native library up when it needs it."""
    native = library.triton_kernel_call_lib
    if not isinstance(native, _Library):
        library.triton_kernel_call_lib = _Library(native)


def _target_capability(device_capability: Any, device: int) -> int:
    """The compute capability of the card in JAX's abstract mesh, or without one of the card of this machine."""
    target = absent_target()
    capability = None
    if target is not None and target.platform == "gpu" and target.device_kind is not None:
        capability = capability_by_name(target.device_kind)
    return int(device_capability(device)) if capability is None else _capability_number(capability)


_THREADS = re.compile(r"^\s*\.reqntid\s+(\d+)", re.MULTILINE)


def _kernel_with_all_warps(
    kernel_class: Any, name: str, num_warps: int, num_ctas: int, shared: int, code: str, *rest: Any
) -> Any:
    """A kernel with the number of warps that it is compiled for.

    Triton adds warps to a warp-specialized kernel. jax-triton passes the number of the caller's options. A launch with
    fewer threads than ``.reqntid`` in the PTX fails (CUDA_ERROR_INVALID_VALUE).
    """
    threads = _THREADS.search(code)
    return kernel_class(name, int(threads[1]) // 32 if threads else num_warps, num_ctas, shared, code, *rest)


def _replace_dce_rule(library: Any) -> None:
    """The rule for dead code takes what JAX passes: the used outputs and the equation, with an argument between them
    since 0.12.
    """
    if jax.__version_info__ < (0, 12):
        return
    from jax._src.interpreters import partial_eval

    partial_eval.dce_rules[library.triton_kernel_call_p] = _keep_call


def _keep_call(used_outputs: Any, *rest: Any) -> tuple[list[bool], Any]:
    """As in jax-triton's own rule, every call and every operand is used."""
    equation = rest[-1]
    return [True] * len(equation.invars), equation


def _make_im2col_optional(library: Any) -> None:
    """Triton 3.6 has one mode of the copy engine, and does not write which. jax-triton, which takes only that mode,
    requires the key.
    """
    metadata_class = getattr(library, "TensorDescMeta", None)
    if metadata_class is None:
        return
    metadata_class.__required_keys__ = metadata_class.__required_keys__ - {"is_im2col"}


def _replace_compilation(library: Any) -> None:
    compile_in_place = library.compile_ttir_inplace
    if not isinstance(compile_in_place, functools.partial):
        library.compile_ttir_inplace = functools.partial(_compile, library, compile_in_place)


def _compile(library: Any, compile_in_place: Any, module: Any, backend: Any, options: Any, *target: Any) -> Any:
    """Compile a kernel from Triton's intermediate representation, or read it from the compile cache. Launches with
    other grids and lengths have the same kernel.
    """
    options = _options_for_older_cuda(options, backend.target.arch)
    if version() >= (0, 4):
        backend = _backend_for_gluon(module, backend)
    if _compile_cache.is_disabled():
        return compile_in_place(module, backend, options, *target)
    name = _compile_cache.key(str(module), str(backend.target), options.hash())
    stored = _compile_cache.read(name)
    if stored is not None:
        return library.CompilationResult(**json.loads(stored))
    result = compile_in_place(module, backend, options, *target)
    _compile_cache.write(name, json.dumps({**dataclasses.asdict(result), **_UNUSED_RESULTS}).encode())
    return result


def _options_for_older_cuda(options: Any, arch: Any) -> Any:
    """The options, with PTX for CUDA 12.8 where it compiles for the card.

    Triton writes PTX for its own ptxas, but the ptxas of JAX's CUDA reads it. If the user names a ptxas to Triton, the
    PTX is for that one.
    """
    ptx_version = getattr(options, "ptx_version", _ABSENT)  # AMD's options have none
    if ptx_version is not None or arch not in _CUDA_12_8_CAPABILITIES or _is_ptxas_overridden(arch):
        return options
    return dataclasses.replace(options, ptx_version=87)


def _is_ptxas_overridden(arch: int) -> bool:
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        return not Path(get_ptxas(arch).path).is_relative_to(Path(knobs.__file__).parent)
    except RuntimeError:  # there is none
        return False


def _backend_for_gluon(module: Any, backend: Any) -> Any:
    """The backend; for a Gluon kernel, which has its own layouts and its own order, with Gluon's passes, which leave
    them as they are.
    """
    # Triton's first pass adds this attribute, and Gluon's kernels begin with it.
    if module.get_int_attr("ttg.num-warps") is not None:
        backend = copy.copy(backend)
        backend.make_ttir = lambda module, *rest: module
        backend.make_ttgir = backend.gluon_to_ttgir
    return backend


def _capability_number(pair: tuple[int, int]) -> int:
    major, minor = pair
    return 10 * major + minor


@functools.cache
def _version(distribution: str) -> tuple[int, ...] | None:
    """The installed version. Triton may be installed by a distribution of another name: then the module has it."""
    try:
        text = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        module = distribution.replace("-", "_")
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            return None
        with _LOCK:
            text = str(importlib.import_module(module).__version__)
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _format_version(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
