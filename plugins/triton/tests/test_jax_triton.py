"""The corrections for versions of jax-triton and Triton: each is needed, where a test can show it, and works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ejkernel_ops import update_kv_pages
from ejkernel_triton.interpreter import compiled_for
from ejkernel_triton.interpreter._compiled import kernels_in
from ejkernel_triton.launch import _jax_triton, _protocol
from ejkernel_triton.launch._launch import launch_p

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

VERSION = _jax_triton.version()
NEW = VERSION >= (0, 4)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
TARGET = "triton_kernel_call_ffi" if NEW else "triton_kernel_call"
VECTOR = jax.ShapeDtypeStruct((200,), jnp.float32)

#: The beginning of the code of a new process.
PROLOGUE = """
import os, sys
import jax, jax.numpy as jnp, triton, triton.language as tl
sys.path.insert(0, {tests!r})
import test_jax_triton as t
"""


def run(code, **environment):
    """The lines that a new process prints."""
    code = PROLOGUE.format(tests=os.path.dirname(__file__)) * ("t." in code) + code
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.split("\n")[:-1]


@triton.jit
def add(x, y, n, out, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask)


def added(x, y):
    results = _jax_triton.call(
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
    assert isinstance(results, tuple)
    return results[0]


def added_by_jax_triton(x, y):
    """Without this package."""
    import jax_triton

    outputs = {"out_type" if hasattr(jax_triton, "TensorDescriptor") else "out_shape": VECTOR}
    return jax_triton.triton_call(x, y, 200, kernel=add, grid=(4,), BLOCK=64, compute_capability=90, **outputs)


def lowered(function, *avals):
    return jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


# -- what is installed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"triton": None}, "triton is not installed: pip install"),
        ({"jax-triton": None}, "jax-triton is not installed: pip install"),
        ({"triton": (3, 5, 1)}, "triton 3.5.1 is older than 3.6: pip install"),
        ({"jax-triton": (0, 3, 0)}, "jax-triton 0.3.0 is older than 0.3.1: pip install"),
    ],
)
def test_a_missing_or_old_package_is_named_with_the_command_that_helps(monkeypatch, versions, message):
    installed = {"triton": (3, 6, 0), "jax-triton": (0, 3, 1), **versions}
    monkeypatch.setattr(_jax_triton, "_version", installed.__getitem__)
    assert _jax_triton.unavailable_reason.__wrapped__().startswith(message)


def test_a_jax_triton_for_later_pythons(monkeypatch):
    monkeypatch.setattr(_jax_triton, "_version", {"triton": (3, 8, 0), "jax-triton": (0, 4, 1)}.__getitem__)
    monkeypatch.setattr(_jax_triton.sys, "version_info", (3, 11, 4))
    assert _jax_triton.unavailable_reason.__wrapped__() == (
        'jax-triton 0.4 does not run on Python 3.11: pip install "jax-triton==0.3.*" "triton>=3.6"'
    )


def test_another_system(monkeypatch):
    monkeypatch.setattr(_jax_triton.sys, "platform", "darwin")
    assert _jax_triton.unavailable_reason.__wrapped__() == "Triton runs on Linux only; this is darwin"


def test_reading_the_versions_imports_nothing():
    assert run(
        "import sys\n"
        "from ejkernel_triton.launch import _jax_triton\n"
        "print(_jax_triton.unavailable_reason(), _jax_triton.version())\n"
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


def test_a_call_without_a_card_is_an_error():
    if _module_of_kernels() != _protocol.__name__:
        pytest.skip("there is a CUDA plugin, and maybe a card")
    call = lambda x: _jax_triton.call(
        add, [x, x], [VECTOR], scalars=(200,), grid=(4,), constants={"BLOCK": 128}, num_warps=4, num_stages=2,
        compute_capability=None,
    )  # fmt: skip
    # jax-triton 0.4 then looks at JAX's abstract mesh.
    with pytest.raises((RuntimeError, ValueError), match="compute_capability=|GPU device kind"):
        lowered(call, VECTOR)


def _module_of_kernels():
    from jaxlib import gpu_triton

    return getattr(gpu_triton, "TritonKernel", _protocol.TritonKernel).__module__


def test_a_scalar_may_be_a_number_of_numpy():
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


@pytest.mark.long
def test_the_environment_is_not_changed():
    code = "import os\nfrom ejkernel_triton.launch import _jax_triton\n{}\nprint(os.environ.get('TRITON_CACHE_DIR'))"
    import_alone = "with _jax_triton._SubstituteNames():\n    import jax_triton"
    assert run(code.format(import_alone), TRITON_CACHE_DIR="/mine") == ["None" if NEW else ""]  # it is needed
    assert run(code.format("_jax_triton.load()"), TRITON_CACHE_DIR="/mine") == ["/mine"]
    assert run("import os\nos.environ.pop('TRITON_CACHE_DIR', None)\n" + code.format("_jax_triton.load()")) == ["None"]


# -- corrections for single versions -----------------------------------------------------------------------------


@pytest.mark.long
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
    print_state = "import jax_triton.triton_lib as l\nprint(type(l.cb).__name__)"
    assert run(print_state) == ["SimpleNamespace"]  # it is needed
    corrected = first + "from ejkernel_triton.launch import _jax_triton\n_jax_triton.load()\n" + print_state
    assert run(corrected + "\nprint(l._TMA_TF32, len(l._TMA_DTYPE_DEVICE_TO_HOST) > 0)") == ["module", "11 True"]


def test_a_triton_without_cuda_is_not_changed(monkeypatch):
    substitute = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia", None)
    library = SimpleNamespace(cb=substitute)
    _jax_triton._restore_cuda(library)
    assert library.cb is substitute


@pytest.mark.skipif(not NEW, reason="jax-triton 0.3 has no such rule")
def test_the_rule_for_dead_code_takes_what_jax_passes():
    from jax._src.interpreters import partial_eval

    _jax_triton.load()
    import jax_triton.triton_lib as library

    rule = partial_eval.dce_rules[library.triton_kernel_call_p]
    has_new_rules = jax.__version_info__ >= (0, 12)
    assert (rule is _jax_triton._keep_call) == (has_new_rules and VERSION <= (0, 4, 1))
    text = lowered(lambda x: (added(x, x), x + 1)[1], VECTOR)
    assert "stablehlo.add" in text
    if has_new_rules and VERSION <= (0, 4, 1):
        program = (
            "try:\n    t.lowered(lambda x: t.added_by_jax_triton(x, x), t.VECTOR)\nexcept TypeError as e:\n    print(e)"
        )
        program = program.replace("t.added_by", "__import__('jax_triton') and t.added_by")
        lines = run(
            "import jax_triton.triton_lib as l\nl.triton_kernel_call_lib = __import__('ejkernel_triton.launch._protocol').launch._protocol\n"
            + program
        )
        assert "takes 2 positional arguments but 3 were given" in lines[0]


def test_the_rule_for_dead_code_uses_every_operand():
    equation = SimpleNamespace(invars=[1, 2, 3])
    assert _jax_triton._keep_call([False], equation) == ([True] * 3, equation)
    assert _jax_triton._keep_call([False], [True], equation) == ([True] * 3, equation)


# -- warps -------------------------------------------------------------------------------------------------------


def test_a_kernel_has_the_warps_that_its_code_is_compiled_for():
    kernel_class = lambda *arguments: arguments
    code = ".visible .entry f(\n)\n.reqntid 384\n{\n}"
    assert _jax_triton._kernel_with_all_warps(kernel_class, "f", 4, 1, 0, code, "ttir", 90)[:3] == ("f", 12, 1)
    assert (
        _jax_triton._kernel_with_all_warps(kernel_class, "f", 4, 1, 0, code.replace("384", "384, 1, 1"), "ttir", 90)[1]
        == 12
    )
    assert _jax_triton._kernel_with_all_warps(kernel_class, "f", 4, 1, 0, "/tmp/f.hsaco", "ttir", 0)[1] == 4


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


@pytest.mark.skipif(_module_of_kernels() != _protocol.__name__, reason="native kernels have no fields to read")
def test_a_warp_specialised_kernel_gets_all_its_warps(monkeypatch):
    kernels = []
    kernel_class = _protocol.TritonKernel

    def kernel(*arguments):
        kernels.append(arguments)
        return kernel_class(*arguments)

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
    # jax-triton passes 4, from the options; the code is for 8.
    assert kernels[0][1] == 8
    assert ".reqntid 256" in kernels[0][4]
    _jax_triton.load()
    import jax_triton.triton_lib as library

    monkeypatch.setattr(library, "triton_kernel_call_lib", _protocol)
    lowered(lambda x: call(x), pair)
    assert kernels[1][1] == 4  # it is needed


# -- the version of the PTX ---------------------------------------------------------------------------------------


def test_the_ptx_is_for_cuda_12_8_unless_the_card_or_the_user_needs_another(monkeypatch, tmp_path):
    from triton.backends.nvidia.compiler import CUDAOptions, get_ptxas

    variables = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    (kernel,) = compiled_for("NVIDIA H200", added, VECTOR, VECTOR)
    assert re.search(r"^\.version (\S+)", kernel.ptx, re.MULTILINE)[1] == "8.7"  # Triton 3.9 writes 9.4
    default, explicit = CUDAOptions(), CUDAOptions(ptx_version=90)
    assert _jax_triton._options_for_older_cuda(default, 90) == CUDAOptions(ptx_version=87)
    assert _jax_triton._options_for_older_cuda(default, 103) is default
    assert _jax_triton._options_for_older_cuda(explicit, 90) is explicit
    assert _jax_triton._options_for_older_cuda(amd := SimpleNamespace(), "gfx942") is amd
    ptxas = tmp_path / "ptxas"
    ptxas.symlink_to(get_ptxas(90).path)
    # Which of the variables Triton reads depends on its version. It ignores a path that it cannot run.
    for path, is_used in ((ptxas, True), (tmp_path / "none", False)):
        uses = []
        for name in variables:
            with monkeypatch.context() as patch:
                patch.setenv(name, str(path))
                assert (get_ptxas(90).path == str(path)) == (
                    _jax_triton._options_for_older_cuda(default, 90) is default
                )
                uses.append(get_ptxas(90).path == str(path))
        assert sum(uses) == is_used


# -- once, and in any thread -------------------------------------------------------------------------------------


def test_corrections_are_applied_once():
    module = _jax_triton.load()
    import jax_triton.triton_lib as library

    before = library.triton_kernel_call_lib
    compile_in_place = library.compile_ttir_inplace
    _jax_triton._wrap_native_library(library)
    _jax_triton._replace_compilation(library)
    assert library.triton_kernel_call_lib is before
    assert library.compile_ttir_inplace is compile_in_place
    assert not isinstance(before._native, _jax_triton._Library)
    assert _jax_triton.load() is module


def test_threads_may_begin_with_different_kernels():
    code = """
