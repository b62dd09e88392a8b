"""Code that relies on undocumented behaviour of JAX. Each function says on which, and in which versions."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec

try:
    # ``jax.extend.core`` is its public home, but importing anything of ``jax.extend`` imports Pallas: 15 to 20 ms.
    #: JAX's class of primitives.
    from jax._src.core import Primitive
except ImportError:
    from jax.extend.core import Primitive

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = [
    "Primitive",
    "avals_like",
    "by_custom_partitioning",
    "ends_at_caller",
    "hide_frames",
    "is_partitioned",
    "keep_weakly",
    "line_of_call",
    "lower_with_devices",
    "lowering_processes",
    "mapped_by_vmap",
    "mapped_mesh_axes",
    "narrow_where_dead",
    "partitioner_spec",
    "reshard_like",
    "reshard_without",
    "short_locations",
    "unchecked_varying",
    "vary_alike",
    "without_hidden_frames",
]


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Cast the arrays so that each varies over every mesh axis that any of them varies over.

    Inside ``shard_map``, the gradient of a replicated array is a sum over the devices. JAX adds that sum where a
    replicated value is cast to a varying one, so the cast has to come before a custom gradient.
    ``aval.mat.varying`` holds the axes (in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    axes = [_varying(array) for array in arrays]
    varying = frozenset[str]().union(*axes)
    return [
        jax.lax.pcast(array, tuple(sorted(varying - axes_of_array)), to="varying") if varying - axes_of_array else array
        for array, axes_of_array in zip(arrays, axes, strict=True)
    ]


def unchecked_varying() -> contextlib.AbstractContextManager[None]:
    """Turn off ``check_vma`` of ``shard_map`` for a ``with`` block.

    A kernel computes on its shard, and its arrays do not vary over a mesh. With the check on, ``pallas_call`` would
    demand to know how each of its outputs varies (``jax._src.config._check_vma``, in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    from jax._src import config

    check: contextlib.AbstractContextManager[None] = config._check_vma(False)
    return check


def avals_like(avals: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct], specs: Sequence[Any]) -> list[Any]:
    """The abstract values of results that vary over the mesh axes that these ``avals`` vary over, with the shardings
    ``specs``. Only a mesh with explicit axes can have any but those of replicated arrays.
    """
    like = next((aval for aval in avals if not aval.sharding.mesh.empty), avals[0])
    return [
        like.update(
            shape=result.shape,
            dtype=result.dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=PartitionSpec(*spec)),
        )
        for result, spec in zip(results, specs, strict=True)
    ]


def mapped_mesh_axes() -> frozenset[str]:
    """The explicit mesh axes that the axes of the surrounding ``jax.vmap`` are sharded over. The types of one element
    do not show them, and JAX refuses a ``shard_map`` over them (the axis environment of ``jax._src.core``, in 0.10.2,
    0.11.2 and 0.12.0.1).
    """
    from jax._src.core import get_axis_env

    axes: frozenset[str] = get_axis_env().explicit_mesh_axis_names
    return axes


def mapped_by_vmap(arrays: Mapping[str, Any]) -> list[frozenset[str]] | None:
    """For each ``jax.vmap`` around an eager call that maps over any of these arrays, the innermost first: the arrays
    that it maps over. None inside a trace of ``jax.jit`` (the traces and tracers of ``jax._src``, in 0.10.2, 0.11.2 and
    0.12.0.1).
    """
    from jax._src.core import trace_ctx
    from jax._src.interpreters.batching import BatchTracer
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace

    levels, trace = [], trace_ctx.trace
    while trace is not None:
        if isinstance(trace, DynamicJaxprTrace):
            return None
        of_trace = {name: array for name, array in arrays.items() if getattr(array, "_trace", None) is trace}
        if any(isinstance(array, BatchTracer) for array in of_trace.values()):
            levels.append(frozenset(of_trace))
        inner = {name: getattr(array, "val", getattr(array, "primal", None)) for name, array in of_trace.items()}
        arrays, trace = {**arrays, **inner}, getattr(trace, "parent_trace", None)
    return levels


