"""What tools/compile_check.py says of machine code, told from listings recorded or made here: needs no compiler."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The end of a kernel that loads, arrives on a barrier and then adds, and of one that adds and stores first (nvcc 13.0, sm_90a).
EARLY = """ probe_early
        /*0090*/                   LDS.128 R4, [R0+0x200] ;                         /* 0x0002000000047984 */
                                                                                    /* 0x000e220000000c00 */
        /*00a0*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x828], RZ ;  /* 0x000828ffffff79a7 */
                                                                                    /* 0x000fe20008100004 */
        /*00b0*/                   IADD3 R4, R6, R4, R5 ;                           /* 0x0000000406047210 */
                                                                                    /* 0x001fc80007ffe005 */
        /*00c0*/                   IADD3 R7, R7, R4, RZ ;                           /* 0x0000000407077210 */
                                                                                    /* 0x000fca0007ffe0ff */
        /*00d0*/                   STG.E desc[UR6][R2.64], R7 ;                     /* 0x0000000702007986 */
                                                                                    /* 0x000fe2000c101906 */
        /*00e0*/                   EXIT ;                                           /* 0x000000000000794d */
                                                                                    /* 0x000fea0003800000 */
"""
LATE = """ probe_late
        /*0090*/                   LDS.128 R4, [R0+0x200] ;                         /* 0x0002000000047984 */
                                                                                    /* 0x000e240000000c00 */
        /*00a0*/                   IADD3 R4, R6, R4, R5 ;                           /* 0x0000000406047210 */
                                                                                    /* 0x001fc80007ffe005 */
        /*00b0*/                   IADD3 R7, R7, R4, RZ ;                           /* 0x0000000407077210 */
                                                                                    /* 0x000fca0007ffe0ff */
        /*00c0*/                   STG.E desc[UR6][R2.64], R7 ;                     /* 0x0000000702007986 */
                                                                                    /* 0x000fe2000c101906 */
        /*00d0*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x828], RZ ;  /* 0x000828ffffff79a7 */
                                                                                    /* 0x000fe20008100004 */
        /*00e0*/                   EXIT ;                                           /* 0x000000000000794d */
                                                                                    /* 0x000fea0003800000 */
