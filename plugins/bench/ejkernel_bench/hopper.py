"""Attention on Hopper: against cuDNN, FlashAttention 3 and 4, our own plain rate, and each kernel.

A call that cuDNN refuses is compared with the rate of a plain call of ours. The choice of the core is compared with
each kernel that it chooses from. FA3 and FA4 are measured where they are installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import geometric_mean

import attrs
import jax

from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import COMMON, SCALED, WITHOUT_CUDNN, self_attention

from . import _flash_attention_peers, suite
from ._attention import by_cudnn, by_our_xla, flops, sizes, work
from ._report import Cell
from ._roof import CARDS, least_seconds
from .flash_attention import LONG
from .suite import OURS, PASSES, Bar, Measurement, Peer, Report

#: The plain call for each that cuDNN refuses: of packed sequences, a batch of sequences of their mean length.
PLAIN = {
    example.name: self_attention(8, 2048, 16, 128, "bfloat16").name if "sequences" in example.name else LONG
    for example in WITHOUT_CUDNN
}
#: Minimum ratios to cuDNN: for each of the common sizes, for their geometric mean, for others, and for short ones.
COMMON_MINIMUM, MEAN_MINIMUM, OTHER_MINIMUM, SHORT_MINIMUM = 1.0, 1.05, 0.9, 1.0
#: The minimum ratio to the plain rate.
PLAIN_MINIMUM = 0.85
#: The most time that a choice may take, relative to the best kernel.
CHOICE_LIMIT = 1.03
#: What the core chooses from. cuDNN stands for our XLA kernel where it can.
KERNELS, CUDNN, XLA = ("triton", "gluon_sm90"), "cuDNN", "xla"
ROUNDS = 5

#: The card whose roof is in the table.
CARD = CARDS["NVIDIA H200"]

#: By the example's name and the pass.
Measurements = Mapping[tuple[str, str], Measurement]


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """On a GPU."""
    if jax.default_backend() != "gpu":
        return Report("hopper", (), text="hopper: there is no GPU here, and nothing was measured")
    peers = {CUDNN: by_cudnn, **_flash_attention_peers.peers()}
    return compare([*COMMON, *SCALED, *WITHOUT_CUDNN], backend, rounds, peers)


def compare(examples: Sequence[Example], backend: str | None, rounds: int, peers: Mapping[str, Peer | None]) -> Report:
    """All contenders of each call. With a backend there is no choice to compare."""
    measured: dict[tuple[str, str], Measurement] = {}
    report = suite.run(
        "flash_attention",
        {**peers, XLA: by_our_xla} if backend is None else peers,
        examples=examples,
        names={example.name for example in examples},
        backend=backend,
        backends=KERNELS,
        reference="xla",
        work=work,
        columns=partial(_columns, measured, tuple(peers)),
        bars=lambda _: bars(measured),
        rounds=rounds,
    )
    return attrs.evolve(report, benchmark="hopper")


def _columns(measured: dict[tuple[str, str], Measurement], peers: Sequence[str], one: Measurement) -> dict[str, Cell]:
    """The others relative to ours, and the roof, of a measurement that is added to the others."""
    measured[one.example.name, one.pass_name] = one
    ratio = over_best(measured, one)
    best: dict[str, Cell] = {} if ratio is None else {"over the best": ratio}
    limit, least = max(least_seconds(one.example, one.pass_name, CARD).items(), key=lambda item: item[1])
    return {**one.over_ours(peers), **best, "roof": one.work.flops / 1e12 / least, "by": limit}


def over_best(measured: Measurements, one: Measurement) -> float | None:
    """The time of the choice, relative to the best of the others: to the sum of the best forward and the best backward
    where both passes are measured.
    """
    both, forward = one.seconds, measured.get((one.example.name, PASSES[0]), one).seconds
    others = [name for name in (CUDNN, *KERNELS, XLA) if name in both and name in forward]
    if not {*KERNELS, XLA} & {*others}:
        return None
    best = min(forward[name] for name in others)
    if one.pass_name != PASSES[0]:
        best += min(both[name] - forward[name] for name in others)
    return both[OURS] / best


def bars(measured: Measurements) -> Iterator[Bar]:
    """Ratios to cuDNN, to our plain rate, and to the best kernel."""
    ratios = {key: one.seconds[CUDNN] / one.seconds[OURS] for key, one in measured.items() if CUDNN in one.times}
    common = [example.name for example in COMMON]
    for pass_name in PASSES:
        of_common = [ratios[name, pass_name] for name in common if (name, pass_name) in ratios]
        if len(of_common) == len(common):
            title = f"the {len(common)} common sizes, {pass_name}: over cuDNN, geometric mean"
            yield Bar(title, geometric_mean(of_common), MEAN_MINIMUM, "times", at_least=True)
    for (name, pass_name), one in measured.items():
        label, plain = f"{name}, {pass_name}", measured.get((PLAIN.get(name, ""), pass_name))
        if (name, pass_name) in ratios:
            other_minimum = SHORT_MINIMUM if sizes(one.example)[1] <= 1024 else OTHER_MINIMUM
            minimum = COMMON_MINIMUM if name in common else other_minimum
            yield Bar(f"{label}: over cuDNN", ratios[name, pass_name], minimum, "times", at_least=True)
        elif plain is not None:
            work = flops(one.example, pass_name) / flops(plain.example, pass_name)
            share = plain.seconds[OURS] * work / one.seconds[OURS]
            yield Bar(f"{label}: of the plain rate", share, PLAIN_MINIMUM, "times", at_least=True)
        if (ratio := over_best(measured, one)) is not None:
            yield Bar(f"{label}: chosen / best", ratio, CHOICE_LIMIT, "times")
