"""Makes plugins of a ``Kernel`` object: an operation, a kernel for each ``run`` method, and a backward operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from ejkernel_core import Invocation as CoreInvocation
from ejkernel_core import NoKernel, NotDifferentiable, Operation, Unsupported, gradient_signature, hookimpl
from ejkernel_core.extend import content, line_of_call, target_of

from ._invocation import Invocation
from ._levels import batched_type, element_type, fold_backward, gradient_types, identity, map_over_levels

#: By backend: the platforms of its method, and its ranks there.
METHODS: dict[str, dict[str, int]] = {
    "triton": {"gpu": 30},
    "pallas": {"tpu": 30},
    "xla": {"cpu": 20, "gpu": 20, "tpu": 20},
    "run": {"cpu": 10, "gpu": 10, "tpu": 10},
}

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


class Slot:
    """Stands for an array among the static leaves."""


@attrs.frozen
class _Label:
    """Stands for an array, to find the gradient that belongs to it."""

    name: str

    def __repr__(self) -> str:
        return self.name


@attrs.frozen
class Written:
    """The form of a call of a kernel object: everything but its arrays. It is a part of keys, with its name."""

    tree: Any
    #: The leaves in order, with ``Slot`` in the place of each array.
    statics: tuple[Any, ...]

    def __repr__(self) -> str:
        return repr(self.fill({name: _Label(name) for name in self.arrays}))

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Written, Any], list[Any]]:
        """The form of a call, together with the content of its static leaves; and its arrays."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        statics = tuple(Slot if _is_array(leaf) else leaf for leaf in leaves)
        arrays = [leaf for leaf, static in zip(leaves, statics, strict=True) if static is Slot]
        return (cls(tree, statics), tuple(map(content, statics))), arrays

    @property
    def arrays(self) -> tuple[str, ...]:
        """A name for each array."""
        return tuple(f"x{i}" for i, static in enumerate(self.statics) if static is Slot)

    def fill(self, arguments: Mapping[str, Any]) -> CallArguments:
        """The positional and the keyword arguments of the call, with these arrays."""
        leaves = (arguments[f"x{i}"] if static is Slot else static for i, static in enumerate(self.statics))
        args, kwargs = self.tree.unflatten(leaves)
        return args, kwargs

    @property
    def signature(self) -> inspect.Signature:
        """The signature of the operation for this form of a call."""
        arrays = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in self.arrays]
        return inspect.Signature([*arrays, inspect.Parameter("written", _KEYWORD, default=self)])

    def unhashable(self) -> str:
        """The sentence about the first static leaf that is not hashable."""
        for path, static in tree_flatten_with_path(self.tree.unflatten(self.statics))[0]:
            try:
                hash(static)
            except TypeError:
                return f"{place(path)} is not an array, so it is static and has to be hashable; got {static!r:.60}"
        raise AssertionError("every static is hashable")


def place(path: Any) -> str:
    """A path into (args, kwargs), as a Python expression."""
    return ("args", "kwargs")[path[0].idx] + keystr(path[1:])


def _is_array(leaf: Any) -> bool:
    # The scalar types of numpy, such as ``numpy.float32``, have a shape and a dtype too. They are static.
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


@attrs.frozen(eq=False, kw_only=True)
class SiteOperation(Operation):
    """The operation of a kernel object."""

    site: Site