"""
ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R3+URZ+0x180], RZ"


@pytest.fixture(scope="module")
def compile_check():
    spec = importlib.util.spec_from_file_location("compile_check", ROOT / "tools/compile_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scoreboards(compile_check):
    return compile_check.scoreboards


def listing(*instructions):
    """Of (text, scoreboard that is held, scoreboards that are waited for), or text alone: 16 bytes each, from address 0."""
    lines = []
    for n, given in enumerate(instructions):
        text, held, waits = (given, None, ()) if isinstance(given, str) else given
        upper = (7 if held is None else held) << 46 | sum(1 << s for s in waits) << 52
        guard, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
        lines += [f"        /*{16 * n:04x}*/ {guard:>16}  {rest} ; /* 0x{0:016x} */", f"{'':50}/* 0x{upper:016x} */"]
    return " made\n" + "\n".join(lines) + "\n"


def load(register, held=None, offset=0x200, op="LDS.128"):
    return f"{op} R{register}, [R0+{offset:#x}]", held, ()


def use(*waits):
    return "IADD3 R1, R4, R5, RZ", None, waits


def found(scoreboards, *instructions, kernel="made"):
    """(address of an arrival, addresses of loads) of each complaint."""
    words = [words.partition(": ")[0] for words in scoreboards.complaints(kernel, listing(*instructions))]
    split = [line.partition(" hands memory back and does not wait for ") for line in words]
    return [
        (int(arrival.split()[0], 16) // 16, [int(part.split()[0], 16) // 16 for part in loads.split("], ")])
        for arrival, _, loads in split
    ]


def test_a_load_under_way_at_an_arrival_is_named(scoreboards):
    assert scoreboards.complaints("probe", LATE) == []
    assert scoreboards.complaints("probe", EARLY) == [
        "00a0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x828], RZ hands memory back and does not wait for "
        "0090 LDS.128 R4, [R0+0x200]: arrive behind an instruction that needs what was made of these"
    ]


@pytest.mark.parametrize(
    ("text", "flagged"),
    [
        (ARRIVE, True),
        ("@!P0 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R168+URZ], RZ", True),  # of another block's
        ("ARRIVES.LDGSTSBAR.64.ARVCNT [UR4+0x8]", True),
        ("UCGABAR_ARV", True),
        ("UBLKCP.S.G [UR8], [UR10], UR6", True),
        ("UTMALDG.2D [UR8], [UR4], desc[UR6]", True),
        ("STAS.128 [R4], R8", True),
        ("@!PT SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R3], RZ", False),  # never runs
        ("LDGSTS.E.BYPASS.128 [R4], [R2.64]", False),  # ptxas orders it behind loads
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ+0x180], R8", False),
    ],
)
def test_what_hands_memory_back(scoreboards, text, flagged):
    for op in ("LDS", "LDS.U16", "LDS.128", "LDSM.16.M88.4", "LD.E.128"):
        assert found(scoreboards, load(4, held=0, op=op), text, use(0), "EXIT") == ([(1, [0])] if flagged else [])
        assert found(scoreboards, load(4, held=0, op=op), use(0), text, "EXIT") == []
    assert found(scoreboards, load(4, held=0, op="LDG.E.128"), text, use(0), "EXIT") == []


def test_a_wait_for_the_last_of_a_row_is_one_for_all_of_it(scoreboards):
    row = load(4), load(8), load(12, held=1)
    assert found(scoreboards, *row, use(1), ARRIVE, "EXIT") == []
    assert found(scoreboards, *row, use(0), ARRIVE, "EXIT") == [(4, [0, 1, 2])]
    two = load(4, held=0), load(8, held=1)
    assert found(scoreboards, *two, use(0), ARRIVE, "EXIT") == [(3, [1])]  # the earlier tells nothing of the later
    assert found(scoreboards, *two, (ARRIVE, None, (0, 1)), "EXIT") == []  # the arrival waits itself
    other = load(8, held=1, op="LD.E.128")  # another block's memory: in no order with the first
    assert found(scoreboards, load(4), other, use(1), ARRIVE, "EXIT") == [(3, [0])]
    assert found(scoreboards, other, load(4, held=0), use(0), ARRIVE, "EXIT") == [(3, [0])]


def test_every_way_to_an_arrival_has_to_wait(scoreboards):
    around = load(4, held=0), "@P0 BRA 0x30", use(0), ARRIVE, "EXIT"
    assert found(scoreboards, *around) == [(3, [0])]
    beside = load(4, held=0), "@P0 BRA 0x40", use(), "BRA 0x50", use(0), ARRIVE, "EXIT"
    assert found(scoreboards, *beside) == [(5, [0])]
    aside = load(4, held=0), "@P0 BRA 0x40", ARRIVE, "EXIT", use(0), "BRA 0x20"
    assert found(scoreboards, *aside) == [(2, [0])]
    both = load(4, held=0), "@P0 BRA 0x40", use(0), "BRA 0x50", use(0), ARRIVE, "EXIT"
    assert found(scoreboards, *both) == []
    for ends in ("@P0 EXIT", "@P0 BRA 0x40", "BRA.U UP0, 0x40"):
        assert found(scoreboards, load(4, held=0), ends, ARRIVE, "EXIT", use(0), "EXIT") == [(2, [0])]
    for ends in ("EXIT", "BRA 0x40"):
        assert found(scoreboards, load(4, held=0), ends, ARRIVE, "EXIT", use(0), "EXIT") == []
    loop = "MOV R0, RZ", ARRIVE, load(4, held=0), "@P0 BRA 0x10", "EXIT"
    assert found(scoreboards, *loop) == [(1, [2])]
    loop_waits = "MOV R0, RZ", ARRIVE, load(4, held=0), use(0), "@P0 BRA 0x10", "EXIT"
    assert found(scoreboards, *loop_waits) == []
    called = "CALL.REL.NOINC 0x30", ARRIVE, "EXIT", load(4, held=0), "RET.REL.NODEC R2 0x0"
    assert found(scoreboards, *called) == [(1, [3])]
    table = load(4, held=0), "BRX R4 -0x20", use(0), "EXIT", ARRIVE, "EXIT"  # its second case arrives
    assert found(scoreboards, *table) == [(4, [0])]


@pytest.mark.parametrize("waits", [(), (0,)])
def test_where_threads_meet_again(scoreboards, waits):
    """Two BSSYs of one register one behind the other, and one within: the way leads through the BSYNCs of each alone."""
    code = (
        "BSSY B0, 0x30", use(), "BSYNC B0", load(4, held=0),  # the first ends where the load is
        "BSSY B0, 0xb0", "BSSY B1, 0x90", "@P0 BRA 0x80", use(0), ("BSYNC B1", None, waits),
        use(), "BSYNC B0", ARRIVE, "EXIT",
    )  # fmt: skip
    assert found(scoreboards, *code) == ([] if waits else [(11, [3])])
    code = (
        "BSSY B0, 0x30", use(), "BSYNC B0", ARRIVE, load(4, held=0),
        "BSSY B0, 0x90", "@P0 BRA 0x80", use(), "BSYNC B0", use(*waits), "EXIT",
    )  # fmt: skip
    assert found(scoreboards, *code) == []  # the second BSYNC does not lead back to what the first BSSY names


def test_the_table_of_w4a8_hopper_may_be_under_way_and_its_codes_may_not(scoreboards):
    def kernel(name, loaded):
        code = (
            "STS.128 [R2+0x33200], R4", "BAR.SYNC.DEFER_BLOCKING 0x2, 0x180", "STS [R2+0x35200], R4",
            load(8, held=1, offset=loaded), ARRIVE, use(1), "EXIT",
        )  # fmt: skip
        return found(scoreboards, *code, kernel=f"void kitchen::{name}<Config<6, 256> >(Params)")

    assert kernel("w4a8_hopper", 0x33200) == []
    assert kernel("w4a8_hopper", 0x20000) == [(4, [3])]  # codes: no store fills their place
    assert kernel("w4a8_hopper", 0x35200) == [(4, [3])]  # what is stored again and again
    assert kernel("awq_gemm_kernel", 0x33200) == [(4, [3])]


def test_the_last_round_of_awq_gemm_reads_no_next_stage(scoreboards):
    def kernel(name, left, waits_for_stage=True):
        code = (
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R8+URZ+0x37800], R9" if waits_for_stage else "HGMMA.64x256x16.F32 R24, R1",
            load(8, held=1, op="LDS.U16"), "HGMMA.64x256x16.F32 R24, R152, gdesc[UR20], R24, gsb0",
            f"WARPGROUP.DEPBAR.LE gsb0, {left:#x}", ARRIVE, use(1), "EXIT",
        )  # fmt: skip
        return found(scoreboards, *code, kernel=f"void kitchen::awq::{name}<GemmConfig<256, 3>, __half, 1>(GemmParams)")

    assert kernel("awq_gemm_kernel", 0) == []
    assert kernel("awq_gemm_kernel", 1) == [(4, [1])]  # within the loop
    assert kernel("awq_gemm_kernel", 0, waits_for_stage=False) == [(4, [1])]  # of the stage itself
    assert kernel("awq_stream_kernel", 0) == [(4, [1])]


def test_no_instruction_is_passed_over(scoreboards):
    unknown = listing(load(4, held=0), "?4 R1", ARRIVE, "EXIT")
    with pytest.raises(ValueError, match="of 4 instructions of a kernel 3 could be read"):
        scoreboards.complaints("made", unknown)


def test_findings_are_kept_until_the_object_or_the_check_changes(compile_check, monkeypatch, tmp_path):
    """An object is disassembled once, and for sm_90a once more when scoreboards.py is another."""
    unit = compile_check.Unit(ROOT / "packages/kitchen-made/csrc/made.cu", ("80", "90a"))
    monkeypatch.setattr(compile_check, "BUILD", tmp_path / "build")
    unit.object.parent.mkdir(parents=True)
    unit.object.touch()
    os.utime(unit.object, (0, 0))
    (tmp_path / "dump").write_text("header\n\t\tFunction :" + EARLY + "\t\tFunction :" + LATE)
    disassembler = tmp_path / "cuobjdump"
    disassembler.write_text(f"#!/bin/sh\necho $3 >> {tmp_path}/calls\ncat {tmp_path}/dump\n")
    disassembler.chmod(0o755)

    read = {"LDS.128": 1, "SYNCS.ARRIVE.TRANS64.A1T0": 1, "IADD3": 2, "STG.E": 1, "EXIT": 1}

    def calls_after(arch):
        kernels = compile_check.machine_code(unit, arch, str(disassembler))
        assert kernels.keys() == {"probe_early", "probe_late"}
        assert all(kernel.counts == read for kernel in kernels.values())
        problems = compile_check.complaints(arch, {}, kernels)
        wanted = ["90a probe_early: 00a0 SYNCS.ARRIVE.TRANS64.A1T0"] if arch == "90a" else []
        assert [" ".join(problem.split()[:4]) for problem in problems] == wanted
        return (tmp_path / "calls").read_text().split()

    assert calls_after("90a") == ["sm_90a"]
    assert calls_after("90a") == ["sm_90a"]
    assert calls_after("80") == ["sm_90a", "sm_80"]
    changed = tmp_path / "scoreboards.py"
    changed.write_text("another check")
    monkeypatch.setattr(compile_check.scoreboards, "__file__", str(changed))
    assert calls_after("80") == ["sm_90a", "sm_80"]
    assert calls_after("90a") == ["sm_90a", "sm_80", "sm_90a"]
    assert calls_after("90a") == ["sm_90a", "sm_80", "sm_90a"]
    os.utime(unit.object)  # compiled again
    os.utime(unit.object.with_suffix(".90a.json"), (0, 0))
    assert calls_after("90a") == ["sm_90a", "sm_80", "sm_90a", "sm_90a"]
