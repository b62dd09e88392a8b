"""rms_norm on a GPU: against XLA, torch, Liger and the copy rate; its gradients, 8 bits, between products.

The suite of layer_norm is the same, with other peers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import Example
from ejkernel_ops.rms_norm import definition
from ejkernel_ops.rms_norm.axes import FORMATS
from ejkernel_ops.rms_norm.examples import large, sweep

from . import suite
from ._calls import PASSES, Function, Inputs, Pass, correct_runs, jitted
from ._errors import TOLERANCE
from ._figures import figures_of
from ._report import Bar, Report, joined
from ._rows import Rows
from ._threads import in_threads

#: (rows, dim) of calls that are large enough to be limited by memory, and of those that a CPU can run.
LARGE = ((16384, 4096), (16384, 8192), (65536, 4096))
SMALL = ((1, 64), (64, 256))
#: Of the sweep, a quick run has the large calls and one of so many others.
QUICK = 3
#: (rows, dim, columns) of a product, a normalization and a product.
PRODUCTS = ((16, 4096, 4096), (256, 2048, 2048), (4096, 4096, 4096), (16384, 4096, 4096), (8192, 8192, 8192))
SMALL_PRODUCTS = ((8, 64, 32),)
#: Nowhere more than 5 % slower than XLA.
SWEEP = 1 / 1.05
#: Between two products no slower, up to the noise of such a measurement.
BETWEEN_PRODUCTS = 0.99
OURS, XLA = suite.OURS, "XLA"
#: Our kernel by platform, which is measured itself, whatever the core chooses.
KERNELS = {"gpu": "triton", "tpu": "pallas_tpu"}
#: Of tensors of PyTorch, x and weight.
TorchNorm = Callable[[Any, Any], Any]


# -- the suite --------------------------------------------------------------------------------------------------------


def run(
    backend: str | None = None, rounds: int = suite.ROUNDS, small: bool = False, quick: bool = False
) -> suite.Report:
    """Over rows and dims, of which a quick run has fewer; on a CPU a few small calls."""
    return measure("rms_norm", by_torch, by_liger, backend, rounds, small, quick)


def peers() -> dict[str, suite.Peer | None]:
    """The peers of a call at any shape."""
    return peers_of("rms_norm", by_torch, by_liger)


def peers_of(operation: str, torch_norm: TorchNorm, liger_norm: TorchNorm) -> dict[str, suite.Peer | None]:
    """XLA's fusions, and the implementations for PyTorch where they are installed."""
    return {
        XLA: partial(_by_xla, operation == "layer_norm"),
        "torch": suite.optional(partial(_torch_peer, torch_norm), "torch"),
        "Liger": suite.optional(partial(_torch_peer, liger_norm), "torch", "liger_kernel"),
    }


def measure(
    operation: str,
    torch_norm: TorchNorm,
    liger_norm: TorchNorm,
    backend: str | None,
    rounds: int,
    small: bool,
    quick: bool,
) -> Report:
    """All calls of a normalization: itself, its gradients alone, its results in 8 bits, and between two products.

    ``quick`` thins the grid of rows and dims. With ``small``, a CPU measures a few small calls.
    """
    if jax.default_backend() == "cpu" and not small:
        return suite.run(operation)
    is_centered = operation == "layer_norm"
    peers: dict[str, dict[str, suite.Peer | None]] = {
        operation: peers_of(operation, torch_norm, liger_norm),
        f"{operation}_bwd": {XLA: partial(_gradients_by_xla, is_centered)},
        f"{operation}_quantized": {XLA: partial(_quantized_by_xla, is_centered)},
    }
    sizes = SMALL if small else _sizes(quick)
    calls = [call for place, size in enumerate(sizes) for call in _calls(operation, *size, place)]
    kernel = KERNELS.get(jax.default_backend(), "")
    reports = []
    for name in peers:
        examples = [call for call in calls if call.op == name]
        reports.append(
            suite.run(
                name,
                peers[name],
                _minima(name, kernel),
                examples=examples,
                names={example.name for example in examples},
                backend=backend,
                backends=[kernel] if kernel in ejkernel_core.registry.backends(name) else (),
                rounds=rounds,
            )
        )
    reports.append(between_products(operation, SMALL_PRODUCTS if small else PRODUCTS, backend, rounds))
    return joined(operation, reports)


