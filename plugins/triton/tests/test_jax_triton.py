"""The module that knows jax-triton's versions: the need of each mend, where it can be shown, and its effect."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import ejkernel_triton
from ejkernel_triton.interpreter import compiled_for
from ejkernel_triton.launch import _compile_cache, _jax_triton, _protocol

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if _jax_triton.missing():
    pytest.skip(_jax_triton.missing(), allow_module_level=True)

VERSION = _jax_triton.version()
NEW = VERSION >= (0, 4)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
TARGET = "triton_kernel_call_ffi" if NEW else "triton_kernel_call"
VECTOR = jax.ShapeDtypeStruct((200,), jnp.float32)

#: In front of what runs in a process of its own.
CALL = """
import os, sys
import jax, jax.numpy as jnp, triton, triton.language as tl
sys.path.insert(0, {tests!r})
import test_jax_triton as t
"""


def run(code, **environment):
    """The lines that a fresh process prints."""
    code = CALL.format(tests=os.path.dirname(__file__)) * ("t." in code) + code
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@triton.jit
def add(x, y, n, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


def added(x, y):
    found = _jax_triton.call(
        add,
        [x, y],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        scalars=(x.size,),
        grid=(4,),
        constants={"BLOCK": 64},
        num_warps=4,
        num_stages=2,
        compute_capability=(9, 0),
        name="added",
    )
    assert isinstance(found, tuple)
    return found[0]


def plainly_added(x, y):
    """Without this package."""
    import jax_triton

    said = {"out_type" if hasattr(jax_triton, "TensorDescriptor") else "out_shape": VECTOR}
    return jax_triton.triton_call(x, y, 200, kernel=add, grid=(4,), BLOCK=64, compute_capability=90, **said)


def lowered(function, *avals):
    return jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


# -- what is installed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({"triton": None}, "triton is not installed: pip install"),
        ({"jax-triton": None}, "jax-triton is not installed: pip install"),
        ({"triton": (3, 5, 1)}, "triton 3.5.1 is too old, 3.6 is the least: pip install"),
        ({"jax-triton": (0, 3, 0)}, "jax-triton 0.3.0 is too old, 0.3.1 is the least: pip install"),
    ],
)
def test_what_is_missing_is_told_with_the_line_that_mends_it(monkeypatch, versions, told):
    here = {"triton": (3, 6, 0), "jax-triton": (0, 3, 1), **versions}
    monkeypatch.setattr(_jax_triton, "_version", here.__getitem__)
    assert _jax_triton.missing.__wrapped__().startswith(told)


def test_a_jax_triton_that_this_python_cannot_read(monkeypatch):
    monkeypatch.setattr(_jax_triton, "_version", {"triton": (3, 8, 0), "jax-triton": (0, 4, 1)}.__getitem__)
    monkeypatch.setattr(_jax_triton.sys, "version_info", (3, 11, 4))
    assert _jax_triton.missing.__wrapped__() == (
        'jax-triton 0.4 does not run on Python 3.11: pip install "jax-triton==0.3.*" "triton>=3.6"'
    )


def test_another_system(monkeypatch):
    monkeypatch.setattr(_jax_triton.sys, "platform", "darwin")
    assert _jax_triton.missing.__wrapped__() == "Triton is made for Linux alone; this is darwin"


def test_asking_imports_nothing():
    assert run(
        "import sys\n"
        "from ejkernel_triton.launch import _jax_triton\n"
        "print(_jax_triton.missing(), _jax_triton.version())\n"
        "print({'triton', 'jax_triton', 'numpy.testing'} & set(sys.modules))"
    ) == [f"None {VERSION}", "set()"]


def test_versions():
    parts = metadata.version("jax-triton").split(".")[:3]
    assert tuple(map(int, parts)) == VERSION
    assert _jax_triton._version.__wrapped__("no-such-distribution") is None


# -- calling -----------------------------------------------------------------------------------------------------


def test_a_call_is_lowered_for_cuda_without_a_gpu_and_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        text = lowered(added, VECTOR, VECTOR)
    assert f"@{TARGET}" in text


def test_a_call_is_exported_for_cuda_without_a_gpu():
    from jax import export

    allowed = [export.DisabledSafetyCheck.custom_call(TARGET)]
    exported = export.export(jax.jit(added), platforms=["cuda"], disabled_checks=allowed)(VECTOR, VECTOR)
    assert exported.platforms == ("cuda",)
    assert TARGET in exported.mlir_module()


def test_the_card_has_to_be_named():
    if _made_by() != _protocol.__name__:
        pytest.skip("there is a CUDA plugin, and maybe a card")
    call = lambda x: _jax_triton.call(
        add, [x, x], [VECTOR], scalars=(200,), grid=(4,), constants={"BLOCK": 128}, num_warps=4, num_stages=2,
        compute_capability=None,
    )  # fmt: skip
    # jax-triton 0.4 asks JAX next, which may have been told of a card that is not here.
    with pytest.raises((RuntimeError, ValueError), match="compute_capability=|GPU device kind"):
        lowered(call, VECTOR)


def _made_by():
    from jaxlib import gpu_triton

    return getattr(gpu_triton, "TritonKernel", _protocol.TritonKernel).__module__


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    text = lowered(
        lambda x: _jax_triton.call(
            add, [x, x], [VECTOR], scalars=(np.int64(200),), grid=(4,), constants={"BLOCK": 64}, num_warps=4,
            num_stages=2, compute_capability=(8, 0),
        ),
        VECTOR,
    )  # fmt: skip
    assert TARGET in text


# -- the environment ---------------------------------------------------------------------------------------------


def test_the_environment_is_left_alone():
    given = "import os\nfrom ejkernel_triton.launch import _jax_triton\n{}\nprint(os.environ.get('TRITON_CACHE_DIR'))"
    plainly = "with _jax_triton._MissingNames():\n    import jax_triton"
    assert run(given.format(plainly), TRITON_CACHE_DIR="/mine") == ["None" if NEW else ""]  # the need
    assert run(given.format("_jax_triton.load()"), TRITON_CACHE_DIR="/mine") == ["/mine"]
    assert run("import os\nos.environ.pop('TRITON_CACHE_DIR', None)\n" + given.format("_jax_triton.load()")) == ["None"]


# -- the mends of single versions --------------------------------------------------------------------------------


@pytest.mark.skipif(NEW, reason="jax-triton 0.4 imports anywhere")
def test_0_3_imports_without_a_cuda_plugin():
    from jaxlib import gpu_triton

    if hasattr(gpu_triton, "TritonKernel"):
        pytest.skip("there is a CUDA plugin")
    assert run("try:\n    import jax_triton\nexcept ImportError:\n    print('needed')") == ["needed"]
    assert run(
        "from ejkernel_triton.launch import _jax_triton\n"
        "from jaxlib import gpu_triton\n"
        "before = set(vars(gpu_triton))\n"
        "print(_jax_triton.load().__name__, set(vars(gpu_triton)) - before)"
    ) == ["jax_triton set()"]


@pytest.mark.skipif(not NEW or TRITON > (3, 6), reason="jax-triton 0.4 with Triton 3.6 alone")
@pytest.mark.parametrize("first", ["", "import jax_triton.triton_lib\n"])
def test_0_4_finds_cuda_in_triton_3_6(first):
    state = "import jax_triton.triton_lib as l\nprint(type(l.cb).__name__)"
    assert run(state) == ["SimpleNamespace"]  # the need
    mended = first + "from ejkernel_triton.launch import _jax_triton\n_jax_triton.load()\n" + state
    assert run(mended + "\nprint(l._TMA_TF32, len(l._TMA_DTYPE_DEVICE_TO_HOST) > 0)") == ["module", "11 True"]


def test_a_triton_without_cuda_stays_so(monkeypatch):
    stand_in = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia", None)
    library = SimpleNamespace(cb=stand_in)
    _jax_triton._admit_cuda(library)
    assert library.cb is stand_in


@pytest.mark.skipif(not NEW, reason="jax-triton 0.3 has no such rule")
def test_the_rule_for_dead_code_takes_what_jax_passes():
    from jax._src.interpreters import partial_eval

    _jax_triton.load()
    import jax_triton.triton_lib as library

    rule = partial_eval.dce_rules[library.triton_kernel_call_p]
    newer = jax.__version_info__ >= (0, 12)
    assert (rule is _jax_triton._keep) == (newer and VERSION <= (0, 4, 1))
    text = lowered(lambda x: (added(x, x), x + 1)[1], VECTOR)
    assert "stablehlo.add" in text
    if newer and VERSION <= (0, 4, 1):
        need = "try:\n    t.lowered(lambda x: t.plainly_added(x, x), t.VECTOR)\nexcept TypeError as e:\n    print(e)"
        need = need.replace("t.plainly", "__import__('jax_triton') and t.plainly")
        told = run(
            "import jax_triton.triton_lib as l\nl.triton_kernel_call_lib = __import__('ejkernel_triton.launch._protocol').launch._protocol\n"
            + need
        )
        assert "takes 2 positional arguments but 3 were given" in told[0]


def test_a_kept_equation_keeps_its_operands():
    equation = SimpleNamespace(invars=[1, 2, 3])
    assert _jax_triton._keep([False], equation) == ([True] * 3, equation)
    assert _jax_triton._keep([False], [True], equation) == ([True] * 3, equation)


# -- warps -------------------------------------------------------------------------------------------------------


def test_the_warps_are_those_that_the_code_was_compiled_for():
    make = lambda *arguments: arguments
    code = ".visible .entry f(\n)\n.reqntid 384\n{\n}"
    assert _jax_triton._kernel(make, "f", 4, 1, 0, code, "ttir", 90)[:3] == ("f", 12, 1)
    assert _jax_triton._kernel(make, "f", 4, 1, 0, code.replace("384", "384, 1, 1"), "ttir", 90)[1] == 12
    assert _jax_triton._kernel(make, "f", 4, 1, 0, "/tmp/f.hsaco", "ttir", 0)[1] == 4


def _warp_specialised():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def first(x, out):
        gl.store(out, gl.load(x))

    @gluon.jit
    def second(x, out):
        gl.store(out + 1, gl.load(x + 1))

    @gluon.jit
    def both(x, out):
        gl.warp_specialize([(first, (x, out)), (second, (x, out))], [4], [24])

    return both


@pytest.mark.skipif(_made_by() != _protocol.__name__, reason="the native kernels cannot be looked into")
def test_a_warp_specialised_kernel_gets_all_its_warps(monkeypatch):
    seen = []

    def kernel(*arguments):
        seen.append(arguments)
        return _original(*arguments)

    _original = _protocol.TritonKernel
    monkeypatch.setattr(_protocol, "TritonKernel", kernel)
    pair = jax.ShapeDtypeStruct((2,), jnp.float32)

    def call(x):
        return _jax_triton.call(
            _warp_specialised(), [x], [pair], grid=(1,), constants={}, num_warps=4, num_stages=1,
            compute_capability=(9, 0),
        )  # fmt: skip

    if not NEW:
        with pytest.raises(NotImplementedError, match=r"Gluon kernels need jax-triton 0\.4; 0\.3\.1 is installed"):
            lowered(call, pair)
        return
    lowered(call, pair)
    # 4 were asked for, which is what jax-triton passes on; the code is for 8.
    assert seen[0][1] == 8
    assert ".reqntid 256" in seen[0][4]
    _jax_triton.load()
    import jax_triton.triton_lib as library

    monkeypatch.setattr(library, "triton_kernel_call_lib", _protocol)
    lowered(lambda x: call(x), pair)
    assert seen[1][1] == 4  # the need


# -- what CUDA can read ------------------------------------------------------------------------------------------


def test_the_code_is_for_cuda_12_8_unless_the_card_or_the_user_says_otherwise(monkeypatch, tmp_path):
    from triton.backends.nvidia.compiler import CUDAOptions, get_ptxas

    named = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
    for name in named:
        monkeypatch.delenv(name, raising=False)
    (kernel,) = compiled_for("NVIDIA H200", added, VECTOR, VECTOR)
    assert re.search(r"^\.version (\S+)", kernel.ptx, re.MULTILINE)[1] == "8.7"  # Triton 3.9 writes 9.4
    own, asked = CUDAOptions(), CUDAOptions(ptx_version=90)
    assert _jax_triton._for_older_cuda(own, 90) == CUDAOptions(ptx_version=87)
    assert _jax_triton._for_older_cuda(own, 103) is own
    assert _jax_triton._for_older_cuda(asked, 90) is asked
    assert _jax_triton._for_older_cuda(amd := SimpleNamespace(), "gfx942") is amd
    mine = tmp_path / "ptxas"
    mine.symlink_to(get_ptxas(90).path)
    # Which of the two Triton asks for a card is of its version. What cannot be run it passes over.
    for path, names in ((mine, True), (tmp_path / "none", False)):
        found = []
        for name in named:
            with monkeypatch.context() as patch:
                patch.setenv(name, str(path))
                assert (get_ptxas(90).path == str(path)) == (_jax_triton._for_older_cuda(own, 90) is own)
                found.append(get_ptxas(90).path == str(path))
        assert sum(found) == names


# -- once, and for all threads -----------------------------------------------------------------------------------


def test_mending_twice_is_mending_once():
    module = _jax_triton.load()
    import jax_triton.triton_lib as library

    before = library.triton_kernel_call_lib
    compile_in_place = library.compile_ttir_inplace
    _jax_triton._complete(library)
    _jax_triton._mend_compilations(library)
    assert library.triton_kernel_call_lib is before
    assert library.compile_ttir_inplace is compile_in_place
    assert not isinstance(before._native, _jax_triton._Library)
    assert _jax_triton.load() is module


def test_compiled_kernels_are_kept_on_disk(tmp_path):
    code = """
