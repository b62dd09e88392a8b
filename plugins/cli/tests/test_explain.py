"""``ejkernel explain``: the verdicts, the configurations, and the times of what was measured."""

from __future__ import annotations

import json

import pytest

from ejkernel_cli.explain import MOST_TIMES, measured_times
from ejkernel_core import Explanation, Provenance, Record, Registry
from ejkernel_core.extend import Shortfall

WORDS = ("explain", "flash_attention", "--shape", "1x300x4x64", "--key", "1x300x2x64", "--causal")


@pytest.fixture
def registry(use_registry):
    registry = Registry(plugins="ejkernel-ops,ejkernel-xla,ejkernel-cudnn")
    use_registry(registry)
    return registry


def test_the_table_has_a_verdict_and_a_configuration_of_every_kernel(run, registry):
    process = run(*WORDS)
    lines = process.stdout.splitlines()
    assert (process.returncode, process.stderr) == (0, "")
    assert lines[0].startswith("flash_attention(query=float32[1,300,4,64], key=float32[1,300,2,64], ")
    assert lines[1] == "flash_attention.xla runs, chosen by heuristic"
    rows = [line.split(maxsplit=2) for line in lines]
    assert ["cudnn", "refused", "it runs on gpu; this is cpu"] in rows
    plan = registry.plan("flash_attention", **call_of(registry).arguments)
    assert ["xla", "chosen", str(plan.cfg).removeprefix("Config(").removesuffix(")")] in rows
    assert ["reference", "able", "with a lower rank"] in rows
    assert any(line.startswith("flash_attention_bwd.xla runs, chosen by heuristic") for line in lines)
    assert max(len(line) for line in lines if "=float32" not in line) <= 80


@pytest.mark.parametrize("words", [("explain", "flash_attention", "--help"), ("explain", "-h", "flash_attention")])
def test_the_help_for_an_operation_has_its_options(run, words):
    process = run(*words)
    assert (process.returncode, process.stderr) == (0, "")
    _, _, options = process.stdout.partition("Options of flash_attention:\n")
    rows = dict(line.split(maxsplit=1) for line in options.splitlines())
    assert rows["--query"] == "an array (batch q_len heads head_dim)"
    assert rows["--softmax-aux"] == "an array (heads sinks), may be left out"
    assert rows["--dropout-seed"] == "an array (a number), may be left out"
    assert rows["--causal"] == "default False"
    for other in (("explain", "--help"), ("explain", "no_operation", "--help")):
        assert "Options of" not in run(*other).stdout


def test_without_verdicts_no_table_is_shown(run, registry, monkeypatch):
    explanation = Explanation("flash_attention", None, "the folder is not trusted\ncalled at home")
    monkeypatch.setattr(registry, "explain", lambda *args, **kwargs: explanation)
    process = run(*WORDS)
    assert process.returncode == 1
    assert process.stdout.strip() == "the folder is not trusted"
    assert process.stderr == "ejkernel: no kernel runs this call of flash_attention\n"


def call_of(registry):
    from ejkernel_cli import parse_call

    return parse_call(WORDS[1], WORDS[2:])


@pytest.fixture
def record(registry):
    """A record of the call in memory, with the times of 11 configurations, and the reasons of 4 that have none."""
    plan = registry.plan("flash_attention", **call_of(registry).arguments)
    slow = tuple((f"xla Config(q_block={n}, kv_block=64)", 3.0 + n) for n in range(8))
    tried = (
        ("reference None", 5.0),
        (f"xla {plan.cfg}", 2.0),
        *slow,
        ("xla Config(q_block=512, kv_block=64)", 2.5),
        ("xla Config(q_block=999, kv_block=64)", "wrong results"),
        ("xla Config(q_block=777, kv_block=64)", "hung: still running after 9 s"),
        ("xla Config(q_block=888, kv_block=64)", "the process crashed while it was run, twice, so it is out"),
        ("xla Config(q_block=666, kv_block=64)", "out of time: not reached within the budget"),
    )
    provenance = Provenance(
        when="2026-01-01T00:00:00+00:00",
        device="a cpu",
        milliseconds=2.0,
        backends=("xla", "reference"),
        tried=tried,
        shortfall=Shortfall(3, 10.0),
    )
    record = Record(plan.cfg, "xla", provenance)
    registry.remember(plan.invocation.key, record)
    return record


