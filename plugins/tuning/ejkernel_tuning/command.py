"""Measure all configurations of a call, of a program's calls or of a compiled program, and store the fastest.

What is interrupted goes on where it ended, with the same command.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ejkernel_cli import (
    CALL_SETTINGS,
    Failure,
    clear_refusals,
    config_text,
    json_option,
    matching_backends,
    matching_operations,
    parse_call,
    print_json,
    print_line,
    print_table,
)

if TYPE_CHECKING:
    from ejkernel_core import Invocation, Provenance

    from ._calls import Outcome

INTERRUPTED = 130
BUDGET_S = 60.0
#: A year, which every clock takes.
MAX_BUDGET_S = 365 * 86400


def _check_seconds(ctx: click.Context, param: click.Parameter, seconds: float) -> float:
    if not 0 < seconds <= MAX_BUDGET_S:  # nor is NaN
        raise click.BadParameter(f"takes seconds above 0, and at most {MAX_BUDGET_S}; got {seconds:g}")
    return seconds


@click.command("tune", context_settings={**CALL_SETTINGS, "help_option_names": ["-h", "--help"]})
@click.argument("operation", required=False, shell_complete=matching_operations)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF IT]...")
@click.option("--shape", "shapes", multiple=True, metavar="SHAPE", help="The shape of the first array; several times.")
@click.option("--recorded", type=click.Path(exists=True, dir_okay=False), help="A file of save_invocations.")
@click.option("--hlo", type=click.Path(exists=True, dir_okay=False), help="The text of a compiled program.")
@click.option("--no-backward", is_flag=True, help="Measure the forward pass alone.")
@click.option(
    "--budget",
    "budget_s",
    type=float,
    callback=_check_seconds,
    default=BUDGET_S,
    show_default=True,
    metavar="SECONDS",
    help="At most, for each pass of each call.",
)
@click.option(
    "--backend", shell_complete=matching_backends, help="Measure this backend alone, for calls with backend=."
)
@click.option("--again", is_flag=True, help="Measure calls anew that have a record.")
@json_option
def command(
    operation: str | None,
    words: tuple[str, ...],
    shapes: tuple[str, ...],
    recorded: str | None,
    hlo: str | None,
    no_backward: bool,
    budget_s: float,
    backend: str | None,
    again: bool,
    as_json: bool,
) -> None:
    """Measure all configurations of all kernels for a call, and store the fastest.

    A call is described as for "ejkernel explain". --recorded takes the calls of a program, which it has recorded by
    ejkernel_tuning.recording and written by save_invocations. --hlo takes the labels in a compiled program, and
    measures the stored calls that have their configurations.

    Later programs use what is stored. A call that has a record takes no time, unless --again.

    \b
    ejkernel tune flash_attention --shape 4x4096x16x128 --causal
    ejkernel tune rms_norm --shape 4096x1024 --shape 16384x1024 --budget 30
    ejkernel tune --recorded calls.json
    """  # noqa: D301  (click reads the character, after which it keeps the lines)
    if operation is not None and operation.startswith("-"):
        raise click.UsageError(f"{operation} belongs to an operation, and comes after it")
    if sum(source is not None for source in (operation, recorded, hlo)) != 1:
        raise click.UsageError("it takes one of an operation, --recorded and --hlo")
    if operation is None and (words or shapes):
        raise click.UsageError(f"{' '.join([*words, *(['--shape'] * bool(shapes))])} belongs to an operation")
    from ._bar import bar

    with bar(budget_s, as_json) as shown, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)  # also where Python has shown the same one before
        missing: list[str] = []
        if operation is not None:
            invocations = _described(operation, words, shapes, not no_backward)
        elif recorded is not None:
            invocations = _recorded(recorded, not no_backward)
        else:
            invocations, missing = _compiled(str(hlo), not no_backward)
        _check_backend(invocations, backend)
        _check_stores()
        outcomes, unstored, is_interrupted = _tune(invocations, budget_s, again, backend, shown)
    if as_json:
        print_json(_as_json(outcomes, missing))
    elif outcomes:
        print_line()
        print_table(("call", "kernel", "ms", "heuristic", "from"), map(_row, outcomes))
    for line in missing:
        click.echo(f"ejkernel: {line}", err=True)
    _tell_of_warnings(caught)
    if is_interrupted:
        _end(len(invocations) - len(outcomes))
    _fail_if_anything_is_missing(outcomes, missing, unstored)


def _tune(
    invocations: Sequence[Invocation], budget_s: float, again: bool, backend: str | None, shown: Any
) -> tuple[list[Outcome], list[str], bool]:
    """The outcomes, why some were not stored, and whether Ctrl-C has ended the work."""
    from ._calls import tune_each
    from ._progress import shown_by

    outcomes: list[Outcome] = []
    unstored: dict[str, None] = {}
    try:
        with shown_by(shown):
            for number, inv in enumerate(invocations, 1):
                shown.start(number, len(invocations), inv)
                for outcome in tune_each([inv], budget_s, retune=again, backend=backend):
                    outcomes.append(outcome)
                    unstored |= dict.fromkeys(_store_failures())
                    for line in (_line(outcome), *_fault_lines(outcome), *(f"  {text}" for text in outcome.broken)):
                        shown.print_line(line)
    except KeyboardInterrupt:
        return outcomes, [*unstored], True
    return outcomes, [*unstored], False


def _store_failures() -> Iterator[str]:
    """Why the policies did not store the last result. The next one that they store ends the failure."""
    import ejkernel_core
    from ejkernel_core import Scope

    for (policy, hook), failure in ejkernel_core.registry.policies(Scope()).failures.items():
        if hook == "config_selected":
            yield f"{policy}: {failure}"


def _end(count: int) -> None:
    from ._threads import end_after_interrupt

    calls = f"{count} call{'s' * (count > 1)}"
    click.echo(f"ejkernel: interrupted, {calls} not done; what was measured is kept: run it again to go on", err=True)
    end_after_interrupt(INTERRUPTED)
    raise click.exceptions.Exit(INTERRUPTED)


# -- the calls ---------------------------------------------------------------------------------------------------------


def _described(operation: str, words: tuple[str, ...], shapes: tuple[str, ...], has_backward: bool) -> list[Invocation]:
    """The calls that the command line describes: one for each shape."""
    words_of_calls = [[*words, "--shape", shape] for shape in shapes] or [[*words]]
    calls = [parse_call(operation, words_of_call) for words_of_call in words_of_calls]
    from ._calls import passes_of

    with clear_refusals(operation):
        passes = [inv for call in calls for inv in passes_of(operation, call.arguments, has_backward)]
    return _unique(passes)


def _recorded(file: str, has_backward: bool) -> list[Invocation]:
    from ejkernel_core import RecordError, UnknownOperation

    from ._saved import load_invocations

    try:
        invocations = load_invocations(file)
    except (RecordError, UnknownOperation, OSError) as error:
        raise Failure(str(error)) from error
    invocations = _unique(_with_passes(invocations, has_backward))
    if not invocations:
        raise Failure(
            f"{file} has no calls; they are recorded while a program is compiled, in ejkernel_tuning.recording"
        )
    return invocations


def _compiled(file: str, has_backward: bool) -> tuple[list[Invocation], list[str]]:
    """The stored calls whose configurations are in the labels of a compiled program, and what is said of the others."""
    from ejkernel_core import RecordError, registry
    from ejkernel_core.extend import OPERATIONS

    from ._labels import extract_labels_from_hlo_text, labels_to_configs
    from ._saved import invocation_of

    # Other text may look like a label, as "items.pop()" does.
    operations = registry.names(OPERATIONS)
    labels = [
        label
        for label in extract_labels_from_hlo_text(_text(file))
        if label.backend is not None and label.name in operations
    ]
    if not labels:
        texts = "compiled.as_text(), or lowered.as_text(debug_info=True)"
        raise Failure(f"{file} has no labels of calls: it takes {texts}, of a program that calls ejkernel_core")
    records = _stored_records()
    invocations, missing = [], []
    for label in labels:
        try:
            cfg = labels_to_configs([label], records=records)[label]
        except RecordError as error:
            text = str(error)
            missing.append(text if text.startswith(str(label)) else f"{label}: {text}")
            continue
        keys = [
            key
            for key, records_of_key in records
            for record in records_of_key
            if (key.op, record.backend, record.cfg) == (label.name, label.backend, cfg)
        ]
        calls = list(filter(None, map(invocation_of, keys)))
        invocations += calls
        if not calls:
            missing.append(
                f"{label}: a label has no shapes, and no stored call has its configuration; record the program by "
                "ejkernel_tuning.recording, and pass --recorded"
            )
    return _unique(_with_passes(invocations, has_backward)), missing


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror or error}") from error


def _stored_records() -> list[Any]:
    try:
        from ejkernel_cache import default_cache
    except ImportError as error:
        raise Failure("the calls of labels are looked up on disk: pip install ejkernel-cache") from error
    return list(default_cache().items())


def _with_passes(invocations: Iterable[Invocation], has_backward: bool) -> list[Invocation]:
    """The invocations; without backward, those of forward operations."""
    if has_backward:
        return list(invocations)
    import ejkernel_core

    registry = ejkernel_core.registry
    backward_names = {registry.operation(name).backward for name in registry.names("ejkernel.operations")}
    return [inv for inv in invocations if inv.op not in backward_names]


def _check_backend(invocations: Sequence[Invocation], backend: str | None) -> None:
    """Fail where none of the calls has kernels of the backend."""
    import ejkernel_core

    registry = ejkernel_core.registry
    if backend is None or any(backend in registry.backends(inv.op) for inv in invocations):
        return
    for inv in invocations:
        try:
            registry.kernel(inv.op, backend)
        except ejkernel_core.UnknownBackend as error:
            raise click.UsageError(str(error)) from None


def _unique(invocations: Iterable[Invocation]) -> list[Invocation]:
    return list({str(inv): inv for inv in invocations}.values())


# -- where the records go ----------------------------------------------------------------------------------------------


def _check_stores() -> None:
    """Fail before anything is measured, where nothing would keep it."""
    import ejkernel_core
    from ejkernel_core import Scope

    policies = ejkernel_core.registry.policies(Scope())
    stores = [
        p.plugin_name for p in policies.stores.hook.config_selected.get_hookimpls() if p.plugin_name in policies.entries
    ]
    if not stores:
        broken = "".join(f"; {verdict}" for verdict in policies.broken)
        raise Failure(f"nothing here stores what is measured: pip install ejkernel-cache{broken}")
    if stores == ["cache"]:
        from ejkernel_cache import default_cache

        fault = default_cache().write_fault()
        if fault is not None:
            reason = f"{default_cache().path} cannot be written to ({fault.strerror or fault})"
            raise Failure(f"{reason}; set EJKERNEL_CACHE_DIR to a folder that can be")


def _tell_of_warnings(caught: Sequence[warnings.WarningMessage]) -> None:
    for text in dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught):
        click.echo(f"ejkernel: {text}", err=True)


def _fail_if_anything_is_missing(outcomes: Sequence[Outcome], missing: Sequence[str], unstored: Sequence[str]) -> None:
    if unstored:
        raise Failure("; ".join(["not everything could be stored", *unstored]))
    count = sum(_best(outcome) is None for outcome in outcomes) + len(missing)
    if count:
        raise Failure(f"{count} call{'s have' if count > 1 else ' has'} no result; the reason is above")


# -- tables ------------------------------------------------------------------------------------------------------------


def _best(outcome: Outcome) -> tuple[str, Any, float | None] | None:
    """Backend, configuration and milliseconds of the result; None where there is none."""
    if outcome.stored is not None:
        provenance = _provenance(outcome)
        return outcome.stored.backend, outcome.stored.cfg, provenance.milliseconds if provenance else None
    best = outcome.tuned.best if outcome.tuned else None
    return None if best is None else (best.backend, best.cfg, best.milliseconds)


def _provenance(outcome: Outcome) -> Provenance | None:
    record = outcome.stored.record if outcome.stored else None
    return record.provenance if record else None


def _heuristic_time(outcome: Outcome) -> float | None:
    """The milliseconds of the heuristic's configuration in the same measurement."""
    from ejkernel_core.extend import text_of

    if outcome.heuristic is None:
        return None
    provenance = _provenance(outcome)
    tried = provenance.tried if provenance else ()
    times = {text: time for text, time in tried if not isinstance(time, str)}
    if outcome.tuned:
        results = ((f"{e.backend} {text_of(e.cfg)}", e.milliseconds) for e in outcome.tuned.entries)
        times = {text: milliseconds for text, milliseconds in results if milliseconds is not None}
    return times.get(f"{outcome.heuristic.backend} {text_of(outcome.heuristic.cfg)}")


