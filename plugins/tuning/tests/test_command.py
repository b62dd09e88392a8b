"""The command ``ejkernel tune``: what it shows and stores, and that nothing is lost where it is interrupted or fails."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

import ejkernel_core
from ejkernel_cache import PersistentCache, default_cache
from ejkernel_cache._directory import Directory
from ejkernel_core import Operation, Registry, Unsupported, hookimpl
from ejkernel_core._plan import Verdict
from ejkernel_core.extend import Plugins, Shortfall
from ejkernel_tuning import Entry, Progress, _autotune, _calls, autotune, load_invocations, recording, save_invocations
from ejkernel_tuning._bar import Bar
from ejkernel_tuning.command import _fault_lines

Run = Callable[..., Any]


@pytest.fixture
def run(run_command: Run) -> Run:
    """``run("triple", ...)``: the exit code and the output of ``ejkernel tune triple ...``."""
    return functools.partial(run_command, "tune")


# -- an operation whose configurations take different times ------------------------------------------------------------


@attrs.frozen
class Config:
    turns: int = 40


def triple(x, *, most=64, plain=False): ...


def triple_bwd(*, x, most, plain, out, d_out, wrt): ...


class Triple:
    """``triple`` in a registry with the cache and the tuner. A configuration with fewer turns is faster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: What is done when a configuration is compiled.
        self.on_compiling: Callable[[Config], None] = lambda cfg: None
        self.compiled: list[int] = []
        self.registry = self.new_registry()

    def new_registry(self, plugins: str = "ejkernel-cache,ejkernel-tuning") -> Registry:
        """As in a new process."""
        default_cache.cache_clear()
        registry = Registry(plugins=plugins)
        outputs = {"outputs": lambda a: (a["x"],)}
        registry.register(
            Operation(
                name="triple",
                signature=triple,
                reference="plain",
                backward="triple_bwd",
                differentiable=("x",),
                **outputs,
            )
        )
        registry.register(
            Operation(
                name="triple_bwd", signature=triple_bwd, arrays=("x", "out", "d_out"), reference="plain", **outputs
            )
        )
        for op, array in (("triple", "x"), ("triple_bwd", "d_out")):
            registry.register(self.kernel(array, (40, 4)), f"{op}.loop")
            registry.register(self.kernel(array, ()), f"{op}.plain")
        listener = SimpleNamespace(select_config=hookimpl(lambda inv: None), tuning_progress=self.on_progress)
        registry.register(listener, "listener")
        return registry

    def kernel(self, array: str, turns: tuple[int, ...]) -> SimpleNamespace:
        @hookimpl
        def heuristic_cfg(inv):
            if inv["plain"] and turns:
                raise Unsupported("it is not plain")
            return Config(turns[0]) if turns else None

        @hookimpl
        def config_space(inv):
            return [Config(n) for n in turns]

        @hookimpl
        def run_backend(inv, cfg):
            value = inv[array]
            if cfg is not None:
                value = jax.lax.fori_loop(0, cfg.turns * 20, lambda i, x: jnp.sin(x) * 0 + x, value)
            return value * (3 if cfg is None or cfg.turns > 0 else 4)  # which is wrong

        kernel = SimpleNamespace(
            heuristic_cfg=heuristic_cfg, run_backend=run_backend, PLATFORMS={"cpu": 50 if turns else 1}
        )
        if turns:
            kernel.Config, kernel.config_space = Config, config_space
        return kernel

    @property
    def on_progress(self) -> Any:
        seen: list[Any] = []

        @hookimpl
        def tuning_progress(inv, progress):
            for trial in progress.trials:
                if trial.step == "compiling" and not any(trial is other for other in seen):
                    seen.append(trial)
                    if trial.cfg is not None and inv.op == "triple":
                        self.compiled.append(trial.cfg.turns)
                        self.on_compiling(trial.cfg)

        return tuning_progress

    def stored(self) -> list[tuple[str, str, int | None]]:
        """Operation, backend and turns of the records on disk, without those of buckets."""
        default_cache.cache_clear()
        return [
            (key.op, str(r.backend), r.cfg and r.cfg.turns) for key, records in default_cache().items() for r in records
        ]


