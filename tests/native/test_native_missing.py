"""The native layer where there is no ROCm: what it says, and what it reads from files."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hipgroupgemm import native
from hipgroupgemm.native import _build, _files, _loader, _rocm

ROOT = Path(__file__).resolve().parents[2]


def test_import_needs_nothing() -> None:
    code = "import sys\nimport hipgroupgemm.native\nprint(sorted({'cffi', 'hip', 'cupy', 'torch'} & set(sys.modules)))\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "[]\n"


def test_no_shim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIPGROUPGEMM_NATIVE_LIBRARY", str(tmp_path / "libhipgroupgemm.so"))
    monkeypatch.setattr(_loader, "_library", None)
    with pytest.raises(native.NativeUnavailableError, match=r"does not exist.*apt install libhipblaslt-dev"):
        native.load()
    with pytest.raises(native.NativeUnavailableError, match="does not exist"):
        native.Handle()
    reason = native.unavailable_reason()
    assert reason is not None
    assert "\n" not in reason
    assert str(tmp_path) in reason


def test_no_hipblaslt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shim = tmp_path / "libhipgroupgemm.so"
    shim.write_bytes(b"not an ELF file")

    def missing(name: str, mode: int = 0) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setenv("HIPGROUPGEMM_NATIVE_LIBRARY", str(shim))
    monkeypatch.setattr(_loader, "_library", None)
    monkeypatch.setattr(_rocm, "roots", lambda: [])
    monkeypatch.setattr(_rocm, "mapped", lambda _: [])
    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(native.NativeUnavailableError, match=r"not found.*libhipblaslt\.so\.1.*ROCM_PATH"):
        native.load()


def test_two_runtimes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shim = tmp_path / "libhipgroupgemm.so"
    shim.write_bytes(b"")
    monkeypatch.setenv("HIPGROUPGEMM_NATIVE_LIBRARY", str(shim))
    monkeypatch.setattr(_loader, "_library", None)
    monkeypatch.setattr(_rocm, "mapped", lambda _: ["/a/libamdhip64.so.6", "/b/libamdhip64.so.7"])
    with pytest.raises(native.NativeUnavailableError, match=r"/a/libamdhip64\.so\.6 and /b/libamdhip64\.so\.7"):
        native.load()


def test_errors_are_what_callers_catch() -> None:
    import pickle

    assert issubclass(native.NativeError, RuntimeError)
    assert issubclass(native.NativeValueError, ValueError)
    assert issubclass(native.NativeUnsupportedError, NotImplementedError)
    error = native.NativeValueError("hgg_run", "HGG_WRONG_STREAM", -1, "hgg_run: stream 0x1")
    assert str(error) == "hgg_run: stream 0x1 [HGG_WRONG_STREAM]"
    for original in (error, native.NativeUnavailableError("nothing is here")):
        copy = pickle.loads(pickle.dumps(original))
        assert type(copy) is type(original)
        assert str(copy) == str(original)
        assert (copy.call, copy.status, copy.library_status, copy.text) == (
            original.call,
            original.status,
            original.library_status,
            original.text,
        )


def test_header_parses_and_agrees_with_python() -> None:
    cffi = pytest.importorskip("cffi")
    ffi = cffi.FFI()
    ffi.cdef(_files.abi_declarations())
    lib = ffi.dlopen(None)
    assert lib.HGG_RECORD_SIZE == native.RECORD_SIZE == 196
    assert lib.HGG_ALIGNMENT == native.WORKSPACE_ALIGNMENT
    assert lib.HGG_ABI_VERSION == _loader.ABI_VERSION
    enums = (("hgg_data_type", native.DATA_TYPES), ("hgg_compute_type", native.COMPUTE_TYPES), ("hgg_ragged", native.RAGGED))
    for enum, table in enums:
        assert set(ffi.typeof(f"enum {enum}").relements.values()) == set(table.values())
    assert [native.RAGGED[name] for name in ("n", "m", "k", "")] == [getattr(lib, f"HGG_RAGGED_{x}") for x in ("N", "M", "K", "NONE")]
    assert ffi.sizeof("hgg_handle") == ffi.sizeof("hgg_instance") == 8
    fields = {name for name, _ in ffi.typeof("hgg_problem").fields}
    assert fields == {field.name for field in dataclasses.fields(native.GemmProblem)}


def test_files_are_found_in_a_checkout() -> None:
    assert Path(native.include_folder(), "hipgroupgemm.h").is_file()


def test_roots_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rocm, site = tmp_path / "rocm", tmp_path / "site"
    for include in (rocm / "include", site / "_rocm_sdk_devel" / "include"):
        (include / "hipblaslt").mkdir(parents=True)
        (include / "hipblaslt" / "hipblaslt-ext.hpp").touch()
    version = "#define HIPBLASLT_VERSION_MAJOR     0\n#define HIPBLASLT_VERSION_MINOR     12\n"
    version += "#define HIPBLASLT_VERSION_PATCH 1\n#define HIPBLASLT_VERSION_TWEAK abc1234\n"
    (rocm / "include" / "hipblaslt" / "hipblaslt-version.h").write_text(version)
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.delenv("ROCM_HOME", raising=False)
    monkeypatch.syspath_prepend(str(site))
    found = _rocm.find_headers()
    assert found == _rocm.Root(str(site / "_rocm_sdk_devel"), "ROCm wheel")
    monkeypatch.setenv("ROCM_PATH", str(rocm))
    found = _rocm.find_headers()
    assert found == _rocm.Root(str(rocm), "ROCM_PATH")
    assert _rocm.header_version(found.include) == (0, 12, 1)
    assert _rocm.header_version(str(site)) is None
    assert _rocm.roots()[-1].path == "/usr"


def test_file_version(tmp_path: Path) -> None:
    for name, version in (
        ("libhipblaslt.so.1.1", (1, 1)),
        ("libhipblaslt.so.0.12.60400", (0, 12)),
        ("libhipblaslt.so.1", None),
        ("libhipblaslt.so", None),
    ):
        (tmp_path / name).touch()
        assert _rocm.file_version(str(tmp_path / name)) == version
    (tmp_path / "link.so").symlink_to(tmp_path / "libhipblaslt.so.0.12.60400")
    assert _rocm.file_version(str(tmp_path / "link.so")) == (0, 12)


def test_names_in_a_file(tmp_path: Path) -> None:
    libc = next(path for path in _rocm.mapped("libc.so") if path.endswith("libc.so.6"))
    assert b"libc.so.6" in _loader._in_file(libc, rb"libc\.so\.\d+")
    (tmp_path / "shim").write_bytes(b"\x7fELF\0HGG_ROCM_FOLDERS=/opt/rocm/lib:/x y/lib64\0more")
    assert _loader._in_file(str(tmp_path / "shim"), rb"HGG_ROCM_FOLDERS=([^\0]*)") == {b"/opt/rocm/lib:/x y/lib64"}


def test_a_second_runtime_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the names in the files, so that hipBLASLt does not bring its own runtime into the process."""
    runtime, other, fits = (tmp_path / name for name in ("libamdhip64.so.7.1", "libhipblaslt.so.0", "libhipblaslt.so.1"))
    runtime.write_bytes(b"..libamdhip64.so.7\0..")
    other.write_bytes(b"..libamdhip64.so.6\0libc.so.6")
    fits.write_bytes(b"..libamdhip64.so.7\0libc.so.6")
    monkeypatch.setattr(_rocm, "mapped", lambda prefix: [str(runtime)] if prefix == "libamdhip64.so" else [])
    with pytest.raises(native.NativeUnavailableError, match=r"needs libamdhip64\.so\.6, but .*libamdhip64\.so\.7\.1 is in this process"):
        _loader._refuse_second_runtime(str(other))
    _loader._refuse_second_runtime(str(fits))