def _fields(cfg: Any) -> dict[str, Any]:
    import attrs

    return attrs.asdict(cfg) if attrs.has(type(cfg)) else {} if cfg is None else {"configuration": cfg}


def _line(outcome: Outcome) -> str:
    """One line for a call that is done."""
    from ._bar import kernel_text

    best = _best(outcome)
    if best is None:
        return f"{outcome.inv}: {_reason(outcome)}"
    backend, cfg, milliseconds = best
    time = "" if milliseconds is None else f", {milliseconds:.4g} ms"
    return f"{outcome.inv.op}: {kernel_text(backend, cfg)}{time}{_gain(outcome)} ({_origin(outcome)})"


def _fault_lines(outcome: Outcome) -> Iterator[str]:
    """A line for each kernel that had wrong results or hung, with the first of its configurations and the reason."""
    from ejkernel_core.extend import Reason, quantity

    from ._bar import kernel_text

    beginnings: dict[str, str] = {Reason.WRONG: "wrong results of", Reason.HUNG: "hung:"}
    faults: dict[tuple[str, str], list[tuple[Any, str]]] = {}
    for backend, cfg, result in _tried(outcome):
        kind, _, reason = result.partition(": ") if isinstance(result, str) else ("", "", "")
        if kind in beginnings:
            faults.setdefault((kind, backend), []).append((cfg, reason))
    for (kind, backend), ((cfg, reason), *others) in faults.items():
        count = f", and {quantity(len(others), 'other configuration')} of it" if others else ""
        yield f"  {beginnings[kind]} {kernel_text(backend, cfg)}{count}: {reason}"


