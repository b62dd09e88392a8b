"""What is read from the compiler's output, on output that was written by hand: no compiler for TPUs is here."""

from __future__ import annotations

import numpy as np
import pytest

from ejkernel_pallas_tpu.testing._compiler import Program
from ejkernel_pallas_tpu.testing._contenders import prefetched, words
from ejkernel_pallas_tpu.testing._schedule import estimate
from ejkernel_pallas_tpu.testing._sharded import COLLECTIVE

UNITS = "MXU, VSTORE:SPILL\n    4     1"
OPERAND = "%s16_s5 = inlined_call_operand.smem [shape: s32[2], index: 0, kind: input, shape index: {}]"
#: As many rounds as the second number that was prefetched says.
LOOP = """
s1 = simm.u32 $0; s6 = sld [smem:s5+$0x1]
s1 = sadd.s32 $1, s1
p0 = slt.s32 s1, s6
(pc) = sbr.rel @p0 $-2 (=0x11)
{v0}
{v0}
{v0}
{v0}
v1 = vadd.8x128.f32 v2, v3
"""
IDLE, PRODUCT = "v0 = vadd.8x128.f32 v1, v2", "(mrf0, gmr0, msra0) = vmatmul.8x128.bf16.lgmr v38"


@pytest.fixture
def program(tmp_path):
    """A folder as the compiler leaves it, for a kernel of these bundles, of which the first spills."""

    def made(text):
        lines = text.strip().splitlines()
        bundles = [f"0:{16 + place:#x} : {{{line}}}" for place, line in enumerate(lines)]
        (tmp_path / "1-TLP-03-assembly-pre-overlay.txt").write_text("\n".join(["0:0xf : {_ = vtrace s2}", *bundles]))
        place = f"[TensorCoreSequencer:0:0x10, TensorCoreSequencer:0:{16 + len(lines):#x})"
        (tmp_path / "1-TLP-04-hlo-details.txt").write_text(
            f"HLO:\n  operation: %attend.1 = f32[8] custom-call()\n  emitted bundle range: {place}\n"
        )
        (tmp_path / "2-attend.1-04-final_bundles.txt").write_text(f"  0x0 : {{ {OPERAND} }}")
        use = "\n".join(["0 1", *["1 0"] * (len(lines) - 1)])
        (tmp_path / "2-attend.1-02-final_hlo-static-per-bundle-utilization.txt").write_text(
            f"== CAPACITY:\n{UNITS}\n== UTILIZATION:\n{use}\n"
        )
        return tmp_path

    return made


@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_branches_are_taken_as_prefetched_values_say(program, rounds):
    found = estimate(program(LOOP.replace("{v0}", IDLE)), "attend.1", [[7, rounds]], "v5e")
    assert found.bundles == found.cycles == 2 + 7 * rounds
    assert found.microseconds == pytest.approx((2 + 7 * rounds) / 1500)
    assert found.spills == 1
    assert found.units == pytest.approx(
        {"MXU": (1 + 7 * rounds) / (4 * found.bundles), "VSTORE:SPILL": 1 / found.bundles}
    )


def test_a_branch_may_say_how_many_bundles_are_issued_before_it(program):
    """With none of them, the four behind it are issued once, at the end."""
    text = LOOP.replace("{v0}", IDLE).replace("$-2 (", "$-2, $0 (")
    assert estimate(program(text), "attend.1", [[7, 3]], "v5e").bundles == 2 + 3 * 3 + 4


def test_matrix_units_are_waited_for(program):
    """Each takes 16 cycles for a product and two more while it is busy: the first of twelve is issued in cycle 5, the
    fourth in 21, and each of the rest 16 cycles behind the one before.
    """
    found = estimate(program(LOOP.replace("{v0}", PRODUCT)), "attend.1", [[7, 3]], "v5e")
    assert (found.bundles, found.cycles) == (23, 21 + 8 * 16 + 1)
    assert estimate(program(LOOP.replace("{v0}", PRODUCT)), "attend.1", [[7, 3]], "v6e").cycles < 90


def test_copies_are_waited_for(program):
    copy = "[vmem:s2], [sflag:$0x5] = dma.simple [hbm:s3], length:$0x{}\n_ = vwait.ge [sflag:$0x5], $0x{}"
    short = estimate(program(copy.format(10, 10)), "attend.1", [[0, 0]], "v5e")
    assert (short.bytes, short.cycles) == (16 * 32, pytest.approx(901))  # 0.6 us at 1.5 GHz, from cycle 1 on
    long = estimate(program(copy.format(100000, 100000)), "attend.1", [[0, 0]], "v5e")
    assert (long.bytes, long.cycles) == (2**25, pytest.approx(1 + 2**25 / 820 * 1.5))


def test_an_instruction_that_nobody_knows_is_told(program):
    with pytest.raises(NotImplementedError, match="sfoo"):
        estimate(program("s1 = sfoo.u32 s2"), "attend.1", [[0, 0]], "v5e")


def test_a_kernel_that_is_not_there_is_told(program):
    with pytest.raises(LookupError, match="other"):
        estimate(program(LOOP.replace("{v0}", IDLE)), "other.1", [], "v5e")


def test_bytes_in_scalar_memory_lie_in_fours():
    scalars = np.arange(5 * 3, dtype=np.int8).reshape(1, 5, 3)
    found = words(scalars)
    assert len(found) == 2 * 128
    assert found[:4] == [0x09060300, 0x0A070401, 0x0B080502, 0]
    assert found[128:132] == [0x0C, 0x0D, 0x0E, 0]
    assert words(np.array([[1, -1]], np.int32)) == [1, -1]


def test_memory_is_read_from_the_report(tmp_path):
    (tmp_path / "1-TLP-05-vmem_report.html").write_text('<script>const x = {"attend.1": {"total_size": 77}};</script>')
    program = Program('%attend.1 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", y\n', tmp_path)
    assert program.kernels == ["attend.1"]
    assert program.vmem("attend.1") == 77
    with pytest.raises(LookupError, match=r"other\.1"):
        program.vmem("other.1")


def test_communication_is_found():
    text = (
        "%a = (f32[8], f32[4]) all-reduce(%x, %y)\n%b = f32[8]{0} collective-permute-start(%a)\n%c = f32[8] add(%a, %b)"
    )
    assert COLLECTIVE.findall(text) == ["all-reduce", "collective-permute-start"]


def test_what_is_prefetched_is_the_walk():
    """Of 4 blocks of 512 queries under causality, ten pairs meet."""
    import jax

    from ejkernel_pallas_tpu.testing._contenders import Shape, ours, registry_of

    shape = Shape("short", 2048, heads=1, kv_heads=1)
    attention = ours(shape).variants[""](registry_of("TPU v5e"))
    found = prefetched(attention, shape.arrays(False))
    assert {name: [len(part) for part in parts] for name, parts in found.items()} == {"flash_attention": [10, 1]}
    assert jax.config.jax_disable_jit is False
