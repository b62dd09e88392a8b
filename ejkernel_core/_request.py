"""A call without the values of its arrays, and the primitive that has it as its parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import jax

from ._content import abstract, content
from ._devices import Target, absent_target, current_platform, target
from ._display import repr_of
from ._errors import NoKernel, PluginError, Unsupported, message
from ._invocation import Invocation
from ._jax_versions import Primitive, keep_weakly, lower_with_devices, vary_alike
from ._operation import Arguments, Operation, Restore
from ._plan import AUTOTUNED, Plan
from ._plugins import Plugins
from ._scopes import EMPTY, Scope

if TYPE_CHECKING:  # imported when arrays are sharded, which most programs do not need
    from ._partitioning import Partitioning


class Numerics(NamedTuple):
    """The settings of JAX that change what a function computes.

    They belong to a thread, and are in effect where a call is traced. Its kernel is traced when JAX lowers the call,
    which may happen in another thread or with other settings.
    """

    x64: bool
    precision: Any

    @classmethod
    def current(cls) -> Numerics:
        """The settings that are in effect now."""
        config: Any = jax.config
        return cls(bool(config.jax_enable_x64), config.jax_default_matmul_precision)

    def in_effect(self) -> contextlib.ExitStack:
        """Put the settings into effect for a ``with`` block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(standard_promotion())
            return stack.pop_all()


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Use standard promotion of dtypes and ranks for a ``with`` block: a user's strict one is not meant for kernels."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Dependencies:
    """By what kinds of keys a compiled function has chosen its kernels, and when.

    An instance is equal only to itself, so that JAX does not reuse for one function what it cached for another.
    """

    def __init__(self) -> None:
        #: By operation and kind: the number of changes of the registry at the first choice.
        self.kinds: dict[tuple[str, str], int] = {}
        #: What was raised last where a call was lowered. The compiler, which lowers it on a shard, shows the text of an
        #: exception and drops the exception.
        self.fault: BaseException | None = None


@attrs.frozen
class CallContext:
    """What a call depends on beside its operation and arguments."""

    registry: Plugins = attrs.field(repr=False)
    backend: str | None = None
    cfg: Any = attrs.field(default=None, repr=repr_of)
    #: The scope where the call is made. When JAX lowers it, another one may be in effect.
    scope: Scope = EMPTY
    dependencies: Dependencies = attrs.field(factory=Dependencies, repr=False)
    #: The processes of the program around the call, where they are known before it is lowered; see ``Invocation``.
    processes: tuple[int, ...] | None = ()


class MappedAxis(NamedTuple):
    """An axis over which ``jax.vmap`` maps a call: these arrays, and all results but ``sums``, have it in front."""

    arrays: frozenset[str]
    #: The gradients that are sums over it.
    sums: frozenset[str] = frozenset()


