"""A call described by words: ``flash_attention --shape 4x4096x16x128 --causal --dtype bfloat16``.

``--shape`` is the shape of the first array. Other arrays have options of their own names (``--key 4x4096x2x128``). The
shapes of the required ones follow from the axes of the operation where they are not given. An operation on a cache may
have sizes in place of arrays: ``--sequences 64 --cached 8192``. Everything else is an option of the operation:
``--causal``, ``--no-causal``, ``--sliding-window 128,0``.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import click

from ._devices import platform
from ._metadata import KERNELS, OPERATIONS, entry_points
from ._output import Failure

if TYPE_CHECKING:  # JAX takes half a second, and --help does not need it
    import jax

    from ejkernel_core import Axes, Operation
    from ejkernel_core.extend import Axis, Layout

Function = TypeVar("Function", bound=Callable[..., Any])
Shape = tuple[int, ...]

#: The ``context_settings`` of a command with ``call_options``: which options there are depends on the operation.
CALL_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
#: What else may be written for these values.
CONSTANTS = {"true": True, "false": False, "none": None}
#: Other names of dtypes.
SHORT_DTYPES = {
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
}
#: By a name that does not say how many bits are the exponent's.
EIGHT_BITS = dict.fromkeys(("fp8", "f8", "float8"), ("float8_e4m3fn", "float8_e5m2"))
#: The largest array of XLA, which ends the process for a larger one.
MAX_BYTES = 2**63 - 1
#: An array in words: a shape, and a dtype if it is to have another one than ``--dtype``.
_ARRAY = re.compile(r"(?P<shape>\(\)|scalar|\d+(?:[x,]\d+)*)(?::(?P<dtype>\w+))?")


@attrs.frozen(eq=False)
class Call:
    """A call of an operation on arrays of which only shapes and dtypes are known."""

    operation: str
    arrays: dict[str, jax.ShapeDtypeStruct]
    options: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arrays and options by name, as ``ejkernel_core.plan`` and the others take them."""
        return {**self.arrays, **self.options}


def call_options(function: Function) -> Function:
    """The parameters ``operation`` and ``words`` of a command whose call ``parse_call`` reads.

    The command also needs ``context_settings=CALL_SETTINGS``.
    """
    with_words = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="--shape SHAPE [OPTIONS OF IT]...")
    return click.argument("operation", shell_complete=matching_operations)(with_words(function))


class CallCommand(click.Command):
    """A command with ``call_options``, whose help has the options of the operation on the line, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = tuple(args)  # --help ends the reading of the line before there is an operation
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        name = next((word for word in ctx.meta.get(_WORDS, ()) if not word.startswith("-")), None)
        if name in {point.name for point in entry_points(OPERATIONS)}:
            import ejkernel_core

            with formatter.section(f"Options of {name}"):
                formatter.write_dl([*_descriptions(ejkernel_core.registry.operation(name))])


_WORDS = f"{__name__}.words"


def _descriptions(operation: Operation) -> Iterator[tuple[str, str]]:
    """The options of an operation, and what each takes."""
    axes = {} if operation.axes is None else operation.axes.arrays
    for name, parameter in operation.signature.parameters.items():
        is_required = parameter.default is parameter.empty
        if name in operation.arrays:
            shape = str(axes.get(name, "")) or ("a number" if name in axes else "")
            yield _option(name), f"an array{f' ({shape})' if shape else ''}{'' if is_required else ', may be left out'}"
        else:
            default = "no default" if is_required else f"default {parameter.default}"
            yield _option(name), default
    for name, parameter in _sizes(operation).items():
        default = "" if parameter.default in (parameter.empty, None) else f", default {parameter.default}"
        yield _option(name), f"in place of arrays of a cache{default}"


def _sizes(operation: Operation) -> dict[str, inspect.Parameter]:
    """The sizes that may be given in place of arrays."""
    if operation.sizes is None:
        return {}
    parameters = inspect.signature(operation.sizes).parameters
    return {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def matching_operations(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The names of installed operations that begin with a text, for completion."""
    return sorted({point.name for point in entry_points(OPERATIONS) if point.name.startswith(incomplete)})


