"""Attention on a GPU, call by call: times and rates; with --peers also those of cuDNN, Pallas and torch.

All contenders of a call are measured in the same run, and only those with right results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import jax

from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import COMMON, VARIED, self_attention

from . import suite
from ._attention import by_jax_nn, by_our_xla, flops, peers_of_gpus, work
from .suite import OURS, PASSES, Bar, Measurement, Peer, Report

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
XLA = "ejkernel xla"
#: Minimum ratios: to the best plain Triton kernel, forward and in both passes; of a window of 1024 to none.
FORWARD_MINIMUM, BOTH_MINIMUM, WINDOW_MINIMUM = 1.25, 1.20, 6.0
#: To our XLA kernel, for the calls that cuDNN refuses.
MINIMA = tuple(suite.Minimum(pass_name, XLA, 2.5) for pass_name in PASSES)
#: The peers whose times are also shown as multiples of ours.
PEERS = ("cuDNN", "jax pallas-triton", "torch FA2", "FA3", "FA4")
ROUNDS = 7


def run(backend: str | None = None, rounds: int = ROUNDS, with_peers: bool = False) -> Report:
    """On a GPU; alone, or with the installed peers."""
    if jax.default_backend() != "gpu":
        return Report("flash_attention", (), text="flash_attention: there is no GPU here, and nothing was measured")
    others = {**peers_of_gpus(), XLA: by_our_xla} if with_peers else {}
    return compare([*COMMON, *VARIED], backend, rounds, others)


def peers() -> dict[str, Peer | None]:
    """The peers of a call at any shape, on this device."""
    return {"jax.nn": by_jax_nn, **(peers_of_gpus() if jax.default_backend() == "gpu" else {})}


def compare(examples: Sequence[Example], backend: str | None, rounds: int, others: Mapping[str, Peer | None]) -> Report:
    """Our call and the others. Expected results are those of our XLA kernel in a wider dtype."""
    return suite.run(
        "flash_attention",
        others,
        MINIMA,
        examples=examples,
        names={example.name for example in examples},
        backend=backend,
        backends=(),
        reference="xla",
        work=work,
        columns=lambda one: one.over_ours(name for name in others if name in PEERS),
        bars=bars,
        rounds=rounds,
    )


def bars(measurements: Sequence[Measurement]) -> Iterator[Bar]:
    """Our rates beside those of a plain Triton kernel, and what a window gains."""
    ours = {(one.example.name, one.pass_name): one for one in measurements}
    for name, triton_rates in TRITON_RATES.items():
        for pass_name, minimum, triton_rate in zip(PASSES, (FORWARD_MINIMUM, BOTH_MINIMUM), triton_rates, strict=True):
            if one := ours.get((name, pass_name)):
                rate = flops(one.example, pass_name) / one.seconds[OURS] / 1e12
                title = f"{name}, {pass_name}: over the best plain Triton kernel so far"
                yield Bar(title, rate / triton_rate, minimum, "times", at_least=True)
    for pass_name in PASSES:
        if {(WINDOWED, pass_name), (LONG, pass_name)} <= {*ours}:
            gain = ours[LONG, pass_name].seconds[OURS] / ours[WINDOWED, pass_name].seconds[OURS]
            yield Bar(f"{WINDOWED}, {pass_name}: none / window", gain, WINDOW_MINIMUM, "times", at_least=True)
