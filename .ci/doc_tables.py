"""Writes the tables of docs/ that are made from the code.

    doc_tables.py            writes them anew, between the comments that mark them
    doc_tables.py --check    says which are not what the code says, and writes nothing

The tables are in the pages and not made by Sphinx, so that docs/ can be read without the site.

What a backend takes is what its kernels say: each is asked by ``heuristic_cfg`` for every example of the operation, in
every dtype, on the device that it is for. No kernel runs, and no such device is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import jax
import numpy as np

from ejkernel_core import Example, Invocation, Unsupported, extend, registry

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "bfloat16", "float16", "float64")
#: For each platform, the device whose kernels are asked.
DEVICES: Mapping[str, dict[str, Any]] = {
    "cpu": {"device_kind": "AMD EPYC 9654", "compute_capability": None},
    "gpu": {"device_kind": "NVIDIA H200", "compute_capability": (9, 0)},
    "tpu": {"device_kind": "TPU v5p", "compute_capability": None},
}
#: The option that a call over several devices has, whatever else it has.
DEVICE_COUNT = "axis_size"
#: The words of examples that are not arguments of the operation, as a row shows them.
MEANINGS = {
    "packed": "packed sequences",
    "dropout": "dropout",
    "positions": "positions in a cache",
    "grouped": "fewer heads of keys than of queries",
    "cross": "different numbers of queries and keys",
    "empty": "arrays without elements",
    "other value_dim": "values of another head dim",
    "negative scale": "a `softmax_scale` below 0",
    "bidirectional window": "a window without `causal`",
    "head_dim": "head dims, of those in the examples",
    "heads": "heads over heads of keys, on four devices",
}
#: Words that are there together: one row.
GROUPS = (
    {"q_segment_ids", "kv_segment_ids"},
    {"cum_seqlens_q", "cum_seqlens_k", "packed"},
    {"dropout_prob", "dropout_seed", "dropout"},
    {"q_start", "kv_lengths", "kv_positions", "positions"},
)
#: The argument that a word is about.
ABOUT = {"bidirectional window": "sliding_window", "negative scale": "softmax_scale"}
#: The sizes of this word have no row: "other value_dim" has one.
LEFT_OUT = "value_dim"
#: The reason of a backend without a kernel for the gradients.
NO_KERNEL = "it has no kernel for them"
#: How many calls are made for each word in each dtype.
SEVERAL = 4
#: Backends that are for up to so many queries.
FEW_QUERIES = {"triton_decode": 16, "gluon_decode_sm90": 16, "pallas_tpu_decode": 16}


# -- what each backend takes -------------------------------------------------------------------------------------------


@attrs.frozen
class Answer:
    """What one backend says to one call: why it refuses the forward and the gradients, or None."""

    words: frozenset[str]
    forward: str | None
    backward: str | None


@contextlib.contextmanager
def devices_at_hand() -> Iterator[None]:
    """Inside, kernels do not refuse a call because of what this machine lacks.

    That is a GPU for cuDNN, and versions of jax-triton for Gluon: the names are private to these plugins.
    """
    from ejkernel_cudnn.flash_attention import library
    from ejkernel_triton.launch import _jax_triton

    card = SimpleNamespace(compute_capability="9.0", platform="gpu", device_kind="NVIDIA H200", process_index=0)
    with (
        mock.patch.object(library, "_library", return_value=(None, None)),
        mock.patch.object(jax, "local_devices", return_value=[card]),
        mock.patch.object(_jax_triton, "unavailable_reason", return_value=None),
        mock.patch.object(_jax_triton, "version", return_value=(0, 4, 1)),
        mock.patch.object(_jax_triton, "no_descriptors_reason", return_value=None),
    ):
        yield


@attrs.frozen
class Call:
    """A call as kernels see it, and that of its gradients."""

    words: frozenset[str]
    forward: Invocation
    backward: Invocation | None


@cache
def examples(op: str) -> tuple[Example, ...]:
    """The examples on which kernels are proved, each in its own dtype and in bfloat16."""
    every = context_examples if op == "context_attention" else registry.operation(op).examples
    assert every is not None
    return tuple(
        attrs.evolve(
            example,
            dtype=dtype,
            features=frozenset({*with_row(example.features)} - {*DTYPES} | ({dtype} if has_floats(example) else set())),
        )
        for example in every()
        if example.op == op and "values" in example.checks
        for dtype in dict.fromkeys((example.dtype, "bfloat16"))
    )


def context_examples() -> Iterator[Example]:
    """Calls on one of four devices. The operation's own examples are on one device alone, where no kernel refuses."""
    ids = np.ones((2, 12), np.int32)
    options: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "q_segment_ids": {"q_segment_ids": ids, "kv_segment_ids": ids},
        "softmax_aux": {"softmax_aux": np.zeros(8)},
        "softmax_scale": {"softmax_scale": 0.5},
        "sliding_window": {"causal": True, "sliding_window": (5, 0)},
        "bidirectional window": {"sliding_window": (5, 5)},
        "logits_soft_cap": {"logits_soft_cap": 2.0},
        "return_lse": {"return_lse": True},
        "cross": {},
        "other value_dim": {},
        "negative scale": {"softmax_scale": -0.5},
    }
    for layout in ("zigzag", "contiguous"):
        for heads in ((8, 8), (8, 4), (8, 2), (6, 3)):
            yield context_example(layout, heads)
        for word in options:
            yield context_example(layout, (8, 4), word, options[word])


