"""Kernels as classes: an operation and its implementations in one, thin over the functions of the core.

A ``Kernel`` needs no registration; what it does is planned, remembered and explained as ``ejkernel_core.call`` is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Generic, Self, TypeVar, get_args, get_origin

import ejkernel_core
from ejkernel_core import Explanation, NoKernel, Plan, Registry
from ejkernel_core._kernel import why_mutable

from ._bridge import Filled, Site, Written
from ._invocation import Invocation
from ._recording import recording

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")

#: How many ways of calling one kernel object are kept: another scalar is another way.
KEPT = 512

#: The methods by backend, the plainest first.
_METHODS = {"run": "run", "xla": "run_xla", "pallas": "run_pallas", "triton": "run_triton"}


class Kernel(Generic[Cfg, Out]):
    """An operation and its implementations in one class. Subclass it, and call an instance.

    ``run`` is the implementation for everywhere; ``run_triton`` goes before it on a GPU, ``run_pallas`` on a TPU, and
    ``run_xla`` everywhere. Arguments may be pytrees. Arrays in them are traced; numbers, strings and everything else
    are static. ``cfg`` and ``backend`` (the name of a method: "triton", "pallas", "xla", "run") are for the framework.

    What an instance computes is compiled: change nothing of it after its first call.
    """

    #: What it is remembered by, beside its arguments; by default, the name of the class.
    name: str
    #: Raised when its results change.
    version: int = 1
    #: The names of what ``run`` returns, where the kernel is registered as a plugin.
    results: tuple[str, ...] = ("out",)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name", cls.__name__)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a class that computes nothing: a subclass may leave ``__init__`` out, as a dataclass does."""
        if not any(getattr(cls, name) is not getattr(Kernel, name) for name in _METHODS.values()):
            raise TypeError(_what_to_write(cls))
        return super().__new__(cls)

    def __init__(self, name: str | None = None, version: int | None = None) -> None:
        self.name = self.name if name is None else name
        self.version = self.version if version is None else version

    # -- to be written -------------------------------------------------------------------------------------------

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Compute the results, in plain JAX: where there is no ``custom_vjp``, JAX differentiates this."""
        raise NotImplementedError

    def run_triton(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Compute the results by Triton, on a GPU."""
        raise NotImplementedError

    def run_pallas(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Compute the results by Pallas, on a TPU."""
        raise NotImplementedError

    def run_xla(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Compute the results by XLA, on anything."""
        raise NotImplementedError

    def heuristic_cfg(self, inv: Invocation) -> Cfg:
        """A good configuration without measuring; by default, the configuration that has all defaults."""
        if self.config_type is None:
            raise NotImplementedError(f"{self.name}: write heuristic_cfg, or say Kernel[Config, Out]")
        config: Cfg = self.config_type()
        return config

    def config_space(self, inv: Invocation) -> Iterable[Cfg]:
        """The configurations worth measuring; by default, the heuristic's alone."""
        return [self.heuristic_cfg(inv)]

    def custom_vjp(
        self, primals: tuple[Any, ...], cfg: Cfg, kwargs: Mapping[str, Any], cotangents: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The gradients of the positional arguments, from the cotangents of the results.

        One gradient for each primal, of its structure, or None where it is zero; after them, optionally, a dict of
        gradients of keyword arguments. A gradient that is asked for and not given is ``NotDifferentiable``.
        """
        raise NotImplementedError

    # -- to be called --------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Out:
        """The results, by the best method there is, with the best configuration that is known."""
        with recording.listening():
            return self._ask(Registry.call, args, kwargs, cfg, backend)  # type: ignore[no-any-return]

    def invocation(self, *args: Any, **kwargs: Any) -> Invocation:
        """That call, frozen; its ``key`` is what configurations are remembered by."""
        return Invocation(self, args, kwargs)

    def plan(self, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Plan:
        """The plan of that call; arrays may be abstract."""
        return self._ask(Registry.plan, args, kwargs, cfg, backend)  # type: ignore[no-any-return]

    def explain(self, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Explanation:
        """The plan of that call and of its gradients, or why there is none."""
        try:
            return self._ask(Registry.explain, args, kwargs, cfg, backend)  # type: ignore[no-any-return]
        except NoKernel as refusal:
            return Explanation(self.name, None, str(refusal))

    def _ask(
        self,
        question: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cfg: Any = None,
        backend: str | None = None,
    ) -> Any:
        reason = None if cfg is None else why_mutable(cfg)
        if reason is not None:
            raise TypeError(f"{self.name}: cfg takes a value that cannot be changed; {reason}")
        way, arrays = Written.of(args, kwargs)
        # A class that does not say which configurations it takes is given any; see ``Site.config_type``.
        takes = type(cfg) if cfg is not None and self.config_type is None else self.config_type
        try:
            registry = self._registries.of((*way, takes), ejkernel_core.registry)
        except TypeError:
            raise TypeError(f"{self.name}: {way[0].unhashable()}") from None
        if registry is None:
            registry = self._registries.add((*way, takes), self._new_registry(way[0], arrays, takes))
        return question(registry, self.name, *arrays, cfg=cfg, backend=backend)

    def _new_registry(self, written: Written, arrays: Sequence[Any], takes: type | None) -> Registry:
        """A registry in which this way of calling is an operation."""
        if not arrays:
            raise TypeError(f"{self.name}: takes at least one array; numbers are static, and jnp.asarray makes one")
        registry = Registry(policies_of=ejkernel_core.registry)
        site = Site(self, written.signature, written.arrays, written.filled, takes).on(arrays)
        for name, plugin in site.as_plugins().items():
            registry.register(plugin, name)
        return registry

    @functools.cached_property
    def _registries(self) -> _Registries:
        return _Registries()

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts anew: what is compiled for this object computes with this object."""
        return {name: value for name, value in vars(self).items() if name not in ("_registries", "plugin")}

    # -- to be registered ----------------------------------------------------------------------------------------

    def as_plugins(self) -> dict[str, Any]:
        """The operation and its kernels, by name, for ``Registry.register``; ``plugin`` gives them to entry points.

        The operation's signature is that of ``run``: its positional parameters are arrays, those that are keyword-only
        or have a default other than None are static options.
        """
        takes = inspect.signature(self.methods()[self.plainest]).parameters.values()
        own = [p for p in takes if p.name != "cfg" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        positional = [p.name for p in own if p.kind is not p.KEYWORD_ONLY]
        arrays = tuple(p.name for p in own if p.name in positional and (p.default is p.empty or p.default is None))

        def filled(arguments: Mapping[str, Any]) -> Filled:
            keywords = {p.name: arguments[p.name] for p in own if p.name not in positional}
            return tuple(arguments[name] for name in positional), keywords

        return Site(self, inspect.Signature(own), arrays, filled, self.config_type, self.results).as_plugins()

    @functools.cached_property
    def plugin(self) -> SimpleNamespace:
        """The same as attributes: an entry point says ``my_package:my_kernel.plugin.operation``, or ``.plugin.xla``."""
        short = {self.name: "operation", f"{self.name}_bwd": "backward_operation"}
        return SimpleNamespace(**{short.get(name, name.rpartition(".")[2]): p for name, p in self.as_plugins().items()})

    # -- what is written -----------------------------------------------------------------------------------------

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The ``run`` methods that this class has, by backend, the plainest first."""
        return {b: getattr(self, n) for b, n in _METHODS.items() if getattr(type(self), n) is not getattr(Kernel, n)}

    @property
    def plainest(self) -> str:
        """The method whose results tell what the others return, and that JAX differentiates."""
        return next(iter(self.methods()))

    def has_custom_vjp(self) -> bool:
        """Whether this class differentiates itself."""
        return type(self).custom_vjp is not Kernel.custom_vjp

    @functools.cached_property
    def config_type(self) -> type[Any] | None:
        """``Cfg``, if the class says ``Kernel[Cfg, Out]`` with a class."""
        for base in type(self).__mro__:
            for generic in vars(base).get("__orig_bases__", ()):
                kind = get_args(generic)[0] if get_origin(generic) is Kernel else None
                if isinstance(kind, type) and kind is not Any:  # which is a class since Python 3.11
                    return kind
        return None


def _what_to_write(cls: type) -> str:
    others = ", ".join([*_METHODS.values()][1:])
    if cls is Kernel:
        subclass = "class MyKernel(Kernel[Config, jax.Array]): def run(self, x, *, cfg): ..."
        return f"Kernel is to be subclassed: write {subclass}, or one of {others}; then call MyKernel()(x)"
    return f"{cls.__qualname__}: write run(self, ..., *, cfg), or one of {others}"


class _Registries:
    """A registry for each way of calling one kernel object, as long as what they take from the core's one holds."""

    def __init__(self) -> None:
        self._made: dict[Any, Registry] = {}
        self._seen: Any = None

    def of(self, way: Any, core: Registry) -> Registry | None:
        # A policy was registered in the core's registry, or something new is remembered there.
        if self._seen != core.changes:
            self._made, self._seen = {}, core.changes
        return self._made.get(way)

    def add(self, way: Any, registry: Registry) -> Registry:
        if len(self._made) >= KEPT:
            self._made.pop(next(iter(self._made)), None)
        self._made[way] = registry
        return registry