@attrs.frozen
class Request:
    """A call without the values of its arrays. It is hashable, so that it can be a parameter of a primitive."""

    context: CallContext
    operation: Operation = attrs.field(repr=lambda operation: operation.name)
    #: The names of the arrays that the call has, in the order of the primitive's operands.
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = attrs.field(repr=repr_of)
    #: The content of the options and of the explicit cfg, which differs where Python's equality does not.
    content: tuple[Any, ...] = attrs.field(repr=False)
    #: The settings where the call is traced, with which its kernel is traced too.
    settings: Numerics = attrs.field(factory=Numerics.current, repr=False)
    #: The outermost first. They are merged into one call or a loop where the call is lowered, on the shard of a device:
    #: merging two axes of which one is sharded would move data between devices.
    mapped: tuple[MappedAxis, ...] = ()
    #: The results that something depends on; None for all. It is not a part of any key.
    needed: frozenset[str] | None = None

    @property
    def all_results(self) -> tuple[str, ...]:
        """The names of what a kernel returns: for a backward operation, the arrays whose gradients it computes."""
        wrt = dict(self.options).get("wrt")
        return wrt if isinstance(wrt, tuple) else self.operation.results

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the needed results."""
        return self.select(self.all_results)

    def select(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """The needed ones of all results."""
        if self.needed is None:
            return tuple(results)
        return tuple(r for name, r in zip(self.all_results, results, strict=True) if name in self.needed)

    def completed(self, results: Mapping[str, Any], values: Sequence[Any]) -> tuple[Any, ...]:
        """All results of a call on these arrays, in order. On those that are not given nothing depends: they are 0."""
        names = self.all_results
        if len(results) == len(names):
            return tuple(results[name] for name in names)
        outputs = attrs.evolve(self, needed=None).outputs(values)
        return tuple(
            results[name] if name in results else jax.numpy.zeros(output.shape, output.dtype)
            for name, output in zip(names, outputs, strict=True)
        )

    def by_name(self, results: Sequence[Any]) -> dict[str, Any]:
        """The needed results by name."""
        return dict(zip(self.results, results, strict=True))

    def needing(self, used: Sequence[bool]) -> Request:
        """The request of those results alone that are used, of those of this one."""
        if all(used):
            return self
        return attrs.evolve(self, needed=frozenset(n for n, is_used in zip(self.results, used, strict=True) if is_used))

    def saving(self, wrt: Sequence[str]) -> Request:
        """The request that also has the results which the gradients of the arrays ``wrt`` are computed from."""
        if self.needed is None:
            return self
        return attrs.evolve(self, needed=self.needed.union(self.operation.residuals(wrt)))

    @property
    def registry(self) -> Plugins:
        return self.context.registry

    def arguments(self, values: Sequence[Any]) -> Arguments:
        """Every parameter by name, with these arrays. An array that the call does not have is None."""
        missing = dict.fromkeys(self.operation.arrays)
        return {**missing, **dict(self.options), **dict(zip(self.arrays, values, strict=True))}

    def with_options(self, changes: Mapping[str, Any]) -> Request:
        """The request with other values of some of its options."""
        if not changes:
            return self
        options = tuple((name, changes.get(name, value)) for name, value in self.options)
        static = content((*(value for _, value in options), self.context.cfg))
        return attrs.evolve(self, options=options, content=static)

    def invocation(self, values: Sequence[Any], target: Target) -> Invocation:
        """The invocation of this request on abstract arrays like these."""
        return Invocation(
            self.operation.name,
            self.arguments([abstract(value) for value in values]),
            target.platform,
            target.device_kind,
            target.compute_capability,
            self.operation,
            target.processes,
            self.registry,
        )

    def plan(self, values: Sequence[Any], target: Target) -> Plan:
        context, inv, changes = self.context, self.invocation(values, target), self.registry.changes
        plan = self.registry.choose(inv, context.backend, context.cfg, context.scope)
        if plan.choice.measured or plan.origin == AUTOTUNED:
            changes = self.registry.changes  # what was stored for this choice is not a change after it
        with contextlib.suppress(TypeError):  # an option without content, so there is no key
            kinds = {(key.op, key.kind): changes for key in inv.tuning_keys}
            for kind in kinds:
                context.dependencies.kinds.setdefault(kind, changes)
            if not self.registry.is_unchanged(kinds):  # by another thread, which did not know of this function
                self.registry.invalidate(inv)
        return plan

    def run(self, plan: Plan, values: Sequence[Any]) -> tuple[Any, ...]:
        """What the kernel returns: all results, with anything in the place of those that are not needed."""
        inv = plan.invocation.with_arrays(dict(zip(self.arrays, values, strict=True)))
        inv = inv if self.needed is None else attrs.evolve(inv, needed=self.needed)
        return plan.kernel.run_backend(inv, plan.choice.cfg)

    def elements(self, values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of these arrays without the mapped axes."""
        return without_axes(self.mapped, self.arrays, values)

    def outputs(self, values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes and dtypes of the results."""
        if not self.mapped:
            return self._outputs(values)
        sizes = [*zip(self.mapped, self.mapped_sizes(values), strict=True)]
        return tuple(
            jax.ShapeDtypeStruct((*(n for axis, n in sizes if name not in axis.sums), *result.shape), result.dtype)
            for name, result in zip(self.results, self._outputs(self.elements(values)), strict=True)
        )

    def mapped_sizes(self, values: Sequence[Any]) -> list[int]:
        """The sizes of the mapped axes, which are smaller on a shard."""
        sizes = []
        for number, axis in enumerate(self.mapped):
            name, value = next(item for item in zip(self.arrays, values, strict=True) if item[0] in axis.arrays)
            sizes.append(value.shape[sum(name in outer.arrays for outer in self.mapped[:number])])
        return sizes

    def _outputs(self, values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        operation, arguments = self.operation, self.arguments(values)
        if operation.outputs is None:
            outputs = _outputs_of_reference(self, [abstract(value) for value in values])
        else:
            outputs = tuple(operation.outputs(arguments))
        for result, array in operation.aliases.items():
            declared, updated = outputs[operation.results.index(result)], abstract(arguments[array])
            if (declared.shape, declared.dtype) != (updated.shape, updated.dtype):
                raise PluginError(f"{operation.name}: {result} is {array}, updated, and has to be like it")
        return self.select(outputs)

    @property
    def may_be_sharded(self) -> bool:
        """Whether an axis of the call may be sharded: its operation says how, or it is an axis of ``jax.vmap``."""
        return self.operation.partitioning is not None or bool(self.mapped)

    def partitioning(self, values: Sequence[Any]) -> Partitioning:
        """The rule by which this call may be sharded. Where its operation has none, mapped axes alone may be."""
        partition = self.operation.partitioning
        from ._partitioning import whole_partitioning

        elements, reason = self.elements(values), f"{self.operation.name} does not say how it may be sharded"
        try:
            rule = None if partition is None else partition(self.arguments(elements))
        except Unsupported as refusal:
            rule, reason = None, message(refusal)
        if rule is None:
            results = dict(zip(self.results, self._outputs(elements), strict=True))
            rule = whole_partitioning(dict(zip(self.arrays, elements, strict=True)), results, reason)
        elif self.needed is not None:
            rule = attrs.evolve(rule, results=dict(self.select([*rule.results.items()])))
        sizes = self.mapped_sizes(values)
        for number, axis in reversed([*enumerate(self.mapped)]):
            rule = rule.with_mapped_axis(f"mapped axis {number}", sizes[number], axis.arrays, axis.sums)
        return rule


def without_axes(axes: Sequence[MappedAxis], names: Sequence[str], values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of arrays, given with their names, without these mapped axes."""
    return [
        jax.ShapeDtypeStruct(value.shape[sum(name in axis.arrays for axis in axes) :], value.dtype)
        for name, value in zip(names, values, strict=True)
    ]


def make_request(context: CallContext, operation: Operation, arguments: Mapping[str, Any]) -> tuple[Request, list[Any]]:
    """Split prepared arguments into a request and its arrays."""
    names = tuple(name for name in operation.arrays if arguments[name] is not None)
    options = tuple((name, value) for name, value in arguments.items() if name not in operation.arrays)
    static = content((*(value for _, value in options), context.cfg))
    return Request(context, operation, names, options, static), [arguments[name] for name in names]


def _outputs_of_reference(request: Request, avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    operation = request.operation
    if operation.reference not in request.registry.backends(operation.name):
        raise PluginError(
            f"{operation.name}: nothing says what it returns. Give the Operation axes or outputs, or a kernel "
            f"{operation.name}.{operation.reference}"
        )
    reference = request.registry.kernel(operation.name, operation.reference)
    invocation = request.invocation(avals, target(current_platform(())))
    try:
        cfg = reference.heuristic_cfg(invocation)
    except Unsupported as refusal:
        raise NoKernel(f"{reference.name}, which says what {operation.name!r} returns, refuses: {refusal}") from refusal

    def run(*values: Any) -> tuple[Any, ...]:
        return reference.run_backend(invocation.with_arrays(dict(zip(request.arrays, values, strict=True))), cfg)

    return tuple(jax.eval_shape(run, *avals))


# -- the primitive -----------------------------------------------------------------------------------------------------

keep_weakly(Request)
kernel_call = Primitive("ejkernel_call")
lower_with_devices(kernel_call)
#: The same primitive for JAX compiling for an absent device, where it cannot pass devices to ``_lower``.
absent_device_call = Primitive("ejkernel_call")
CALLS = (kernel_call, absent_device_call)


def bind(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of the best kernel for the request, by the primitive."""
    primitive = kernel_call if absent_target() is None else absent_device_call
    return tuple(primitive.bind(*vary_alike(arrays), request=request))


def used_results(restore: Restore, outputs: Sequence[Any]) -> list[bool]:
    """Which of these results the caller gets something of."""
    program = jax.make_jaxpr(restore)(tuple(outputs)).jaxpr
    used = {id(variable) for eqn in program.eqns for variable in eqn.invars} | {id(v) for v in program.outvars}
    return [id(variable) in used for variable in program.invars]


def requests_in(program: Any) -> Iterator[tuple[Request, list[Any]]]:
    """The requests of the calls in a jaxpr, and in those that it has inside, with the shapes of their arrays."""
    for equation in program.eqns:
        if equation.primitive in CALLS:
            yield equation.params["request"], [variable.aval for variable in equation.invars]
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from requests_in(inner)