def context_example(layout: str, heads: tuple[int, int], word: str = "", options: Mapping[str, Any] = {}) -> Example:
    heads_word, layout_word = f"heads={heads[0]} over {heads[1]}", f"layout={layout}"
    length, value_dim = 20 if word == "cross" else 12, 24 if word == "other value_dim" else 16
    arguments = {
        "query": np.zeros((2, 12, heads[0], 16)),
        "key": np.zeros((2, length, heads[1], 16)),
        "value": np.zeros((2, length, heads[1], value_dim)),
        "axis": "sequence",
        DEVICE_COUNT: 4,
        "layout": layout,
        **options,
    }
    return Example(
        f"{word} {layout_word} {heads_word}",
        "context_attention",
        lambda draw: arguments,
        wrt=("query", "key", "value"),
        features=frozenset({heads_word, layout_word, "float32", *options, *filter(None, [word])}),
        checks=frozenset({"values"}),
    )


def has_floats(example: Example) -> bool:
    """Whether an array of the call has the example's dtype: without one, no row is about dtypes."""
    return any(np.issubdtype(getattr(value, "dtype", int), np.floating) for value in example.arguments(0).values())


def with_row(words: Iterable[str]) -> Iterator[str]:
    return (word for word in words if not word.startswith(f"{LEFT_OUT}="))


@cache
def calls(op: str) -> tuple[Call, ...]:
    """The examples; and for each of their words, in every dtype, calls in which there is little else."""
    by_text = {str(example.abstract()): (example.features, example.abstract()) for example in examples(op)}
    for word in sorted({word for example in examples(op) for word in example.features - {*DTYPES}}):
        reduced = {e.name: reduced_words(op, word, e) for e in examples(op) if word in e.features}
        with_word = sorted((e for e in examples(op) if e.name in reduced), key=lambda e: (len(reduced[e.name]), e.name))
        for dtype in DTYPES:
            alone: dict[str, tuple[frozenset[str], dict[str, Any]]] = {}
            for example in with_word:
                arguments = only(op, word, attrs.evolve(example, dtype=dtype))
                if arguments is not None:
                    alone[f"{word} {arguments}"] = (reduced[example.name] | {dtype}, arguments)
                if len(alone) == SEVERAL:
                    break
            by_text |= alone
    return tuple(Call(words, *invocations(op, arguments)) for words, arguments in by_text.values())


def group_of(word: str) -> set[str]:
    """The words of the same row."""
    name = word.partition("=")[0]
    return next((group for group in GROUPS if name in group), {name})


def reduced_words(op: str, word: str, example: Example) -> frozenset[str]:
    """The words of what ``only`` leaves of an example, without the dtype: the word and those of shapes."""
    of_shapes = example.features - {
        *registry.operation(op).signature.parameters,
        *DTYPES,
        *ABOUT,
        *set().union(*GROUPS),
    }
    return frozenset(of_shapes | {word} | (group_of(word) & example.features))


