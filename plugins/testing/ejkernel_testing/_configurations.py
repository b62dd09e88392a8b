"""The configuration space of a kernel: what it offers is valid, and has the right values and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import attrs
import jax

from ejkernel_core import Example, Invocation, Record, Registry, Unsupported, overlay_cache
from ejkernel_core.extend import MAX_CONFIGURATIONS, LoadedKernel

from ._checks import check_outcome
from ._outcome import arguments, computed_arrays, generator

#: How many configurations are run: the heuristic's, the first, the last and a drawn one; or all.
COUNTS = ("few", "all")


class Space(NamedTuple):
    """One kernel, and the invocation for which it has a configuration space."""

    kernel: LoadedKernel
    inv: Invocation


def configurations(registry: Registry, kernel: str, example: Example) -> None:
    """The kernel's configuration space has frozen values of its own type, each of them once. The same for its backward
    kernel, if it has one.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> configurations(registry, kernel, example)
    """
    with jax.enable_x64(example.dtype == "float64"):
        for space in _spaces(registry, kernel, example):
            _check_space(*space, example)


def configuration_values(
    registry: Registry, kernel: str, example: Example, count: str = "all", roundings: float = 1.0
) -> dict[str, list[Any]]:
    """Configurations of the kernel, and of its backward kernel, have the reference's values and gradients. ``count`` is
    one of COUNTS. All are those that the space has for the example, and those that it has for measured examples, except
    for configurations that ``check_cfg`` refuses here: these are returned, by the names of the kernels.

    >>> from ejkernel_testing._double import double
    >>> registry, kernel, example = double()
    >>> configuration_values(registry, kernel, example)
    {}
    """
    with jax.enable_x64(example.dtype == "float64"):
        spaces = [space for space in _spaces(registry, kernel, example) if space.kernel.config_type is not None]
        for space in spaces:
            _check_space(*space, example)
        own = [_few(space, example) if count == "few" else list(_own(space)) for space in spaces]
        further = _measured(registry, kernel) if count == "all" and spaces else {}
    refused: dict[str, list[Any]] = {space.kernel.name: [] for space in spaces}
    for space, configs in zip(spaces, own, strict=True):
        for cfg in further.get(space.kernel.name, ()):
            if cfg not in configs:
                (refused[space.kernel.name] if _refusal(space, cfg) else configs).append(cfg)
    # A program has a forward and a backward: it runs a configuration of each.
    for chosen in zip_longest(*own):
        _check_values(registry, kernel, example, zip(spaces, chosen, strict=True), roundings)
    return refused


def _spaces(registry: Registry, kernel: str, example: Example, is_abstract: bool = False) -> Iterator[Space]:
    """The kernel and its backward kernel, as far as they run the example."""
    backend = kernel.rpartition(".")[2]
    values = example.abstract() if is_abstract else arguments(registry, example)
    explanation = registry.explain(example.op, **values, backend=backend)
    for plan in (explanation.plan, explanation.backward.plan if explanation.backward else None):
        if plan is not None and plan.kernel.backend == backend:
            yield Space(plan.kernel, plan.invocation)


def _check_space(kernel: LoadedKernel, inv: Invocation, example: Example) -> None:
    prefix, faults = f"configurations: {kernel.name} on {example.name}: ", list[str]()
    configs = list(kernel.configurations(inv, faults.append))
    assert not faults, f"{prefix}{faults[0]}"
    assert len(configs) < MAX_CONFIGURATIONS, f"{prefix}there are more than {MAX_CONFIGURATIONS}, or they have no end"
    for cfg, count in Counter(configs).items():
        assert count == 1, f"{prefix}gives {cfg} {'twice' if count == 2 else f'{count} times'}"
        refusal = _refusal(Space(kernel, inv), cfg)
        assert not refusal, f"{prefix}gives {cfg}, which check_cfg refuses: {refusal}"


def _refusal(space: Space, cfg: Any) -> str:
    """Why ``check_cfg`` refuses a configuration; empty if it does not."""
    try:
        space.kernel.check_cfg(space.inv, cfg)
    except Unsupported as refusal:
        return str(refusal)
    return ""


def _own(space: Space) -> dict[Any, None]:
    """The configurations for the invocation, that of the heuristic first."""
    heuristic = space.kernel.heuristic_cfg(space.inv)
    return dict.fromkeys((heuristic, *space.kernel.configurations(space.inv, lambda fault: None)))


def _few(space: Space, example: Example) -> list[Any]:
    """The heuristic's configuration, the first, the last and one that is drawn by the names of kernel and example."""
    configs = list(space.kernel.configurations(space.inv, lambda fault: None))
    drawn = generator(example.name, "configuration", space.kernel.name).integers(max(len(configs), 1))
    few: Sequence[Any] = [*configs[:1], *configs[-1:], *configs[drawn : drawn + 1]]
    return list(dict.fromkeys((space.kernel.heuristic_cfg(space.inv), *few)))


def _measured(registry: Registry, kernel: str) -> dict[str, dict[Any, None]]:
    """The configurations for the operation's examples that are measured, which are too large to be run here."""
    examples = registry.operation(kernel.rpartition(".")[0]).examples
    configs: dict[str, dict[Any, None]] = {}
    for example in examples() if examples else ():
        if "benchmark" in example.uses:
            for space in _spaces(registry, kernel, example, is_abstract=True):
                configs.setdefault(space.kernel.name, {}).update(_own(space))
    return configs


def _check_values(
    registry: Registry, kernel: str, example: Example, chosen: Iterable[tuple[Space, Any]], roundings: float
) -> None:
    """Compare what a program computes with these configurations. A space without a further one has None."""
    configs = [(space, cfg) for space, cfg in chosen if cfg is not None]
    text = " and ".join(f"{space.kernel.name} with {cfg}" for space, cfg in configs)
    overlay = {space.inv.key: Record(cfg, space.kernel.backend) for space, cfg in configs}
    differentiated = _differentiated(example, [space.inv for space, _ in configs])
    try:
        with overlay_cache(overlay):
            actual = computed_arrays(registry, kernel.rpartition(".")[2], differentiated)
    except Exception as fault:  # of any type: it is that of a kernel with a wrong configuration
        fault.add_note(f"configurations: {text} on {example.name}")
        raise
    check_outcome("configurations", registry, kernel, differentiated, actual, roundings, f"; {text}")


def _differentiated(example: Example, invocations: Iterable[Invocation]) -> Example:
    """The example, differentiated as in the invocation of the backward, whose configuration would not be used else."""
    wrt = next((inv["wrt"] for inv in invocations if "wrt" in inv), None)
    return example if wrt is None or {*wrt} == {*example.wrt} else attrs.evolve(example, wrt=tuple(wrt))
