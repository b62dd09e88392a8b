"""The resources of the kernels for products of groups on Hopper: every configuration, compiled by Triton alone.

The figures of the heuristic configurations are in `grouped_resources.json`, with a hash of what decides them. The tests
compile what is not in it with the same hash, and those of the long sweep compile everything.
`python -m plugins.triton.tests.test_grouped_resources` writes the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import pytest

import ejkernel_core
from ejkernel_core import Invocation
from ejkernel_triton import grouped_matmul_sm90 as grouped_matmul
from ejkernel_triton.grouped_matmul_sm90 import _tiling
from ejkernel_triton.grouped_matmul_sm90 import d_rhs as grouped_matmul_d_rhs
from ejkernel_triton.grouped_matmul_sm90._tiling import Config
from ejkernel_triton.launch import _jax_triton
from plugins.triton.tests.hopper_launches import SHARED_MEMORY, Figures, Launch, Lock, record_launches

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

LOCK = Lock.read(Path(__file__).with_name("grouped_resources.json"))
GROUPS, ROWS = 8, 4096


@attrs.frozen
class Product:
    """A call: of rows and matrices, or the gradient of matrices."""

    gradient: bool = False
    transposed: bool = False
    bias: bool = False
    activation: str | None = None
    dtype: str = "bfloat16"
    result: str | None = None
    #: The last tile of a row is not full.
    k: int = 2048
    n: int = 1408

    def __str__(self) -> str:
        """What is not as in a plain product."""
        unusual = attrs.asdict(self, filter=lambda field, value: value != field.default)
        return " ".join(name if value is True else f"{name}={value}" for name, value in unusual.items()) or "plain"

    @property
    def backend(self) -> Any:
        """The kernel's module."""
        return grouped_matmul_d_rhs if self.gradient else grouped_matmul

    @property
    def instructions(self) -> int:
        """Those for the product of a step. Each sums 16 numbers."""
        return 64 // 16

    @property
    def has_halves(self) -> bool:
        """Whether the gates and the values of a tile are fetched apart."""
        return _tiling.GATES.get(self.activation) == "halves"

    def widths(self, cfg: Config) -> int:
        """How many widths of tiles the kernel has: a narrow tile is the last of a row, or of a large group."""
        is_even = self.has_halves or self.n % cfg.columns == 0 or self.n % cfg.columns > 128
        return 1 if cfg.columns == 128 or (is_even and not self.gradient) else 2

    @property
    def has_one_tile(self) -> bool:
        """Whether the gradient is one tile, narrow or not. How many groups have narrow ones does not matter then."""
        return self.gradient and max(self.k, self.n) <= 128

    def copies(self, cfg: Config) -> int:
        """The instructions that fetch a step: of the rows, twice 64, and of the matrix in pieces of 128 bytes."""
        return 2 + cfg.columns // 128 * (1 if self.transposed and not self.gradient else 2)

    def best(self) -> list[Config]:
        """The heuristic's configuration for each width of a tile that the call may have."""
        stages = max if self.gradient else min
        widths = (256,) if self.has_halves else (256, 128)
        return [Config(width, stages(_tiling.STAGES[width])) for width in widths]

    def configurations(self) -> list[Config]:
        """All of these widths."""
        widths = {cfg.columns for cfg in self.best()}
        return [
            Config(width, count, band)
            for width in sorted(widths)
            for count in _tiling.STAGES[width]
            for band in _tiling.BANDS
        ]

    def invocation(self, groups: int = GROUPS) -> Invocation:
        """The call on an H200."""
        k, n = self.k, self.n
        rows = {name: jax.ShapeDtypeStruct((ROWS, size), self.dtype) for name, size in (("lhs", k), ("d_out", n))}
        options = {"transpose_rhs": self.transposed, "preferred_element_type": self.result}
        if self.gradient:
            boundaries = jax.ShapeDtypeStruct((groups + 1,), "int32")
            inv = ejkernel_core.invocation("grouped_matmul_d_rhs", **rows, boundaries=boundaries, **options)
        else:
            matrix = (groups, n, k) if self.transposed else (groups, k, n)
            inv = ejkernel_core.invocation(
                "grouped_matmul",
                rows["lhs"],
                jax.ShapeDtypeStruct(matrix, self.dtype),
                jax.ShapeDtypeStruct((groups,), "int32"),
                rhs_bias=jax.ShapeDtypeStruct((groups, n), self.dtype) if self.bias else None,
                activation=self.activation,
                **options,
            )
        return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))


MULTIPLICATIONS = [
    Product(),
    Product(transposed=True),
    Product(bias=True),
    *(Product(activation=activation) for activation in ("silu_gated", "gelu_gated", "swiglu_oai")),
]
#: With all that they may have.
FULL = [
    Product(transposed=transposed, bias=True, activation=activation)
    for transposed in (False, True)
    for activation in ("silu_gated", "gelu_gated", "swiglu_oai")
]
GRADIENTS = [Product(gradient=True), Product(gradient=True, transposed=True)]
OTHER_TYPES = [
    attrs.evolve(product, **types)
    for product in (MULTIPLICATIONS[0], FULL[0], FULL[2], GRADIENTS[0])
    for types in ({"dtype": "float16"}, {"result": "float32"})
]
QUICK = [
    *((product, product.best()[0]) for product in (*MULTIPLICATIONS[:2], *FULL[::2], *GRADIENTS)),
    *((product, product.best()[1]) for product in (MULTIPLICATIONS[0], GRADIENTS[0])),
]


def pairs(products: list[Product], configurations: Callable[[Product], list[Config]]) -> list[Any]:
    return [
        pytest.param(product, cfg, id=f"{product}-{cfg}") for product in products for cfg in configurations(product)
    ]


