"""How a ``Kernel`` object becomes plugins: an operation, a kernel for each of its ``run`` methods, and a backward."""

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
from ejkernel_core._devices import current_platform, target
from ejkernel_core._keys import content
from ejkernel_core._operation import Arguments, Restore

from ._invocation import Invocation
from ._levels import as_they_are, element, fold_backward, gradient_types, mapped_over, whole

#: The methods by backend: where each runs, and how strongly it is preferred there.
METHODS: dict[str, dict[str, int]] = {
    "triton": {"gpu": 30},
    "pallas": {"tpu": 30},
    "xla": {"cpu": 20, "gpu": 20, "tpu": 20},
    "run": {"cpu": 10, "gpu": 10, "tpu": 10},
}

Filled = tuple[tuple[Any, ...], dict[str, Any]]

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


class Slot:
    """Where an array goes."""


@attrs.frozen
class _Label:
    """Stands for an array, to see where a gradient belongs."""

    name: str

    def __repr__(self) -> str:
        return self.name


@attrs.frozen
class Written:
    """How a call of a kernel object was written: everything but its arrays."""

    tree: Any
    #: What is no array, in order, and ``Slot`` for each that is one.
    statics: tuple[Any, ...]

    def __repr__(self) -> str:
        return repr(self.filled({name: _Label(name) for name in self.arrays}))

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Written, Any], list[Any]]:
        """How it is written together with the content of its statics, which tells calls apart, and the arrays."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        statics = tuple(Slot if _is_array(leaf) else leaf for leaf in leaves)
        arrays = [leaf for leaf, static in zip(leaves, statics, strict=True) if static is Slot]
        return (cls(tree, statics), tuple(map(content, statics))), arrays

    @property
    def arrays(self) -> tuple[str, ...]:
        """A name for each array."""
        return tuple(f"x{i}" for i, static in enumerate(self.statics) if static is Slot)

    def filled(self, arguments: Mapping[str, Any]) -> Filled:
        """The positional and the keyword arguments, with these arrays."""
        leaves = (arguments[f"x{i}"] if static is Slot else static for i, static in enumerate(self.statics))
        args, kwargs = self.tree.unflatten(leaves)
        return args, kwargs

    @property
    def signature(self) -> inspect.Signature:
        """The signature of the operation that this way of writing makes."""
        arrays = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in self.arrays]
        return inspect.Signature([*arrays, inspect.Parameter("written", _KEYWORD, default=self)])

    def unhashable(self) -> str:
        """Which of the statics it is, in words."""
        for path, static in tree_flatten_with_path(self.tree.unflatten(self.statics))[0]:
            try:
                hash(static)
            except TypeError:
                return f"{place(path)} is no array, so it is static and has to be hashable; got {static!r:.60}"
        raise AssertionError("every static is hashable")


def place(path: Any) -> str:
    """A path into (args, kwargs), as Python writes it."""
    return ("args", "kwargs")[path[0].idx] + keystr(path[1:])


def _is_array(leaf: Any) -> bool:
    # numpy's scalar types have a shape and a dtype too: ``numpy.float32`` itself is a static.
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


@attrs.frozen(eq=False, kw_only=True)
class SiteOperation(Operation):
    """An operation that a kernel object makes."""

    site: Site


@attrs.frozen(eq=False)
class Site:
    """A kernel object together with one way of calling it."""

    #: A ``Kernel``, whose module builds on this one.
    kernel: Any
    signature: inspect.Signature
    arrays: tuple[str, ...]
    #: Prepared arguments to the arguments of the ``run`` methods.
    filled: Callable[[Mapping[str, Any]], Filled]
    config_type: type | None
    results: tuple[str, ...] = ("out",)
    #: The structure of the results, if that is how they are given back; else they are given back flat.
    tree: Any = None

    def on(self, arrays: Sequence[Any]) -> Site:
        """With the structure of the results, as the plainest method returns them for arrays like these."""
        avals = dict(zip(self.arrays, jax.eval_shape(lambda *given: given, *arrays), strict=True))
        # No invocation is known before the results are: this one has the arguments alone.
        tree: Any = jax.tree.structure(self.promised(self._bare({**avals, "mapped": ()}, arrays)))
        return attrs.evolve(self, tree=tree, results=tuple(f"out{i}" for i in range(tree.num_leaves)))

    # -- as plugins ----------------------------------------------------------------------------------------------

    def as_plugins(self) -> dict[str, Any]:
        """The operation, its kernels, and its backward where there is a ``custom_vjp``: by name."""
        kernel = self.kernel
        mapped = inspect.Parameter("mapped", _KEYWORD, default=())
        signature = self.signature.replace(parameters=[*self.signature.parameters.values(), mapped])
        own = kernel.has_custom_vjp()
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
            backward=f"{kernel.name}_bwd" if own else None,
            # What has gradients of its own is never differentiated by JAX, not even with backend="run".
            reference="" if own else kernel.plainest,
        )
        kernels = {f"{kernel.name}.{backend}": _Backend(self, backend) for backend in kernel.methods()}
        return {kernel.name: operation, **kernels, **(self._backward(signature) if own else {})}

    def _backward(self, signature: inspect.Signature) -> dict[str, Any]:
        name = f"{self.kernel.name}_bwd"
        own = gradient_signature(signature, self.results)
        outer = inspect.Parameter("outer", _KEYWORD, default=())
        operation = SiteOperation(
            site=self,
            name=name,
            version=self.kernel.version,
            signature=own.replace(parameters=[*own.parameters.values(), outer]),
            arrays=(*self.arrays, *self.saved),
            prepare=lambda arguments: (arguments, tuple),
            outputs=gradient_types,
            fold=fold_backward,
            reference="backward",
        )
        return {name: operation, f"{name}.backward": _Backward(self)}

    @property
    def saved(self) -> tuple[str, ...]:
        """The arrays that the backward has beside those of the forward."""
        return (*self.results, *(f"d_{name}" for name in self.results))

    def _fold(self, arguments: Mapping[str, Any], names: frozenset[str], size: int) -> tuple[Arguments, Restore]:
        """One more level of ``mapped``: the names of what has one more leading axis, as every result has. The outermost
        level is the first.
        """
        return {**arguments, "mapped": ((*sorted(names), *self.saved), *arguments["mapped"])}, as_they_are

    def _restore(self, results: tuple[Any, ...]) -> Any:
        if self.tree is not None:
            return self.tree.unflatten(results)
        return results[0] if len(results) == 1 else results

    def _outputs(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        leaves = self._flat(self.promised(self._bare(arguments)))
        return tuple(whole(arguments, arguments["mapped"], leaf) for leaf in leaves)

    def _bare(self, arguments: Mapping[str, Any], arrays: Sequence[Any] = ()) -> CoreInvocation:
        where = target(current_platform(arrays))
        return CoreInvocation(self.kernel.name, arguments, where.platform, where.device_kind, where.compute_capability)

    # -- what the kernel object says -----------------------------------------------------------------------------

    def promised(self, inv: CoreInvocation) -> Any:
        """What the plainest of the methods returns for shapes like these, without mapped axes: its structure."""
        try:
            cfg = self.heuristic(inv)
        except Unsupported as refusal:
            raise NoKernel(f"no kernel can do {inv}\n  {self.kernel.name}: {refusal}") from refusal
        method = self.kernel.methods()[self.kernel.plainest]

        def run(given: Mapping[str, Any]) -> Any:
            args, kwargs = self.filled({**inv.arguments, **given})
            return method(*args, cfg=cfg, **kwargs)

        return jax.eval_shape(run, self.elements(inv))

    def heuristic(self, inv: CoreInvocation) -> Any:
        """The kernel object's own answer to a call."""
        cfg = self.kernel.heuristic_cfg(self.view(inv))
        if self.kernel.config_type and not isinstance(cfg, self.kernel.config_type):
            wanted = self.kernel.config_type.__qualname__
            raise TypeError(f"{self.kernel.name}: heuristic_cfg returns a {type(cfg).__qualname__}, not a {wanted}")
        return cfg

    def view(self, inv: CoreInvocation) -> Any:
        """What the kernel object's own methods are told of a call: the shapes that one of its runs sees."""
        args, kwargs = self.filled({**inv.arguments, **self.elements(inv)})
        return Invocation(self.kernel, args, kwargs, core=inv)

    def run(self, backend: str, arguments: Mapping[str, Any], cfg: Any) -> list[Any]:
        """The results of one method, flat."""
        method = self.kernel.methods()[backend]

        def once(given: Mapping[str, Any]) -> list[Any]:
            args, kwargs = self.filled({**arguments, **given})
            return [jnp.asarray(leaf) for leaf in self._flat(method(*args, cfg=cfg, **kwargs))]

        levels = [(frozenset(level), None) for level in arguments["mapped"]]
        loops = f"{self.kernel.name}.run_triton" if backend == "triton" else ""
        return mapped_over(once, levels, self._given(arguments, self.arrays), loops)

    @staticmethod
    def _given(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
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
        return {name: element(arguments, levels, name) for name in self._given(arguments, self.arrays)}


@attrs.frozen(eq=False)
class _Hooks:
    """The kernel hooks that every method of a kernel object has alike."""

    site: Site

    @property
    def Config(self) -> type | None:  # noqa: N802  # the names that the core looks for
        return self.site.config_type

    @hookimpl
    def heuristic_cfg(self, inv: CoreInvocation) -> Any:
        return self.site.heuristic(inv)

    @hookimpl
    def config_space(self, inv: CoreInvocation) -> Any:
        return list(self.site.kernel.config_space(self.site.view(inv)))


@attrs.frozen(eq=False)
class _Backend(_Hooks):
    """The kernel hooks over one of the ``run`` methods."""

    name: str

    @property
    def PLATFORMS(self) -> dict[str, int]:  # noqa: N802
        return METHODS[self.name]

    @property
    def CODE(self) -> tuple[Any, ...]:  # noqa: N802  # what this kernel does: the hooks are everybody's
        return self.site.kernel.methods()[self.name], self.site.kernel.heuristic_cfg

    @hookimpl
    def run_backend(self, inv: CoreInvocation, cfg: Any) -> Any:
        return self.site.run(self.name, inv.arguments, cfg)


@attrs.frozen(eq=False)
class _Backward(_Hooks):
    """The kernel hooks over ``custom_vjp``."""

    PLATFORMS = METHODS["run"]

    @property
    def CODE(self) -> tuple[Any, ...]:  # noqa: N802
        return self.site.kernel.custom_vjp, self.site.kernel.heuristic_cfg

    @hookimpl
    def run_backend(self, inv: CoreInvocation, cfg: Any) -> Any:
        site = self.site
        tree = jax.tree.structure(site.promised(inv)) if site.tree is None else site.tree

        def once(given: Mapping[str, Any]) -> list[Any]:
            arguments = {**inv.arguments, **given}
            args, kwargs = site.filled(arguments)
            by_result = tree.unflatten(_cotangent(arguments, name) for name in site.results)
            cotangents = tuple(by_result) if isinstance(by_result, (tuple, list)) else (by_result,)
            found = _by_array(site, arguments, site.kernel.custom_vjp(args, cfg, kwargs, cotangents))
            return [found(name) for name in inv["wrt"]]

        # What is mapped in the forward alone is one call: the gradient of what its elements share is a sum.
        levels = [(frozenset(level), None) for level in inv["outer"]]
        levels += [(frozenset(level), inv["wrt"]) for level in inv["mapped"]]
        loops = f"{site.kernel.name}.custom_vjp" if "triton" in site.kernel.methods() else ""
        return mapped_over(once, levels, site._given(inv, (*site.arrays, *site.saved)), loops)


# -- gradients -------------------------------------------------------------------------------------------------------


def _cotangent(arguments: Mapping[str, Any], name: str) -> Any:
    given = arguments[f"d_{name}"]
    return jnp.zeros_like(arguments[name]) if given is None else given


def _by_array(site: Site, arguments: Mapping[str, Any], gradients: Any) -> Callable[[str], Any]:
    """The gradient of an array by its name; zero where ``custom_vjp`` says None."""
    labels = {name: _Label(name) for name in site.arrays if arguments[name] is not None}
    args, kwargs = site.filled({**arguments, **labels})
    told = f"{site.kernel.name}: custom_vjp returns"
    count = len(args)
    if not isinstance(gradients, (tuple, list)) or len(gradients) not in (count, count + 1):
        got = f"{len(gradients)} values" if isinstance(gradients, (tuple, list)) else f"a {type(gradients).__name__}"
        raise TypeError(f"{told} a gradient for each of its {count} primals, and a dict for keywords; got {got}")
    by_keyword = gradients[count] if len(gradients) > count else {}
    if not isinstance(by_keyword, Mapping) or not by_keyword.keys() <= kwargs.keys():
        raise TypeError(f"{told} after those of its primals a dict for the keywords {[*kwargs]}; got {by_keyword!r}")
    found: dict[str, Any] = {}
    given = {name: kwargs[name] for name in by_keyword}
    try:
        jax.tree.map(_noting(found), (tuple(gradients[:count]), dict(by_keyword)), (args, given), is_leaf=_is_none)
    except ValueError as fault:
        raise TypeError(f"{told} gradients of another structure than its arguments: {fault}") from fault
    places = {leaf.name: place(path) for path, leaf in tree_flatten_with_path((args, kwargs))[0] if _is_label(leaf)}

    def gradient(name: str) -> Any:
        primal = arguments[name]
        if name not in found:
            raise NotDifferentiable(f"{told} no gradient of {places[name]}: return a dict of such after the others")
        value = jnp.zeros_like(primal) if found[name] is None else jnp.asarray(found[name])
        if (value.shape, value.dtype) != (primal.shape, primal.dtype):
            raise TypeError(f"{told} {_typed(value)} as the gradient of {places[name]}, which is {_typed(primal)}")
        return value

    return gradient


def _noting(found: dict[str, Any]) -> Callable[[Any, Any], None]:
    def note(gradient: Any, labels: Any) -> None:
        if gradient is not None and not jax.tree_util.all_leaves([labels]):
            raise ValueError(f"one value for {labels!r}")
        found.update({label.name: gradient for label in jax.tree.leaves(labels) if _is_label(label)})

    return note


def _is_none(value: Any) -> bool:
    return value is None


def _is_label(value: Any) -> bool:
    return isinstance(value, _Label)


def _typed(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