def matching_backends(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The names of the backends of the operation on the line that begin with a text, for completion."""
    operation = ctx.params.get("operation")
    kernels = [point.name.rpartition(".") for point in entry_points(KERNELS)]
    return sorted({b for op, _, b in kernels if op == (operation or op) and b.startswith(incomplete)})


def parse_call(operation: str, words: Sequence[str]) -> Call:
    """The call that the words after the name of an operation describe.

    Raises ``click.UsageError`` for words that describe none. The operation checks the shapes when it is called.
    """
    import ejkernel_core

    if operation.startswith("-"):
        raise click.UsageError(f"the operation comes before its options; got {operation!r} first")
    try:
        definition = ejkernel_core.registry.operation(operation)
    except ejkernel_core.UnknownOperation as error:
        raise click.UsageError(str(error)) from None
    values = _values_by_name(definition, words)
    sizes = {name: values.pop(name) for name in _sizes(definition) if name in values}
    options = {name: value for name, value in values.items() if name not in definition.arrays}
    _check_options(definition, options)
    texts = {name: value for name, value in values.items() if name in definition.arrays}
    if sizes:
        texts = {**_texts_of_sizes(definition, texts, sizes), **texts}
    dtype = options.pop("dtype", None) if "dtype" not in definition.signature.parameters else None
    return Call(operation, _arrays(definition, texts, options, dtype), options)


@contextlib.contextmanager
def clear_refusals(operation: str) -> Iterator[None]:
    """Raise ``Failure`` for what the operation refuses about its arguments, in its own words and with its name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        raise Failure(text if text.startswith(operation) else f"{operation}: {text}") from error


def _check_options(operation: Operation, options: Collection[str]) -> None:
    """Raise for an option without a default that is not given."""
    names = [name for name in operation.signature.parameters if name not in operation.arrays]
    missing = [_option(name) for name in names if name not in options and _has_no_default(operation, name)]
    if missing:
        raise click.UsageError(f"{operation.name} needs {' and '.join(missing)} with a value{_all_options(operation)}")


def _texts_of_sizes(operation: Operation, texts: Mapping[str, str], sizes: Mapping[str, Any]) -> dict[str, str]:
    """The arrays that the sizes stand for, in words."""
    assert operation.sizes is not None
    missing = [_option(name) for name, one in _sizes(operation).items() if one.default is one.empty]
    missing = [option for option in missing if option not in map(_option, sizes)]
    if missing:
        raise click.UsageError(f"{_option(next(iter(sizes)))} also needs {' and '.join(missing)}")
    first = _first_array(operation)
    if first not in texts:
        raise click.UsageError(f"the shape of {first} is missing, as --shape 4x4096x16x128")
    with clear_refusals(operation.name):
        arrays = operation.sizes(_array(first, texts[first], None)[0], **sizes)
    return {name: "x".join(map(str, shape)) + f":{dtype}" * bool(dtype) for name, (shape, dtype) in arrays.items()}


# -- words -------------------------------------------------------------------------------------------------------------


def _values_by_name(operation: Operation, words: Sequence[str]) -> dict[str, Any]:
    """The value of each argument that the words name: text for an array, any literal for an option."""
    values: dict[str, Any] = {}
    for word, text in _pairs(words):
        name, value = _argument(operation, word, text)
        if name in values:
            raise click.UsageError(f"{word}: {name} is given twice")
        values[name] = value
    return values


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Every option with its text, or with None where it has none."""
    place = 0
    while place < len(words):
        word = words[place]
        if not word.startswith("--"):
            raise click.UsageError(f"{word!r} follows no option; a shape is given by --shape, as --shape 4x4096x16x128")
        place += 1
        if "=" in word:
            name, _, text = word.partition("=")
            yield name, text
        elif place < len(words) and not words[place].startswith("--"):
            yield word, words[place]
            place += 1
        else:
            yield word, None


def _argument(operation: Operation, word: str, text: str | None) -> tuple[str, Any]:
    """The name and the value of one argument, or of a size in place of arrays."""
    parameters = {**_sizes(operation), **operation.signature.parameters}
    name = word.removeprefix("--").replace("-", "_")
    if name == "shape" and name not in parameters:
        name = _first_array(operation)
    if name == "dtype" and name not in parameters:
        return name, _required_text(word, text, "bfloat16")
    if name.startswith("no_") and name not in parameters and name[3:] in parameters:
        if text is not None:
            raise click.UsageError(f"{word} takes no value; got {text!r}")
        return name[3:], False
    if name not in parameters:
        raise click.UsageError(f"{operation.name} has no option {word}{_hint(name, operation)}")
    if name in operation.arrays:
        return name, _required_text(word, text, "4x4096x16x128")
    if text is None and not isinstance(parameters[name].default, bool):
        raise click.UsageError(f"{word} takes a value, as {word} 128, or {word} true")
    return name, True if text is None else literal(text)


def _first_array(operation: Operation) -> str:
    if not operation.arrays:
        raise click.UsageError(f"{operation.name} takes no array, so it has no --shape")
    return operation.arrays[0]


def _required_text(word: str, text: str | None, example: str) -> str:
    if text is None:
        raise click.UsageError(f"{word} takes a value, as {word} {example}")
    return text


def _hint(name: str, operation: Operation) -> str:
    """The end of a sentence about an unknown option: the most similar one, or all that there are."""
    names = ["shape", "dtype", *operation.signature.parameters, *_sizes(operation)]
    similar = [*(n for n in names if name in n.split("_")), *difflib.get_close_matches(name, names, 1)]
    if similar:
        return f"; did you mean {_option(similar[0])}?"
    return _all_options(operation)


def _all_options(operation: Operation) -> str:
    """The end of a sentence about a call that cannot be read."""
    return (
        f"; it has {', '.join(map(_option, ('shape', 'dtype', *operation.signature.parameters, *_sizes(operation))))}"
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def literal(text: str) -> Any:
    """The value that a text stands for: a literal of Python, a tuple where it has commas, or else the text itself.

    >>> literal("0.5"), literal("128,0"), literal("true"), literal("query,key"), literal("fp8_row")
    (0.5, (128, 0), True, ('query', 'key'), 'fp8_row')
    """
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    if "," in text:
        return tuple(literal(part.strip()) for part in text.split(",") if part.strip())
    return text


# -- arrays ------------------------------------------------------------------------------------------------------------


def _arrays(
    operation: Operation, texts: Mapping[str, str], options: Mapping[str, Any], dtype: str | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of the call, in the order of the operation's parameters."""
    import jax

    layouts = operation.axes.layouts(operation.complete(options)) if operation.axes else {}
    parsed = {name: _array(name, text, layouts.get(name)) for name, text in texts.items()}
    shapes = {name: shape for name, (shape, _) in parsed.items()}
    first = operation.arrays[0] if operation.arrays else None
    if first is not None and first not in shapes and _is_required(operation, first):
        raise click.UsageError(f"the shape of {first} is missing, as --shape 4x4096x16x128")
    shapes |= _following_shapes(operation, layouts, shapes)
    dtypes = _Dtypes(operation, shapes, dtype)
    arrays = {
        name: jax.ShapeDtypeStruct(shapes[name], dtypes.of(name, parsed[name][1] if name in parsed else None))
        for name in operation.arrays
        if name in shapes
    }
    for name, array in arrays.items():
        if array.size * array.dtype.itemsize > MAX_BYTES:
            raise click.UsageError(
                f"{name}: an array has less than 2**63 bytes; {'x'.join(map(str, array.shape))} has more"
            )
    return arrays


def _is_required(operation: Operation, name: str) -> bool:
    """Whether a call needs the array. A backward operation needs the cotangent of the first result, too."""
    axes = operation.axes
    is_cotangent = axes is not None and axes.of_gradients and name == f"d_{next(iter(axes.results))}"
    return is_cotangent or _has_no_default(operation, name)


def _has_no_default(operation: Operation, name: str) -> bool:
    return operation.signature.parameters[name].default is inspect.Parameter.empty


def _array(name: str, text: str, layout: Layout | None) -> tuple[Shape, str | None]:
    """The shape and the dtype in a text. A number is the value of an array that is one number."""
    match = _ARRAY.fullmatch(text)
    if match is None and layout is not None and not layout.axes and not layout.has_leading:
        raise click.UsageError(f"{name} takes a number, as {_option(name)} 1, or with a dtype 1:int32; got {text!r}")
    if match is None:
        raise click.UsageError(f"{name} takes a shape, as 4x4096x16x128, or with a dtype 4x4096:int32; got {text!r}")
    lengths = [] if match["shape"] in ("()", "scalar") else [int(n) for n in re.split("[x,]", match["shape"])]
    if layout is not None and not layout.has_leading and len(layout.axes) == 1 < len(lengths):
        raise click.UsageError(
            f"{name} has one axis: give its length, as {_option(name)} {len(lengths)}; what it holds does not matter"
        )
    if layout is not None and len(lengths) == 1 and all(not axis.name and axis.offset == 1 for axis in layout.axes):
        return (1,) * len(layout.axes), match["dtype"]
    return tuple(lengths), match["dtype"]


def _following_shapes(
    operation: Operation, layouts: Mapping[str, Layout], shapes: Mapping[str, Shape]
) -> dict[str, Shape]:
    """The shapes of required arrays that are not given: an axis has the size that it has in another array."""
    missing = [name for name in operation.arrays if name not in shapes and _is_required(operation, name)]
    if not missing:
        return {}
    first = operation.arrays[0]
    if operation.axes is None:
        return dict.fromkeys(missing, shapes[first])
    sizes = _Sizes(operation.axes, layouts[first], shapes[first])
    for name in (first, *(name for name in operation.arrays if name in shapes)):
        sizes.add(layouts[name], shapes[name])
    following: dict[str, Shape] = {}
    unknown: list[str] = []
    for name in missing:
        shape = sizes.shape(layouts[name])
        if shape is None:
            unknown.append(name)
        else:
            following[name] = shape
            sizes.add(layouts[name], shape)
    if unknown:
        what = "shape of {} does" if len(unknown) == 1 else "shapes of {} do"
        options = ", ".join(f"{_option(name)} with the lengths of {layouts[name]}" for name in unknown)
        raise click.UsageError(
            f"{operation.name}: the {what.format(', '.join(unknown))} not follow from the others; pass {options}"
        )
    return following


class _Sizes:
    """The sizes of named axes, as far as the arrays so far have them."""

    def __init__(self, axes: Axes, first_layout: Layout, first_shape: Shape) -> None:
        self._multiples = {**axes.multiples, **{base: multiple for multiple, base in axes.multiples.items()}}
        self._first_layout, self._first_shape = first_layout, first_shape
        self._sizes: dict[str, Any] = {}

    @property
    def _num_left_out(self) -> int:
        """The number of leading axes that the caller may leave out, and has: those of a packed call, for example."""
        is_shorter = not self._first_layout.has_leading
        return max(len(self._first_layout.axes) - len(self._first_shape), 0) if is_shorter else 0

    def add(self, layout: Layout, shape: Shape) -> None:
        """Take over the sizes of an array, where its shape fits its layout."""
        for axis, length in _lengths(layout, shape):
            if axis.name and axis.divisor == 1 and not axis.is_broadcast:
                size = length if axis.is_plain else axis.size(length)
                if size is not None:
                    self._sizes.setdefault(axis.name, size)

    def shape(self, layout: Layout) -> Shape | None:
        """The shape of another array; None where an axis of it is in no array so far."""
        is_like_first = len(layout.axes) == len(self._first_layout.axes)
        left_out = self._num_left_out if is_like_first else 0
        shape: list[int] = []
        for place, axis in enumerate(layout.axes):
            if place >= left_out:
                length = self._length(axis, place - len(layout.axes) if is_like_first else None)
                if length is None:
                    return None
                shape += length if isinstance(length, tuple) else (length,)
        return tuple(shape)

    def _length(self, axis: Axis, place: int | None) -> Any:
        if not axis.name:
            return axis.offset
        size = self._sizes.get(axis.name, self._sizes.get(self._multiples.get(axis.name, "")))
        if size is None and place is not None and -place <= len(self._first_shape):
            size = self._first_shape[place]
        return None if size is None else axis.length(size)


def _lengths(layout: Layout, shape: Shape) -> list[tuple[Axis, Any]]:
    """The axes of an array with their lengths. The caller may have left out leading axes; none for a longer shape."""
    if layout.fits(len(shape)):
        return layout.lengths(shape)
    if layout.has_leading or len(shape) > len(layout.axes):
        return []
    return list(zip(layout.axes[len(layout.axes) - len(shape) :], shape, strict=True))


class _Dtypes:
    """The dtypes of the arrays of a call: one for floating arrays, and for others that of the operation's examples."""

    def __init__(self, operation: Operation, names: Collection[str], dtype: str | None) -> None:
        self._operation = operation
        self._floating = _dtype(dtype or default_dtype())
        self._in_examples = _dtypes_in_examples(operation, names)

    def of(self, name: str, explicit: str | None) -> Any:
        import numpy as np

        if explicit is not None:
            return _dtype(explicit)
        axes = self._operation.axes
        if axes is not None and name.removeprefix("d_") in axes.statistics:
            return np.promote_types(self._floating, np.float32)
        return self._in_examples.get(name) or self._floating


def default_dtype() -> str:
    """The dtype of floating arrays without ``--dtype``: float32 on a CPU, bfloat16 elsewhere."""
    return "float32" if platform() == "cpu" else "bfloat16"


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    if name in EIGHT_BITS:
        raise click.UsageError(f"{name!r} stands for several dtypes: {' and '.join(EIGHT_BITS[name])}")
    try:
        return jnp.dtype(SHORT_DTYPES.get(name, name))
    except TypeError:
        names = ("bfloat16", "float16", "float32", "float64", "int8", "int32", "int64", "bool", "uint32")
        similar = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {similar[0]}?" if similar else f", as {', '.join(names[:3])}"
        raise click.UsageError(f"{name!r} is not a dtype{hint}") from None


def _dtypes_in_examples(operation: Operation, names: Collection[str]) -> dict[str, Any]:
    """The dtypes of those arrays that are not of floating-point numbers in the operation's examples."""
    import jax.numpy as jnp

    dtypes: dict[str, Any] = {}
    try:
        examples = tuple(operation.examples()) if operation.examples is not None else ()
    except ModuleNotFoundError:  # examples may be made with ejkernel-testing, which is not needed to call anything
        return {}
    for example in examples:
        if example.op == operation.name:
            arguments = example.abstract()
            dtypes |= {name: _dtype_of(arguments[name]) for name in names if arguments.get(name) is not None}
        if all(name in dtypes for name in names):
            break
    return {name: dtype for name, dtype in dtypes.items() if not jnp.issubdtype(dtype, jnp.floating)}


def _dtype_of(value: Any) -> Any:
    import jax.numpy as jnp

    if hasattr(value, "dtype"):
        return value.dtype
    return jnp.dtype("bool" if isinstance(value, bool) else "int32" if isinstance(value, int) else "float32")