def only(op: str, word: str, example: Example) -> dict[str, Any] | None:
    """An example without the options and optional arrays that have nothing to do with a word; None if it is not a call.

    A call without a batch axis, for example, needs its boundaries, whatever the word is.
    """
    parameters = registry.operation(op).signature.parameters
    kept = group_of(word) | {ABOUT.get(word), DEVICE_COUNT}
    arguments = {
        name: value
        for name, value in example.abstract().items()
        if parameters[name].default is inspect.Parameter.empty or name in kept
    }
    try:
        registry.invocation(op, **arguments)
    except (TypeError, ValueError):
        return None
    return arguments


def invocations(op: str, arguments: Mapping[str, Any]) -> tuple[Invocation, Invocation | None]:
    """The call and that of its gradients, as kernels see them."""
    explanation = registry.explain(op, **arguments)
    assert explanation.plan is not None, explanation.error
    backward = None if explanation.backward is None else explanation.backward.plan
    return explanation.plan.invocation, None if backward is None else backward.invocation


def refusal(op: str, backend: str, inv: Invocation) -> str | None:
    """Why a kernel refuses a call on the devices that it is for, or None. The platforms have to agree."""
    if backend not in registry.backends(op):
        return NO_KERNEL
    kernel = registry.kernel(op, backend)
    reasons = set()
    for platform, device in DEVICES.items():
        if kernel.rank_on(platform) is not None:
            try:
                kernel.heuristic_cfg(attrs.evolve(inv, platform=platform, **device))
            except Unsupported as error:
                reasons.add(str(error))
            else:
                reasons.add("")
    if len(reasons) != 1:
        raise SystemExit(f"{kernel.name} says different things on its platforms, which no table shows: {reasons}")
    return reasons.pop() or None


def shortened(inv: Invocation, queries: int) -> Invocation:
    """A call with its first queries alone."""
    query = inv["query"]
    batch, length, *features = query.shape
    return inv.with_arrays({"query": query.update(shape=(batch, min(length, queries), *features))})


def answers(op: str, backend: str) -> list[Answer]:
    """What a backend says to all calls of an operation; one that is for few queries, to calls of few."""
    with all_dtypes():
        op_calls = calls(op)
    with devices_at_hand():
        return [
            Answer(
                call.words,
                refusal(op, backend, shortened(call.forward, FEW_QUERIES[backend]))
                if backend in FEW_QUERIES
                else refusal(op, backend, call.forward),
                None if call.backward is None else refusal(call.backward.op, backend, call.backward),
            )
            for call in op_calls
        ]


def words(op: str) -> list[str]:
    """The words of the calls of an operation."""
    return in_order(op, {word for call in calls(op) for word in call.words})


def in_order(op: str, words: Iterable[str]) -> list[str]:
    """Dtypes, the operation's arguments in their order, then the others."""
    order = [*DTYPES, *registry.operation(op).signature.parameters, *MEANINGS]

    def place(word: str) -> tuple[int, int, str]:
        name = word.partition("=")[0]
        return order.index(name) if name in order else len(order), len(word), word

    return sorted(words, key=place)


def rows_of_words(op: str) -> dict[str, list[str]]:
    """The words of each row, by the row's title: those of one group, or the sizes of one axis."""
    rows: dict[frozenset[str], list[str]] = {}
    for word in words(op):
        rows.setdefault(frozenset(group_of(word)), []).append(word)
    return {", ".join(dict.fromkeys(map(title, group))): group for group in rows.values()}


def title(word: str) -> str:
    name = word.partition("=")[0]
    return MEANINGS.get(name, f"`{name}`")