import hashlib
from triton.backends.nvidia import compiler
make_llir = compiler.CUDABackend.make_llir
compiler.CUDABackend.make_llir = lambda *given: (print("compiled"), make_llir(*given))[1]
for dtype in ("float32", "bfloat16"):
    x = jax.ShapeDtypeStruct((200,), dtype)
    print(hashlib.sha256(t.lowered(t.added, x, x).encode()).hexdigest())
"""
    folder = {"TRITON_CACHE_DIR": str(tmp_path / "kept")}
    first = run(code, **folder)
    assert [line == "compiled" for line in first] == [True, False, True, False]
    assert run(code, **folder) == [line for line in first if line != "compiled"]
    # Whoever wants to see a compilation, or Triton to compile, gets one.
    assert run(code, **folder, TRITON_ALWAYS_COMPILE="1") == first
    assert run(code, **folder, JAX_TRITON_DUMP_DIR=str(tmp_path / "seen")) == first
    # What is damaged is not there, nor what cannot be.
    for file in (tmp_path / "kept").rglob(_compile_cache.FILE):
        file.write_text(file.read_text()[:-9])
    assert run(code, **folder) == first
    assert run(code, TRITON_CACHE_DIR="/proc/no/folder") == first


@pytest.mark.skipif(not NEW, reason="jax-triton 0.3 describes no arrays")
def test_what_is_kept_says_how_arrays_are_described(tmp_path, monkeypatch):
    _jax_triton.load()
    import jax_triton.triton_lib as library
    from triton.runtime.cache import get_cache_manager

    described = {"block_size": [1, 64, 1, 128], "elem_size": 2, "elem_type": 10, "fp4_padded": False, "swizzle": 3}
    made = library.CompilationResult("ptx", "name", 7, "ttgir", "llir", 16, 8, [described | {"is_im2col": False}])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_compile_cache, "_folder", lambda *given: get_cache_manager("0" * 64))
    compilations = iter([made])  # a second one would fail
    assert _compile_cache.compiled(library, lambda *given: next(compilations), None, None, None) is made
    again = _compile_cache.compiled(library, lambda *given: next(compilations), None, None, None)
    assert again == dataclasses.replace(made, ttgir="", llir="")


def test_threads_may_begin_with_different_kernels():
    code = """