def _tried(outcome: Outcome) -> Iterator[tuple[str, Any, float | str]]:
    """The backend, the configuration and the outcome of all that was tried, now or for the stored record."""
    if outcome.tuned is not None:
        yield from ((entry.backend, entry.cfg, entry.outcome) for entry in outcome.tuned.entries)
    elif (provenance := _provenance(outcome)) is not None:
        for text, result in provenance.tried:
            backend, _, cfg = text.partition(" ")
            yield backend, cfg, result


def _gain(outcome: Outcome) -> str:
    best, heuristic = _best(outcome), _heuristic_time(outcome)
    if best is None or not best[2] or heuristic is None or outcome.heuristic is None:
        return ""
    if (outcome.heuristic.backend, outcome.heuristic.cfg) == best[:2]:
        return ", as the heuristic says"
    return f", {heuristic / best[2]:.3g}x as fast as the heuristic's"


def _origin(outcome: Outcome) -> str:
    if outcome.stored is not None:
        provenance = _provenance(outcome)
        when = f" {provenance.when[:10]}" if provenance else ""
        text = f"stored{when}, by {outcome.stored.origin.partition(' (')[0]}"
    else:
        text = f"measured in {outcome.tuned.seconds:.1f} s" if outcome.tuned else ""
    return f"{text}; {shortfall}" if (shortfall := _shortfall(outcome)) else text


