"""Launches in programs, the compile cache that stores them, and the modules that they import."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ejkernel_triton
from ejkernel_triton.launch import _compile_cache, _jax_triton, _launch

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

#: For a new process: lowers attention for an H200, and prints a hash of the program and which modules are imported.
ATTENTION = """
import hashlib, json, sys
import jax, jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
import ejkernel_core

def attention(*arrays):
    return ejkernel_core.call("flash_attention", *arrays, causal=True, backend="{backend}")

arrays = [jax.ShapeDtypeStruct((1, {length}, 2, 64), jnp.bfloat16)] * 3
with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))):
    program = jax.jit(attention).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
imported = sorted({{"torch", "triton", "jax_triton"}} & set(sys.modules))
print(json.dumps([hashlib.sha256(program.encode()).hexdigest(), imported]))
"""
BACKENDS = ["triton", "gluon_sm90"]


def run(code, path=(), **environment):
    """The lines that a new process prints."""
    path = [str(folder) for folder in path]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    environment["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def attention(backend, cache, path=(), length=256, **environment):
    """The hash of the program, and the modules that its process has imported. It prints nothing else."""
    (line,) = run(ATTENTION.format(backend=backend, length=length), path, TRITON_CACHE_DIR=str(cache), **environment)
    program, imported = json.loads(line)
    return program, imported


def is_refused(backend):
    return backend == "gluon_sm90" and (_jax_triton.version() < (0, 4, 1) or _jax_triton.no_descriptors_reason())


@pytest.fixture
def torch(tmp_path):
    """A folder with a package named torch, which prints a line when it is imported, and fails."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("print('torch is imported')\nraise ImportError('this is not torch')\n")
    return package.parent


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cached_launch_imports_no_compiler_and_nothing_imports_torch(backend, tmp_path, torch):
    if is_refused(backend):
        pytest.skip("the Gluon kernels need newer versions")
    assert run("try:\n    import torch\nexcept ImportError:\n    pass", [torch]) == ["torch is imported"]
    program, imported = attention(backend, tmp_path / "cache", [torch])
    assert imported == ["jax_triton", "triton"]
    assert attention(backend, tmp_path / "cache", [torch]) == (program, [])


@pytest.mark.long
def test_changes_that_invalidate_a_cached_launch(tmp_path):
    cache, compiled = tmp_path / "cache", ["jax_triton", "triton"]
    program, imported = attention("triton", cache)
    assert imported == compiled
    assert attention("triton", cache) == (program, [])
    # The user wants a compilation, or the files that it writes.
    assert attention("triton", cache, TRITON_ALWAYS_COMPILE="1") == (program, compiled)
    assert attention("triton", cache, JAX_TRITON_DUMP_DIR=str(tmp_path / "steps")) == (program, compiled)
    # Triton compiles in another way.
    assert attention("triton", cache, DISABLE_LLVM_OPT="1")[1] == compiled
    # Damaged files are not read.
    for file in (cache / _compile_cache.FOLDER).iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert attention("triton", cache) == (program, compiled)
    assert attention("triton", cache) == (program, [])
    # The folder cannot be written.
    assert attention("triton", "/proc/no/folder") == (program, compiled)


@pytest.mark.long
def test_a_kernel_is_not_compiled_again_for_another_length(tmp_path):
    code = ATTENTION.replace(
        "import ejkernel_core",
        """import ejkernel_core
if {length} == 512:
    from triton.backends.nvidia import compiler
    compiler.CUDABackend.make_llir = None
""",
    )
    for length in (256, 512):
        run(code.format(backend="triton", length=length), TRITON_CACHE_DIR=str(tmp_path))


# -- the key -----------------------------------------------------------------------------------------------------


def test_a_key_is_the_same_in_every_process_and_depends_on_parts_files_and_compilers(monkeypatch, tmp_path):
    print_key = "from ejkernel_triton.launch import _compile_cache as c\nprint(c.key('name', 1))"
    in_processes = run(print_key) + run(print_key, PYTHONHASHSEED="7") + run(print_key, TRITON_CACHE_DIR="/elsewhere")
    assert len(set(in_processes)) == 1
    first = _compile_cache.key("name", 1)
    assert _compile_cache.key("name", 2) != first
    ptxas = tmp_path / "ptxas"
    keys = {first}
    for content in ("one", "another"):
        ptxas.write_text(content)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
        keys.add(_compile_cache.key("name", 1))
    assert len(keys) == 3
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(_compile_cache, "compilers", lambda: ("another Triton",))
    assert _compile_cache.key("name", 1) not in keys


def test_a_change_of_a_compilers_files_is_noticed(monkeypatch, tmp_path):
    package = tmp_path / "triton"
    (package / "_C" / "__pycache__").mkdir(parents=True)
    library = package / "_C" / "libtriton.so"
    library.write_text("code")
    monkeypatch.setattr(_compile_cache, "_folders", lambda name: [str(package)] if name == "triton" else [])
    before = _compile_cache.compilers.__wrapped__()
    (package / "_C" / "__pycache__" / "x.pyc").write_text("bytes")
    assert _compile_cache.compilers.__wrapped__() == before
    os.utime(library, ns=(1, 1))
    assert _compile_cache.compilers.__wrapped__() != before