import importlib, sys, threading
from ejkernel_triton.launch import _jax_triton

# What kernels import, too: from more sides Triton's circles are sure to break.
kernels = [f"ejkernel_triton.{name}" for name in ("flash_attention._forward", "flash_attention._backward", "flash_attention_sm90._forward")]
kernels += ["triton", "triton.language", "triton.experimental.gluon", "triton.experimental.gluon.language"]
gate, told = threading.Barrier(1 + len(kernels)), []

def work(name):
    gate.wait()
    try:
        if name is None:
            _jax_triton.load()
        else:
            with _jax_triton.importing():
                importlib.import_module(name)
    except Exception as fault:
        told.append(repr(fault))

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=work, args=(name,)) for name in [*kernels, None]]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(told)
"""
    assert run(code) == ["[]"]


def test_all_kernels_are_imported_by_one_thread_at_a_time():
    package = Path(ejkernel_triton.__file__).parent
    # All but who holds the lock, and what is imported by its users.
    files = [file for file in package.rglob("*.py") if {"interpreter", "_jax_triton.py"}.isdisjoint(file.parts)]
    with_kernels = {
        "ejkernel_triton." + ".".join(file.relative_to(package).with_suffix("").parts)
        for file in files
        if re.search(r"^(import|from) triton\b", file.read_text(), re.MULTILINE)
    }
    found = [(file.name, *place) for file in files for place in _imports(ast.parse(file.read_text()), with_kernels)]
    assert len(found) >= 7
    assert [place for place in found if not place[-1]] == []


def _imports(tree, modules):
    """Of these modules and Triton's, in functions: of which, and whether it is done under the lock."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for statement in function.body:
            guarded = isinstance(statement, ast.With) and ast.unparse(statement.items[0]) == "_jax_triton.importing()"
            for node in ast.walk(statement):
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                yield from ((name, guarded) for name in names if name in modules or name.split(".")[0] == "triton")


