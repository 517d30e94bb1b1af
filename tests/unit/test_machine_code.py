"""What is found in machine code, and what is not."""

from tests.unit.machine_code import lost_operands, unset_registers

LOOP = """
.L_x_3:
        /*2660*/                   MOV R9, RZ ;
        /*27a0*/                   HGMMA.64x64x16.F32.BF16 R24, R100, gdesc[UR20], RZ, !UPT ;
        /*27b0*/                   HGMMA.64x64x16.F32.BF16 R24, R96, gdesc[UR20], R24, gsb0 ;
        /*3440*/                   F2FP.BF16.F32.PACK_AB R{own}, R25, R24 ;
        /*3450*/                   HGMMA.64x64x16.F32.BF16 R56, R{own}, gdesc[UR20].tnspB, R56 ;
        /*39a0*/               @P0 BRA `(.L_x_3) ;
"""


def test_an_operand_that_the_loop_overwrites_is_found_in_machine_code() -> None:
    assert lost_operands(LOOP.replace("{own}", "88")) == []
    assert lost_operands(LOOP.replace("{own}", "100")) == [100]


WAYS = """
        /*0030*/                   ULDC.64 UR32, c[0x0][0x208] ;
        /*0040*/                   S2UR UR14, SR_CTAID.X ;
        /*1e60*/              @!P1 BRA `(.L_x_1) ;
        /*2140*/                   UIADD3 UR{own}, UP0, UR14, 0x40, URZ ;
        /*2150*/                   UIADD3.64 UR20, UR32, 0x2, URZ ;
.L_x_1:
        /*4ea0*/                   UIADD3 UR38, UP0, UR34, 0x40, URZ ;
        /*4eb0*/                   UISETP.GE.AND UP1, UPT, UR33, UR38, UPT ;
        /*4ec0*/               @P1 BRA `(.L_x_1) ;
        /*9a80*/                   EXIT ;
"""


def test_a_register_that_a_way_leaves_unwritten_is_found_in_machine_code() -> None:
    assert unset_registers(WAYS.replace("{own}", "36").replace("UR34", "UR33")) == []
    assert unset_registers(WAYS.replace("{own}", "36")) == [34]
    assert unset_registers(WAYS.replace("{own}", "34")) == [34], "one of two ways"
    assert unset_registers(WAYS.replace("{own}", "34").replace("@!P1 ", "")) == [34], "no way"
    assert unset_registers(WAYS.replace("{own}", "34").replace("@!P1 BRA `(.L_x_1)", "NOP")) == []
