"""How the compiler's output is read, on output that is written by hand: this needs no compiler for TPUs."""

from __future__ import annotations

import numpy as np
import pytest

from ejkernel_pallas_tpu.testing._compiler import Program
from ejkernel_pallas_tpu.testing._prefetch import words
from ejkernel_pallas_tpu.testing._schedule import estimate
from ejkernel_pallas_tpu.testing._sharded import COLLECTIVE

UNITS = "MXU, VSTORE:SPILL\n    4     1"
ARGUMENT = "%s1_s5 = inlined_call_operand.smem [shape: s32[2], index: 0, kind: input, shape index: {}] /* operand 0 */"
SUM, PRODUCT = "%v9_v0 = vadd.f32 %v1_v1, %v2_v2", "%10 = vmatmul.bf16.gmra.mxu0 %v11_v38"


def loop(work: str, delay: int = 4) -> list[str]:
    """Bundles that go round as often as the second number in scalar memory says."""
    return [
        f"{{ {ARGUMENT}  ;;  %s2_s1 = smov.u32 0 }}",
        "{ %s3_s6 = sld [smem:[%s1_s5 + $0x1]] }",
        "{ %s4_s1 = sadd.s32 1, %s2_s1 /* a comment\nwith /* another */ and sbr.rel in it */ } /* Start region 7 */",
        "{ %p5_p0 = scmp.lt.s32.totalorder %s4_s1, %s3_s6  ;;  %s6_s1 = int_to_ptr.hbm %s4_s1 } /* Start region 8 */",
        "{ %8 = sbr.rel (%p5_p0) target = $region7 }",
        *(f"{{ {work} }}{' /* End region 8 */' * (number == delay)}" for number in range(1, 5)),
        "{}",
    ]


@pytest.fixture
def program(tmp_path):
    """A folder as the compiler leaves it, for a kernel of these bundles, of which the first spills."""

    def write(bundles):
        listing = "\n".join(f"  {place:#x} LB: > {bundle}" for place, bundle in enumerate(bundles))
        (tmp_path / "2-attend.1-04-final_bundles.txt").write_text(f"LB: loop body\n\n{listing}\n")
        uses = "\n".join(["0 1", *["1 0"] * (len(bundles) - 1)])
        (tmp_path / "2-attend.1-02-final_hlo-static-per-bundle-utilization.txt").write_text(
            f"== CAPACITY:\n{UNITS}\n== UTILIZATION:\n{uses}\n"
        )
        return tmp_path

    return write


@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_branches_depend_on_the_values_in_scalar_memory(program, rounds):
    result = estimate(program(loop(SUM)), "attend.1", [[7, rounds]], "v5e")
    assert result.bundles == result.cycles == 3 + 7 * rounds
    assert result.microseconds == pytest.approx((3 + 7 * rounds) / 1500)
    assert result.spills == 1
    assert result.units == pytest.approx(
        {"MXU": (2 + 7 * rounds) / (4 * result.bundles), "VSTORE:SPILL": 1 / result.bundles}
    )


def test_on_v7x_branches_differ_in_how_many_bundles_they_issue(program):
    """The region of a branch ends with the last of them, and an empty bundle comes next if they are fewer than six."""
    bundles = loop(SUM, delay=2)
    bundles.insert(7, "{}")
    assert estimate(program(bundles), "attend.1", [[7, 3]], "v7x").bundles == 2 + 3 * 5 + 4
    bundles = loop(SUM, delay=0)
    assert estimate(program(bundles), "attend.1", [[7, 3]], "v7x").bundles == 2 + 3 * 3 + 5


def test_matrix_units_are_waited_for(program):
    """Each takes 16 cycles for a product and two more while it is busy: the first of twelve is issued in cycle 6, the
    fourth in 22, and each of the rest 16 cycles behind the one before.
    """
    folder = program(loop(PRODUCT))
    result = estimate(folder, "attend.1", [[7, 3]], "v5e")
    assert (result.bundles, result.cycles) == (24, 22 + 8 * 16 + 1)
    assert estimate(folder, "attend.1", [[7, 3]], "v6e").cycles < 90