def test_threads_that_come_at_once_get_what_is_mended():
    code = """
import threading
from ejkernel_triton.launch import _jax_triton
found, start = [], threading.Barrier(8)
def work():
    start.wait()
    module = _jax_triton.load()
    import jax_triton.triton_lib as library
    found.append((module.__name__, type(library.triton_kernel_call_lib).__name__))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), set(found))
"""
    assert run(code) == ["8 {('jax_triton', '_Library')}"]


# -- the launch in a program -------------------------------------------------------------------------------------


def _launches(native):
    """Launches with everything in them."""
    kernel = native.TritonKernel("name", 4, 1, 1000, "ptx", "ttir", 90)
    numbers = [
        (-5, "i32"),
        (0, "i32"),
        (True, "B"),
        (5, "i64"),
        (2**31, "u32"),
        (2**63, "u64"),
        (1.5, "fp32"),
        (1.5, "fp64"),
    ]
    parameters = [native.create_array_parameter(0, 16), native.create_array_parameter(64, 0)]
    parameters += [native.create_scalar_parameter(value, kind) for value, kind in numbers]
    one = native.TritonKernelCall(kernel, 3, 2, 1, parameters)
    two = native.TritonKernelCall(kernel, 3, 70000, 0, [])
    both = native.TritonAutotunedKernelCall("auto", [(one, "one"), (two, "two")], ((0, 1, 400), (2, 0, 0)))
    return [one.to_proto("nm", b"meta"), two.to_proto("", b""), both.to_proto("nm", b"")]