def reshard_like(array: Any, other: Any) -> Any:
    """Give an array the sharding of ``other``, where shardings are part of the type (explicit mesh axes).

    Where ``other`` comes from outside of any mesh, the array stays as it is.
    """
    sharding = jax.typeof(other).sharding
    if sharding.mesh.empty or jax.typeof(array).sharding == sharding:
        return array
    if shared := mapped_mesh_axes() & _names(sharding.spec):
        raise ValueError(
            f"the gradient of {jax.typeof(other).str_short(True)} cannot be sharded as the array is, because a "
            f"jax.vmap around it maps over an axis that is sharded over {', '.join(map(repr, sorted(shared)))} too: "
            "reshard the array before, with jax.sharding.reshard"
        )
    return jax.sharding.reshard(array, sharding)


def reshard_without(array: Any, entries: Sequence[Any]) -> Any:
    """The array, not sharded over the mesh axes in these entries of a ``PartitionSpec``."""
    sharding, axes = jax.typeof(array).sharding, _names(entries)
    if not axes & _names(sharding.spec):
        return array
    kept = [tuple(name for name in _names_of(entry) if name not in axes) or None for entry in sharding.spec]
    return jax.sharding.reshard(array, sharding.update(spec=PartitionSpec(*kept)))


def _names(entries: Sequence[Any]) -> frozenset[str]:
    """The mesh axes in entries of a ``PartitionSpec``."""
    return frozenset(name for entry in entries for name in _names_of(entry))


