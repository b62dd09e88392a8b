"""Which tests run: a share of them, or as many as fit into a budget.

With ``--budget SECONDS``, cases are chosen by what they cost, as ``costs.json`` beside them has it, and never by a
clock. First come those marked ``always``, of which each has found a fault; then, in half of the budget, those that are
new, or whose test was edited; then all others, drawn by a seed. In the long run each of these gets the same time: a
cheap case is always drawn, and one that costs ten times as much as the dearest of the cheap ones once in ten runs. The
seed is the digest of the sources, so that it works in an archive too, and other sources draw other cases.

With ``--until``, no case begins after that time, whatever was drawn: a bound for a machine that is slower than the costs
say, and for cases of which none are recorded.

With ``--record-costs``, the cases that run write what they cost.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import math
import resource
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

#: Beside the tests of each package.
COSTS = "costs.json"
#: Seconds of the processor. They are recorded as one of these, so that small changes do not change the file.
PRICES = tuple(float(f"{digit}e{power}") for power in range(-3, 3) for digit in (1, 2, 5))
#: Of a case whose test has no recorded case.
UNKNOWN = 1.0
#: What is hashed for the seed, in the folders that have sources.
SOURCES = (".py", ".toml")
FOLDERS = ("ejkernel_core", "plugins", "tests")
LEFTOVERS = ("__pycache__", "build", ".pytest_cache", ".hypothesis")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection", "a part of the tests, drawn by a text: the same in every process")
    group.addoption("--share", type=float, default=1.0, metavar="FRACTION", help="run this share of the tests")
    group.addoption("--seed", default="", metavar="TEXT", help="what draws them; for a budget, by default a digest")
    group.addoption("--budget", type=seconds, metavar="SECONDS", help="run tests that cost so much together")
    group.addoption("--until", type=float, default=math.inf, metavar="SECONDS", help="since 1970: no test begins later")
    group.addoption("--record-costs", action="store_true", help="write what each test costs")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "always: has found a fault, and is part of every budget")
    if config.getoption("--budget") is not None and not config.getoption("--seed"):
        config.option.seed = digest(config.rootpath)  # workers get it with the options
    config.pluginmanager.register(Selection(config), "selection")
    config.pluginmanager.register(Deadline(config.getoption("--until")), "deadline")


def digest(root: Path) -> str:
    """Of the sources that are there."""
    state = hashlib.sha256()
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            name = file.relative_to(root)
            if file.suffix in SOURCES and not any(part in LEFTOVERS for part in name.parts):
                state.update(f"{name.as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return state.hexdigest()[:8]


def draw(seed: str, test: str) -> float:
    """A number from 0 to 1, by the test's own name: what else there is has no say in it."""
    return int.from_bytes(hashlib.sha256(f"{seed} {test}".encode()).digest()[:8], "big") / 2**64


# -- costs -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Costs:
    """Of one test: the digest of its source, and the price of each case."""

    source: str
    prices: Mapping[str, float]

    def price(self, case: str) -> float:
        """That of the dearest case, for a new one."""
        return self.prices.get(case, max(self.prices.values(), default=UNKNOWN))


def split(nodeid: str) -> tuple[Path, str, str]:
    """The folder of the tests, the test in it, and the case."""
    test, _, case = nodeid.partition("[")
    file, _, name = test.partition("::")
    folder = next(parent for parent in (Path(file).parent, *Path(file).parents) if parent.name == "tests")
    return folder, f"{Path(file).relative_to(folder).as_posix()}::{name}", case.removesuffix("]")