def _sizes(quick: bool) -> list[tuple[int, int]]:
    """(rows, dim) that are measured."""
    return [size for place, size in enumerate(sweep()) if not quick or place % QUICK == 0 or size in LARGE]


def _minima(operation: str, kernel: str) -> Iterator[suite.Minimum]:
    """For large calls those of the core's choice; over the sweep those of our kernel itself, too."""
    forward, both = PASSES
    if operation.endswith("_quantized"):
        is_fp8 = partial(_is_large, words=("fp8_row", "fp8_block128"))
        yield suite.Minimum(forward, suite.COPY, 0.85, applies=is_fp8)
    elif not operation.endswith("_bwd"):
        yield suite.Minimum(forward, suite.COPY, 0.92, applies=_is_large)
        yield suite.Minimum(forward, XLA, 1.2, applies=partial(_is_large, words=("residual",)))
        yield suite.Minimum(both, XLA, 1.35, applies=_is_large)
    for contender in (OURS, *((kernel,) if kernel else ())):
        for pass_name in PASSES:
            yield suite.Minimum(pass_name, XLA, SWEEP, is_worst=True, of=contender)


def _is_large(example: Example, words: Collection[str] = ("",)) -> bool:
    """Whether it is a large call with one of these words in its name; by default with nothing but a weight."""
    size, _, word = example.name.partition(" bfloat16")
    return size in {f"{rows} x {dim}" for rows, dim in LARGE} and word.removeprefix(", ") in words


# -- the calls --------------------------------------------------------------------------------------------------------


def _calls(operation: str, rows: int, dim: int, place: int) -> Iterator[Example]:
    """With and without a residual: the normalization, its gradients, and 8 bits, whose formats take turns."""
    words = list(FORMATS)
    for number, names in enumerate(((), ("residual",))):
        forward = large(operation, rows, dim, *names, uses=())
        yield forward
        yield _gradients(forward)
        formats = words if (rows, dim) in LARGE and not names else [words[(place + number) % len(words)]]
        for word in formats:
            yield large(f"{operation}_quantized", rows, dim, *names, uses=(), quantize=word)


def _gradients(forward: Example) -> Example:
    """The gradients alone, from the sum and the statistics that the forward has saved."""
    is_centered = forward.op == "layer_norm"
    names = ("mean", "rstd") if is_centered else ("rstd",)

    def arguments(draw: int) -> dict[str, Any]:
        call, others = forward.arguments(draw), forward.arguments(draw + 1)
        options = {"residual": None, "bias": None, "epsilon": 1e-6, "weight_offset": 0.0}
        out, total, *statistics = definition.forward({**options, **call}, is_centered)
        saved = {"out": out, "sum": total, **dict(zip(names, statistics, strict=True))}
        cotangents = {"d_out": others["x"], **({"d_sum": others["residual"]} if "residual" in others else {})}
        return {**call, **saved, **cotangents, "wrt": forward.wrt}

    return attrs.evolve(forward, op=f"{forward.op}_bwd", arguments=arguments, wrt=())


# -- the peers --------------------------------------------------------------------------------------------------------


def _has_only(arguments: Mapping[str, Any], *names: str) -> bool:
    """Whether the call has no other arguments than these."""
    return {name for name, value in arguments.items() if value is not None} <= {*names}


def _by_xla(is_centered: bool, arguments: Mapping[str, Any]) -> Function | None:
    """As one would write it in JAX, for XLA to fuse."""
    if not _has_only(arguments, "x", "weight", "residual", "epsilon"):
        return None
    epsilon = arguments.get("epsilon", 1e-6)

    def norm(x: Any, weight: Any = 1.0, residual: Any = None) -> Any:
        rows = x if residual is None else x + residual
        wide_rows = rows.astype(jnp.float32)
        if is_centered:
            wide_rows -= wide_rows.mean(-1, keepdims=True)
        unit = wide_rows * jax.lax.rsqrt((wide_rows * wide_rows).mean(-1, keepdims=True) + epsilon)
        out = (unit * weight).astype(x.dtype)
        return out if residual is None else (out, rows)

    return norm


def by_torch(x: Any, weight: Any) -> Any:
    """PyTorch's own, eager."""
    from torch.nn.functional import rms_norm

    return rms_norm(x, weight.shape, weight, 1e-6)