def _names_of(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def lower_with_devices(primitive: Any) -> None:
    """Have JAX pass the devices when it lowers this primitive: callbacks and custom partitionings in kernels need them.

    JAX searches the jaxpr that it compiles for primitives that need devices, and cannot see into this one
    (``prim_requires_devices_during_lowering``, in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def narrow_where_dead(primitive: Any, narrowed: Callable[[Sequence[bool], dict[str, Any]], dict[str, Any]]) -> None:
    """Have JAX leave out the results of a primitive on which nothing depends. ``narrowed`` gives the parameters for
    those that are used (``dce_rules`` of ``jax.interpreters.partial_eval``, in 0.10.2, 0.11.2 and 0.12.0.1,
    which passes one more argument before the equation).
    """
    from jax.interpreters import partial_eval

    def rule(used: list[bool], *others: Any) -> tuple[list[bool], Any]:
        eqn = others[-1]
        if not any(used):
            return [False] * len(eqn.invars), None
        outvars = [variable for variable, is_used in zip(eqn.outvars, used, strict=True) if is_used]
        return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=narrowed(used, eqn.params))

    partial_eval.dce_rules[primitive] = rule


def lowering_processes(context: Any) -> tuple[int, ...] | None:
    """The processes whose devices a program is lowered for, sorted; None where they are unknown.

    The devices are ``device_assignment`` of a ``ShardingContext``, or those of the mesh of an ``SPMDAxisContext`` (of
    ``jax._src.sharding_impls``, in 0.10.2, 0.11.2 and 0.12.0.1). A ``shard_map`` by the mesh of its arguments' types
    leaves only their number: where it is that of all devices, the program is for all processes.
    """
    axis_context = context.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else getattr(axis_context, "device_assignment", None)
    if devices is not None:
        return tuple(sorted({device.process_index for device in devices}))
    if jax.process_count() == 1:
        return ()
    is_for_all = mesh is not None and mesh.size == jax.device_count()
    return tuple(range(jax.process_count())) if is_for_all else None


def is_partitioned(module_context: Any) -> bool:
    """Whether the compiler partitions this program over several known devices of a mesh, and asks
    ``custom_partitioning`` how.

    It does not where an outer ``shard_map`` is over some of the axes: JAX would end the process there (in 0.10.2 and
    0.12.0.1). What is exported cannot call back, and GSPMD, the partitioner before Shardy, knows no rules.
    """
    from jax._src import config
    from jax._src.sharding_impls import ShardingContext

    context = module_context.axis_context
    is_exported = getattr(module_context.lowering_parameters, "for_export", False)
    if not isinstance(context, ShardingContext) or is_exported or len(module_context.platforms) > 1:
        return False
    has_devices = context.num_devices > 1 and bool(context.device_assignment) and context.abstract_mesh is not None
    return has_devices and bool(config.use_shardy_partitioner.value)


def by_custom_partitioning(
    function: Any, partition: Any, rule: str, whole: tuple[str, ...], sizes: dict[str, int]
) -> Any:
    """The function, to be partitioned by ``partition`` when it is compiled. ``rule`` has a factor for each dimension;
    those in ``whole`` are never sharded, and ``sizes`` has the sizes of those that are not a dimension by themselves.
    """
    from jax.experimental.custom_partitioning import custom_partitioning

    partitioned = custom_partitioning(function)
    partitioned.def_partition(
        partition, sharding_rule=rule, need_replication_factors=whole, decode_shardings=False, **sizes
    )
    return partitioned


def partitioner_spec(sharding: Any, mesh: Any) -> Any:
    """The ``PartitionSpec`` of a sharding that the partitioner passes, for the axes of the mesh; an empty one where
    they cannot express it, as where it divides an axis of the mesh. ``custom_partitioning`` itself would raise there
    (in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    from jax._src.sharding_impls import parse_flatten_op_sharding

    with contextlib.suppress(KeyError, ValueError, AssertionError):
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)[0]
    return PartitionSpec()


def keep_weakly(kind: type) -> None:
    """Have JAX keep parameters of this type for no longer than the program that has them.

    A cache of JAX, of the types of results by primitive and parameters, would keep the last 2048 of them
    (``weakref_cache_key_types`` of ``jax._src.util``, in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    from jax._src import util

    kinds: set[type] = getattr(util, "weakref_cache_key_types", set())
    kinds.add(kind)


def short_locations() -> None:
    """Leave the callers out of the locations in the program that this thread lowers. Before JAX 0.11, XLA could follow
    them in a circle for ever where one module is put into another. The thread is one of XLA's there.
    """
    if jax.__version_info__ < (0, 11):
        from jax._src import config

        config.include_full_tracebacks_in_locations.set_local(False)


def hide_frames(folder: str) -> None:
    """Have JAX treat the code in this folder as its own, in tracebacks and in the locations of programs: they end at
    the user's line (``_exclude_paths`` of two modules of ``jax._src``, in 0.10.2, 0.11.2 and 0.12.0.1).
    """
    from jax._src import source_info_util, traceback_util

    for module in (source_info_util, traceback_util):
        module.register_exclusion(folder)


def without_hidden_frames(traceback: TracebackType | None) -> TracebackType | None:
    """What JAX leaves of a traceback where it hides frames (``filter_traceback``, in 0.10.2, 0.11.2 and 0.12.0.1)."""
    if traceback is None or jax.config.jax_traceback_filtering == "off":  # type: ignore[attr-defined]
        return traceback
    from jax._src import traceback_util

    visible: TracebackType | None = traceback_util.filter_traceback(traceback)
    return visible


def ends_at_caller(function: Function) -> Function:
    """The function, whose tracebacks have no hidden frames where its caller is not one of JAX's own functions, which
    would leave them out.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as fault:
            fault.__traceback__ = without_hidden_frames(fault.__traceback__)
            raise

    return call  # type: ignore[return-value]


def line_of_call() -> str | None:
    """Where the user's program makes the call that JAX lowers now, as in ``model.py:31, in attention``.

    JAX lowers programs one inside another, so the equations that it is at are in the frames of ``jaxpr_subcomp``. Each
    has the lines at which it was traced, inside of the program that it is in. Those of ``eval_jaxpr`` are run one by
    one, as in an eager ``jax.checkpoint`` (in 0.10.2, 0.11.2 and 0.12.0.1). An eager call is still running.
    """
    from jax._src import source_info_util

    frames = [*_frames()]
    for frame in frames:
        eqn = frame.f_locals.get("eqn") if frame.f_code.co_name in ("jaxpr_subcomp", "eval_jaxpr") else None
        for line in () if eqn is None else source_info_util.user_frames(eqn.source_info.traceback):
            return f"{line.file_name}:{line.start_line}, in {line.function_name}"
    for frame in frames:
        code = frame.f_code
        if source_info_util.is_user_filename(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno}, in {code.co_qualname}"
    return None


def _frames() -> Iterator[FrameType]:
    """The frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _varying(array: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(array), "mat", None)
    return frozenset(kind.varying) if kind is not None else frozenset()