@pytest.fixture
def triple_op(cache_folder: Path, use_registry: Any) -> Triple:
    op = Triple(cache_folder)
    use_registry(op.registry)
    return op


SHAPE = ("triple", "--shape", "5x30")


# -- measure -----------------------------------------------------------------------------------------------------------


def test_what_was_wrong_is_shown_with_how_much(run: Run, triple_op: Triple) -> None:
    triple_op.registry.register(triple_op.kernel("x", (0,)), "triple.wrong")
    triple_op.registry.register(triple_op.kernel("x", (40, 0, -1)), "triple.loop")
    expected = [
        "  wrong results of loop (turns=0), and 1 other configuration of it: the result is off by 0.33 of the largest "
        "value; 0.0001 is allowed",
        "  wrong results of wrong (turns=0): the result is off by 0.33 of the largest value; 0.0001 is allowed",
    ]
    for _ in range(2):  # measured, and stored
        output = run(*SHAPE, "--no-backward", "--budget", 30)
        assert output.code == 0
        assert sorted(line for line in output.text.splitlines() if "wrong results" in line) == expected


def test_the_fastest_is_stored_and_shown_beside_the_heuristic(run: Run, triple_op: Triple) -> None:
    output = run(*SHAPE, "--budget", 30)
    assert output.code == 0
    first, second, *table = output.text.splitlines()
    assert re.fullmatch(
        r"triple: plain, [\d.e-]+ ms, [\d.]+x as fast as the heuristic's \(measured in [\d.]+ s\)", first
    )
    assert second.startswith("triple_bwd: plain, ")
    assert {("triple", "plain", None), ("triple_bwd", "plain", None)} <= {*triple_op.stored()}
    assert "most=64" in output.text
    assert re.search(r" measured\n.* in [\d.]+ s\n", output.text)  # a time and its unit in one line of the table
    assert "5x30 float32" in output.text
    assert max(map(len, table)) <= 80
    assert output.errors.splitlines()[0].startswith("measuring 1/2 triple: triple(x=float32[5,30], most=64)")


def test_a_second_run_measures_nothing_unless_it_is_to(
    run: Run, triple_op: Triple, use_registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*SHAPE, "--no-backward").code == 0
    use_registry(triple_op.new_registry())
    with monkeypatch.context() as patch:
        patch.setattr(_calls, "tune", lambda *arguments: pytest.fail("it measures"))
        output = run(*SHAPE, "--no-backward")
    assert output.code == 0
    assert re.search(r"triple: plain, .* as fast as the heuristic's \(stored 20\d\d-\d\d-\d\d, by disk\)", output.text)
    assert output.errors == ""
    triple_op.compiled.clear()
    assert "measured in" in run(*SHAPE, "--no-backward", "--again").text
    assert sorted(triple_op.compiled) == [4, 40]


def test_several_shapes_are_several_calls(run: Run, triple_op: Triple) -> None:
    output = run("triple", "--shape", "5x30", "--most", 8, "--shape=2x30", "--no-backward", "--shape", "5x30", "--json")
    calls = json.loads(output.text)["calls"]
    assert [call["call"].partition(" on ")[0] for call in calls] == [
        "triple(x=float32[5,30], most=8)",
        "triple(x=float32[2,30], most=8)",
    ]
    for call in calls:
        assert (call["outcome"], call["backend"], call["heuristic"]["backend"]) == ("measured", "plain", "loop")
        assert call["heuristic"]["config"] == {"turns": 40}
        times = {(entry["backend"], entry["config"].get("turns")): entry["milliseconds"] for entry in call["tried"]}
        assert call["milliseconds"] == times["plain", None] < times["loop", 4] < times["loop", 40]
        assert call["heuristic"]["milliseconds"] == times["loop", 40]
    assert "measured in" in output.errors  # not in the JSON


