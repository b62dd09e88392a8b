"""Converts ``FwdParams`` and ``BwdParams`` to the configurations of installed kernels, whose fields differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

import ejkernel_core
from ejkernel_core import Candidate, Invocation, Key, Record, Scope, Unsupported
from ejkernel_core.extend import ScopeChange

from ._content import short_hash
from ._params import BwdParams, FwdParams

#: By parameter: the names that kernels have for it.
NAMES = {
    "q_blocksize": ("q_block",),
    "kv_blocksize": ("k_block", "kv_block"),
    "num_warps": ("num_warps",),
    "num_stages": ("num_stages", "stages"),
}
#: The passes of a backward that have blocks. The pass for a bias has its own small ones.
PASSES = ("keys", "queries", "fused")


@contextlib.contextmanager
def kernel_config(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], cfg: Any, backend: str | None
) -> Iterator[Any]:
    """Convert parameters to a configuration for calling ``op`` inside of the block. Another ``cfg`` stays as it is.

    Parameters that are None have the values of the kernel's heuristic. The configuration is for the best kernel that
    can run the call and has all parameters that are set. ``BwdParams`` for a forward operation are for its backward.
    """
    if not isinstance(cfg, (FwdParams, BwdParams)) or _is_type_of_kernel(op, cfg):
        yield cfg
        return
    inv = ejkernel_core.invocation(op, *args, **kwargs)
    is_backward = inv.operation is not None and "wrt" in inv.operation.signature.parameters
    if isinstance(cfg, FwdParams) and is_backward:
        raise TypeError(f"cfg: {op} is a backward pass, which takes BwdParams; got FwdParams")
    if isinstance(cfg, BwdParams) and not is_backward:
        with _backward_overlay(op, args, kwargs, cfg, backend):
            yield None
    else:
        yield _first_fitting_config(inv, cfg, backend)


def _is_type_of_kernel(op: str, cfg: Any) -> bool:
    """Whether a kernel has configurations of this type."""
    return any(kernel.config_type is type(cfg) for kernel in ejkernel_core.registry.kernels(op)[0])


def _first_fitting_config(inv: Invocation, params: Any, backend: str | None) -> Any:
    """The configuration for the first kernel that has all parameters. ``TypeError`` with all reasons if there is none;
    None if no kernel can run the call, for which the call raises.
    """
    known_backend = backend if backend in ejkernel_core.registry.backends(inv.op) else None
    candidates, _ = ejkernel_core.registry.candidates(inv, known_backend)
    reasons = []
    for candidate in candidates:
        try:
            return _config_of_candidate(inv, params, candidate)
        except Unsupported as reason:
            reasons.append(f"{candidate.kernel.name} {reason}")
    if reasons:
        raise TypeError(f"cfg: {type(params).__name__} fits no kernel that can do this call: {'; '.join(reasons)}")
    return None


def _config_of_candidate(inv: Invocation, params: Any, candidate: Candidate) -> Any:
    cfg = configuration(params, candidate.cfg)
    candidate.kernel.check_cfg(inv, cfg)
    return cfg


def configuration(params: FwdParams | BwdParams, cfg: Any) -> Any:
    """A kernel's configuration with these parameters, and the rest as in ``cfg``. ``Unsupported`` says what it takes.

    >>> from ejkernel_xla.flash_attention import Config
    >>> configuration(FwdParams(q_blocksize=64), Config(kv_block=128))
    Config(q_block=64, kv_block=128)
    """
    passes = {name: getattr(cfg, name, None) for name in PASSES}
    evolved = {name: _with_params(part, params) for name, part in passes.items() if attrs.has(type(part))}
    return attrs.evolve(cfg, **evolved) if evolved else _with_params(cfg, params)


def _with_params(cfg: Any, params: FwdParams | BwdParams) -> Any:
    field_names = [field.name for field in attrs.fields(type(cfg))] if attrs.has(type(cfg)) else []
    fitting = {field: name for field, names in NAMES.items() for name in names if name in field_names}
    values = params.to_dict()
    if not values:
        return cfg
    unsupported = [field for field in values if field not in fitting]
    if unsupported:
        if not fitting:
            raise Unsupported("takes none of these parameters")
        raise Unsupported(f"takes {', '.join(fitting)}, and not {', '.join(unsupported)}")
    changes: dict[str, Any] = {fitting[field]: value for field, value in values.items()}
    try:
        return attrs.evolve(cfg, **changes)
    except (ValueError, TypeError) as fault:
        raise Unsupported(f"refuses it: {fault.args[0]}") from fault


# -- the backward pass of a call -------------------------------------------------------------------------------------


@attrs.frozen
class _Overlay:
    """An overlay with these parameters for one backward operation, for all shapes."""

    op: str
    params: BwdParams
    digest: str = attrs.field(init=False)

    @digest.default
    def _content(self) -> str:
        return short_hash([self.op, self.params])

    def find(self, key: Key, candidate: Candidate) -> Record | None:
        if key.op != self.op:
            return None
        try:
            return Record(configuration(self.params, candidate.cfg), candidate.backend)
        except Unsupported:
            return None

    def backends_by_hand(self, key: Key) -> tuple[str, ...]:
        return ()  # whichever the core chooses


def _backward_overlay(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], params: BwdParams, backend: str | None
) -> contextlib.AbstractContextManager[None]:
    explanation = ejkernel_core.explain(op, *args, backend=backend, **kwargs)
    plan = None if explanation.backward is None else explanation.backward.plan
    if plan is None:
        raise TypeError(f"cfg: BwdParams are for a backward pass, and {op} has none here: {explanation}")
    backward_backends = ejkernel_core.registry.backends(plan.invocation.op)
    _first_fitting_config(plan.invocation, params, backend if backend in backward_backends else None)
    overlay: Any = _Overlay(plan.invocation.op, params)

    def change(scope: Scope) -> Scope:
        return attrs.evolve(scope, overlays=(overlay, *scope.overlays))

    return ScopeChange(change)