@attrs.frozen(eq=False)
class Site:
    """A kernel object with one form of a call."""

    #: A ``Kernel``, whose module builds on this one; with the methods of ``kernel``.
    any_kernel: Any
    signature: inspect.Signature
    arrays: tuple[str, ...]
    #: From prepared arguments to the arguments of the ``run`` methods.
    fill: Callable[[Mapping[str, Any]], CallArguments]
    config_type: type | None
    results: tuple[str, ...] = ("out",)
    #: The structure in which the caller gets the results; None for a flat tuple.
    tree: Any = None

    @property
    def kernel(self) -> Any:
        """The object that is called: of several with equal attributes, the last one."""
        return self.any_kernel.caller()

    def with_results(self, arrays: Sequence[Any]) -> Site:
        """Add the structure of the results that the most general method returns for arrays like these."""
        avals = dict(zip(self.arrays, jax.eval_shape(lambda *values: values, *arrays), strict=True))
        # There is no operation before the results are known, so this invocation has the arguments alone.
        tree: Any = jax.tree.structure(self.results_of(self._abstract_invocation({**avals, "mapped": ()}, arrays)))
        return attrs.evolve(self, tree=tree, results=tuple(f"out{i}" for i in range(tree.num_leaves)))

    # -- as plugins ----------------------------------------------------------------------------------------------

    def as_plugins(self) -> dict[str, Any]:
        """The operation, its kernels, and the backward operation if there is a ``custom_vjp``, by name."""
        kernel = self.kernel
        mapped = inspect.Parameter("mapped", _KEYWORD, default=())
        signature = self.signature.replace(parameters=[*self.signature.parameters.values(), mapped])
        has_vjp = kernel.has_custom_vjp()
        operation = SiteOperation(
            site=self,
            name=kernel.name,
            version=kernel.version,
            signature=signature,
            arrays=self.arrays,
            results=self.results,
            prepare=lambda arguments: (arguments, self._restore),
            outputs=self._outputs,
            fold=self._fold,
            backward=f"{kernel.name}_bwd" if has_vjp else None,
            # With its own gradients, it has no reference: JAX never differentiates it, not even with backend="run".
            reference="" if has_vjp else kernel.plainest,
        )
        kernels = {f"{kernel.name}.{backend}": _Backend(self, backend) for backend in kernel.methods()}
        return {kernel.name: operation, **kernels, **(self._backward(signature) if has_vjp else {})}

    def _backward(self, signature: inspect.Signature) -> dict[str, Any]:
        name = f"{self.kernel.name}_bwd"
        forward_signature = gradient_signature(signature, self.results)
        outer = inspect.Parameter("outer", _KEYWORD, default=())
        operation = SiteOperation(
            site=self,
            name=name,
            version=self.kernel.version,
            signature=forward_signature.replace(parameters=[*forward_signature.parameters.values(), outer]),
            arrays=(*self.arrays, *self.backward_arrays),
            prepare=lambda arguments: (arguments, tuple),
            outputs=gradient_types,
            fold=fold_backward,
            reference="backward",
        )
        return {name: operation, f"{name}.backward": _Backward(self)}

    @property
    def backward_arrays(self) -> tuple[str, ...]:
        """The arrays that the backward operation has beside those of the forward."""
        return (*self.results, *(f"d_{name}" for name in self.results))

    def _fold(
        self, arguments: Mapping[str, Any], names: frozenset[str], size: int, sums: frozenset[str]
    ) -> tuple[dict[str, Any], Callable[[tuple[Any, ...]], Any]]:
        """Add a level to ``mapped``: the names of the arrays with one more leading axis, which all results have. The
        outermost level is the first.
        """
        return {**arguments, "mapped": ((*sorted(names), *self.backward_arrays), *arguments["mapped"])}, identity

    def _restore(self, results: tuple[Any, ...]) -> Any:
        if self.tree is not None:
            return self.tree.unflatten(results)
        return results[0] if len(results) == 1 else results

    def _outputs(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        leaves = self._flat(self.results_of(self._abstract_invocation(arguments)))
        return tuple(batched_type(arguments, arguments["mapped"], leaf) for leaf in leaves)

    def _abstract_invocation(self, arguments: Mapping[str, Any], arrays: Sequence[Any] = ()) -> CoreInvocation:
        platform, device_kind, capability, _ = target_of(arrays)
        return CoreInvocation(self.kernel.name, arguments, platform, device_kind, capability)

    # -- calls of the kernel object's methods --------------------------------------------------------------------

    def results_of(self, inv: CoreInvocation) -> Any:
        """The abstract results of the most general method, for the shapes without mapped axes."""
        try:
            cfg = self.heuristic(inv)
        except Unsupported as refusal:
            error = NoKernel(f"no kernel can do {inv}\n  {self.kernel.name}: {refusal}")
            error.name_line(line_of_call())
            raise error from refusal
        method = self.kernel.methods()[self.kernel.plainest]

        def run(arrays: Mapping[str, Any]) -> Any:
            args, kwargs = self.fill({**inv.arguments, **arrays})
            return method(*args, cfg=cfg, **kwargs)

        return jax.eval_shape(run, self.elements(inv))

    def heuristic(self, inv: CoreInvocation) -> Any:
        """The heuristic configuration of the kernel object."""
        cfg = self.kernel.heuristic_cfg(self.kernel_invocation(inv))
        if self.kernel.config_type and not isinstance(cfg, self.kernel.config_type):
            expected = self.kernel.config_type.__qualname__
            raise TypeError(f"{self.kernel.name}: heuristic_cfg returns a {type(cfg).__qualname__}, not a {expected}")
        return cfg

    def kernel_invocation(self, inv: CoreInvocation) -> Any:
        """The invocation for the kernel object's methods, with the shapes that one run sees, without mapped axes."""
        args, kwargs = self.fill({**inv.arguments, **self.elements(inv)})
        return Invocation(self.kernel, args, kwargs, core=inv)

    def run(self, backend: str, arguments: Mapping[str, Any], cfg: Any) -> list[Any]:
        """The results of one method, as a flat list."""
        method = self.kernel.methods()[backend]

        def run_element(arrays: Mapping[str, Any]) -> list[Any]:
            args, kwargs = self.fill({**arguments, **arrays})
            return [jnp.asarray(leaf) for leaf in self._flat(method(*args, cfg=cfg, **kwargs))]

        levels = [(frozenset(level), None) for level in arguments["mapped"]]
        loop_name = f"{self.kernel.name}.run_triton" if backend == "triton" else ""
        return map_over_levels(run_element, levels, self._present_arrays(arguments, self.arrays), loop_name)

    @staticmethod
    def _present_arrays(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        return {name: arguments[name] for name in names if arguments[name] is not None}

    def _flat(self, out: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(out)
        if self.tree is not None and tree != self.tree:
            raise TypeError(
                f"{self.kernel.name}: returns {tree}; it returned {self.tree} before. What it returns may depend on "
                "static arguments, not on shapes or on the method"
            )
        if len(leaves) != len(self.results):
            raise TypeError(f"{self.kernel.name}: returns {len(leaves)} arrays; results names {self.results}")
        return leaves

    def elements(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        levels = (*arguments.get("outer", ()), *arguments["mapped"])
        return {name: element_type(arguments, levels, name) for name in self._present_arrays(arguments, self.arrays)}


@attrs.frozen(eq=False)
class _Hooks:
    """The hooks that are the same for all methods of a kernel object."""

    site: Site

    @property
    def Config(self) -> type | None:  # noqa: N802  # the name that the core looks for
        return self.site.config_type

    @hookimpl
    def heuristic_cfg(self, inv: CoreInvocation) -> Any:
        return self.site.heuristic(inv)

    @hookimpl
    def config_space(self, inv: CoreInvocation) -> Any:
        return list(self.site.kernel.config_space(self.site.kernel_invocation(inv)))


@attrs.frozen(eq=False)
class _Backend(_Hooks):
    """The hooks of a kernel for one of the ``run`` methods."""

    name: str

    @property
    def PLATFORMS(self) -> dict[str, int]:  # noqa: N802
        return METHODS[self.name]

    @property
    def CODE(self) -> tuple[Any, ...]:  # noqa: N802  # the code of this kernel; the hooks are the same for all
        return self.site.kernel.methods()[self.name], self.site.kernel.heuristic_cfg

    @hookimpl
    def run_backend(self, inv: CoreInvocation, cfg: Any) -> Any:
        return self.site.run(self.name, inv.arguments, cfg)


@attrs.frozen(eq=False)
class _Backward(_Hooks):
    """The hooks of the backward kernel, for ``custom_vjp``."""

    PLATFORMS = METHODS["run"]

    @property
    def CODE(self) -> tuple[Any, ...]:  # noqa: N802
        return self.site.kernel.custom_vjp, self.site.kernel.heuristic_cfg

    @hookimpl
    def run_backend(self, inv: CoreInvocation, cfg: Any) -> Any:
        site = self.site
        tree = jax.tree.structure(site.results_of(inv)) if site.tree is None else site.tree

        def run_element(arrays: Mapping[str, Any]) -> list[Any]:
            arguments = {**inv.arguments, **arrays}
            args, kwargs = site.fill(arguments)
            by_result = tree.unflatten(_cotangent(arguments, name) for name in site.results)
            cotangents = tuple(by_result) if isinstance(by_result, (tuple, list)) else (by_result,)
            gradient_of = _gradient_function(site, arguments, site.kernel.custom_vjp(args, cfg, kwargs, cotangents))
            return [gradient_of(name) for name in inv["wrt"]]

        # A level that is mapped in the forward only is one call, so gradients of what its elements share are summed.
        levels = [(frozenset(level), None) for level in inv["outer"]]
        levels += [(frozenset(level), inv["wrt"]) for level in inv["mapped"]]
        loop_name = f"{site.kernel.name}.custom_vjp" if "triton" in site.kernel.methods() else ""
        arrays = site._present_arrays(inv, (*site.arrays, *site.backward_arrays))
        return map_over_levels(run_element, levels, arrays, loop_name)


# -- gradients -------------------------------------------------------------------------------------------------------


def _cotangent(arguments: Mapping[str, Any], name: str) -> Any:
    cotangent = arguments[f"d_{name}"]
    return jnp.zeros_like(arguments[name]) if cotangent is None else cotangent


def _gradient_function(site: Site, arguments: Mapping[str, Any], gradients: Any) -> Callable[[str], Any]:
    """A function from the name of an array to its gradient, which is zero where ``custom_vjp`` returns None."""
    labels = {name: _Label(name) for name in site.arrays if arguments[name] is not None}
    args, kwargs = site.fill({**arguments, **labels})
    prefix = f"{site.kernel.name}: custom_vjp returns"
    count = len(args)
    if not isinstance(gradients, (tuple, list)) or len(gradients) not in (count, count + 1):
        got = f"{len(gradients)} values" if isinstance(gradients, (tuple, list)) else f"a {type(gradients).__name__}"
        raise TypeError(f"{prefix} a gradient for each of its {count} primals, and a dict for keywords; got {got}")
    by_keyword = gradients[count] if len(gradients) > count else {}
    if not isinstance(by_keyword, Mapping) or not by_keyword.keys() <= kwargs.keys():
        raise TypeError(f"{prefix} after those of its primals a dict for the keywords {[*kwargs]}; got {by_keyword!r}")
    gradient_by_name: dict[str, Any] = {}
    gradient_tree = tuple(gradients[:count]), dict(by_keyword)
    label_tree = args, {name: kwargs[name] for name in by_keyword}
    try:
        jax.tree.map(_collect_into(gradient_by_name), gradient_tree, label_tree, is_leaf=_is_none)
    except ValueError as fault:
        raise TypeError(f"{prefix} gradients of another structure than its arguments: {fault}") from fault
    places = {leaf.name: place(path) for path, leaf in tree_flatten_with_path((args, kwargs))[0] if _is_label(leaf)}

    def gradient(name: str) -> Any:
        primal = arguments[name]
        if name not in gradient_by_name:
            raise NotDifferentiable(f"{prefix} no gradient of {places[name]}: return a dict of such after the others")
        value = jnp.zeros_like(primal) if gradient_by_name[name] is None else jnp.asarray(gradient_by_name[name])
        if (value.shape, value.dtype) != (primal.shape, primal.dtype):
            got, expected = _type_text(value), _type_text(primal)
            raise TypeError(f"{prefix} {got} as the gradient of {places[name]}, which is {expected}")
        return value

    return gradient


def _collect_into(gradient_by_name: dict[str, Any]) -> Callable[[Any, Any], None]:
    def collect(gradient: Any, labels: Any) -> None:
        if gradient is not None and not jax.tree_util.all_leaves([labels]):
            raise ValueError(f"one value for {labels!r}")
        gradient_by_name.update({label.name: gradient for label in jax.tree.leaves(labels) if _is_label(label)})

    return collect


def _is_none(value: Any) -> bool:
    return value is None


def _is_label(value: Any) -> bool:
    return isinstance(value, _Label)


def _type_text(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