def test_a_backend_can_be_measured_alone(run: Run, triple_op: Triple, tmp_path: Path) -> None:
    output = run(*SHAPE, "--backend", "loop", "--json")
    forward, backward = json.loads(output.text)["calls"]
    for call in (forward, backward):
        assert (call["backend"], {entry["backend"] for entry in call["tried"]}) == ("loop", {"loop"})
    assert {backend for _, backend, _ in triple_op.stored()} == {"loop"}
    x = jax.ShapeDtypeStruct((5, 30), "float32")
    plan = triple_op.registry.plan("triple", x, backend="loop")
    assert (plan.origin.partition(" ")[0], {"turns": plan.cfg.turns}) == ("memory", forward["config"])
    assert triple_op.registry.plan("triple", x).origin == "heuristic"  # which may be faster was not measured
    recorded = json.loads(run("--recorded", recorded_file(tmp_path), "--backend", "plain", "--json").text)["calls"]
    assert {entry["backend"] for call in recorded for entry in call["tried"]} == {"plain"}
    refused = run(*SHAPE, "--plain", "--backend", "loop", "--no-backward")
    assert (refused.code, refused.text.partition("; ")[2].partition("\n")[0]) == (
        1,
        "triple.loop (registered at run time): refused, it is not plain",
    )


def test_a_kernel_that_is_chosen_by_the_heuristic_is_said_to_be_the_same(run: Run, triple_op: Triple) -> None:
    output = run(*SHAPE, "--no-backward", "--plain")
    assert "triple: plain, " in output.text
    assert ", as the heuristic says (measured" in output.text
    assert "the same" in output.text


def test_a_call_that_another_process_has_measured_meanwhile_is_not_measured_again(
    run: Run, triple_op: Triple, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, SimpleNamespace(record=None)])
    monkeypatch.setattr(_calls, "_stored_choice", lambda *arguments: next(answers))
    monkeypatch.setattr(_calls, "_is_to_be_measured", lambda choice, budget_s: choice is None)
    monkeypatch.setattr(_calls, "tune", lambda *arguments: pytest.fail("it measures"))
    inv = triple_op.registry.invocation("triple", jnp.ones(3))
    (outcome,) = _calls.tune_each([inv], 5.0)
    assert outcome.stored is not None
    assert outcome.tuned is None


# -- recorded programs -------------------------------------------------------------------------------------------------


def recorded_file(folder: Path) -> Path:
    with recording() as invocations:
        x = jax.ShapeDtypeStruct((7, 30), "float32")
        jax.jit(jax.grad(lambda x: ejkernel_core.call("triple", x, most=5).sum())).lower(x)
    save_invocations(folder / "calls.json", invocations)
    return folder / "calls.json"


def test_a_recorded_program_is_tuned(run: Run, triple_op: Triple, tmp_path: Path) -> None:
    file = recorded_file(tmp_path)
    output = run("--recorded", file)
    assert output.code == 0
    assert {op for op, *_ in triple_op.stored()} == {"triple", "triple_bwd"}
    assert "7x30 float32" in output.text
    assert [line.partition(":")[0] for line in run("--recorded", file, "--no-backward").text.splitlines()[:2]] == [
        "triple",
        "",
    ]


def test_the_labels_of_a_compiled_program_are_looked_up(
    run: Run, triple_op: Triple, use_registry: Any, tmp_path: Path
) -> None:
    cfg = Config(4)
    inv = triple_op.registry.invocation("triple", jnp.ones((7, 30)), most=5)
    default_cache().put(inv.key, ejkernel_core.Record(cfg, "loop"))
    program = jax.jit(lambda x: ejkernel_core.call("triple", x, most=5)).lower(jnp.ones((7, 30))).compile()
    file = tmp_path / "program.txt"
    others = ("triple.loop(less=3)", "triple.loop(turns=33)", "opts.items()")
    file.write_text(program.as_text() + "".join(f'\nop_name="jit(f)/{label}/mul"' for label in others))
    assert "triple.loop(turns=4)" in program.as_text()
    output = run("--hlo", file, "--again")
    assert output.code == 1
    assert "triple: plain, " in output.text
    assert "measured in" in output.text
    field, fault, last = output.errors.splitlines()[-3:]
    assert field.startswith("ejkernel: triple.loop(less=3): extra fields found (less)")
    assert fault.startswith(
        "ejkernel: triple.loop(turns=33): a label has no shapes, and no stored call has its configuration"
    )
    assert last == "ejkernel: 2 calls have no result; the reason is above"