@attrs.frozen(eq=False)
class Column:
    """What one backend says to all calls."""

    answers: list[Answer]

    def is_accepted(self, word: str) -> bool:
        return any(word in answer.words and answer.forward is None for answer in self.answers)

    def deciding(self, word: str) -> Iterator[Answer]:
        """The calls in which all other words are taken, so that a refusal is about this one."""
        return (
            a for a in self.answers if word in a.words and all(map(self.is_accepted, a.words - group_of(word) - {word}))
        )

    @functools.cached_property
    def reasons_of_plain_calls(self) -> set[str]:
        """Why calls are refused that have nothing but a dtype and sizes: a single token, for example."""
        return {without_numbers(answer.forward) for answer in self.answers if answer.forward and is_plain(answer.words)}

    def refused_alone(self, word: str) -> Iterator[Answer]:
        """The refused calls in which there is nothing but the word, and the reason is not that of a plain call."""
        for answer in self.deciding(word):
            is_alone = not is_plain({word}) and is_plain(answer.words - group_of(word))
            if is_alone and answer.forward and without_numbers(answer.forward) not in self.reasons_of_plain_calls:
                yield answer

    @cache  # noqa: B019, a column lives as long as the program
    def verdict(self, word: str) -> str:
        """One of "yes", "some", "forward only" and "no"; "" where no example says."""
        answers = [answer for answer in self.answers if word in answer.words]
        if any(answer.forward is None and answer.backward is None for answer in answers):
            return "some" if any(self.refused_alone(word)) else "yes"
        if any(answer.forward is None for answer in answers):
            return "forward only"
        return "no" if any(self.deciding(word)) else ""

    def explaining(self, word: str) -> Iterable[Answer]:
        """Calls that show why a word is not taken, or not always."""
        if self.verdict(word) == "some":
            return self.refused_alone(word)
        return [answer for answer in self.deciding(word) if answer.forward or answer.backward][:1]

    def is_of_its_own(self, answer: Answer) -> bool:
        """Whether every word of a call is taken in other calls."""
        accepted = {"yes", "some", "forward only"} if answer.forward else {"yes", "some"}
        return all(self.verdict(word) in accepted for word in answer.words)

    def cell(self, group: Sequence[str]) -> str:
        """What a row shows: a verdict, or the sizes that are taken."""
        verdicts = {word: self.verdict(word) for word in group}
        if "=" in group[0]:
            taken = {word.partition("=")[2]: verdict in ("yes", "forward only") for word, verdict in verdicts.items()}
            return "all" if all(taken.values()) else ", ".join(size for size in taken if taken[size])
        if not all(verdicts.values()):
            raise SystemExit(f"no example shows whether {group} is taken: add one with nothing else in it")
        return min(verdicts.values(), key=("no", "forward only", "some", "yes").index)

    def reasons(self, rows: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
        """Pairs of what is refused and why: rows first, then calls of which every word is taken alone."""
        refused = {word: name for name, group in rows.items() for word in group if self.verdict(word) != "yes"}
        refusals = [(name, answer) for word, name in refused.items() for answer in self.explaining(word)]
        refusals += [("some calls", answer) for answer in self.answers if self.is_of_its_own(answer)]
        names: dict[str, dict[str, None]] = {}
        first: dict[str, str] = {}
        for name, answer in refusals:
            reason = answer.forward or answer.backward
            if reason is not None:
                key = without_numbers(reason)
                first.setdefault(key, reason)
                what = f"{name}, gradients" if reason != NO_KERNEL else "gradients"
                names.setdefault(key, {})[name if answer.forward else what] = None
        return ((", ".join(names[key]), reason) for key, reason in first.items())


def is_plain(words: Iterable[str]) -> bool:
    """Whether there is nothing but a dtype and sizes."""
    return all(word in DTYPES or "=" in word for word in words)


def without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "", reason)


def features(op: str) -> str:
    """The table of an operation, and the kernels' reasons."""
    backends = sorted(registry.backends(op), key=lambda name: (name == "reference", name))
    columns = {backend: Column(answers(op, backend)) for backend in backends}
    rows = rows_of_words(op)
    table = [("", *(f"`{backend}`" for backend in backends)), ("platform", *(platforms(op, b) for b in backends))]
    table += [(name, *(columns[backend].cell(group) for backend in backends)) for name, group in rows.items()]
    why = [(f"`{b}`", what, reason) for b in backends for what, reason in columns[b].reasons(rows)]
    text = f"`{op}`:\n\n{markdown(table)}\n"
    if why:
        text += f"\nThe reasons, in the kernels' own words:\n\n{markdown([('backend', 'refuses', 'because'), *why])}\n"
    return text


def platforms(op: str, backend: str) -> str:
    ranks = {platform: registry.kernel(op, backend).rank_on(platform) for platform in DEVICES}
    own = [platform for platform, rank in ranks.items() if rank is not None]
    return "any" if len(own) == len(ranks) else ", ".join(own)


# -- what a kernel may refuse ------------------------------------------------------------------------------------------


