"""jax-triton, as its versions are: what each of them needs, and one way to call a kernel through all of them.

============  ==================  =====================================================================================
jax-triton    with                what is mended
============  ==================  =====================================================================================
all           -                   importing it deletes TRITON_CACHE_DIR from the environment, or sets it to ""
0.3           no CUDA plugin      it does not import: two names are missing in ``jaxlib.gpu_triton``
0.4           triton 3.6          a name is missing in Triton's driver: jax-triton takes CUDA for not available
0.4.0, 0.4.1  jax 0.12 and later  its rule for dead code takes two arguments where JAX passes three
to 0.4.1      all                 warp-specialised kernels are launched with fewer threads than Triton compiled them for
to 0.4.1      all                 Gluon kernels go through the passes for Triton, which rewrite them, or fail
to 0.4.1      all                 compiled kernels are kept in memory alone: every process would compile them anew
to 0.4.1      triton 3.6          a word is missing that it wants of every array that is described for the copy engine
to 0.4.1      triton 3.8, 3.9     its PTX wants CUDA 12.9, 13.4: an older one beside JAX cannot read it
all           no CUDA plugin      lowering for CUDA needs classes of the plugin: `_portable` has them in plain Python
============  ==================  =====================================================================================

Nothing is imported before a kernel is called. ``missing`` asks the metadata of what is installed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
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

import jax

from ejkernel_core._devices import absent
from ejkernel_triton.launch._cards import capability_by_name

#: The newest jax-triton that needs the mends for 0.4.
_LAST_SEEN = (0, 4, 1)
_TRITON, _JAX_TRITON = (3, 6), (0, 3, 1)
_CARDS_OF_CUDA_12_8 = (*range(70, 91), 100, 101, 120)
_LOCK = threading.RLock()
_ABSENT = object()


@functools.cache
def missing() -> str | None:
    """Why Triton kernels cannot be used here, with the line that mends it; None where they can."""
    # jax-triton 0.4 is written in the syntax of Python 3.12.
    suits = '"jax-triton>=0.3.1"' if sys.version_info >= (3, 12) else '"jax-triton==0.3.*"'
    mend = f'pip install {suits} "triton>=3.6"'
    if not sys.platform.startswith("linux"):
        return f"Triton is made for Linux alone; this is {sys.platform}"
    for name, least in (("triton", _TRITON), ("jax-triton", _JAX_TRITON)):
        found = _version(name)
        if found is None:
            return f"{name} is not installed: {mend}"
        if found < least:
            return f"{name} {_dotted(found)} is too old, {_dotted(least)} is the least: {mend}"
    if sys.version_info < (3, 12) and (_version("jax-triton") or ()) >= (0, 4):
        return f"jax-triton 0.4 does not run on Python {_dotted(sys.version_info[:2])}: {mend}"
    return None


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
    zeroed: Sequence[int] = (),
    updated: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Launch a kernel whose parameters are the arrays, the scalars, the outputs, and then constants by name.

    ``zeroed`` are the places of outputs that are filled with zeros before. ``updated`` says which array becomes which
    output, by their places: the kernel changes it, and has no parameter for that output; jax-triton 0.4 can do that. An
    array may be described for the copy engine, by ``described``.
    """
    module = load()
    gluon = "gluon" in type(kernel).__module__
    if gluon and version() < (0, 4):
        raise NotImplementedError(f"Gluon kernels need jax-triton 0.4; {_dotted(version())} is installed")
    # Triton is to cease, one day, to join a product and a sum into one instruction unless it is told to.
    said: Any = {"out_shape": tuple(outputs), "enable_fp_fusion": True}
    if version() >= (0, 4):
        said = {"out_type": tuple(outputs), "backend_options": {"enable_fp_fusion": True}}
    results = _triton_call(
        module,
        *arrays,
        # A subclass of int, as NumPy's and JAX's numbers are, would be refused by the native code.
        *(int(scalar) for scalar in scalars),
        kernel=kernel,
        grid=tuple(grid),
        name=name,
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=None if compute_capability is None else _capability(compute_capability),
        zeroed_outputs=tuple(zeroed),
        **({"input_output_aliases": dict(updated)} if updated else {}),
        **said,
        **constants,
    )
    return tuple(results)