def test_what_is_saved_is_loaded(triple_op: Triple, tmp_path: Path) -> None:
    file = recorded_file(tmp_path)
    forward, backward = load_invocations(file)
    x = jax.ShapeDtypeStruct((7, 30), "float32")
    assert forward.key == triple_op.registry.invocation("triple", x, most=5).key
    assert (backward.op, backward["wrt"], backward["d_out"].shape) == ("triple_bwd", ("x",), (7, 30))
    values = {"most": (1, jnp.dtype("bfloat16"), float("inf"), [None, "a"]), "x": x}
    save_invocations(file, [attrs.evolve(forward, arguments=values)])
    (loaded,) = load_invocations(file)
    assert dict(loaded) == {**values, "plain": None}


@pytest.mark.parametrize("value", [Config(3), Exception, lambda: 3, {1: 2}])
def test_an_option_without_json_is_named(triple_op: Triple, tmp_path: Path, value: Any) -> None:
    inv = triple_op.registry.invocation("triple", jnp.ones(3))
    with pytest.raises(ejkernel_core.RecordError, match=r"^triple: most=.* cannot be written; tune it in the program"):
        save_invocations(tmp_path / "calls", [inv.with_arrays({"most": value})])
    assert not (tmp_path / "calls").exists()


# -- something is wrong ------------------------------------------------------------------------------------------------


def test_an_interrupted_measurement_is_kept_and_goes_on(run: Run, triple_op: Triple, use_registry: Any) -> None:
    """Ctrl-C comes when the second configuration is compiled. The next run does not compile the first again."""

    def interrupt(cfg: Config) -> None:
        if cfg.turns == 4:
            signal.raise_signal(signal.SIGINT)

    triple_op.on_compiling = interrupt
    output = run(*SHAPE, "--budget", 100)
    assert output.code == 130
    assert output.errors.splitlines()[-1] == (
        "ejkernel: interrupted, 2 calls not done; what was measured is kept: run it again to go on"
    )
    assert triple_op.stored() == []
    assert list((triple_op.folder / ".tuning").glob("*.json"))
    triple_op.on_compiling = lambda cfg: None
    triple_op.compiled.clear()
    use_registry(triple_op.new_registry())
    output = run(*SHAPE, "--budget", 100, "--json")
    assert triple_op.compiled == [4]
    tried = json.loads(output.text)["calls"][0]["tried"]
    assert {entry["config"].get("turns") for entry in tried if entry["milliseconds"]} == {None, 4, 40}
    assert list((triple_op.folder / ".tuning").glob("*.json")) == []


def test_what_is_done_before_ctrl_c_is_shown(run: Run, triple_op: Triple, monkeypatch: pytest.MonkeyPatch) -> None:
    tune, count = _calls.tune, iter(range(9))

    def tune_once(*arguments: Any) -> Any:
        if next(count):
            raise KeyboardInterrupt
        return tune(*arguments)

    monkeypatch.setattr(_calls, "tune", tune_once)
    output = run(*SHAPE)
    assert output.code == 130
    assert "5x30 float32" in output.text
    assert "1 call not done" in output.errors
    assert {op for op, *_ in triple_op.stored()} == {"triple"}


def test_a_full_disk_loses_no_result(run: Run, triple_op: Triple, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Directory, "write", refuse)
    output = run(*SHAPE, "--no-backward", "--json")
    assert output.code == 1
    assert json.loads(output.text)["calls"][0]["backend"] == "plain"
    warning, last = output.errors.splitlines()[-2:]
    assert "No space left on device" in warning
    stored = "ejkernel: not everything could be stored; cache: config_selected raised OSError: [Errno 28] No space left"
    assert last == f"{stored} on device"


def test_a_result_that_was_not_stored_is_told_though_the_next_one_was(
    run: Run, triple_op: Triple, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = Directory.write, iter(range(99))

    def refuse_once(self: Directory, place: Any, data: bytes) -> None:
        if next(count) == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, place, data)

    monkeypatch.setattr(Directory, "write", refuse_once)
    output = run(*SHAPE, "--shape", "7x30", "--no-backward")
    assert output.code == 1
    assert output.errors.endswith("config_selected raised OSError: [Errno 28] No space left on device\n")
    assert len(triple_op.stored()) == 1