def refusable() -> str:
    """The words of the examples, by operation, and what those words mean that are not arguments."""
    own = {op: features_of_examples(op) for op in operations()}
    rows = [(f"`{op}`", *kinds_of_words(op, words)) for op, words in own.items() if words]
    table = markdown([("operation", "dtypes", "arguments", "other words"), *rows])
    known = {word for words in own.values() for word in words}
    meanings = [(f"`{word}`", meaning) for word, meaning in MEANINGS.items() if word in known]
    return f"{table}\n\n{markdown([('word', 'a call with'), *meanings])}\n"


def operations() -> list[str]:
    return sorted(point.name for point in entry_points(group="ejkernel.operations"))


def features_of_examples(op: str) -> set[str]:
    every = registry.operation(op).examples
    return set() if every is None else {word for example in every() if example.op == op for word in example.features}


def kinds_of_words(op: str, words: Iterable[str]) -> tuple[str, str, str]:
    """The dtypes, the arguments and the other words of an operation, as text. Sizes of one axis are one item."""
    kinds: tuple[dict[str, list[str]], ...] = ({}, {}, {})
    for word in in_order(op, words):
        name, _, size = word.partition("=")
        kind = 0 if word in DTYPES else 1 if word in registry.operation(op).signature.parameters else 2
        kinds[kind].setdefault(name, []).append(size)
    texts = ([word_text(name, sizes) for name, sizes in kind.items()] for kind in kinds)
    dtypes, arguments, others = map(", ".join, texts)
    return dtypes, arguments, others


def word_text(name: str, sizes: Sequence[str]) -> str:
    return f"`{name}=N` with N of {', '.join(sizes)}" if all(sizes) else f"`{name}`"


# -- the configurations ------------------------------------------------------------------------------------------------


def configurations() -> str:
    """Every kernel's ``Config``: its fields with types, defaults and comments."""
    sections = []
    for op in operations():
        for backend in registry.backends(op):
            kernel = registry.kernel(op, backend)
            kind = kernel.config_type
            if kind is not None and attrs.has(kind) and attrs.fields(kind):
                sections.append((kernel.name, str(kernel.config_name), kind))
    return "\n".join(section(*parts) for parts in sections)


def section(kernel: str, name: str, kind: type) -> str:
    summary = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    comments = comments_of(kind)
    rows = [
        (f"`{field.name}`", f"`{type_name(kind, field.name)}`", default(field), comments.get(field.name, ""))
        for field in attrs.fields(kind)
    ]
    prose = textwrap.fill(f"`{name}`. {summary.replace('``', '`')}", 120)
    return f"## {kernel}\n\n{prose}\n\n{markdown([('field', 'type', 'default', 'is'), *rows])}\n"


def type_name(kind: type, field: str) -> str:
    """The type of a field as its source has it: attrs replaces its own copy once something resolves the types."""
    annotation = next(
        base.__annotations__[field] for base in kind.__mro__ if field in vars(base).get("__annotations__", ())
    )
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def default(field: Any) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    return "computed" if isinstance(field.default, attrs.Factory) else f"`{field.default!r}`"  # type: ignore[arg-type]


def comments_of(kind: type) -> dict[str, str]:
    """The comments ``#:`` above the fields of a class and of its bases, by field."""
    comments: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        lines: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if match := re.match(r"\s*#: ?(.*)", line):
                lines.append(match[1])
            else:
                if match := re.match(r"\s+(\w+): ", line):
                    comments[match[1]] = " ".join(lines).replace("``", "`")
                lines = []
    return comments


# -- pages -------------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    lines = (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))
    return "\n".join(re.sub(r"(?<=\|)  (?=\|)", " ", line) for line in lines)


def operations_on(page: Path) -> list[str]:
    """The operations that have a table on a page: those with a line of their own in its region."""
    _, _, region = page.read_text().partition("<!-- features: ")
    return re.findall(r"^`(\w+)`:$", region, re.MULTILINE)


def operation_pages(package: str = "") -> list[Path]:
    """The pages of operations, or those with an operation of this package."""
    modules = {point.name: point.module for point in entry_points(group="ejkernel.operations")}
    pages = sorted((ROOT / "docs/operations").glob("*.md"))
    return [page for page in pages if not package or any(modules[op].startswith(package) for op in operations_on(page))]