def test_the_environment_of_triton_is_in_the_key():
    from triton import knobs

    groups = [group for group in vars(knobs).values() if isinstance(group, knobs.base_knobs)]
    names = {knob.key for group in groups for knob in group.knob_descriptors.values() if getattr(knob, "key", None)}
    assert len(names) > 30
    # The compiler of Triton's launcher, which JAX does not use.
    assert {name for name in names if not name.startswith(_compile_cache._PREFIXES)} == {"CC"}


def test_the_sources_of_a_kernel_are_in_the_key(monkeypatch, tmp_path):
    module = tmp_path / "kernel.py"
    module.write_text("x = 1")
    monkeypatch.setattr(_compile_cache, "_folders", lambda name: [str(tmp_path)])
    before = _compile_cache.sources("any")
    module.write_text("x = 2")
    assert _compile_cache.sources("any") != before


def test_a_launch_is_not_stored_if_its_source_has_changed(monkeypatch):
    stored = []
    monkeypatch.setattr(_compile_cache, "write", lambda name, content: stored.append(content))
    monkeypatch.setattr(_compile_cache, "read", lambda name: None)
    monkeypatch.setattr(_launch, "_compile", lambda launch, avals: b"opaque")
    launch = _jax_triton.Launch("ejkernel_triton.x:f", (), (), (), (1,), (), 4, 2, 90, "", (), ())
    assert _launch.opaque(launch, []) == b"opaque"
    assert stored == [b"opaque"]
    monkeypatch.setattr(_compile_cache, "sources", lambda package: "edited")
    assert _launch.opaque(launch, []) == b"opaque"
    assert len(stored) == 1


def test_the_folder_is_that_of_triton(monkeypatch, tmp_path):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert _compile_cache._folder() == Path(knobs.cache.dir) / _compile_cache.FOLDER
    print_folder = "from ejkernel_triton.launch import _compile_cache as c\nprint(c._folder())"
    with_triton = f"{print_folder}\nfrom triton import knobs\nprint(c._folder())"
    for environment in ({"TRITON_CACHE_DIR": "", "TRITON_HOME": str(tmp_path)}, {"TRITON_CACHE_DIR": str(tmp_path)}):
        assert len(set(run(with_triton, **environment))) == 1


# -- imports -----------------------------------------------------------------------------------------------------


def test_torch_is_blocked_for_one_thread(monkeypatch, torch):
    monkeypatch.syspath_prepend(torch)
    messages = []

    def work():
        with pytest.raises(ImportError) as error:
            __import__("torch")
        messages.append(str(error.value))

    with _jax_triton._TorchBlocker():
        work()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    assert messages == ["torch is blocked while Triton is initialized", *["this is not torch"] * 2]


@pytest.mark.skipif(_jax_triton.triton_version() >= (3, 8), reason="Triton does not import torch from 3.8 on")
def test_triton_imports_torch_if_it_is_not_blocked(torch):
    code = "import triton._C.libtriton as l\nl.native_specialize_impl(None, 0, False, False, False)"
    assert run(code, [torch]) == ["torch is imported"]


def test_only_a_compilation_imports_kernels():
    package = Path(ejkernel_triton.__file__).parent
    files = [file for file in package.rglob("*.py") if file.parent.name not in ("interpreter", "launch")]
    kernels = [file for file in files if re.search(r"^(import|from) triton\b", file.read_text(), re.MULTILINE)]
    modules = {"ejkernel_triton." + ".".join(file.relative_to(package).with_suffix("").parts) for file in kernels}
    assert len(modules) >= 7
    imports = {file.name: _imports(ast.parse(file.read_text())) for file in files if file not in kernels}
    assert {name: names & modules for name, names in imports.items() if names & modules} == {}
    assert {name for name, names in imports.items() if any(module.startswith("triton") for module in names)} == set()


def _imports(tree):
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


# -- the program -------------------------------------------------------------------------------------------------


def test_a_launch_is_the_same_custom_call_as_that_of_jax_triton(monkeypatch):
    _jax_triton.load()
    launch = _launch_of_add()
    arrays = [jax.ShapeDtypeStruct((200,), jnp.float32)] * 2

    def calls(function):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        return [line.split("custom_call", 1)[1] for line in text.splitlines() if "custom_call" in line]

    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    monkeypatch.setattr(_jax_triton, "import_kernel", lambda kernel: add_kernel())
    (call,) = calls(lambda *arrays: _launch.launch_p.bind(*arrays, launch=launch))
    (expected,) = calls(lambda *arrays: _jax_triton.call_jax_triton(launch, arrays))
    names = re.compile(r"%\w+")
    assert names.sub("%", call) == names.sub("%", expected)


def _launch_of_add():
    constants = (("BLOCK", 64),)
    aliases = ((0, 0),) if _jax_triton.version() >= (0, 4) else ()
    return _jax_triton.Launch(
        "ejkernel_triton:add",
        (None, None),
        (200,),
        (((200,), "float32"),),
        (4,),
        constants,
        4,
        2,
        90,
        "add",
        (),
        aliases,
    )


def add_kernel():
    import triton
    import triton.language as tl

    if _jax_triton.version() >= (0, 4):

        @triton.jit
        def add(x, y, n, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(x + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

    else:

        @triton.jit
        def add(x, y, n, out, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

    return add
