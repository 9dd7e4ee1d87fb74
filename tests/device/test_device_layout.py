"""The structs: the compiler's offsets are the documented ones, and the headers are plain C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from device_host import layout as L
from device_host.build import DEVICE, INCLUDE, HostBuild, compile_host

DTYPES = {
    "hgg_user_arguments": L.RECORD,
    "hgg_operand": L.OPERAND,
    "hgg_matrix": L.MATRIX,
    "hgg_fault": L.FAULT,
    "hgg_tile": L.TILE,
    "hgg_arguments": L.ARGUMENTS,
}


class Field(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("offset", ctypes.c_int),
        ("size", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostBuild:
    return HostBuild(compile_host(tmp_path_factory.mktemp("layout"), options=("-O0",)))


def test_offsets_are_those_of_the_documentation(host: HostBuild) -> None:
    count = ctypes.c_int.in_dll(host.library, "hgg_test_layout_count").value
    fields = (Field * count).in_dll(host.library, "hgg_test_layout")
    seen = {}
    for f in fields:
        seen.setdefault(f.type.decode(), {})[f.name.decode()] = (f.offset, f.size)
    assert seen.keys() == DTYPES.keys()
    for name, dtype in DTYPES.items():
        assert dtype.fields is not None
        mine = {field: (entry[1], entry[0].itemsize) for field, entry in dtype.fields.items()}
        assert seen[name] == mine, name
    assert (L.RECORD.itemsize, L.ARGUMENTS.itemsize) == (196, 648)
    assert ctypes.c_int.in_dll(host.library, "hgg_test_threads").value == L.THREADS


def test_headers_are_plain_c(tmp_path: Path) -> None:
    compiler = next(name for name in ("gcc", "clang", "cc") if shutil.which(name))
    source = tmp_path / "plain.c"
    source.write_text('#include "arguments.h"\nint main(void) { return (int)sizeof(hgg_arguments) != 648; }\n')
    command = [
        compiler,
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{DEVICE}",
        f"-I{INCLUDE}",
        str(source),
    ]
    subprocess.run([*command, "-o", str(tmp_path / "plain")], check=True)
    subprocess.run([str(tmp_path / "plain")], check=True)


def test_host_launch_refuses_what_it_does_not_know(host: HostBuild) -> None:
    nothing = np.zeros((), L.ARGUMENTS)
    assert host.launch("hgg_scan", nothing, 1) == 0
    assert host.launch("hgg_other", nothing, 1) == 1
    assert host.launch("hgg_scan", nothing, 0) == 2
    assert host.launch("hgg_scan", nothing, 1, threads=128) == 2
