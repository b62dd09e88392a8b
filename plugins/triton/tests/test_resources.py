"""The resources of a card that each configuration takes, for every example with the use "resources".

They are in `resources.json`, with a hash of what decides them. Few of those whose hash has changed are compiled
at once, the others in the long sweep, with a tenth of the recorded ones. To record them:
`ejkernel triton resources --lock plugins/triton/tests/resources.json --write`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

import ejkernel_core
from ejkernel_cli import main
from ejkernel_triton.interpreter import _resources, _table, compiled_for
from ejkernel_triton.interpreter._lock import Lock, key
from ejkernel_triton.interpreter._resources import (
    CARDS,
    Case,
    Program,
    Resources,
    cases,
    installed_kernels,
    programs,
    sources,
)
from ejkernel_triton.launch import _jax_triton

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

LOCK_FILE = Path(__file__).with_name("resources.json")
H200, A100, L40S, GB200 = CARDS
KIB = 1024
#: The shared memory that CUDA gives to a program. It is written down again, because the limit of the configuration space
#: is under test.
LIMITS = {H200: 227 * KIB, A100: 163 * KIB, L40S: 99 * KIB, GB200: 227 * KIB}

#: The bytes that may be spilled, the most of all versions of Triton: by card (None for all), function, dtype, padded head
#: dim and the values of the configuration.
SPILLED: dict[tuple[str | None, str, str, int, tuple[int, int, int, int]], int] = {
    # At a head dim of 96 alone, and with Triton 3.6 alone.
    (None, "attend", "float32", 128, (32, 32, 8, 1)): 48,
    # In float32 the operands of wide heads are more than a program's registers, in any shape.
    (None, "attend", "float32", 256, (16, 32, 8, 1)): 96,
    (None, "sum_over_queries", "float32", 256, (16, 16, 8, 1)): 1024,
    (None, "sum_over_keys", "float32", 256, (16, 16, 8, 1)): 192,
}


#: The same for the other kernels: by card, kernel and the values of the configuration.
SPILLED_BY_OTHERS = {
    # One register, with 64 in use and 128 available.
    (A100, "layer_norm_bwd.triton", "1, 16, 1, 0, 0"): 4,
    # Two registers, with 40 in use: the compiler keeps to the number of programs that run at the same time.
    (GB200, "rms_norm.triton", "2, 16, 1, 0"): 8,
    # Two registers, outside of the loop, with 80 in use and 128 available, or all.
    (A100, "ragged_paged_attention.triton", "4, 128, 8, 2"): 8,
    (L40S, "ragged_paged_attention.triton", "1, 64, 8, 3"): 8,
}


def spilled_at_most(case: Case, program: Program) -> int:
    """The bytes that a program may spill."""
    if "Q_BLOCK" not in dict(program.launch.constants):
        return SPILLED_BY_OTHERS.get((case.card, case.kernel, case.configuration), 0)
    dtype = str(case.invocation["query"].dtype)
    return max(SPILLED.get((card, program.name, dtype, *blocks_of(program)), 0) for card in (case.card, None))


def blocks_of(program: Program) -> tuple[int, tuple[int, int, int, int]]:
    """The padded head dim of an attention kernel, and its blocks, warps and stages."""
    launch, constants = program.launch, dict(program.launch.constants)
    return constants["WIDTH"], (constants["Q_BLOCK"], constants["K_BLOCK"], launch.num_warps, launch.num_stages)


def check(case: Case, program: Program, resources: Resources) -> None:
    description = f"{case}, {program.name}: {resources}"
    most = min(case.estimates().get(program.name, LIMITS[case.card]), LIMITS[case.card])
    assert resources.shared_memory <= most, f"{description}; the configuration space assumes at most {most}"
    spilled = spilled_at_most(case, program)
    assert resources.spilled <= spilled, f"{description}; at most {spilled} bytes may be spilled"


@pytest.fixture(scope="module")
def lock() -> Lock:
    return Lock.read(LOCK_FILE)


#: The examples that are compiled before the long sweep, if they have changed.
QUICK = ("H16 D64 bfloat16 causal", "H16 D128 bfloat16 causal", "16384 x 4096 bfloat16")


def is_quick(case: Case) -> bool:
    """Whether a case that has changed is compiled before the long sweep: few heuristic configurations of two cards."""
    return case.is_heuristic and case.card in (H200, A100) and case.example.endswith(QUICK)


#: Those of the Gluon kernels, which jax-triton does not compile with every Python, are in test_gluon_resources.
KERNELS = [point.name for point in installed_kernels() if point.name.endswith(".triton")]
CALLS = sorted({(case.kernel, case.example) for case in cases([H200], KERNELS)})


def programs_of_call(kernel: str, example: str, cards: Sequence[str] = CARDS) -> Iterator[tuple[Case, Program]]:
    return programs(case for case in cases(cards, [kernel], example) if case.example == example)


@pytest.mark.parametrize(("kernel", "example"), CALLS, ids=str)
def test_every_configuration_fits_and_spills_nothing(lock: Lock, kernel: str, example: str) -> None:
    for case, program in programs_of_call(kernel, example):
        resources = lock.get(program)
        if resources is None and is_quick(case):
            resources = program.compile()
        if resources is not None:
            check(case, program, resources)


def is_drawn(program: Program, seed: str) -> bool:
    """Whether a recorded program is among the tenth that is compiled all the same, so that a wrong record is found."""
    return int(hashlib.sha256(f"{seed} {program.digest}".encode()).hexdigest(), 16) % 10 == 0


@pytest.mark.long
@pytest.mark.parametrize("card", [H200, A100])  # the records of the others are not complete
@pytest.mark.parametrize(("kernel", "example"), CALLS, ids=str)
def test_the_compiler_reports_what_is_recorded(
    pytestconfig: pytest.Config, lock: Lock, kernel: str, example: str, card: str
) -> None:
    seed = pytestconfig.getoption("--seed")
    for case, program in programs_of_call(kernel, example, [card]):
        recorded = lock.get(program)
        if recorded is None or is_drawn(program, seed):
            resources = program.compile()
            check(case, program, resources)
            assert recorded in (None, resources), f"{case}, {program.name}: {LOCK_FILE.name} differs"


def test_every_kernel_has_calls() -> None:
    assert {kernel for kernel, _ in CALLS} == {*KERNELS}


def test_every_exception_is_a_configuration_that_is_offered() -> None:
    configurations = set()
    for case, program in programs(cases(kernels=["flash_attention.triton", "flash_attention_bwd.triton"])):
        for card in (case.card, None):
            configurations.add((card, program.name, str(case.invocation["query"].dtype), *blocks_of(program)))
    assert {*SPILLED} <= configurations


def test_launches_inside_of_loops_are_found() -> None:
    """Of each chunk of rows there is one."""
    for kernel in ("fused_linear_cross_entropy.triton", "fused_linear_cross_entropy_sum.triton"):
        case = next(cases([H200], [kernel], "8192 x 4096"))
        assert [program.name for program in case.programs()] == ["lose"]


# -- hashes ----------------------------------------------------------------------------------------------------------


def first_program(**options: Any) -> Program:
    case = next(cases([H200], ["rms_norm.triton"], "8192 x 8192"))
    (program,) = case.programs()
    return attrs.evolve(program, launch=attrs.evolve(program.launch, **options))


@pytest.mark.parametrize(
    "options", [{"num_warps": 32}, {"compute_capability": 80}, {"scalars": (1,)}, {"constants": ()}], ids=str
)
def test_a_hash_depends_on_the_launch(options: dict[str, Any]) -> None:
    assert first_program().digest == first_program().digest != first_program(**options).digest


def test_a_hash_depends_on_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = first_program().digest
    monkeypatch.setattr(_resources.metadata, "version", lambda name: "0")
    assert first_program().digest != before


def test_a_hash_depends_on_the_code_of_all_imported_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "device_code"
    package.mkdir()
    files = {
        "__init__": "",
        "_tile": "def tile(x):\n    return x\n",
        "_kernel": "from device_code import _tile\n\ndef kernel(x):\n    return _tile.tile(x)\n",
        "_other": "def other(x):\n    return x\n",
    }

    def digest(**changes: str) -> str:
        for name, code in {**files, **changes}.items():
            (package / f"{name}.py").write_text(code)
        _resources.sources.cache_clear()
        _resources._code.cache_clear()
        return sources("device_code._kernel")

    monkeypatch.syspath_prepend(tmp_path)
    before = digest()
    assert digest(_tile=files["_tile"].replace("return x", "return -x")) != before
    assert digest(_kernel=files["_kernel"].replace("tile(x)", "tile(x + 1)")) != before
    assert digest(_other="") == before
    assert digest(_tile='def tile(x):\n    """A docstring."""\n    return x  # a comment\n') == before


def test_a_hash_does_not_depend_on_where_the_modules_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel, shared = (
        "from device_code.{}.z import tile\n\ndef kernel(x):\n    return tile(x)\n",
        "def tile(x):\n    return x\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    digests = set()
    for own, other in (("a", "b"), ("b", "a")):
        for folder, name, text in ((own, "kernel", kernel.format(other)), (other, "z", shared)):
            (tmp_path / "device_code" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "device_code" / folder / f"{name}.py").write_text(text)
        (tmp_path / "device_code" / "__init__.py").touch()
        _resources.sources.cache_clear()
        _resources._code.cache_clear()
        digests.add(sources(f"device_code.{own}.kernel"))
    assert len(digests) == 1


def test_what_has_changed_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []
    resources = Resources(1024, 32, 0)

    def compile(program: Program) -> Resources:
        compiled.append(program.name)
        return resources

    monkeypatch.setattr(Program, "compile", compile)
    chosen = list(cases([H200], ["rms_norm.triton"], "8192 x 8192"))
    file = tmp_path / "resources.json"
    lock = Lock.read(file)
    records = list(lock.record(chosen))
    assert len(compiled) == len(records) == len(chosen)
    lock.write(file)
    ((_, _, recorded),) = Lock.read(file).record(chosen[:1])
    assert recorded == resources
    assert len(compiled) == len(chosen)
    monkeypatch.setattr(_resources.metadata, "version", lambda name: "0")
    list(Lock.read(file).record(chosen[:1]))
    assert len(compiled) == len(chosen) + 1


# -- the command -----------------------------------------------------------------------------------------------------


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """The exit code of `ejkernel triton resources`, and what it prints to both streams."""
    with pytest.raises(SystemExit) as exit_:
        main(["triton", "resources", *words])
    captured = capsys.readouterr()
    return exit_.value.code, captured.out, captured.err


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--card", A100, "--kernel", "flash_attention.triton", "--example", "H16 D64 bfloat16 causal"]
    code, output, _ = run_command(capsys, *options, "--lock", str(LOCK_FILE))
    assert code == 0
    title, _, row, *_ = output.splitlines()
    assert title == (
        "| card | kernel | example | configuration | function | shared KiB | at most | registers | spilled bytes |"
    )
    case = next(cases([A100], ["flash_attention.triton"], "S4096 H16 D64 bfloat16"))
    (program,) = case.programs()
    resources = program.compile()
    sizes = [f"{size / KIB:.1f}" for size in (resources.shared_memory, case.estimates()["attend"])]
    cells = [case.card, case.kernel, case.example, "128, 64, 8, 3", "attend", *sizes, str(resources.registers), "0"]
    assert [cell.strip() for cell in row.strip("|").split("|")] == cells


def test_a_lock_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Program, "compile", lambda program: Resources(0, 40, 0))
    file = tmp_path / "resources.json"
    options = ["--card", H200, "--kernel", "rms_norm_bwd.triton", "--example", "8192 x 8192"]
    assert run_command(capsys, *options, "--lock", str(file), "--write")[0] == 0
    chosen = list(programs(cases([H200], ["rms_norm_bwd.triton"], "8192 x 8192")))
    assert all(Lock.read(file).get(program) == Resources(0, 40, 0) for _, program in chosen)
    assert len(file.read_text().splitlines()) == len(chosen) + 2


def test_a_complete_lock_file_has_no_rows_of_removed_cases(tmp_path: Path) -> None:
    chosen = list(cases([H200], ["rms_norm.triton"], "8192 x 8192"))
    resources = Resources(0, 40, 0)
    lock = Lock({key(case, program): (program.digest, resources) for case, program in programs(chosen)})
    file = tmp_path / "resources.json"
    for is_complete, count in ((False, len(chosen)), (True, 1)):
        list(_table.write(lock, chosen[:1], file, is_complete))
        assert len(Lock.read(file).rows) == count


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--card", "NVIDIA K80"], 2, "--card: there is no 'NVIDIA K80'; there are NVIDIA H200, "),
        (["--kernel", "flash"], 2, "--kernel: there is no 'flash'; there are flash_attention.gluon_decode_sm90, "),
        (["--write"], 2, "--write needs --lock"),
        (["--lock", "FILE"], 1, "cannot be read: Expecting value"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    file = tmp_path / "resources.json"
    file.write_text("no lock file")
    words = [str(file) if word == "FILE" else word for word in options]
    exit_code, _, error = run_command(capsys, *words)
    assert exit_code == code
    assert message in error
    assert error.count("\n") == 1


# -- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bias", "attention_mask"])
def test_rows_of_an_odd_length_are_loaded_as_those_of_an_even_one(name: str) -> None:
    def loads(length: int) -> tuple[int, ...]:
        array = jax.ShapeDtypeStruct((1, length, 4, 128), jnp.bfloat16)
        extra = jax.ShapeDtypeStruct((1, 4, length, length), jnp.bfloat16 if name == "bias" else jnp.bool_)
        arrays = {"query": array, "key": array, "value": array, name: extra}
        (kernel,) = compiled_for(
            H200, lambda a: ejkernel_core.call("flash_attention", **a, causal=True, backend="triton"), arrays
        )
        return tuple(map(kernel.count, ("ld.global.b8", "ld.global.b16", "cp.async.ca", "cp.async.cg")))

    assert loads(1023) == loads(1024)
    assert loads(1024)[:2] == (0, 0)  # no load of a single element