def by_liger(x: Any, weight: Any) -> Any:
    """Liger's Triton kernel through PyTorch."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Without an offset, cast as in Gemma (all in float32), and not in place: the cotangents are used again.
    return LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "gemma", False)


def _torch_peer(function: TorchNorm, arguments: Mapping[str, Any]) -> suite.TorchFunction | None:
    """A function of PyTorch, which has a weight and no residual."""
    is_taken = "weight" in arguments and _has_only(arguments, "x", "weight")
    return suite.TorchFunction(function) if is_taken else None


def _gradients_by_xla(is_centered: bool, arguments: Mapping[str, Any]) -> Function:
    """From what the forward has saved, too."""
    options = dict.fromkeys(("weight", "bias", "residual", "d_out", "d_sum", "d_mean", "d_rstd"))
    options |= {"weight_offset": 0.0, "wrt": arguments["wrt"]}
    return lambda **arrays: definition.gradients({**options, **arrays}, is_centered)


def _quantized_by_xla(is_centered: bool, arguments: Mapping[str, Any]) -> Function:
    """By the definition; the sum is a result only where there is a residual."""
    options = {"bias": None, "residual": None, "epsilon": 1e-6, "weight_offset": 0.0, "quantize": arguments["quantize"]}
    count = 3 if "residual" in arguments else 2
    return lambda **arrays: definition.quantized({**options, **arrays}, is_centered)[:count]


# -- between two products ---------------------------------------------------------------------------------------------


def between_products(operation: str, sizes: Sequence[tuple[int, int, int]], backend: str | None, rounds: int) -> Report:
    """A product, a normalization and a product in one program: XLA may fuse its own normalization with a product."""
    by_xla = _by_xla(operation == "layer_norm", {})
    assert by_xla is not None  # it takes a call with a weight
    norms: dict[str, Function] = {OURS: partial(ejkernel_core.call, operation, backend=backend), XLA: by_xla}
    reference = _between(by_xla, "highest")
    name = f"{operation} between products"
    columns = ("rows x dim x columns", OURS, "range", XLA, "range", f"{XLA} / {OURS}", "kernels")
    rows = Rows(f"{name}: milliseconds, medians of {rounds} rounds in turn", columns, series=(OURS, XLA))
    bars: list[Bar] = []
    faults: list[str] = []
    inputs = {size: _inputs_of_products(*size) for size in sizes}
    programs = {
        (size, pass_name): {name: jitted(_between(norm), pass_name, inputs[size]) for name, norm in norms.items()}
        for size in sizes
        for pass_name in PASSES
    }
    in_threads(Pass.compile, [program for by_name in programs.values() for program in by_name.values()])
    for (size, pass_name), by_name in programs.items():
        label, names = f"{' x '.join(map(str, size))} bfloat16, {pass_name}", inputs[size].names(pass_name)
        expected = jitted(reference, pass_name, inputs[size].astype("float32"))()
        correct, new_faults = correct_runs(by_name, label, expected, names, TOLERANCE["bfloat16"])
        faults += new_faults
        if len(correct) == len(by_name):
            figures = figures_of(correct, rounds)
            times = figures.times
            ratio = times[XLA].median / times[OURS].median
            cells = [cell for contender in by_name for cell in times[contender].scaled(1e-3)[:2]]
            rows.add(label, *cells, ratio, by_name[OURS].kernels(), beside=figures.beside())
            bars.append(Bar(f"{label}: over {XLA}", ratio, BETWEEN_PRODUCTS, "times", at_least=True))
    return Report(name, [rows.table()], bars, faults)


def _between(norm: Function, precision: str | None = None) -> Function:
    product = partial(jnp.matmul, precision=precision)
    return lambda x, first, weight, second: product(norm(product(x, first), weight), second)


def _inputs_of_products(rows: int, dim: int, columns: int) -> Inputs:
    shapes = {"x": (rows, dim), "first": (dim, dim), "weight": (dim,), "second": (dim, columns)}
    *keys, key = jax.random.split(jax.random.key(0), len(shapes) + 1)
    arrays = {
        name: jax.random.normal(array_key, shape, "bfloat16")
        for array_key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    cotangent = jax.random.normal(key, (rows, columns), "bfloat16")
    return Inputs(arrays, tuple(arrays), (cotangent,), ("out",), ("out",))
