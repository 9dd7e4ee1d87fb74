"""From a candidate and a config to the kernel's specialisation: signature, constants, what is divisible, compile options."""

from __future__ import annotations

from typing import Any

from hipgroupgemm.backends.triton.candidates import Candidate, Machine
from hipgroupgemm.backends.triton.compiler import KernelSpec, element_of
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode

__all__ = ["parts_spec", "room_for_groups", "spec_of", "table_bytes"]

_MOST_GROUPS = 1024  # that a block scans by itself


def spec_of(candidate: Candidate, config: GroupedGemmConfig, machine: Machine, *, scanning: bool = True) -> KernelSpec:
    """The specialisation that runs a config (a plan's key) with a candidate; scanning: the sizes too, where the kernel can."""
    if candidate.kernel == "hopper":
        return _hopper_spec(candidate, config, machine, room_for_groups(candidate, config, machine) if scanning else 0)
    return _portable_spec(candidate, config, machine)


def room_for_groups(candidate: Candidate, config: GroupedGemmConfig, machine: Machine) -> int:
    """Groups that a block of the kernel has room to scan by itself, 0 where it cannot: then they are scanned in front of it."""
    k, c = candidate, config
    if k.kernel != "hopper" or c.ragged_mode is RaggedDotMode.BATCH or c.sizes_per_batch or c.group_count != c.group_total:
        return 0
    if not 0 < c.group_total <= _MOST_GROUPS:
        return 0
    room = max(128, 1 << (c.group_total - 1).bit_length())
    needed = k.shared_bytes(FLOAT_BYTES[c.type_a], FLOAT_BYTES[c.type_d]) + table_bytes(room)
    return room if k.blocks * (needed + 1024) <= machine.shared_memory + 1024 else 0


def table_bytes(groups: int) -> int:
    """Shared memory of the tables of so many groups, and of the scan that makes them."""
    return 8 * groups + 512 if groups else 0


