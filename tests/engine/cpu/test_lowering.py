"""Every instruction set can be compiled for, on any machine: LLVM makes the instructions that were meant.

Whether they compute the right numbers is for a machine that has them to say (`test_linear.py` and its neighbours).
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

# Writes the assembly of a tile of each format, of so many rows, for another CPU than this one.
PROGRAM = """
import sys
import llvmlite.binding as llvm
import llvmlite.ir as ir
from busllm.engine.cpu import instructions, kernels

byte_dot, has_bfloat16_dot, triple, cpu, features, rows = sys.argv[1:]
chosen = instructions.Instructions(cpu, (), instructions.ByteDot(byte_dot), has_bfloat16_dot == "True")
kernels.prepare_kernels()
instructions.detect_instructions = lambda *_: chosen
from busllm.engine.cpu import tiles

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
module = ir.Module()
for make in (tiles.int4_tile, tiles.int8_tile, tiles.bfloat16_tile):
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 9)
    function = ir.Function(module, kind, make.__name__)
    builder = ir.IRBuilder(function.append_basic_block())
    make(int(rows)).write(builder, *function.args)
    builder.ret_void()
parsed = llvm.parse_assembly(str(module))
machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
passes.getModulePassManager().run(parsed, passes)
print(machine.emit_assembly(parsed))
"""
X86, ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"
AVX2 = "+avx2,+fma,+f16c"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512vl,+avx512dq"
# Of four bytes in 16 lanes: two formats, eight in a group, two rows; zero points of int4, sums of int8 weights.
PRODUCTS = 2 * 8 * 2 + 2 + 8
PAIRS = 16 * 2  # of bfloat16

TARGETS = [
    ("vnni-512", True, X86, "sapphirerapids", f"{AVX512},+avx512vnni,+avx512bf16", "vpdpbusd", PRODUCTS),
    ("vnni-512", True, X86, "sapphirerapids", f"{AVX512},+avx512vnni,+avx512bf16", "vdpbf16ps", PAIRS),
    ("vnni-512", False, X86, "cascadelake", f"{AVX512},+avx512vnni", "vpdpbusd", PRODUCTS),
    ("vnni-256", False, X86, "alderlake", f"{AVX2},+avxvnni", "vpdpbusd", 2 * PRODUCTS),
    ("madd-512", False, X86, "skylake-avx512", AVX512, "vpmaddubsw", 8 * 2 + 2),
    ("madd-256", False, X86, "haswell", AVX2, "vpmaddubsw", 2 * (8 * 2 + 2)),
    ("neon-usdot", False, ARM, "neoverse-v1", "+neon,+dotprod,+i8mm", "usdot", 4 * PRODUCTS),
    # Of int8 once more for each four states, which are the same in all lanes.
    ("neon-sdot", False, ARM, "neoverse-n1", "+neon,+dotprod", "sdot", 4 * PRODUCTS + 16),
    ("neon", False, ARM, "cortex-a72", "+neon", "mla", 4 * PRODUCTS),
]


@pytest.mark.parametrize(("byte_dot", "has_bfloat16", "triple", "cpu", "features", "mnemonic", "least"), TARGETS)
def test_a_tile_is_made_of_the_instructions_that_were_chosen(
    byte_dot: str, has_bfloat16: bool, triple: str, cpu: str, features: str, mnemonic: str, least: int
) -> None:
    lines = assembly(byte_dot, has_bfloat16, triple, cpu, features, 2)
    used = Counter(line.split()[0] for line in lines)
    assert used[mnemonic] >= least, used


def test_states_come_from_memory_within_the_instruction_and_sums_stay_in_registers() -> None:
    features = f"{AVX512},+avx512vnni,+avx512bf16"
    lines = assembly("vnni-512", True, X86, "sapphirerapids", features, 12)
    products = [line for line in lines if line.startswith("vpdpbusd")]
    from_memory = [line for line in products if "{1to16}" in line]
    assert len(from_memory) >= 12 * (8 + 8 + 1)  # int4, int8, zero points of int4
    assert len(products) - len(from_memory) <= 8  # sums of int8 weights
    on_the_stack = [line for line in lines if "zmm" in line and "(%rsp)" in line]
    assert len(on_the_stack) <= 4, on_the_stack


def assembly(byte_dot: str, has_bfloat16: bool, triple: str, cpu: str, features: str, rows: int) -> list[str]:
    """The instructions of a tile of each format, one after the other."""
    arguments = [byte_dot, str(has_bfloat16), triple, cpu, features, str(rows)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (line.removeprefix("\t").removeprefix("{vex}").strip() for line in done.stdout.splitlines())
    return [line for line in lines if line]
