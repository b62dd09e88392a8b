"""What the warps of a program share: the ring of blocks, and the arrays of results."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ejkernel_triton.gluon.shared_memory import barriers, words


@aggregate
class Steps:
    """A ring of blocks of keys and their values, which one warp fills and groups of warps read."""

    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    #: As they are read: numbers of 8 bits are words of two.
    key_words: gl.shared_memory_descriptor
    value_words: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    values_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, keys, values, key_words, value_words, keys_full, values_full, empty, COUNT):
        self.keys = keys
        self.values = values
        self.key_words = key_words
        self.value_words = value_words
        self.keys_full = keys_full
        self.values_full = values_full
        self.empty = empty
        self.COUNT = gl.constexpr(COUNT)

    @gluon.jit
    def wait_for_place(self, step):
        """Until the place of a step is empty: where its keys and values go, and the barriers that count their bytes."""
        place = step % self.COUNT
        mbarrier.wait(self.empty.index(place), ((step // self.COUNT) & 1) ^ 1)
        return (
            self.keys.index(place),
            self.values.index(place),
            self.keys_full.index(place),
            self.values_full.index(place),
        )

    @gluon.jit
    def wait_for_keys(self, step):
        """The keys of a step, when they are there: (slots, columns)."""
        mbarrier.wait(self.keys_full.index(step % self.COUNT), (step // self.COUNT) & 1)
        keys = self.key_words
        return keys.index(step % self.COUNT).reshape([keys.shape[2], keys.shape[4]])

    @gluon.jit
    def wait_for_values(self, step):
        mbarrier.wait(self.values_full.index(step % self.COUNT), (step // self.COUNT) & 1)
        values = self.value_words
        return values.index(step % self.COUNT).reshape([values.shape[2], values.shape[4]])

    @gluon.jit
    def release(self, step):
        """Give the place of a step back, whose blocks have been read."""
        mbarrier.arrive(self.empty.index(step % self.COUNT))


@gluon.jit
def allocate_steps(key, value, BLOCK: gl.constexpr, COUNT: gl.constexpr, READERS: gl.constexpr):
    """An empty ring of ``COUNT`` steps, of ``BLOCK`` keys each."""
    keys = gl.allocate_shared_memory(key.dtype, [COUNT, 1, BLOCK, 1, key.block_shape[3]], key.layout)
    values = gl.allocate_shared_memory(value.dtype, [COUNT, 1, BLOCK, 1, value.block_shape[3]], value.layout)
    key_words, value_words = keys, values
    if key.dtype.primitive_bitwidth == 8:
        key_words, value_words = words(keys), words(values)
    full, values_full, empty = barriers(COUNT, 1), barriers(COUNT, 1), barriers(COUNT, READERS)
    return Steps(keys, values, key_words, value_words, full, values_full, empty, COUNT)


@aggregate
class Results:
    """The arrays of results, as those of the portable kernel: with several splits the sums of each, and else the output
    and the log-sum-exp.
    """

    out: gl.tensor
    maxima: gl.tensor
    totals: gl.tensor
    sinks: gl.tensor
    LSE: gl.constexpr
    SINKS: gl.constexpr
    V_DIM: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, out, maxima, totals, sinks, LSE, SINKS, V_DIM):
        self.out = out
        self.maxima = maxima
        self.totals = totals
        self.sinks = sinks
        self.LSE = gl.constexpr(LSE)
        self.SINKS = gl.constexpr(SINKS)
        self.V_DIM = gl.constexpr(V_DIM)