def _hopper_spec(k: Candidate, c: GroupedGemmConfig, machine: Machine, groups: int) -> KernelSpec:
    element, out = element_of(c.type_a), element_of(c.type_d)
    consumers = k.warps // 4
    height = k.bm // consumers
    registers, spare, limit = _registers(consumers, k.blocks)
    constants: dict[str, Any] = {
        "BM": k.bm,
        "BN": k.bn,
        "BK": k.bk,
        "STAGES": k.stages,
        "CONSUMERS": consumers,
        # an instruction as wide as the tile, unless its accumulators alone would take all registers that several blocks leave a thread
        "MMA_N": min(k.bn, 256 if limit >= 160 else 128 if limit >= 96 else 64),
        "SUBTILES": k.subtiles,
        "BUFFERS": k.buffers,
        "REGISTERS": registers,
        "SPARE": spare,
        "GROUPS": groups,
    }
    boxes: dict[str, Any] = {}
    divisible: list[tuple[str, int]] = []
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        function = "contracting"
        boxes["lhs"] = ("desc", element, (1, 1, k.bk, height))
        boxes["out"] = ("desc", out, (1, 1, height, k.bn // k.subtiles) if k.subtiles else (1, 1, 8, 64))
        boxes["rhs"] = ("desc", element, (1, 1, k.bk, k.bn))
        scalars = {"out_pointer": f"*{out}", "out_g": "i64", "out_b": "i64", "out_m": "i64", "starts": "*i64", "ends": "*i64"}
        scalars.update(sizes="*i32", sizes_step="i64", fault="*i64")
        vector = 16 // FLOAT_BYTES[c.type_d]
        divisible = [("out_pointer", 16), ("out_g", vector), ("out_b", vector), ("out_m", vector)]
        divisible += [("columns", 16)] if c.n % 16 == 0 else []
        scalars.update(dict.fromkeys(("extent", "rows", "columns", "groups", "batches", "scans"), "i32"))
        scalars.update(dict.fromkeys(("window", "active", "wide", "offsets"), "i32"))
        constants["PROGRAMMATIC"] = not groups
    else:
        function = "non_contracting"
        boxes["lhs"] = ("desc", element, (1, 1, 1, height, k.bk))
        boxes["out"] = ("desc", out, (1, 1, 1, height, k.bn // k.subtiles))
        boxes["rhs"] = ("desc", element, (1, 1, k.bn, k.bk) if c.trans_b else (1, 1, k.bk, k.bn))
        scalars = {"tiles": "*i32", "tile_count": "*i32", "cover": "*i64", "starts": "*i64", "ends": "*i64"}
        scalars.update(sizes="*i32", sizes_step="i64", fault="*i64")
        scalars.update(dict.fromkeys(("rows_total", "columns", "depth", "groups", "batches", "scans", "window", "zero_tail"), "i32"))
        scalars.update(wide="i32", offsets="i32")
        table = c.ragged_mode is RaggedDotMode.NON_CONTRACTING
        constants.update(LOG=max(groups, 1).bit_length() - 1, RHS_K_INNER=c.trans_b, TABLE=table, PROGRAMMATIC=table and not groups)
    signature = {"lhs": boxes["lhs"], "rhs": boxes["rhs"], "out": boxes["out"], **scalars, "alpha": "fp32"}
    signature.update(dict.fromkeys(constants, "constexpr"))
    module = "hopper_slabs" if function == "contracting" else "hopper_rows"
    options = (("num_warps", 4), ("maxnreg", limit))
    return KernelSpec(module, function, tuple(signature.items()), tuple(constants.items()), tuple(divisible), options, machine.target)


def _registers(consumers: int, blocks: int) -> tuple[int, int, int]:
    """Registers of a consumer's thread and of the copying warp's (whose group of four warps has as many), and of all at the start.

    What the group of the copying warp gives up, the first consumer gets; it must be as many as the others have.
    """
    groups = consumers + 1
    limit = min(65536 // (blocks * groups * 128) // 8 * 8, 168 if consumers > 1 else 160)
    spare = 24 if limit < 100 or consumers == 3 else 40
    return min((limit * groups - spare) // consumers // 8 * 8, 232), spare, limit


_STRIDES = {
    False: ("lhs_b", "lhs_m", "lhs_k", "rhs_g", "rhs_b", "rhs_k", "rhs_n", "out_b", "out_m", "out_n", "c_b", "c_m", "c_n"),
    True: ("lhs_b", "lhs_m", "lhs_k", "rhs_b", "rhs_k", "rhs_n", "out_g", "out_b", "out_m", "out_n", "c_g", "c_b", "c_m", "c_n"),
}


def _portable_spec(k: Candidate, c: GroupedGemmConfig, machine: Machine) -> KernelSpec:
    slabs = c.ragged_mode is RaggedDotMode.CONTRACTING
    a, b, d = (f"*{element_of(t)}" for t in (c.type_a, c.type_b, c.type_d))
    wide = c.type_a != c.type_b
    # TF32 allows less than float32, it does not demand it: gfx950 has no such unit
    tf32 = c.compute_type == "tf32" and machine.target.architecture != "gfx950"
    precision = "tf32" if tf32 else "ieee"
    constants: dict[str, Any] = {"BM": k.bm, "BN": k.bn, "BK": k.bk}
    signature: dict[str, Any]
    if slabs:
        function = "contracting"
        constants.update(SPLIT=k.split, WIDE=wide, HAS_C=bool(c.beta), PRECISION=precision)
        signature = {"lhs": a, "rhs": b, "out": d, "c": d, "starts": "*i64", "ends": "*i64", "parts": "*fp32"}
        scalars: tuple[str, ...] = ("rows", "columns", "groups", "batches", "scans", "window", "active")
        tail: tuple[str, ...] = ()
    else:
        function = "non_contracting"
        table = c.ragged_mode is RaggedDotMode.NON_CONTRACTING
        bias = c.epilogue.bias
        constants.update(TABLE=table, WIDE=wide, EVEN_K=c.k % k.bk == 0, HAS_C=bool(c.beta), HAS_BIAS=bias)
        constants.update(SWAP=k.swap, PRECISION=precision)
        signature = {"lhs": a, "rhs": b, "out": d, "c": d, "bias": d, "tiles": "*i32", "tile_count": "*i32", "cover": "*i64"}
        signature["rows_total"] = "i64"
        scalars = ("columns", "depth", "groups", "batches", "scans", "window", "zero_tail")
        tail = ("bias_g", "bias_n")
    signature.update(dict.fromkeys(scalars, "i32"))
    units = {"lhs_m": c.lhs_strides[1], "lhs_k": c.lhs_strides[2], "rhs_k": c.rhs_strides[2], "rhs_n": c.rhs_strides[3]}
    units.update(out_m=c.output_strides[2], out_n=c.output_strides[3], c_m=c.c_strides[2], c_n=c.c_strides[3])
    divisible = {}
    inner = {
        "lhs": "lhs_m" if c.trans_a else "lhs_k",
        "rhs": "rhs_k" if c.trans_b else "rhs_n",
        "out": "out_n" if c.must_swap_operands else "out_m",
        "c": "c_n" if c.must_swap_operands else "c_m",
    }
    alignments = {"lhs": c.lhs_alignment, "rhs": c.rhs_alignment, "out": c.output_alignment, "c": c.c_alignment}
    sizes = {"lhs": c.type_a, "rhs": c.type_b, "out": c.type_d, "c": c.type_c}
    for name in _STRIDES[slabs] + tail:
        operand = name.split("_")[0]
        if name == inner.get(operand) and units[name] == 1:
            signature[name] = "constexpr"
            constants[name] = 1
            continue
        signature[name] = "i64"
        if operand in alignments and alignments[operand] == 16 and name != inner[operand]:
            divisible[name] = 16 // FLOAT_BYTES[sizes[operand]]
    for operand, alignment in alignments.items():
        if alignment == 16:
            divisible[operand] = 16
    for name, extent in (("columns", c.n), *((("rows", c.m),) if slabs else ())):
        if extent % 16 == 0:  # lets masks be taken whole vectors at a time
            divisible[name] = 16
    signature.update(alpha="fp32", beta="fp32")
    signature.update({name: "constexpr" for name in constants if name not in signature})
    options = {"num_warps": k.warps, "num_stages": k.stages, **dict(k.extra)}
    return KernelSpec(
        "portable",
        function,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple(divisible.items()),
        tuple(options.items()),
        machine.target,
    )


def parts_spec(candidate: Candidate, config: GroupedGemmConfig, machine: Machine) -> KernelSpec:
    """The specialisation that adds up a split candidate's parts."""
    c = config
    d = f"*{element_of(c.type_d)}"
    signature: dict[str, Any] = {"parts": "*fp32", "out": d, "c": d}
    signature.update(dict.fromkeys(("rows", "columns", "groups", "batches"), "i32"))
    signature.update(dict.fromkeys(("out_g", "out_b", "out_m", "out_n", "c_g", "c_b", "c_m", "c_n"), "i64"))
    signature.update(alpha="fp32", beta="fp32")
    constants = {"BM": 32, "BN": 64, "SPLIT": candidate.split, "HAS_C": bool(c.beta)}
    signature.update(dict.fromkeys(constants, "constexpr"))
    return KernelSpec("portable", "add_parts", tuple(signature.items()), tuple(constants.items()), (), (("num_warps", 4),), machine.target)