def test_a_folder_that_others_can_write_to_is_not_a_failure(run: Run, triple_op: Triple) -> None:
    triple_op.folder.mkdir(parents=True, exist_ok=True)
    triple_op.folder.chmod(0o777)
    output = run(*SHAPE, "--no-backward")
    assert output.code == 0
    assert "can be written to by other users" in output.errors
    assert len(triple_op.stored()) == 1


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_measured(
    run: Run, triple_op: Triple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for place, reason in (("file", "is a file, not a folder"), ("file/below", "Not a directory")):
        monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / place))
        default_cache.cache_clear()
        assert run(*SHAPE) == (
            1,
            "",
            f"ejkernel: {tmp_path}/{place} cannot be written to ({reason}); set EJKERNEL_CACHE_DIR to a folder that "
            "can be\n",
        )
    assert triple_op.compiled == []


@pytest.mark.long
@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_records_are_stored_where_nobody_reads_the_output(cache_folder: Path, streams: str) -> None:
    words = [sys.executable, "-m", "ejkernel_cli", "tune", "rms_norm", "--shape", "3x8", "--no-backward"]
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", *words]
    process = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert (process.returncode, "Traceback" in process.stderr) == (0, False)
    assert {key.op for key, _ in PersistentCache(cache_folder).items()} == {"rms_norm"}


def test_without_a_store_nothing_is_measured(run: Run, triple_op: Triple, use_registry: Any) -> None:
    use_registry(triple_op.new_registry("ejkernel-tuning"))
    assert run(*SHAPE).errors == "ejkernel: nothing here stores what is measured: pip install ejkernel-cache\n"
    assert triple_op.compiled == []


def test_a_budget_that_is_too_short_has_no_result(run: Run, triple_op: Triple) -> None:
    output = run(*SHAPE, "--no-backward", "--budget", "0.000001")
    assert output.code == 1
    assert "out of time" in output.text
    assert output.errors.splitlines()[-1] == "ejkernel: 1 call has no result; the reason is above"
    assert triple_op.stored() == []


def test_what_the_budget_did_not_reach_is_said_when_it_is_measured_and_when_it_is_stored(
    run: Run, triple_op: Triple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_autotune, "_shortfall", lambda *arguments: Shortfall(2, 60.0))
    words = "2 configurations were not measured in 60 s"
    for output in (run(*SHAPE, "--no-backward"), run(*SHAPE, "--no-backward")):
        assert words in output.text
    (call,) = json.loads(run(*SHAPE, "--no-backward", "--json").text)["calls"]
    assert call["outcome"] == "stored"
    assert call["shortfall"].startswith(words)