def _triton_call(module: ModuleType, *arguments: Any, **given: Any) -> Any:
    with warnings.catch_warnings():
        # 0.4 would rather have a reference that the caller filled with zeros, which 0.3 does not take.
        warnings.filterwarnings("ignore", "zeroed_outputs is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return module.triton_call(*arguments, **given)


def described(array: jax.Array, block: Sequence[int], layout: Any) -> Any:
    """An array from which Hopper's copy engine takes blocks of this shape, to lie so in shared memory.

    A kernel could describe it itself, but in memory that jaxlib allocates at every launch, and a launch that allocates
    has no place in the graphs that XLA makes of several launches.
    """
    return load().TensorDescriptor.from_array(array, tuple(block), layout)


def why_no_descriptors() -> str | None:
    """Why arrays cannot be described for the copy engine, or None where they can."""
    from jaxlib import gpu_triton

    if version() > _LAST_SEEN:
        return f'jax-triton {_dotted(version())} is not known here: pip install "jax-triton=={_dotted(_LAST_SEEN)}"'
    if hasattr(gpu_triton, "TritonKernel") and not hasattr(gpu_triton, "create_tma_descriptor_parameter"):
        return f'jaxlib {_dotted(_version("jaxlib") or ())} writes none: pip install "jax>=0.11.2"'
    return None


def load() -> ModuleType:
    """The package ``jax_triton``, imported and mended."""
    # A thread that comes first has finished with all mends before another one gets the module.
    return _loaded or _load()


def version() -> tuple[int, ...]:
    """The version of jax-triton."""
    found = _version("jax-triton")
    assert found is not None, missing()
    return found


def version_of_triton() -> tuple[int, ...]:
    found = _version("triton")
    assert found is not None, missing()
    return found


@contextmanager
def importing() -> Iterator[None]:
    """Around imports of kernels, one thread at a time. Triton's modules import one another in circles: who comes from
    another side meanwhile finds them half done, and what that leaves behind fails in this process from then on.
    """
    with _LOCK:
        load()
        yield


_loaded: ModuleType | None = None


def _load() -> ModuleType:
    global _loaded
    with _LOCK:
        if _loaded is None:
            with _CacheFolderKept(), _MissingNames():
                import jax_triton
            import jax_triton.triton_lib as library

            _complete(library)
            if version() >= (0, 4):
                _admit_cuda(library)
            if (0, 4) <= version() <= _LAST_SEEN:
                _keep_what_is_called(library)
                _miss_no_im2col(library)
            if version() <= _LAST_SEEN:
                _mend_compilations(library)
            _loaded = jax_triton
        return _loaded


class _CacheFolderKept:
    """TRITON_CACHE_DIR as it was: Triton's own compilations in this process are to go where the user said."""

    def __enter__(self) -> None:
        self.before = os.environ.get("TRITON_CACHE_DIR")

    def __exit__(self, *fault: object) -> None:
        if self.before is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = self.before


class _MissingNames:
    """jax-triton 0.3 reads two functions from ``jaxlib.gpu_triton`` that are there with a CUDA plugin only."""

    def __enter__(self) -> None:
        from jaxlib import gpu_triton

        from ejkernel_triton.launch import _protocol

        self.module: Any = gpu_triton
        self.added: list[str] = []
        if version() < (0, 4):
            for name in ("get_compute_capability", "get_serialized_metadata"):
                if not hasattr(gpu_triton, name):
                    setattr(gpu_triton, name, getattr(_protocol, name))
                    self.added.append(name)

    def __exit__(self, *fault: object) -> None:
        # jax-triton has its own references now, and others who ask jaxlib get the answer that they would have had.
        for name in self.added:
            delattr(self.module, name)


def _admit_cuda(library: Any) -> None:
    """Triton 3.6 has no name for the number of tf32 in CUDA's descriptions of tensors.

    jax-triton asks for that name and for Triton's compiler in one breath, and without it has stand-ins for both. Where
    it was imported before us, too, the compiler is put in its place afterwards.
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
    """``jaxlib.gpu_triton`` as jax-triton sees it: what the plugin offers, or the portable way; right warp counts."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name, _ABSENT)
        if found is _ABSENT:
            from ejkernel_triton.launch import _protocol

            found = getattr(_protocol, name)
        if name == "TritonKernel" and version() <= _LAST_SEEN:
            return functools.partial(_kernel, found)
        if name == "get_compute_capability":
            return functools.partial(_of_target, found)
        return found


def _complete(library: Any) -> None:
    """Put ``_Library`` in its place. jax-triton looks each name up when it needs it."""
    native = library.triton_kernel_call_lib
    if not isinstance(native, _Library):
        library.triton_kernel_call_lib = _Library(native)


def _of_target(of_device: Any, device: int) -> int:
    """The compute capability of the card that JAX is told to compile for; else that of the card that is here."""
    told = absent()
    known = capability_by_name(told.device_kind) if told is not None and told.platform == "gpu" else None
    return int(of_device(device)) if known is None else _capability(known)


_THREADS = re.compile(r"^\s*\.reqntid\s+(\d+)", re.MULTILINE)


def _kernel(make: Any, name: str, num_warps: int, num_ctas: int, shared: int, code: str, *rest: Any) -> Any:
    """A kernel with as many warps as it was compiled for.

    Triton adds warps to a kernel that is specialised by warps. jax-triton passes on the number that was asked for, and
    a launch with fewer threads than ``.reqntid`` in the PTX says fails (CUDA_ERROR_INVALID_VALUE).
    """
    threads = _THREADS.search(code)
    return make(name, int(threads[1]) // 32 if threads else num_warps, num_ctas, shared, code, *rest)


def _keep_what_is_called(library: Any) -> None:
    """A rule for dead code that takes what JAX passes: used outputs and the equation; between them, since 0.12, more.

    It keeps every call, and every operand of it, as jax-triton's own rule does.
    """
    if jax.__version_info__ < (0, 12):
        return
    from jax._src.interpreters import partial_eval

    partial_eval.dce_rules[library.triton_kernel_call_p] = _keep


def _keep(used_outs: Any, *more: Any) -> tuple[list[bool], Any]:
    equation = more[-1]
    return [True] * len(equation.invars), equation


def _miss_no_im2col(library: Any) -> None:
    """Triton 3.6 knows one way in which the copy engine takes blocks, and does not say which it is. jax-triton, which
    takes no other, will not have its word missing.
    """
    known = getattr(library, "TensorDescMeta", None)
    if known is None:
        return
    known.__required_keys__ = known.__required_keys__ - {"is_im2col"}


def _mend_compilations(library: Any) -> None:
    from ejkernel_triton.launch import _compile_cache

    compile_in_place = library.compile_ttir_inplace
    if not isinstance(compile_in_place, functools.partial):
        kept = functools.partial(_compile_cache.compiled, library)
        library.compile_ttir_inplace = functools.partial(_compiled, library, kept, compile_in_place)


def _compiled(
    library: Any, kept: Any, compile_in_place: Any, module: Any, backend: Any, options: Any, *target: Any
) -> Any:
    options = _for_older_cuda(options, backend.target.arch)
    if version() >= (0, 4):
        backend = _leaving_gluon_as_it_is(module, backend)
    if library._JAX_TRITON_DUMP_DIR:  # whoever asks for the steps of a compilation is to see them
        return compile_in_place(module, backend, options, *target)
    return kept(compile_in_place, module, backend, options, *target)


def _for_older_cuda(options: Any, arch: Any) -> Any:
    """With PTX for CUDA 12.8, where that knows the card.

    Triton writes for the ptxas that came with it, and that of JAX's CUDA reads it. Who names another one to Triton has
    said for which to write.
    """
    asked = getattr(options, "ptx_version", _ABSENT)  # AMD's have none
    if asked is not None or arch not in _CARDS_OF_CUDA_12_8 or _names_a_ptxas(arch):
        return options
    return dataclasses.replace(options, ptx_version=87)


def _names_a_ptxas(arch: int) -> bool:
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        return not Path(get_ptxas(arch).path).is_relative_to(Path(knobs.__file__).parent)
    except RuntimeError:  # there is none
        return False


def _leaving_gluon_as_it_is(module: Any, backend: Any) -> Any:
    """A Gluon kernel says itself what lies where and what runs beside what: Triton's compiler has passes of its own for
    it, which change nothing of that.
    """
    # What Triton's own kernels get from their first pass, Gluon's have from the beginning.
    if module.get_int_attr("ttg.num-warps") is not None:
        backend = copy.copy(backend)
        backend.make_ttir = lambda module, *rest: module
        backend.make_ttgir = backend.gluon_to_ttgir
    return backend


def _capability(pair: tuple[int, int]) -> int:
    major, minor = pair
    return 10 * major + minor


@functools.cache
def _version(distribution: str) -> tuple[int, ...] | None:
    """Of what is installed; Triton may come under another distribution's name, then it is asked itself."""
    try:
        text = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        module = distribution.replace("-", "_")
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            return None
        with _LOCK:
            text = str(importlib.import_module(module).__version__)
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