@functools.cache
def recorded(folder: Path) -> Mapping[str, Costs]:
    """The tests of a folder, by name."""
    try:
        entries = json.loads((folder / COSTS).read_text())
        return {
            name: Costs(entry["source"], {case: float(p) for p, cases in entry["cases"].items() for case in cases})
            for name, entry in entries.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as fault:
        raise pytest.UsageError(f"{folder / COSTS} is damaged, so remove it, and make test-long: {fault!r}") from fault


def seconds(text: str) -> float:
    """Of a budget."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def record(folder: Path, costs: Mapping[str, tuple[str, Mapping[str, float]]]) -> None:
    """Write the source and the costs of the tests that have run, in place of all that their files had."""
    before = recorded(folder)
    files = {name.partition("::")[0] for name in costs}
    entries = {name: _entry(test.source, test.prices) for name, test in before.items() if _file(name) not in files}
    for name, (source, cases) in costs.items():
        prices = before[name].prices if name in before else {}
        entries[name] = _entry(source, {case: rounded(cost, prices.get(case)) for case, cost in cases.items()})
    lines = (f"{json.dumps(name)}: {json.dumps(entries[name], ensure_ascii=False)}" for name in sorted(entries))
    (folder / COSTS).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded.cache_clear()


def _file(test: str) -> str:
    return test.partition("::")[0]


def _entry(source: str, prices: Mapping[str, float]) -> dict[str, Any]:
    cases = defaultdict(list)
    for case, price in sorted(prices.items(), key=lambda item: (item[1], item[0])):
        cases[f"{price:g}"].append(case)
    return {"source": source, "cases": cases}


def rounded(cost: float, before: float | None) -> float:
    """The price before, unless the cost is now more than twice as high or low; else the nearest price."""
    if before is not None and before / 2 <= max(cost, PRICES[0]) <= 2 * before:
        return before
    return min(PRICES, key=lambda price: abs(math.log(price / max(cost, PRICES[0]))))


def spent() -> float:
    """Seconds of the processor, of this process and of those that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@functools.cache
def _lines_of_functions(file: str) -> Mapping[int, str]:
    """By the first line, decorators included, the digest of each function's text."""
    text = Path(file).read_text()
    lines = text.splitlines()
    digests = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            body = "\n".join(lines[first - 1 : node.end_lineno])
            digests[first] = hashlib.sha256(body.encode()).hexdigest()[:8]
    return digests


def source(item: pytest.Item) -> str:
    """The digest of the test's own text; empty where it has none."""
    function = getattr(item, "function", None)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return _lines_of_functions(code.co_filename).get(code.co_firstlineno, "")


# -- a budget --------------------------------------------------------------------------------------------------------


@attrs.frozen
class Case:
    """One case, before it is known whether it runs."""

    name: str
    price: float
    is_always: bool
    #: New, or of a test that was edited.
    is_new: bool

    def rank(self, seed: str) -> float:
        """The lowest come first. The product makes the chance of a case the inverse of its price."""
        return draw(seed, self.name) * self.price


@attrs.frozen
class Choice:
    """The cases that run, and what they cost."""

    names: frozenset[str]
    seconds: float
    #: Every case of up to this price runs; one of twice the price runs once in two runs.
    certain: float


def choose(cases: Sequence[Case], budget: float, seed: str) -> Choice:
    """Those marked always, whatever they cost; new ones in half of the budget; and as many others as there is room for.

    >>> cases = [Case("a", 3, True, False), Case("b", 2, False, True), Case("c", 9, False, False)]
    >>> sorted(choose(cases, 10, "seed").names)
    ['a', 'b']
    """
    names, seconds = set[str](), 0.0
    ranked = sorted(cases, key=lambda case: case.rank(seed))
    steps: tuple[tuple[float, list[Case]], ...] = (
        (math.inf, [case for case in ranked if case.is_always]),
        (budget / 2, [case for case in ranked if case.is_new]),
        (budget, ranked),
    )
    for room, candidates in steps:
        for case in candidates:
            if case.name not in names and seconds + case.price <= room:
                names.add(case.name)
                seconds += case.price
    left = [case for case in ranked if case.name not in names]
    return Choice(frozenset(names), seconds, min((case.rank(seed) for case in left), default=math.inf))


def case_of(item: pytest.Item, root: Path) -> Case:
    folder, name, case = split(item.nodeid)
    test = recorded(root / folder).get(name)
    is_new = test is None or case not in test.prices or test.source != source(item)
    price = UNKNOWN if test is None else test.price(case)
    return Case(item.nodeid, price, item.get_closest_marker("always") is not None, is_new)


class Selection:
    """The hooks of one run, in the process that leads and in each worker."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_recording: bool = config.getoption("--record-costs")
        self._start = 0.0
        self._costs: dict[str, tuple[str, float]] = {}
        self._lines: list[str] = []
        self._chances: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = self._names(items)
        left = [item for item in items if item.nodeid not in names]
        if left:
            self._config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.nodeid in names]

    def _names(self, items: Sequence[pytest.Item]) -> Collection[str]:
        option = self._config.getoption
        budget, seed = option("--budget"), option("--seed")
        if budget is None:
            return {item.nodeid for item in items if draw(seed, item.nodeid) < option("--share")}
        cases = [case_of(item, self._config.rootpath) for item in items]
        choice = choose(cases, budget, seed)
        self._chances = {
            case.name: min(1.0, choice.certain / case.price) for case in cases if not (case.is_always or case.is_new)
        }
        self._lines = list(_summary(cases, choice, budget, seed))
        return choice.names

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._start = spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        if self._is_recording and call.when == "teardown":
            item.user_properties.append(("cost", (source(item), spent() - self._start)))
        report: Any = yield
        chance = self._chances.get(item.nodeid, 1.0)
        if report.failed and chance < 1:
            report.sections.append(("selection", f"one run in {1 / chance:.0f} has this case: mark it always"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cost":
                self._costs[report.nodeid] = tuple(value)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["selection"] = self._lines
        elif self._is_recording:
            self._record()

    def _record(self) -> None:
        folders: dict[Path, dict[str, tuple[str, dict[str, float]]]] = defaultdict(dict)
        for nodeid, (text, cost) in self._costs.items():
            folder, name, case = split(nodeid)
            folders[folder].setdefault(name, (text, {}))[1][case] = cost
        for folder, costs in folders.items():
            record(self._config.rootpath / folder, costs)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._lines = getattr(node, "workeroutput", {}).get("selection", self._lines)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(line)


class Deadline:
    """Leaves out the cases that have not begun at a time, without a report, and says how many they are."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._left_out = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.time() < self._until:
            return None
        self._left_out += 1
        return True

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out += getattr(node, "workeroutput", {}).get("left_out", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.write_line(f"the time was over: {self._left_out} cases did not begin")


def _summary(cases: Sequence[Case], choice: Choice, budget: float, seed: str) -> Iterator[str]:
    every = sum(case.price for case in cases)
    yield (
        f"{len(choice.names)} of {len(cases)} cases, {choice.seconds:.0f} of {every:.0f} s; those of up to "
        f"{choice.certain:.2g} s are all here; the same again: make test SEED={seed}"
    )
    always = sum(case.price for case in cases if case.is_always)
    if always > budget:
        yield f"the cases marked always cost {always:.0f} s, and the budget is {budget:.0f} s"
    left_out = sum(case.is_new and case.name not in choice.names for case in cases)
    if left_out:
        yield f"{left_out} cases that are new or edited are not here: make test-long runs them, and records their costs"