def test_measured_times_are_shown_with_the_lead_of_the_winner(run, record):
    lines = run(*WORDS).stdout.splitlines()
    assert lines[1] == "flash_attention.xla runs, chosen by memory"
    assert ["reference", "able", "slower when it was measured"] in [line.split(maxsplit=2) for line in lines]
    (summary,) = [line for line in lines if line.startswith("measured ") and "a cpu" in line]
    assert "on a cpu: 2 ms; 3 configurations were not measured in 10 s" in summary
    assert "the fastest is 1.25x as fast as the next configuration, and 2.50x as fast as reference" in lines
    start = next(number for number, line in enumerate(lines) if line.startswith("measured   ")) + 2
    rows = [line.split() for line in lines[start : start + MOST_TIMES]]
    assert rows[0] == ["xla", *str(record.cfg)[len("Config(") : -1].split(), "2", "1.00x"]
    assert rows[1][-2:] == ["2.5", "1.25x"]
    assert rows[-1][-2:] == ["7", "3.50x"]
    assert lines[start + MOST_TIMES + 1 :][:3] == [
        "3 more were slower and 1 was left out or failed; --json has all",
        "xla Config(q_block=777, kv_block=64): hung: still running after 9 s",
        "xla Config(q_block=888, kv_block=64): the process crashed while it was run, twice, so it is out",
    ]


def test_json_has_the_record_and_both_directions(run, registry, record):
    explanation = json.loads(run(*WORDS, "--json").stdout)
    assert (explanation["kernel"], explanation["origin"]) == ("flash_attention.xla", "memory")
    assert explanation["config"] == {"q_block": record.cfg.q_block, "kv_block": record.cfg.kv_block}
    assert explanation["measured"]["milliseconds"] == 2.0
    assert explanation["measured"]["tried"][0] == ["reference None", 5.0]
    assert len(explanation["measured"]["tried"]) == 15
    verdicts = {verdict["name"]: verdict["verdict"] for verdict in explanation["verdicts"]}
    assert verdicts["flash_attention.cudnn"] == "refused"
    assert explanation["backward"]["kernel"] == "flash_attention_bwd.xla"
    assert explanation["backward"]["measured"] is None


def test_the_calls_that_a_kernel_makes_are_listed(run, registry):
    words = ("explain", "moe_permute_matmul", "--shape", "16x8", "--token-order", "32", "--rhs", "4x8x6")
    words = (*words, "--group-sizes", "4", "--k", "2")
    output = run(*words).stdout
    forward, backward = output.split("moe_permute_matmul_bwd(", 1)
    parts = forward.partition("part ")[2]
    assert parts.index("moe_permute(x=float32[16,8]") < parts.index("grouped_matmul(lhs=float32[32,8]")
    assert " on cpu" not in parts
    assert backward.index("grouped_matmul_bwd(lhs=") < backward.index("grouped_matmul_d_rhs(lhs=")
    explanation = json.loads(run(*words, "--json").stdout)
    assert [part["kernel"] for part in explanation["parts"]] == ["moe_permute.xla", "grouped_matmul.xla"]
    assert [part["operation"] for part in explanation["backward"]["parts"][1]["parts"]] == [
        "grouped_matmul",
        "grouped_matmul_d_rhs",
    ]


def test_times_are_sorted_and_failures_left_out(record):
    times = [ms for _, ms in measured_times(record.provenance)]
    assert times == sorted(times)
    assert len(times) == 11


def test_a_call_that_no_kernel_runs_fails_and_has_the_reasons(run, registry):
    process = run("explain", "flash_attention", "--shape", "1x8x4x64", "--backend", "cudnn")
    assert process.returncode == 1
    assert process.stdout.startswith("no kernel can do flash_attention(")
    assert "it runs on gpu; this is cpu" in process.stdout
    assert (
        process.stderr == "ejkernel: no kernel runs this call of flash_attention; the table has each kernel's reason\n"
    )
    process = run("explain", "flash_attention", "--shape", "1x8x4x64", "--backend", "cudnn", "--json")
    assert (process.returncode, json.loads(process.stdout)["kernel"]) == (1, None)


def test_one_backend_is_explained_alone(run, registry):
    explanation = json.loads(run("explain", "rms_norm", "--shape", "3x8", "--backend", "reference", "--json").stdout)
    assert explanation["kernel"] == "rms_norm.reference"
    assert {v["name"]: v["verdict"] for v in explanation["verdicts"]}["rms_norm.xla"] == "left out"


@pytest.mark.long
def test_a_damaged_record_is_told_in_one_line(run_process, tmp_path):
    words = ("rms_norm", "--shape", "3x8")
    run_process("tune", *words)
    for file in tmp_path.glob("configs/*/rms_norm/*/*.json"):
        file.write_text("{")
    lines = run_process("explain", *words).stderr.splitlines()
    assert lines
    assert all(line.startswith("ejkernel: warning: ejkernel-cache: ") for line in lines)


def test_a_typo_in_the_environment_is_told(run, registry):
    process = run("explain", "rms_norm", "--shape", "3x8", EJKERNEL_AUTOTNUE="on_miss")
    assert process.stdout.splitlines()[-1].endswith("nothing reads it; did you mean EJKERNEL_AUTOTUNE?")
