"""Attention on a GPU, call by call: times and rates; with --peers also those of cuDNN, Pallas and torch.

All contenders of a call are measured in the same run, and only those with right results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import attrs
import jax

from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import COMMON, VARIED, self_attention

from ._attention import by_jax_nn, by_our_xla, flops, peers_of_gpus
from ._calls import PASSES, Inputs, Pass, Run, by_core, correct_runs, draw, jitted, tolerance_of
from ._figures import figures_of
from ._peers import Peer, pass_of
from ._report import Bar, Cell, Report
from ._rows import Rows
from ._timing import Times

#: For each of the common sizes, the most TFLOP/s of a plain Triton kernel on an H200, forward and both passes.
TRITON_RATES = dict(
    zip(
        (example.name for example in COMMON),
        ((334, 318), (294, 260), (348, 317), (347, 292), (283, 220), (338, 283), (269, 235)),
        strict=True,
    )
)
LONG = self_attention(1, 16384, 16, 128, "bfloat16").name
WINDOWED = self_attention(1, 16384, 16, 128, "bfloat16", window=1023).name
#: Minimum ratios: to the best plain Triton kernel, forward and in both passes; of a window of 1024 to none; to our XLA
#: kernel.
FORWARD_MINIMUM, BOTH_MINIMUM, WINDOW_MINIMUM, XLA_MINIMUM = 1.25, 1.20, 6.0, 2.5
#: The peers whose times are also shown as multiples of ours.
PEERS = ("cuDNN", "jax pallas-triton", "torch FA2", "FA3", "FA4")
ROUNDS = 7

#: By the example's name and the pass: our TFLOP/s, and the times of all contenders, ours first.
Rates = Mapping[tuple[str, str], tuple[float, Mapping[str, Times]]]


def run(backend: str | None = None, rounds: int = ROUNDS, with_peers: bool = False) -> Report:
    """On a GPU; alone, or with the installed peers."""
    if jax.default_backend() != "gpu":
        return Report("flash_attention", (), text="flash_attention: there is no GPU here, and nothing was measured")
    found = {**peers_of_gpus(), "ejkernel xla": by_our_xla} if with_peers else {}
    installed, text = installed_peers("flash_attention", found)
    return attrs.evolve(compare([*COMMON, *VARIED], backend, rounds, installed), text=text)


def installed_peers(suite: str, peers: Mapping[str, Peer | None]) -> tuple[dict[str, Peer], str]:
    """Those that are installed, and what the report says of the others."""
    installed = {name: peer for name, peer in peers.items() if peer is not None}
    absent = ", ".join(name for name in peers if name not in installed)
    return installed, f"{suite}: not installed, and not measured: {absent}" if absent else ""


def peers() -> dict[str, Peer | None]:
    """The peers of a call at any shape, on this device."""
    return {"jax.nn": by_jax_nn, **(peers_of_gpus() if jax.default_backend() == "gpu" else {})}


def compare(examples: Sequence[Example], backend: str | None, rounds: int, others: Mapping[str, Peer]) -> Report:
    """One row for each example and pass: our time and rate, and the times of the others."""
    faults: list[str] = []
    rates: dict[tuple[str, str], tuple[float, Mapping[str, Times]]] = {}
    ours = f"ejkernel {backend}" if backend else "ejkernel"
    ratios = [f"{name} / ours" for name in others if name in PEERS]
    columns = ("", ours, "range", "TFLOP/s", *others, *ratios)
    rows = Rows(f"milliseconds, medians of {rounds} rounds in turn, bfloat16", columns, series=(ours, *others))
    for example in examples:
        inputs = draw(example)
        expected = reference(example, inputs)()
        for pass_name in PASSES:
            passes = {name: pass_of(peer, example, inputs, pass_name) for name, peer in others.items()}
            runs: dict[str, Run] = {ours: jitted(by_core(example, backend), pass_name, inputs)}
            runs |= {name: run for name, run in passes.items() if run is not None}
            label = f"{pass_name}, {example.name}"
            runs, new_faults = correct_runs(runs, label, expected, inputs.names(pass_name), tolerance_of(example))
            faults += new_faults
            if ours not in runs:
                continue
            figures = figures_of(runs, rounds)
            times = figures.times
            rate = flops(example, pass_name) / times[ours].median / 1e12
            rates[example.name, pass_name] = rate, times
            cells = (*times[ours].scaled(1e-3)[:2], rate, *_peer_cells(times, ours, others))
            rows.add(f"{example.name}, {pass_name}", *cells, beside=figures.beside())
    return Report("flash_attention", [rows.table()], list(_bars(rates)), faults)


def reference(example: Example, inputs: Inputs) -> Pass:
    """Both passes by our XLA kernel, in float32."""
    return jitted(by_core(example, "xla"), PASSES[1], inputs.astype("float32"))


def _peer_cells(times: Mapping[str, Times], ours: str, others: Mapping[str, Peer]) -> Iterator[Cell]:
    for name in others:
        yield times[name].scaled(1e-3)[0] if name in times else "-"
    for name in others:
        if name in PEERS:
            yield times[name].median / times[ours].median if name in times else "-"


def _bars(rates: Rates) -> Iterator[Bar]:
    for name, triton_rates in TRITON_RATES.items():
        for pass_name, ratio, triton_rate in zip(PASSES, (FORWARD_MINIMUM, BOTH_MINIMUM), triton_rates, strict=True):
            if (name, pass_name) in rates:
                title = f"{name}, {pass_name}: over the best plain Triton kernel so far"
                yield Bar(title, rates[name, pass_name][0] / triton_rate, ratio, "times", at_least=True)
    for pass_name in PASSES:
        if (WINDOWED, pass_name) in rates and (LONG, pass_name) in rates:
            gain = _ours(rates[LONG, pass_name][1]) / _ours(rates[WINDOWED, pass_name][1])
            yield Bar(f"{WINDOWED}, {pass_name}: none / window", gain, WINDOW_MINIMUM, "times", at_least=True)
    for (name, pass_name), (_, times) in rates.items():
        if "ejkernel xla" in times and len(times) > 1:
            gain = times["ejkernel xla"].median / _ours(times)
            yield Bar(f"{name}, {pass_name}: over the XLA kernel", gain, XLA_MINIMUM, "times", at_least=True)


def _ours(times: Mapping[str, Times]) -> float:
    return median(next(iter(times.values())).seconds)