def launched(launches: list[Launch], product: Product, cfg: Config, groups: int = GROUPS) -> list[Launch]:
    """The launches of a call: of the table, and of the product. The configuration is checked as the core checks it."""
    launches.clear()
    inv = product.invocation(groups)
    product.backend.check_cfg(inv, cfg)
    arrays = {name: x for name, x in inv.arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    jax.eval_shape(lambda arrays: product.backend.run_backend(inv.with_arrays(arrays), cfg), arrays)
    table, multiplication = launches
    return [table, attrs.evolve(multiplication, products=product.instructions)]


def check(figures: Figures, product: Product, cfg: Config) -> None:
    # Two groups of four, one that fetches, and one that finds tiles, with room for two more.
    assert figures.num_warps == 12
    assert figures.shared_memory <= SHARED_MEMORY
    # XLA makes graphs of several launches, which must not allocate.
    assert not figures.scratch
    # Numbers are spilled behind the loop, where a gradient in float32 is stored: 4 by Triton 3.6, 22 by 3.9.
    assert max(figures.spilled) <= (22 if product.gradient and product.result == "float32" else 0)
    # One warp loads for each tile its group, and the rows where that begins and ends; before the loop, how many there are.
    # Triton 3.9 omits the last where it does not matter.
    assert figures.tile_numbers in ((3, 4) if product.has_one_tile else (4,))
    assert figures.words["wgmma.mma_async"] == 2 * product.widths(cfg) * product.instructions
    assert figures.words["cp.async.bulk.tensor"] == product.copies(cfg)
    # Whole lines of 16 bytes for each thread.
    assert not figures.words["st.global.b16"]


def check_loops(figures: Figures, product: Product, cfg: Config) -> None:
    assert len(figures.loops) == 2 * product.widths(cfg)
    for loop in figures.loops:
        # Only the product of this step may still run. Other waits would mean that products wait for each other.
        assert loop.waits == (1,)
        assert (loop.loads, loop.stores) == (0, 0)


@pytest.mark.parametrize(("product", "cfg"), QUICK, ids=str)
def test_the_best_configurations_compile_for_hopper(launches: list[Launch], product: Product, cfg: Config) -> None:
    _, launch = launched(launches, product, cfg)
    figures = LOCK.get(launch)
    check(figures, product, cfg)
    check_loops(figures, product, cfg)


@pytest.mark.long
@pytest.mark.parametrize(("product", "cfg"), pairs([*MULTIPLICATIONS, *GRADIENTS], Product.configurations))
def test_every_configuration_compiles_for_hopper(launches: list[Launch], product: Product, cfg: Config) -> None:
    compile_and_compare(launches, product, cfg)


@pytest.mark.long
@pytest.mark.parametrize(("product", "cfg"), pairs([*FULL, *OTHER_TYPES], Product.best))
def test_every_feature_and_type_compiles_for_hopper(launches: list[Launch], product: Product, cfg: Config) -> None:
    compile_and_compare(launches, product, cfg)


def compile_and_compare(launches: list[Launch], product: Product, cfg: Config) -> None:
    _, launch = launched(launches, product, cfg)
    figures = launch.compile()
    check(figures, product, cfg)
    check_loops(figures, product, cfg)
    assert LOCK.figures.get(launch.digest) in (None, figures), f"{LOCK.file.name} differs"


@pytest.mark.long
@pytest.mark.parametrize(("product", "cfg"), pairs([*MULTIPLICATIONS, *GRADIENTS], Product.best))
def test_matrices_that_are_smaller_than_a_tile_compile(launches: list[Launch], product: Product, cfg: Config) -> None:
    product = attrs.evolve(product, k=24, n=16)
    _, launch = launched(launches, product, cfg)
    check(launch.compile(), product, cfg)


@pytest.mark.parametrize("groups", [8, 128, pytest.param(_tiling.MOST_GROUPS, marks=pytest.mark.long)])
@pytest.mark.parametrize("product", [MULTIPLICATIONS[0], GRADIENTS[0]], ids=str)
def test_the_tables_compile(launches: list[Launch], product: Product, groups: int) -> None:
    table, _ = launched(launches, product, product.best()[0], groups)
    figures = LOCK.get(table)
    assert not figures.scratch
    assert figures.shared_memory <= SHARED_MEMORY
    assert figures.spilled == (0, 0)


@pytest.mark.parametrize("product", [*MULTIPLICATIONS, *GRADIENTS], ids=str)
def test_every_configuration_of_the_space_is_compiled(launches: list[Launch], product: Product) -> None:
    space = product.backend.config_space(product.invocation())
    assert space[0] == product.backend.heuristic_cfg(product.invocation()) == product.best()[0]
    narrow = attrs.evolve(product, n=128)
    if narrow.transposed and narrow.gradient:
        narrow = attrs.evolve(narrow, k=128)
    of_narrow = product.backend.config_space(narrow.invocation())
    assert of_narrow[0] == product.best()[-1]
    assert {*space, *of_narrow} == {*product.configurations()}


def recorded_launches(launches: list[Launch]) -> Iterator[tuple[str, Launch]]:
    """The launches of the tests before the long sweep."""
    for product, cfg in QUICK:
        yield f"{product}, {cfg}", launched(launches, product, cfg)[1]
    for product in (MULTIPLICATIONS[0], GRADIENTS[0]):
        for groups in (8, 128):
            yield f"table, {product}, {groups} groups", launched(launches, product, product.best()[0], groups)[0]


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        LOCK.write(recorded_launches(record_launches(monkeypatch)))