def table_of_operations(docs: str = "", package: str = "") -> str:
    """The pages of operations, each with the first sentence on it, for a page from which ``docs`` leads to docs/."""
    rows = []
    for page in operation_pages(package):
        title, text = page.read_text().removeprefix("# ").split("\n\n")[:2]
        sentence = re.split(r"(?<=\.)\s", text)[0].replace("\n", " ")
        sentence = re.sub(r"\]\((?=\w+\.md)", f"]({docs}operations/", sentence)
        rows.append((f"[{title}]({docs}operations/{page.name})", sentence))
    return markdown([("operation", "is"), *rows]) + "\n"


def table_of_distributions(root: str = "") -> str:
    """What pip installs, for a page from which ``root`` leads to the repository: the core, then all plugins."""
    rows = []
    for project in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))):
        metadata = tomllib.loads(project.read_text())["project"]
        page = (project.parent / metadata["readme"]).relative_to(ROOT)
        rows.append(
            (f"[{metadata['name']}]({root}{page})", f"`{metadata['name'].replace('-', '_')}`", metadata["description"])
        )
    return markdown([("distribution", "package", "is"), *rows]) + "\n"


# -- the third circle of names -----------------------------------------------------------------------------------------


def extended_names() -> str:
    """The names of ``ejkernel_core.extend``, by their modules, each with the first sentence about it."""
    tables = []
    for module, names in extend._NAMES.items():
        source = importlib.import_module(f"ejkernel_core.{module}")
        rows = [(f"`{name}`", sentence_about(source, name)) for name in names.split()]
        title = (source.__doc__ or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")
        tables.append(f"{title}\n\n{markdown([('name', ''), *rows])}")
    return "\n\n".join(tables) + "\n"


def sentence_about(module: Any, name: str) -> str:
    """The first sentence of a docstring, or of the comment above a constant."""
    comment = re.search(
        rf"((?:^ *#:.*\n)+)^(?: .*import )?{name}(?:: .*)?(?: = .*)?$", inspect.getsource(module), re.MULTILINE
    )
    text = " ".join(re.findall(r"#: ?(.*)", comment[1])) if comment else inspect.getdoc(getattr(module, name)) or ""
    paragraph = text.partition("\n\n")[0].replace("\n", " ")
    return re.sub(r"``?([^`]*)``?", r"`\1`", re.split(r"(?<=\.)\s", paragraph)[0]).replace("|", "\\|")


def regions() -> dict[tuple[str, str], Any]:
    """By page and name of a region: the function that makes it."""
    pages = {
        (f"docs/operations/{page.name}", "features"): (lambda page=page: "\n".join(map(features, operations_on(page))))
        for page in operation_pages()
    }
    return {
        **pages,
        ("README.md", "distributions"): table_of_distributions,
        ("docs/distributions.md", "distributions"): lambda: table_of_distributions("../"),
        ("docs/index.md", "operations"): table_of_operations,
        ("plugins/ops/README.md", "operations"): lambda: table_of_operations("../../docs/", "ejkernel_ops"),
        ("docs/reference/configurations.md", "configurations"): configurations,
        ("docs/reference/extend.md", "names"): extended_names,
        ("docs/reference/refusals.md", "words"): refusable,
    }


def with_region(text: str, name: str, content: str) -> str:
    """The text of a page with the content between the comments of a region."""
    start, end = f"<!-- {name}: made by .ci/doc_tables.py -->\n", f"<!-- end of {name} -->"
    before, has_start, rest = text.partition(start)
    _, has_end, after = rest.partition(end)
    if not (has_start and has_end):
        raise SystemExit(f"the page has no comments {start.strip()} and {end}")
    return f"{before}{start}\n{content}\n{end}{after}"


def is_written(page: str, name: str) -> bool:
    text = (ROOT / page).read_text()
    return with_region(text, name, regions()[page, name]()) == text


@contextlib.contextmanager
def all_dtypes() -> Iterator[None]:
    """Inside, arrays may be float64, and numbers that are too large for a dtype are infinite without a warning."""
    with jax.enable_x64(True), np.errstate(over="ignore"):
        yield


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table is not up to date")
    is_check = parser.parse_args(arguments if arguments is None else list(arguments)).check
    for page, name in regions():
        if is_check and not is_written(page, name):
            raise SystemExit(f"{page}: {name} are not what the code says: run `make doc-tables`")
        if not is_check:
            text = (ROOT / page).read_text()
            (ROOT / page).write_text(with_region(text, name, regions()[page, name]()))


if __name__ == "__main__":
    main()