import importlib, sys, threading
from ejkernel_triton.launch import _jax_triton

# Triton's own modules, too: with imports from more sides a missing lock is certain to fail.
kernels = [f"ejkernel_triton.{name}" for name in ("flash_attention._forward", "flash_attention._backward", "flash_attention_sm90._forward")]
kernels += ["triton", "triton.language", "triton.experimental.gluon", "triton.experimental.gluon.language"]
gate, messages = threading.Barrier(1 + len(kernels)), []

def work(name):
    gate.wait()
    try:
        if name is None:
            _jax_triton.load()
        else:
            with _jax_triton.import_lock():
                importlib.import_module(name)
    except Exception as fault:
        messages.append(repr(fault))

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=work, args=(name,)) for name in [*kernels, None]]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(messages)
"""
    assert run(code) == ["[]"]


def test_every_thread_gets_the_corrected_module():
    code = """
import threading
from ejkernel_triton.launch import _jax_triton
modules, start = [], threading.Barrier(8)
def work():
    start.wait()
    module = _jax_triton.load()
    import jax_triton.triton_lib as library
    modules.append((module.__name__, type(library.triton_kernel_call_lib).__name__))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(modules), set(modules))
"""
    assert run(code) == ["8 {('jax_triton', '_Library')}"]


# -- the launch in a program -------------------------------------------------------------------------------------


def _launches(native):
    """Launches with every kind of parameter."""
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


#: The first of them by jaxlib's plugins for 0.10.2, 0.11.2 and 0.12.0.1, which write the same.
SERIALIZED = (
    b'\nn\n\x1a\n\x04name\x10\x04\x18\xe8\x07"\x03ptx*\x04ttir0ZP\x01\x10\x03\x18\x02 \x01*\x04\n\x02\x10\x10*\x04\n'
    b"\x02\x08@*\x0b\x18\xfb\xff\xff\xff\xff\xff\xff\xff\xff\x01*\x02\x18\x00*\x02\x10\x01*\x02(\x05*\x06 \x80\x80"
    b"\x80\x80\x08*\x0b0\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01*\x05=\x00\x00\xc0?*\tA\x00\x00\x00\x00\x00\x00\xf8?"
    b'\x1a\x04meta"\x02nm'
)


def test_a_launch_has_the_bytes_that_the_plugin_writes():
    from jaxlib import gpu_triton

    assert _launches(_protocol)[0] == SERIALIZED
    if hasattr(gpu_triton, "TritonKernel"):
        assert _launches(_protocol) == _launches(gpu_triton)


def test_a_descriptor_has_the_bytes_that_the_plugin_writes():
    parameter = _protocol.create_tma_descriptor_parameter(
        elem_type=7,
        swizzle=3,
        shape=[11, 300, 13, 14],
        strides=[21000, 22, 23, 1],
        block_shape=[1, 64, 1, 33],
        oob_fill=1,
    )
    # By jaxlib's plugin for 0.11.2.
    expected = "4a1d0a1b080710031a050bac020d0e220688a4011617012a04014001213001"
    assert parameter.serialized.hex() == expected


def test_scratch_memory_is_written():
    kernel = _protocol.TritonKernel("name", 4, 1, 1000, "ptx", "ttir", 90, 128, 16)
    assert kernel.serialized().endswith(b"P\x01`\x80\x01h\x10")


def test_functions_of_the_plugin_raise_without_it():
    with pytest.raises(ValueError, match="type 'i8' cannot be passed"):
        _protocol.create_scalar_parameter(1, "i8")
    with pytest.raises(RuntimeError, match="needs jaxlib's CUDA plugin"):
        _protocol.get_serialized_metadata(b"")


def _layout_round_trip():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def kernel(x, out):
        row_layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        column_layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
        rows = gl.arange(0, 64, gl.SliceLayout(1, row_layout))[:, None]
        offsets = rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, row_layout))[None, :]
        tile = gl.convert_layout(gl.load(x + offsets), column_layout) * 2.0
        gl.store(out + offsets, gl.convert_layout(tile, row_layout))

    return kernel


@pytest.mark.skipif(not NEW, reason="Gluon kernels need jax-triton 0.4")
def test_layouts_of_a_gluon_kernel_are_not_rewritten():
    tile = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def call(x):
        return _jax_triton.call(
            _layout_round_trip(), [x], [tile], grid=(1,), constants={}, num_warps=4, num_stages=1,
            compute_capability=(9, 0),
        )  # fmt: skip

    (kernel,) = compiled_for("NVIDIA H200", call, tile)
    # The conversions need shared memory. Triton's own passes would remove them.
    assert kernel.shared_memory >= 64 * 64 * 4
    assert kernel.count("st.shared") > 0


# -- in place ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_new", [False, True])
def test_results_of_updated_arrays_come_last(monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    """For jax-triton 0.4 alone, and not in what the caller gets."""
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 4, 1) if is_new else (0, 3, 1))
    x, y = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)

    def call(x: Any, y: Any) -> Any:
        return _jax_triton.call(
            "module:kernel", [x, y], [y, jax.ShapeDtypeStruct((5,), jnp.int32), x], grid=(1,), constants={},
            num_warps=4, num_stages=1, compute_capability=(9, 0), zeroed_outputs=[1], aliases={1: 0, 0: 2},
        )  # fmt: skip

    program = jax.make_jaxpr(call)(x, y)
    (launch,) = (equation.params["launch"] for equation in program.eqns if equation.primitive is launch_p)
    assert [shape for shape, _ in launch.outputs] == ([(5,), (3,), (2,)] if is_new else [(3,), (5,), (2,)])
    assert launch.zeroed_outputs == ((0,) if is_new else (1,))
    assert launch.aliases == (((1, 1), (0, 2)) if is_new else ((1, 0), (0, 2)))
    assert [aval.shape for aval in program.out_avals] == [(3,), (5,), (2,)]


@pytest.mark.parametrize("is_pair", [False, True])
def test_all_arrays_have_barriers_and_nothing_else_is_launched(is_pair: bool) -> None:
    """Arguments before the launch and results after it: XLA would pass a part of a larger array as it is.

    Threads move 16 bytes at once, and the number of the first page goes to the kernel, without another instruction.
    """
    pages = jax.ShapeDtypeStruct((64, 64, 8, 128), jnp.bfloat16)
    joined = jax.ShapeDtypeStruct((64, 64, 16, 128), jnp.bfloat16)
    token = jax.ShapeDtypeStruct((256, 8, 128), jnp.bfloat16)

    def step(key: Any, value: Any, slots: Any, first_page: Any, *cache: Any) -> Any:
        given = cache if is_pair else cache[0]
        return update_kv_pages(key, value, given, slots, first_page=first_page, backend="triton")

    arrays = [
        token,
        token,
        jax.ShapeDtypeStruct((256,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        *([pages, pages] if is_pair else [joined]),
    ]
    with use_abstract_mesh(
        AbstractMesh((1,), ("_",), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"))
    ):
        lowered = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda",))
    text, count = lowered.as_text(), 2 if is_pair else 1
    names = re.findall(r"stablehlo\.(\w+)", text)
    assert {*names} == {"custom_call", "output_operand_alias", "reshape", "optimization_barrier"}
    barriers = re.findall(r"(%\w+) = stablehlo\.optimization_barrier (%[\w#]+)", text)
    assert len(barriers) == names.count("optimization_barrier")
    (operands,) = re.findall(r"custom_call @\w+\((.*?)\)", text)
    assert [name for name, _ in barriers[:-count]] == operands.split(", ")
    (result,) = re.findall(r"(%\w+)(?::2)? = stablehlo\.custom_call", text)
    assert [name.partition("#")[0] for _, name in barriers[-count:]] == [result] * count
    (compiled,) = kernels_in(lowered)
    assert compiled.ptx.count("ld.global.v4.b32") == compiled.ptx.count("st.global.v4.b32") == 2
    assert compiled.spilled == 0