#: What jaxlib's plugins write for the first: those for 0.10.2, 0.11.2 and 0.12.0.1 write the same.
WRITTEN = (
    b'\nn\n\x1a\n\x04name\x10\x04\x18\xe8\x07"\x03ptx*\x04ttir0ZP\x01\x10\x03\x18\x02 \x01*\x04\n\x02\x10\x10*\x04\n'
    b"\x02\x08@*\x0b\x18\xfb\xff\xff\xff\xff\xff\xff\xff\xff\x01*\x02\x18\x00*\x02\x10\x01*\x02(\x05*\x06 \x80\x80"
    b"\x80\x80\x08*\x0b0\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01*\x05=\x00\x00\xc0?*\tA\x00\x00\x00\x00\x00\x00\xf8?"
    b'\x1a\x04meta"\x02nm'
)


def test_the_portable_way_writes_what_the_plugin_writes():
    from jaxlib import gpu_triton

    assert _launches(_protocol)[0] == WRITTEN
    if hasattr(gpu_triton, "TritonKernel"):
        assert _launches(_protocol) == _launches(gpu_triton)


def test_an_array_for_the_copy_engine_is_written_as_the_plugin_writes_it():
    parameter = _protocol.create_tma_descriptor_parameter(
        elem_type=7,
        swizzle=3,
        shape=[11, 300, 13, 14],
        strides=[21000, 22, 23, 1],
        block_shape=[1, 64, 1, 33],
        oob_fill=1,
    )
    # By jaxlib's plugin for 0.11.2.
    written = "4a1d0a1b080710031a050bac020d0e220688a4011617012a04014001213001"
    assert parameter.serialized.hex() == written


def test_scratch_memory_is_told():
    kernel = _protocol.TritonKernel("name", 4, 1, 1000, "ptx", "ttir", 90, 128, 16)
    assert kernel.serialized().endswith(b"P\x01`\x80\x01h\x10")


def test_what_the_portable_way_cannot_do_is_told():
    with pytest.raises(ValueError, match="type 'i8' cannot be passed"):
        _protocol.create_scalar_parameter(1, "i8")
    with pytest.raises(RuntimeError, match="takes jaxlib's CUDA plugin"):
        _protocol.get_serialized_metadata(b"")


def _turned_round_and_back():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def kernel(x, out):
        along: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        across: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
        rows = gl.arange(0, 64, gl.SliceLayout(1, along))[:, None]
        at = rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, along))[None, :]
        tile = gl.convert_layout(gl.load(x + at), across) * 2.0
        gl.store(out + at, gl.convert_layout(tile, along))

    return kernel


@pytest.mark.skipif(not NEW, reason="Gluon kernels need jax-triton 0.4")
def test_what_a_gluon_kernel_says_of_layouts_is_not_rewritten():
    tile = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def call(x):
        return _jax_triton.call(
            _turned_round_and_back(), [x], [tile], grid=(1,), constants={}, num_warps=4, num_stages=1,
            compute_capability=(9, 0),
        )  # fmt: skip

    (kernel,) = compiled_for("NVIDIA H200", call, tile)
    # Through shared memory and back: Triton's passes see that this is for nothing.
    assert kernel.shared_memory >= 64 * 64 * 4
    assert kernel.count("st.shared") > 0
