"""NumPy dtypes of the structs in device/arguments.h and include/user_arguments.h.

Written by hand from the documented offsets; test_device_layout.py compares the compiler's own with them.
"""

import numpy as np

RECORD = np.dtype(
    {
        "names": [
            "m", "n", "batch", "k", "d", "c", "a", "b",
            "stride_d1", "stride_d2", "stride_c1", "stride_c2",
            "stride_a1", "stride_a2", "stride_b1", "stride_b2",
            "alpha", "beta", "scale_a", "scale_b", "scale_c", "scale_d", "scale_alpha_vec", "bias",
            "bias_type", "reserved", "e", "stride_e1", "stride_e2", "act0", "act1", "activation_type",
        ],
        "formats": [
            "<u4", "<u4", "<u4", "<u4", "<u8", "<u8", "<u8", "<u8",
            "<u4", "<u4", "<u4", "<u4", "<u4", "<u4", "<u4", "<u4",
            "V16", "V16", "<u8", "<u8", "<u8", "<u8", "<u8", "<u8",
            "<i4", "<i4", "<u8", "<u4", "<u4", "<f4", "<f4", "<i4",
        ],
        "offsets": [
            0, 4, 8, 12, 16, 24, 32, 40,
            48, 52, 56, 60, 64, 68, 72, 76,
            80, 96, 112, 120, 128, 136, 144, 152,
            160, 164, 168, 176, 180, 184, 188, 192,
        ],
        "itemsize": 196,
    }
)  # fmt: skip

LISTED = -(2**63)  # a group stride

OPERAND = np.dtype([("base", "<u8"), ("row_stride", "<i8"), ("group_stride", "<i8"), ("batch_stride", "<i8")])
MATRIX = np.dtype(
    [
        ("base", "<u8"),
        ("row_stride", "<i8"),
        ("column_stride", "<i8"),
        ("group_stride", "<i8"),
        ("batch_stride", "<i8"),
    ]
)
FAULT = np.dtype([("kind", "<i4"), ("batch", "<i4"), ("group", "<i8"), ("wanted", "<i8"), ("left", "<i8")])
TILE = np.dtype([("problem", "<i4"), ("rows", "<i4"), ("first_row", "<i8")])

ARGUMENTS = np.dtype(
    [
        ("sizes", "<u8"), ("sizes_stride", "<i8"), ("sizes_batch_stride", "<i8"),
        ("group_offset", "<u8"), ("group_offset_value", "<i8"), ("ragged_extent", "<i8"),
        ("starts", "<u8"), ("ends", "<u8"), ("covered_range", "<u8"), ("fault", "<u8"),
        ("sizes_kind", "<i4"), ("sizes_type", "<i4"), ("group_offset_type", "<i4"), ("batch_count", "<i4"),
        ("group_count", "<i4"), ("group_total", "<i4"), ("mode", "<i4"), ("flags", "<u4"),
        ("records", "<u8"), ("record_count", "<i4"), ("block_rows", "<i4"),
        ("tiles", "<u8"), ("tile_count", "<u8"), ("tile_capacity", "<i8"),
        ("alpha", "V16"), ("beta", "V16"),
        ("d", OPERAND), ("c", OPERAND), ("a", OPERAND), ("b", OPERAND), ("bias", OPERAND),
        ("out", MATRIX), ("c_matrix", MATRIX),
        ("out_rows", "<i8"), ("out_columns", "<i8"),
        ("out_batch_count", "<i4"), ("out_type", "<i4"), ("c_type", "<i4"),
        ("record", RECORD),
    ]
)  # fmt: skip

THREADS = 256
SIZES_NONE, SIZES_COUNTS, SIZES_OFFSETS = 0, 1, 2
INTEGERS = {"i1": 0, "i2": 1, "i4": 2, "i8": 3, "u1": 4, "u2": 5, "u4": 6, "u8": 7}
RAGGED_N, RAGGED_M, RAGGED_K = 0, 1, 2
FLOATS = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}
OVERRIDE_ALPHA, OVERRIDE_BETA = 1, 2
FAULT_NONE, FAULT_NEGATIVE, FAULT_PAST_END, FAULT_OFFSETS, FAULT_GROUP_OFFSET = range(5)
KERNELS = ("hgg_fill", "hgg_scan", "hgg_zero_uncovered")
