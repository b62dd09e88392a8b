"""The rows of a table while it is measured: whoever listens is told each as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from ._report import ABSENT, Cell, Table, cell_text

Listener = Callable[[str], object]

_listener: ContextVar[Listener] = ContextVar("listener", default=lambda line: None)
#: The rows of the tables that were begun while somebody listens.
_begun: ContextVar[list[Rows]] = ContextVar("begun")


@contextmanager
def listening(listener: Listener) -> Iterator[list[Rows]]:
    """Call the listener with every line that is announced in this context.

    The list has the rows of each table that was begun: what there is to show of a measurement that does not end.
    """
    begun: list[Rows] = []
    tokens = _listener.set(listener), _begun.set(begun)
    try:
        yield begun
    finally:
        _listener.reset(tokens[0])
        _begun.reset(tokens[1])


def announce(line: str) -> None:
    """Tell what is being done. A measurement may take minutes, and nobody should have to guess."""
    _listener.get()(line)


class Rows(Iterable[tuple[Cell, ...]]):
    """The rows of a table so far. A suite adds each row when it is measured."""

    def __init__(self, title: str, columns: Sequence[str], series: Sequence[str] = ()) -> None:
        self.title, self.columns, self.series = title, tuple(columns), tuple(series)
        self._rows: list[tuple[Cell, ...]] = []
        #: Of each row, by column.
        self._beside: list[Mapping[str, Cell]] = []

    def add(self, *cells: Cell, beside: Mapping[str, Cell] = MappingProxyType({})) -> None:
        """Add a row, and announce it in one line. The columns ``beside`` are last, where any row has them."""
        if not self._rows:
            announce(self.title)
            _begun.get([]).append(self)
        self._rows.append(cells)
        self._beside.append(beside)
        figures = (f", {column} {cell_text(cell)}" for column, cell in beside.items())
        announce(f"  {self._line(cells)}{''.join(figures)}")

    def _line(self, cells: Sequence[Cell]) -> str:
        pairs = zip(self.columns[1:], cells[1:], strict=True)
        # The rest of a wide row is for the table at the end.
        shown = [pair for pair in pairs if pair[1] != ABSENT and (not self.series or pair[0] in self.series)]
        figures = (f"{column} {cell_text(cell)}".strip() for column, cell in shown)
        return f"{cells[0]}: {', '.join(figures)}"

    def table(self) -> Table:
        """The table of all rows."""
        columns = tuple(dict.fromkeys(column for beside in self._beside for column in beside))
        pairs = zip(self._rows, self._beside, strict=True)
        rows = [(*cells, *(beside.get(column, ABSENT) for column in columns)) for cells, beside in pairs]
        return Table(self.title, (*self.columns, *columns), rows, self.series)

    def __iter__(self) -> Iterator[tuple[Cell, ...]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
