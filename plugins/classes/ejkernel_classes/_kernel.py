"""Kernels as classes: an operation and its implementations in one class, as a thin layer over the core.

A ``Kernel`` needs no registration. Its calls are planned, stored and explained like those of ``ejkernel_core.call``.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Generic, Self, TypeVar, get_args, get_origin

import attrs

import ejkernel_core
from ejkernel_core import Explanation, NoKernel, Plan, Registry
from ejkernel_core.extend import content, ends_at_caller, why_mutable

from ._bridge import CallArguments, Site, Written
from ._invocation import Invocation
from ._other_names import other_names
from ._recording import recording
from ._tuned import record_of_result

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")

#: The most forms of a call that are kept for a kernel object. Every different scalar makes another form.
MAX_FORMS = 512

#: The most objects for which what is compiled is kept after them, for others that are equal.
MAX_OBJECTS = 64
#: The attributes that are made of others.
_DERIVED = ("plugin", "config_type")

#: The methods by backend, the most general first.
_METHODS = {"run": "run", "xla": "run_xla", "pallas": "run_pallas", "triton": "run_triton"}

_MISSING_HEURISTIC = "write heuristic_cfg(self, inv), or subclass Kernel[Config, Out]"


class Kernel(Generic[Cfg, Out]):
    """An operation and its implementations in one class. Subclass it, and call an instance.

    ``run`` is the implementation for all platforms. ``run_triton`` is preferred to it on a GPU, ``run_pallas`` on a
    TPU, and ``run_xla`` on all platforms. Arguments may be pytrees. Arrays in them are traced; numbers, strings and
    all other values are static. ``cfg`` and ``backend`` (the name of a method: "triton", "pallas", "xla", "run") are
    arguments of the framework.

    An instance is compiled at its first call, so it must not change afterwards.
    """

    #: The name of its operation, which is a part of its keys; by default, the name of the class.
    name: str
    #: Increase it when the results change.
    version: int = 1
    #: The names of what ``run`` returns, where the kernel is registered as a plugin.
    results: tuple[str, ...] = ("out",)

    # Not among the attributes that ``without_compiled`` shares. Subclasses have a ``__dict__`` beside it.
    __slots__ = ("__dict__", "__weakref__", "_caller", "_own_registries")
    _own_registries: _Registries
    _caller: weakref.ref[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name", cls.__name__)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise for a class that cannot run, or has no configurations. ``__init__`` may be a subclass's own."""
        if not any(getattr(cls, name) is not getattr(Kernel, name) for name in _METHODS.values()):
            raise TypeError(_missing_method_text(cls))
        self = super().__new__(cls)
        if cls.heuristic_cfg is Kernel.heuristic_cfg:
            _check_default(cls, self.config_type)
        return self

    @other_names(op_id="name= takes the name")
    def __init__(self, name: str | None = None, version: int | None = None) -> None:
        self.name = self.name if name is None else name
        self.version = self.version if version is None else version

    # -- methods that a subclass writes --------------------------------------------------------------------------

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Compute the results in plain JAX. Without ``custom_vjp``, JAX differentiates this method."""
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
            raise NotImplementedError(f"{self.name}: {_MISSING_HEURISTIC}")
        config: Cfg = self.config_type()
        return config

    def config_space(self, inv: Invocation) -> Iterable[Cfg]:
        """The configurations worth measuring; by default, the heuristic's alone."""
        return [self.heuristic_cfg(inv)]

    def custom_vjp(
        self, primals: tuple[Any, ...], cfg: Cfg, kwargs: Mapping[str, Any], cotangents: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Compute the gradients of the positional arguments from the cotangents of the results.

        Return one gradient for each primal, of the same structure, or None where it is zero; and after them, if
        needed, a dict with the gradients of keyword arguments. If JAX needs one that is missing, it raises
        ``NotDifferentiable``.
        """
        raise NotImplementedError

    # -- methods that a user calls -------------------------------------------------------------------------------

    @ends_at_caller
    def __call__(self, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Out:
        """The results, by the best method with the best configuration."""
        with recording.record_calls():
            return self._call_registry(Registry.call, args, kwargs, cfg, backend)  # type: ignore[no-any-return]

    def invocation(self, *args: Any, **kwargs: Any) -> Invocation:
        """The invocation of such a call. Configurations are stored under its ``key``."""
        return Invocation(self, args, kwargs)

    @ends_at_caller
    def plan(self, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Plan:
        """The plan of such a call. Arrays may be abstract."""
        return self._call_registry(Registry.plan, args, kwargs, cfg, backend)  # type: ignore[no-any-return]

    @ends_at_caller
    def explain(self, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Explanation:
        """The plan of such a call and of its gradients, or the error in place of it."""
        try:
            return self._call_registry(Registry.explain, args, kwargs, cfg, backend)  # type: ignore[no-any-return]
        except NoKernel as refusal:
            return Explanation(self.name, None, str(refusal))

    def _call_registry(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cfg: Any = None,
        backend: str | None = None,
    ) -> Any:
        record = None if cfg is None else record_of_result(self.name, cfg, backend)
        if record is not None:
            cfg, backend = record.cfg, record.backend
        reason = None if cfg is None else why_mutable(cfg)
        if reason is not None:
            raise TypeError(f"{self.name}: cfg takes a value that cannot be changed; {reason}")
        form, arrays = Written.of(args, kwargs)
        object.__setattr__(self._registries.kernel, "_caller", weakref.ref(self))
        # A class without a type for its configurations takes any ``cfg``.
        config_type = type(cfg) if cfg is not None and self.config_type is None else self.config_type
        try:
            registry = self._registries.get((*form, config_type), ejkernel_core.registry)
        except TypeError:
            raise TypeError(f"{self.name}: {form[0].unhashable()}") from None
        if registry is None:
            registry = self._registries.add((*form, config_type), self._new_registry(form[0], arrays, config_type))
        return function(registry, self.name, *arrays, cfg=cfg, backend=backend)

    def _new_registry(self, written: Written, arrays: Sequence[Any], config_type: type | None) -> Registry:
        """A registry in which this form of a call is an operation."""
        if not arrays:
            raise TypeError(f"{self.name}: takes at least one array; numbers are static, and jnp.asarray makes one")
        registry = Registry(policies_of=ejkernel_core.registry)
        site = Site(self._registries.kernel, written.signature, written.arrays, written.fill, config_type).with_results(
            arrays
        )
        for name, plugin in site.as_plugins().items():
            registry.register(plugin, name)
        return registry

    @property
    def _registries(self) -> _Registries:
        """Those of the first object of this class with equal attributes: what is compiled for it is right for all."""
        try:
            registries = self._own_registries
        except AttributeError:
            registries = _registries_like(self)
            object.__setattr__(self, "_own_registries", registries)  # the class may be frozen
        return registries

    def without_compiled(self) -> Self:
        """An object with the attributes of this one, and without what is compiled for it. Programs of JAX have it. If
        they had this one, neither would ever be freed.
        """
        other = object.__new__(type(self))
        object.__setattr__(other, "__dict__", self.__dict__)
        for name in _slots(type(self)):
            if hasattr(self, name):
                object.__setattr__(other, name, getattr(self, name))
        return other

    def caller(self) -> Self:
        """Of an object without what is compiled: the last object that was called; itself where that is gone."""
        caller: Self | None = self._caller() if hasattr(self, "_caller") else None
        return self if caller is None else caller

    def _content(self) -> Any:
        """The class and the attributes; None where one of the attributes, such as a list, can be changed."""
        if _slots(type(self)):  # they may have anything
            return None
        classes = [base for base in type(self).__mro__ if issubclass(base, Kernel) and base is not Kernel]
        attributes = {name: value for name, value in vars(self).items() if name not in _DERIVED}
        key = content(attributes), tuple(attributes.values())
        try:
            hash(key)
        except Exception:  # of any type: the class of an attribute may be a user's own
            return None
        # A notebook may replace a method of the class.
        return type(self), key, tuple(_Identity(value) for base in classes for value in vars(base).values())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is compiled for this object: it computes with this object, and not with a copy."""
        return {name: value for name, value in vars(self).items() if name != "plugin"}

    # -- as plugins ----------------------------------------------------------------------------------------------

    def as_plugins(self) -> dict[str, Any]:
        """The operation and its kernels by name, for ``Registry.register``. ``plugin`` has them for entry points.

        The operation has the signature of ``run``. Positional parameters are arrays. Parameters that are keyword-only,
        or have a default other than None, are static options.
        """
        signature = inspect.signature(self.methods()[self.plainest]).parameters.values()
        parameters = [p for p in signature if p.name != "cfg" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        required = [p.name for p in parameters if p.default is p.empty or p.default is None]
        arrays = tuple(name for name in required if name in positional)

        def fill(arguments: Mapping[str, Any]) -> CallArguments:
            keywords = {p.name: arguments[p.name] for p in parameters if p.name not in positional}
            return tuple(arguments[name] for name in positional), keywords

        return Site(self, inspect.Signature(parameters), arrays, fill, self.config_type, self.results).as_plugins()

    @functools.cached_property
    def plugin(self) -> SimpleNamespace:
        """The plugins as attributes, for entry points such as ``my_package:my_kernel.plugin.operation``."""
        names = {self.name: "operation", f"{self.name}_bwd": "backward_operation"}
        plugins = self.as_plugins().items()
        return SimpleNamespace(**{names.get(name, name.rpartition(".")[2]): plugin for name, plugin in plugins})

    # -- what the class defines ----------------------------------------------------------------------------------

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The ``run`` methods that this class has, by backend, the most general first."""
        return {b: getattr(self, n) for b, n in _METHODS.items() if getattr(type(self), n) is not getattr(Kernel, n)}

    @property
    def plainest(self) -> str:
        """The backend of the most general method. It defines the results, and JAX differentiates it."""
        return next(iter(self.methods()))

    def has_custom_vjp(self) -> bool:
        """Whether this class has its own gradients."""
        return type(self).custom_vjp is not Kernel.custom_vjp

    @functools.cached_property
    def config_type(self) -> type[Any] | None:
        """The type of the configurations, if the class is a subclass of ``Kernel[Cfg, Out]`` with a class ``Cfg``."""
        for base in type(self).__mro__:
            for generic in vars(base).get("__orig_bases__", ()):
                config_type = get_args(generic)[0] if get_origin(generic) is Kernel else None
                if isinstance(config_type, type) and config_type is not Any:  # ``Any`` is a class since Python 3.11
                    return config_type
        return None


def _check_default(cls: type, config_type: type | None) -> None:
    """Raise where the heuristic that a class inherits, the configuration with all defaults, does not exist."""
    if config_type is None:
        raise TypeError(f"{cls.__qualname__}: {_MISSING_HEURISTIC}")
    try:
        config_type()
    except TypeError as fault:
        raise TypeError(f"{cls.__qualname__}: write heuristic_cfg(self, inv), because {fault}") from None


def _missing_method_text(cls: type) -> str:
    others = ", ".join([*_METHODS.values()][1:])
    if cls is Kernel:
        subclass = "class MyKernel(Kernel[Config, jax.Array]): def run(self, x, *, cfg): ..."
        return (
            f"Kernel is to be subclassed: write {subclass}, or one of {others}; then call MyKernel()(x). Its name is "
            "that of the class, or name= in super().__init__(name=...)"
        )
    return f"{cls.__qualname__}: write run(self, ..., *, cfg), or one of {others}"


def _slots(kind: type) -> list[str]:
    """The slots of the subclasses of ``Kernel``."""
    own = {*Kernel.__slots__}
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    return [name for name in names if name not in own]


@attrs.frozen(eq=False)
class _Identity:
    """Equal to another one of the same object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Registries:
    """The registries for the forms of calls of one kernel object, until the registry of the core changes."""

    def __init__(self, kernel: Kernel[Any, Any]) -> None:
        #: One of the objects, for what JAX keeps.
        self.kernel = kernel.without_compiled()
        self._registry_by_form: dict[Any, Registry] = {}
        self._changes: Any = None

    def get(self, form: Any, core: Registry) -> Registry | None:
        # The registry of the core has a new policy or a new record.
        if self._changes != core.changes:
            self._registry_by_form, self._changes = {}, core.changes
        return self._registry_by_form.get(form)

    def add(self, form: Any, registry: Registry) -> Registry:
        if len(self._registry_by_form) >= MAX_FORMS:
            self._registry_by_form.pop(next(iter(self._registry_by_form)), None)
        self._registry_by_form[form] = registry
        return registry


#: By the content of an object: its registries. The oldest are dropped first, whose objects may have theirs still.
_registries_by_content: dict[Any, _Registries] = {}


def _registries_like(kernel: Kernel[Any, Any]) -> _Registries:
    """The registries of the objects with the same content; new ones where the object has none."""
    key = kernel._content()
    if key is None:
        return _Registries(kernel)
    registries = _registries_by_content.pop(key, None) or _Registries(kernel)
    _registries_by_content[key] = registries  # the latest
    while len(_registries_by_content) > MAX_OBJECTS:
        _registries_by_content.pop(next(iter(_registries_by_content)), None)
    return registries