def test_copies_are_waited_for(program):
    copy = "{{ %1 = dma.hbm_to_vmem [thread:$0] (!%p2_p2), /*hbm=*/%s3_s3, {0}, %s4_s4, [#allocation5], 64, 64, 4 }}"
    wait = "{{ %5 = dma.done.wait (!%p2_p2), [#allocation5], {0} }}"
    short = estimate(program([text.format(16) for text in (copy, wait)]), "attend.1", [], "v5e")
    assert (short.bytes, short.cycles) == (16 * 32, pytest.approx(901))  # 0.6 us at 1.5 GHz, from cycle 1 on
    long = estimate(program([text.format(2**20) for text in (copy, wait)]), "attend.1", [], "v5e")
    assert (long.bytes, long.cycles) == (2**25, pytest.approx(1 + 2**25 / 820 * 1.5))


def test_instructions_of_a_bundle_read_registers_before_any_is_written(program):
    bundles = [
        "{ %s1_s1 = smov.u32 2  ;;  %s2_s2 = smov.u32 3 }",
        "{ %s3_s1 = smov.u32 %s2_s2  ;;  %s4_s2 = smov.u32 %s1_s1 }",
        "{ %p5_p1 = scmp.eq.s32.totalorder %s3_s1, 3  ;;  %p6_p2 = scmp.eq.s32.totalorder %s4_s2, 2 }",
        "{ %p7_p3 = pnand %p5_p1, %p6_p2 } /* Start region 1 */",
        "{ %8 = sbr.rel (!%p7_p3) target = $region2 }",
        *["{}"] * 3,
        "{} /* End region 1 */",
        *[f"{{ {SUM} }}"] * 10,
        "{} /* Start/End empty region 2 */",
    ]
    assert estimate(program(bundles), "attend.1", [], "v5e").bundles == 10


def test_an_unknown_instruction_is_an_error(program):
    with pytest.raises(NotImplementedError, match="sfoo"):
        estimate(program(["{ %s1_s1 = sfoo.u32 %s2_s2 }"]), "attend.1", [[0, 0]], "v5e")


def test_a_kernel_without_a_listing_is_an_error(program):
    with pytest.raises(LookupError, match=r"no file \*-final_bundles.txt for the kernel other.1"):
        estimate(program(loop(SUM)), "other.1", [], "v5e")


def test_four_bytes_share_a_word_of_scalar_memory():
    scalars = np.arange(5 * 3, dtype=np.int8).reshape(1, 5, 3)
    result = words(scalars)
    assert len(result) == 2 * 128
    assert result[:4] == [0x09060300, 0x0A070401, 0x0B080502, 0]
    assert result[128:132] == [0x0C, 0x0D, 0x0E, 0]
    assert words(np.array([[1, -1]], np.int32)) == [1, -1]


def test_memory_is_read_from_the_report(tmp_path):
    (tmp_path / "1-TLP-05-vmem_report.html").write_text('<script>const x = {"attend.1": {"total_size": 77}};</script>')
    program = Program('%attend.1 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", y\n', tmp_path)
    assert program.kernels == ["attend.1"]
    assert program.vmem("attend.1") == 77
    with pytest.raises(LookupError, match=r"does not have the kernel other\.1"):
        program.vmem("other.1")
    # A kernel that was compiled, and moves main memory alone, is not in the report.
    (tmp_path / "1-other.1-25-final_bundles.txt").touch()
    assert program.vmem("other.1") == 0


def test_collectives_of_a_program():
    text = (
        "%a = (f32[8], f32[4]) all-reduce(%x, %y)\n%b = f32[8]{0} collective-permute-start(%a)\n%c = f32[8] add(%a, %b)"
    )
    assert COLLECTIVE.findall(text) == ["all-reduce", "collective-permute-start"]


def test_the_operations_of_plain_jax_are_those_with_a_schedule(tmp_path):
    text = "%region (x: f32[]) -> f32[] {\n  %sum.1 = add(%x)\n}\nENTRY %main (x: f32[8]) -> f32[8] {\n"
    text += "  %bitcast.1 = bitcast(%x)\n  %fusion.1 = fusion(%bitcast.1)\n  ROOT %fusion.2 = fusion(%fusion.1)\n}\n"
    for name in ("sum.1", "fusion.1", "fusion.2"):
        (tmp_path / f"1-{name}-02-final_bundles.txt").write_text("")
    assert Program(text, tmp_path).operations == ["fusion.1", "fusion.2"]
