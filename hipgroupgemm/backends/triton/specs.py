"""From an algorithm and a config to the kernel's specialisation: types of parameters, constants, what is divisible, compile options."""

from __future__ import annotations

from typing import Any, NamedTuple

from hipgroupgemm.backends.triton.compiler import ELEMENTS, KernelSpec
from hipgroupgemm.backends.triton.kernel_config import DeviceProperties, KernelConfig
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode

__all__ = ["Operand", "add_partials_spec", "operands_of", "room_for_groups", "spec_of", "table_bytes"]

_MOST_GROUPS = 1024  # that a block scans by itself


class Operand(NamedTuple):
    """An operand as the kernels see it: its type, alignment (bytes), strides (elements) by parameter, and its inner axis's parameter."""

    type: str
    alignment: int
    strides: dict[str, int]
    inner: str

    @property
    def pointer(self) -> str:
        """The type of its pointer in Triton's spelling."""
        return f"*{ELEMENTS[self.type]}"


def operands_of(config: GroupedGemmConfig) -> dict[str, Operand]:
    """The operands by role. A kernel's parameters are named after them: `lhs`, `lhs_m`."""
    c = config

    def operand(role: str, kind: str, alignment: int, axes: str, strides: tuple[int, ...], inner: str) -> Operand:
        named = {f"{role}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}
        return Operand(kind, alignment, named, f"{role}_{inner}")

    contracting = c.ragged_mode is RaggedDotMode.CONTRACTING
    # in CONTRACTING out has an axis of groups, else rhs has
    rhs_axes, rhs_strides = ("bkn", c.rhs_strides[1:]) if contracting else ("gbkn", c.rhs_strides)
    out_axes, first = ("gbmn", 0) if contracting else ("bmn", 1)
    out_inner = "n" if c.must_swap_operands else "m"
    return {
        "lhs": operand("lhs", c.type_a, c.lhs_alignment, "bmk", c.lhs_strides, "m" if c.trans_a else "k"),
        "rhs": operand("rhs", c.type_b, c.rhs_alignment, rhs_axes, rhs_strides, "k" if c.trans_b else "n"),
        "out": operand("out", c.type_d, c.output_alignment, out_axes, c.output_strides[first:], out_inner),
        "c": operand("c", c.type_c, c.c_alignment, out_axes, c.c_strides[first:], out_inner),
        "bias": operand("bias", c.type_d, 1, "gn", (c.bias_group_stride, c.bias_inner_stride), ""),
    }


_KINDS = dict.fromkeys(("tiles", "tile_count", "sizes"), "*i32") | dict.fromkeys(("covered_range", "group_starts", "group_ends"), "*i64")
_KINDS |= {"fault": "*i64", "sizes_step": "i64", "partials": "*fp32", "alpha": "fp32", "beta": "fp32"}
_SCAN = "sizes sizes_step sizes_are_wide sizes_are_ends fault"


def _parameters(names: str) -> dict[str, Any]:
    """Types of parameters that are no operands."""
    return {name: _KINDS.get(name, "i32") for name in names.split()}


def _spec(
    kernel: str, parameters: dict[str, Any], constants: dict[str, Any], divisible: dict[str, int], options: dict[str, Any], device: Any
) -> KernelSpec:
    module, function = kernel.split(".")
    signature, *others = ((*x.items(),) for x in (parameters | dict.fromkeys(constants, "constexpr"), constants, divisible, options))
    return KernelSpec(module, function, signature, others[0], others[1], others[2], device.target)


def spec_of(kernel: KernelConfig, config: GroupedGemmConfig, device: DeviceProperties, *, scanning: bool = True) -> KernelSpec:
    """The specialisation that runs a config (a plan's key); scanning: it scans the sizes too, where the kernel can."""
    if kernel.kernel == "tma":
        return _hopper_spec(kernel, config, device, room_for_groups(kernel, config, device) if scanning else 0)
    return _portable_spec(kernel, config, device)


def room_for_groups(kernel: KernelConfig, config: GroupedGemmConfig, device: DeviceProperties) -> int:
    """Groups that a block of the kernel has room to scan by itself, 0 where it cannot: then they are scanned in front of it."""
    k, c = kernel, config
    if k.kernel != "tma" or c.ragged_mode is RaggedDotMode.BATCH or c.sizes_per_batch or c.group_count != c.group_total:
        return 0
    if not 0 < c.group_total <= _MOST_GROUPS:
        return 0
    room = max(128, 1 << (c.group_total - 1).bit_length())
    needed = k.shared_bytes(FLOAT_BYTES[c.type_a], FLOAT_BYTES[c.type_d]) + table_bytes(room)
    return room if k.blocks * (needed + 1024) <= device.shared_memory + 1024 else 0


def table_bytes(groups: int) -> int:
    """Shared memory of the tables of so many groups, and of the scan that makes them."""
    return 8 * groups + 512 if groups else 0


def _hopper_spec(k: KernelConfig, c: GroupedGemmConfig, device: DeviceProperties, groups: int) -> KernelSpec:
    element, out = ELEMENTS[c.type_a], ELEMENTS[c.type_d]
    height = k.tile_m // k.consumers
    registers, spare, limit = _registers(k.consumers, k.blocks)
    constants: dict[str, Any] = {"BM": k.tile_m, "BN": k.tile_n, "BK": k.tile_k, "STAGES": k.stages, "CONSUMERS": k.consumers}
    # an instruction as wide as the tile, unless its accumulators alone would take all registers that several blocks leave a thread
    constants["MMA_N"] = min(k.tile_n, 256 if limit >= 160 else 128 if limit >= 96 else 64)
    constants.update(SUBTILES=k.subtiles, BUFFERS=k.buffers, REGISTERS=registers, SPARE=spare, GROUPS=groups)
    divisible: dict[str, int] = {}
    boxes: dict[str, tuple[int, ...]]
    parameters: dict[str, Any]
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        boxes = {"lhs": (1, 1, k.tile_k, height), "rhs": (1, 1, k.tile_k, k.tile_n)}
        boxes["out"] = (1, 1, height, k.tile_n // k.subtiles) if k.subtiles else (1, 1, 8, 64)
        parameters = {"out_pointer": f"*{out}", **dict.fromkeys(("out_g", "out_b", "out_m"), "i64")}
        divisible = {"out_pointer": 16, **dict.fromkeys(("out_g", "out_b", "out_m"), 16 // FLOAT_BYTES[c.type_d])}
        if c.n % 16 == 0:
            divisible["N"] = 16
        parameters |= _parameters(f"group_starts group_ends {_SCAN} M N K groups batches scans swizzle active alpha")
        constants["PROGRAMMATIC"] = not groups
        listed, maps = c.out_listed, "out_maps"
    else:
        boxes = {"lhs": (1, 1, 1, height, k.tile_k), "out": (1, 1, 1, height, k.tile_n // k.subtiles)}
        boxes["rhs"] = (1, 1, k.tile_n, k.tile_k) if c.trans_b else (1, 1, k.tile_k, k.tile_n)
        parameters = _parameters(
            f"tiles tile_count covered_range group_starts group_ends {_SCAN} M N K groups batches scans swizzle zero_uncovered alpha"
        )
        table = c.ragged_mode is RaggedDotMode.NON_CONTRACTING
        constants.update(LOG=max(groups, 1).bit_length() - 1, RHS_K_INNER=c.trans_b, TABLE=table, PROGRAMMATIC=table and not groups)
        listed, maps = c.rhs_listed, "rhs_maps"
    constants["LISTED"] = listed
    if listed:
        parameters[maps] = "*i64"
    else:
        constants[maps] = 0
    parameters.update({role: ("desc", out if role == "out" else element, boxes[role]) for role in ("lhs", "rhs", "out")})
    function = "contracting" if c.ragged_mode is RaggedDotMode.CONTRACTING else "non_contracting"
    return _spec(f"hopper_{function}.{function}", parameters, constants, divisible, {"num_warps": 4, "maxnreg": limit}, device)


def _registers(consumers: int, blocks: int) -> tuple[int, int, int]:
    """Registers of a consumer's thread and of the producer's (whose group of four warps has as many), and of all at the start.

    What the group of the producer gives up, the first consumer gets; it must be as many as the others have.
    """
    groups = consumers + 1
    limit = min(65536 // (blocks * groups * 128) // 8 * 8, 168 if consumers > 1 else 160)
    spare = 24 if limit < 100 or consumers == 3 else 40
    return min((limit * groups - spare) // consumers // 8 * 8, 232), spare, limit


def _portable_spec(k: KernelConfig, c: GroupedGemmConfig, device: DeviceProperties) -> KernelSpec:
    contracting = c.ragged_mode is RaggedDotMode.CONTRACTING
    # TF32 allows less than float32, it does not demand it: gfx950 has no such unit
    tf32 = c.compute_type == "tf32" and device.target.architecture != "gfx950"
    constants: dict[str, Any] = {"BM": k.tile_m, "BN": k.tile_n, "BK": k.tile_k, "WIDE": c.type_a != c.type_b, "HAS_C": bool(c.beta)}
    constants["PRECISION"] = "tf32" if tf32 else "ieee"
    constants.update(_listed(c))
    operands = operands_of(c)
    if contracting:
        del operands["bias"]
        constants["SPLIT"] = k.split
        parameters = _parameters("group_starts group_ends partials M N groups batches scans swizzle active alpha beta")
    else:
        table = c.ragged_mode is RaggedDotMode.NON_CONTRACTING
        constants.update(TABLE=table, EVEN_K=c.k % k.tile_k == 0, HAS_BIAS=c.epilogue.bias, SWAP=k.swap)
        parameters = _parameters("tiles tile_count covered_range M N K groups batches scans swizzle zero_uncovered alpha beta")
        parameters["M"] = "i64"
    divisible = {}
    for role, operand in operands.items():
        parameters[role] = operand.pointer
        aligned = operand.alignment == 16
        if aligned:  # of a list that is the table
            divisible[role] = 16
        for name, stride in operand.strides.items():
            parameters[name] = "i64"
            if name == operand.inner and stride == 1:
                constants[name] = 1
            elif name != operand.inner and aligned:
                divisible[name] = 16 // FLOAT_BYTES[operand.type]
    for name, extent in (("N", c.n), *((("M", c.m),) if contracting else ())):
        if extent % 16 == 0:  # lets masks be taken whole vectors at a time
            divisible[name] = 16
    options = {"num_warps": k.warps, "num_stages": k.stages, **dict(k.extra)}
    return _spec(f"portable.{'contracting' if contracting else 'non_contracting'}", parameters, constants, divisible, options, device)


def _listed(c: GroupedGemmConfig) -> dict[str, Any]:
    """The constants that say whether operands are lists, and whether the arrays of these are aligned to 16 bytes."""
    aligned = min(c.output_alignment, c.c_alignment) if c.out_listed else c.rhs_alignment
    listed = c.out_listed or c.rhs_listed
    return {"LISTED": listed, "ALIGNED": listed and aligned == 16}


def add_partials_spec(kernel: KernelConfig, config: GroupedGemmConfig, device: DeviceProperties) -> KernelSpec:
    """The specialisation that adds up a split-k algorithm's partials."""
    parameters = _parameters("partials M N groups batches alpha beta")
    for role in ("out", "c"):
        operand = operands_of(config)[role]
        parameters |= {role: operand.pointer, **dict.fromkeys(operand.strides, "i64")}
    constants = {"BM": 32, "BN": 64, "SPLIT": kernel.split, "HAS_C": bool(config.beta), **_listed(config)}
    return _spec("portable.add_partials", parameters, constants, {}, {"num_warps": 4}, device)