def _shortfall(outcome: Outcome) -> str:
    """What was not measured within the budget, if anything."""
    records = outcome.tuned.records if outcome.tuned else ()
    provenance = _provenance(outcome) or next((record.provenance for record in records), None)
    return str(provenance.shortfall) if provenance and provenance.shortfall else ""


def _reason(outcome: Outcome) -> str:
    notes = outcome.tuned.notes if outcome.tuned else ()
    faults = [f"{e.backend}: {e.reason}" for e in outcome.tuned.entries if e.reason][:1] if outcome.tuned else []
    text = outcome.reason or "; ".join(["nothing could be measured", *faults, *notes])
    return " ".join(text.split())


def _row(outcome: Outcome) -> tuple[str, ...]:
    best = _best(outcome)
    if best is None:
        return _call(outcome.inv), "none", "", "", _reason(outcome)
    backend, cfg, milliseconds = best
    time = "" if milliseconds is None else f"{milliseconds:.4g}"
    kernel = "\n".join(filter(None, [backend, config_text(cfg)]))
    origin = _origin(outcome).replace("measured in", "measured\nin")  # a folded line would part a time from its unit
    return _call(outcome.inv), kernel, time, _comparison(outcome), origin


def _comparison(outcome: Outcome) -> str:
    """The milliseconds of the heuristic's configuration, and how many times as long that is."""
    best, heuristic = _best(outcome), _heuristic_time(outcome)
    if best is None or not best[2] or outcome.heuristic is None:
        return ""
    if (outcome.heuristic.backend, outcome.heuristic.cfg) == best[:2]:
        return "the same"
    return "" if heuristic is None else f"{heuristic:.4g}\n{heuristic / best[2]:.3g}x"