def test_broken_kernels_are_shown_when_a_call_is_measured_and_when_it_is_stored(
    run: Run, triple_op: Triple, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = triple_op.kernel("x", (0,))
    kernel.heuristic_cfg = hookimpl(lambda inv: 1 // 0)
    triple_op.registry.register(kernel, "triple.raises")
    kernels_that_load = Plugins.kernels
    absent = Verdict("triple.absent", "mine 1.0", "broken", "_run is marked @hookimpl but is not a hook")
    monkeypatch.setattr(Plugins, "kernels", lambda self, op: (kernels_that_load(self, op)[0], [absent]))
    expected = [f"  {absent}", "  triple.raises (registered at run time): broken, heuristic_cfg raised"]
    for _ in range(2):
        lines = [line for line in run(*SHAPE, "--no-backward", "--budget", 30).text.splitlines() if "broken" in line]
        assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
    assert "broken" not in run(*SHAPE, "--no-backward", "--backend", "loop").text
    result = autotune("triple", jnp.ones((5, 30)), num_iters=2, remember=False)
    assert f"\n{expected[0]}\n{expected[1]}" in str(result)


def test_what_hung_is_shown_below_the_call() -> None:
    reason = "still running after 9 s; left behind in a thread"
    entries = (
        Entry("plain", None, 1.0, 0.1),
        Entry("loop", Config(40), reason=f"hung: {reason}"),
        Entry("loop", Config(4), reason=f"out of time: {reason}, probably blocked by loop (turns=40)"),
    )
    outcome: Any = SimpleNamespace(tuned=SimpleNamespace(entries=entries))
    assert [*_fault_lines(outcome)] == [f"  hung: loop (turns=40): {reason}"]


def test_the_reason_why_no_kernel_runs_is_shown(run: Run, triple_op: Triple, use_registry: Any) -> None:
    registry = triple_op.new_registry()
    refusal = SimpleNamespace(
        PLATFORMS={"abacus": 1}, heuristic_cfg=hookimpl(lambda inv: None), run_backend=hookimpl(lambda inv, cfg: 0)
    )
    registry.register(refusal, "triple.plain")
    use_registry(registry)
    output = run(*SHAPE, "--no-backward", "--plain")
    assert output.code == 1
    assert "no kernel can run it" in output.text
    assert "it is not plain" in output.text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("nothing", "--shape", "3"), 2, "no operation 'nothing' is installed"),
        (("triple", "--shape", "3xx"), 2, "3xx"),
        (("triple", "--shape", "3", "--less", "4"), 2, "triple has no option --less"),
        (("triple", "--recorded", "{calls}"), 2, "it takes one of an operation, --recorded and --hlo"),
        ((), 2, "it takes one of an operation, --recorded and --hlo"),
        (("--recorded", "{calls}", "--shape", "3"), 2, "--shape belongs to an operation"),
        (("--recorded", "{calls}", "--plain"), 2, "--plain belongs to an operation, and comes after it"),
        (("triple", "--shape", "3", "--budget", "0"), 2, "'--budget': takes seconds above 0, and at most 31536000; got 0"),
        (("triple", "--shape", "3", "--budget", "nan"), 2, "'--budget': takes seconds above 0, and at most 31536000; got nan"),
        (("triple", "--shape", "3", "--budget", "inf"), 2, "'--budget': takes seconds above 0, and at most 31536000; got inf"),
        (("triple", "--shape", "3", "--budget", "long"), 2, "'--budget': 'long' is not a valid float"),
        (("triple", "--shape", "3", "--backend", "lop"), 2, "no backend 'lop' of 'triple' is installed"),
        (("--recorded", "{one}", "--backend", "lop"), 2, "no backend 'lop' of 'triple' is installed"),
        (("--recorded", "{missing}"), 2, "'{missing}' does not exist"),
        (("--recorded", "{text}"), 1, "{text} is not a file of save_invocations: not JSON: Expecting value"),
        (("--recorded", "{list}"), 1, "{list} is not a file of save_invocations: it takes an object of JSON with a list of invocations"),
        (("--recorded", "{empty}"), 1, "{empty} is not a file of save_invocations: it takes an object of JSON with a list of"),
        (("--recorded", "{null}"), 1, "{null}, call 2: it takes an object of JSON with an operation and arguments"),
        (("--recorded", "{pair}"), 1, "{pair}, call 1: its operation is a name and a version, and its arguments are"),
        (("--hlo", "{program}"), 1, "{program} has no labels of calls: it takes compiled.as_text()"),
        (("--recorded", "{calls}"), 1, "{calls} has no calls; they are recorded while a program is compiled"),
        (("--recorded", "{other}"), 1, "{other}: $.schema is 9; this version reads 1"),
        (("--recorded", "{unknown}"), 1, "no operation 'quadruple' is installed"),
        (("--recorded", "{older}"), 1, "{older}, call 1 is of version 7 of triple, and here is version 1"),
        (("--hlo", "{text}"), 1, "{text} has no labels of calls: it takes compiled.as_text(), or lowered.as_text(debug_info=True)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    run: Run, triple_op: Triple, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    texts = {
        "calls": {"schema": 1, "invocations": []},
        "other": {"schema": 9, "invocations": []},
        "unknown": {"schema": 1, "invocations": [{"operation": ["quadruple", 1], "arguments": {}}]},
        "one": {"schema": 1, "invocations": [{"operation": ["triple", 1], "arguments": {}}]},
        "older": {"schema": 1, "invocations": [{"operation": ["triple", 7], "arguments": {}}]},
        "list": [],
        "empty": {},
        "null": {"schema": 1, "invocations": [{"operation": ["triple", 1], "arguments": {}}, None]},
        "pair": {"schema": 1, "invocations": [{"operation": "triple", "arguments": {}}]},
    }
    places = {name: tmp_path / name for name in (*texts, "text", "program", "missing")}
    for name, text in texts.items():
        places[name].write_text(json.dumps(text))
    places["text"].write_text("no JSON\n")
    places["program"].write_text("for name, value in opts.items():\n    y.sum()\n")
    output = run(*(word.format(**places) for word in words))
    assert (output.code, output.text) == (code, "")
    assert message.format(**places).casefold() in output.errors.casefold()
    assert output.errors.count("\n") == 1


# -- the bar -----------------------------------------------------------------------------------------------------------


def test_the_bar_has_the_counts_the_best_and_the_time_left(triple_op: Triple, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from ejkernel_tuning import Trial

    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    console = Console(width=60, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    bar = Bar(lambda text: None, 60.0, sys.stderr, console)
    inv = triple_op.registry.invocation("triple", jnp.ones(3))
    bar.start(2, 3, inv)
    entries = (
        Entry("loop", Config(40), 1.5),
        Entry("plain", None, 0.5),
        Entry("loop", Config(4), reason="wrong"),
        Entry("loop", Config(2)),
    )
    bar(Progress(inv, entries, 15.0, 60.0, trials=(Trial("loop", Config(2), "compiling"),)))
    with console.capture() as capture:
        console.print(bar)
    first, second = re.sub(r"\x1b\[[\d;]*m", "", capture.get()).splitlines()
    assert re.fullmatch(r"2/3 triple ━+[╸╺]?━* 3 of 4 at most 1:45 left in all", first)
    assert second.strip() == "best 0.5 ms by plain; compiling loop (turns=2)"
    assert max(len(first), len(second)) <= 60
    bar(Progress(inv, (), 20.0, 60.0, finished=True))
    assert bar._counts == "3 of 4"


# -- a real terminal ---------------------------------------------------------------------------------------------------

NORM = ("tune", "rms_norm", "--shape", "60x128", "--no-backward")


@pytest.mark.long
def test_a_terminal_shows_a_bar_and_a_pipe_does_not(run_in_terminal: Any, cache_folder: Path) -> None:
    code, text = run_in_terminal(*NORM, columns=60)
    assert code == 0
    assert "━" in text
    assert "at most" in text
    assert "\x1b[?25h" in text  # the cursor is back
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)
    assert re.search(r"rms_norm: (xla|reference), [\d.]+ ms, .*\(measured in", plain)
    table = [line.rstrip() for line in plain[plain.rindex("call ") :].splitlines()]
    assert [line for line in table if len(line) > 60] == []
    code, text = run_in_terminal(*NORM)
    assert "(stored 20" in text
    assert code == 0


@pytest.mark.long
def test_ctrl_c_in_a_terminal_ends_cleanly_and_the_same_command_goes_on(
    run_in_terminal: Any, cache_folder: Path
) -> None:
    # Large enough that a busy machine does not end it before Ctrl-C.
    words = ("tune", "flash_attention", "--shape", "1x1000x4x64", "--no-backward")
    code, text = run_in_terminal(*words, answers={"best": chr(3)}, timeout_s=120.0)
    assert code == 130, text
    assert "ejkernel: interrupted, 1 call not done; what was measured is kept: run it again to go on" in text
    assert "Traceback" not in text
    assert "\x1b[?25h" in text
    (file,) = (cache_folder / ".tuning").glob("*.json")
    results = [(d["config"], d["milliseconds"]) for d in json.loads(file.read_text()) if d["milliseconds"]]
    assert results
    code, text = run_in_terminal(*words, timeout_s=120.0)
    assert code == 0
    records = [record for _, records in PersistentCache(cache_folder).items() for record in records]
    tried = [time for _, time in records[0].provenance.tried]
    assert {time for _, time in results} & {*tried}


@pytest.mark.long
def test_no_color_and_a_dumb_terminal_are_obeyed(
    run_in_terminal: Any, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    _, text = run_in_terminal(*NORM)
    assert re.search(r"\x1b\[(\d+;)*3\d(;\d+)*m", text) is None
    monkeypatch.setenv("TERM", "dumb")
    code, text = run_in_terminal(*NORM, "--again")
    assert code == 0
    assert "\x1b" not in text
    assert "measuring rms_norm: rms_norm(x=float32[60,128]" in text