def test_kernel_files_that_a_catalogue_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "hipblaslt" / "library" / "gfx942"
    library.mkdir(parents=True)
    stems = [f"TensileLibrary_{name}_gfx942" for name in ("BB_BB", "HH_HH", "SS_SS")]
    (library / "TensileLibrary_lazy_gfx942.dat").write_bytes(b"\x93" + b"".join(b"\xd9\x1d" + stem.encode() + b"\xc0" for stem in stems))
    for name in (f"{stems[0]}.dat", f"{stems[0]}.co", f"{stems[1]}.dat", f"{stems[2]}.hsaco"):
        (library / name).touch()

    def loaded() -> types.SimpleNamespace:
        return types.SimpleNamespace(hipblaslt=str(tmp_path / "libhipblaslt.so.1"))

    monkeypatch.setattr(_loader, "load", loaded)
    monkeypatch.delenv("HIPBLASLT_TENSILE_LIBPATH", raising=False)
    assert native.missing_kernel_files() == [str(library / f"{stems[1]}.co"), str(library / f"{stems[2]}.dat")]
    monkeypatch.setenv("HIPBLASLT_TENSILE_LIBPATH", str(tmp_path / "elsewhere"))
    assert native.missing_kernel_files() == []
    wanted = [str(library / f"{stems[1]}.co"), str(library / f"{stems[2]}.dat")]
    assert native.missing_kernel_files(str(tmp_path / "hipblaslt")) == wanted
    monkeypatch.setattr(_loader, "load", lambda: (_ for _ in ()).throw(native.NativeUnavailableError("no shim")))
    assert native.missing_kernel_files() == []


def test_build_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    include = tmp_path / "rocm" / "include" / "hipblaslt"
    include.mkdir(parents=True)
    (include / "hipblaslt-ext.hpp").touch()
    out = tmp_path / "out"

    def attempt() -> str:
        assert not _build.NativeBuild(_rocm, ROOT).run(out)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("hipgroupgemm: built without the hipblaslt backend's native part: ")
        return lines[0]

    monkeypatch.setenv("HIPGROUPGEMM_BUILD_NATIVE", "0")
    assert "HIPGROUPGEMM_BUILD_NATIVE is 0" in attempt()
    monkeypatch.delenv("HIPGROUPGEMM_BUILD_NATIVE")
    monkeypatch.setattr(_rocm, "find_headers", lambda: None)
    assert re.search(r"no include/hipblaslt/hipblaslt-ext\.hpp in .*/usr .*ROCM_PATH", attempt())
    root = _rocm.Root(str(tmp_path / "rocm"), "ROCM_PATH")
    monkeypatch.setattr(_rocm, "find_headers", lambda: root)
    monkeypatch.setenv("CXX", "false")
    assert "the compiler failed: status 1" in attempt()
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert "cannot be run" in attempt()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in attempt()
    monkeypatch.setenv("HIPGROUPGEMM_BUILD_NATIVE", "1")
    with pytest.raises(SystemExit, match="so this is an error"):
        _build.NativeBuild(_rocm, ROOT).run(out)
    assert not out.exists()