def _call(inv: Invocation) -> str:
    """The operation, its arrays by shape, and its options that are not off, each in a line."""
    names: dict[str, list[str]] = {}
    options = []
    for name, value in inv.arguments.items():
        if hasattr(value, "shape"):
            names.setdefault(f"{'x'.join(map(str, value.shape)) or 'scalar'} {value.dtype}", []).append(name)
        elif value is not None and value is not False and value != 0:
            options.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
    arrays = [line for shape, group in names.items() for line in (", ".join(group), f"  {shape}")]
    return "\n".join([inv.op, *arrays, *options])


def _as_json(outcomes: Sequence[Outcome], missing: Sequence[str]) -> dict[str, Any]:
    return {"calls": list(map(_outcome_as_json, outcomes)), "missing": list(missing)}


def _outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    best, heuristic, heuristic_time = _best(outcome), outcome.heuristic, _heuristic_time(outcome)
    backend, cfg, milliseconds = best or (None, None, None)
    return {
        "call": str(outcome.inv),
        "operation": outcome.inv.op,
        "outcome": "failed" if best is None else "stored" if outcome.stored else "measured",
        "reason": _reason(outcome) if best is None else "",
        "backend": backend,
        "config": _fields(cfg),
        "milliseconds": milliseconds,
        "heuristic": None
        if heuristic is None
        else {"backend": heuristic.backend, "config": _fields(heuristic.cfg), "milliseconds": heuristic_time},
        "seconds": outcome.tuned.seconds if outcome.tuned else 0.0,
        "tried": [
            {
                "backend": entry.backend,
                "config": _fields(entry.cfg),
                "milliseconds": entry.milliseconds,
                "reason": entry.reason,
            }
            for entry in (outcome.tuned.entries if outcome.tuned else ())
        ],
        "notes": list(outcome.tuned.notes) if outcome.tuned else [],
        "shortfall": _shortfall(outcome),
    }
