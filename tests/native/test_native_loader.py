"""Finding and sharing hipBLASLt and the HIP runtime: each case in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hipgroupgemm.native import load, shim_path

LIBRARY = load()
PROBLEM = "p = n.GemmProblem(*['float16'] * 4, count=2, m=64, n=64, k=64, lda=64, ldb=64, ldc=64, ldd=64)\n"


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, "-c", "import ctypes, os\nimport hipgroupgemm.native as n\n" + code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, (result.returncode, result.stdout, result.stderr)
    return result.stdout


def reason(code: str = "", **environment: str) -> str:
    return run(code + "\nprint(n.unavailable_reason())", **environment)


def compiled(folder: Path, name: str, source: str, *flags: str) -> Path:
    path = folder / name
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), f"-Wl,-soname,{name}", *flags],
        input=source,
        text=True,
        check=True,
    )
    return path


def test_what_is_loaded() -> None:
    assert LIBRARY.shim == shim_path()
    assert LIBRARY.built_for[:2] == (1, 1)
    assert os.path.basename(LIBRARY.hipblaslt) == "libhipblaslt.so.1.1"
    assert LIBRARY.hip == os.path.join(os.environ["LD_LIBRARY_PATH"].split(":")[0], "libamdhip64.so.6")


def test_nothing_is_loaded_by_the_import() -> None:
    out = run("from hipgroupgemm.native import _rocm\nprint(_rocm.mapped('libamdhip64'), _rocm.mapped('libhipblaslt'))")
    assert out == "[] []\n"


def test_two_runtimes_are_refused_with_both_paths(tmp_path: Path) -> None:
    other = compiled(tmp_path, "libamdhip64.so.7", "int hipInit(unsigned flags) { return (int)flags; }")
    both = f"ctypes.CDLL({str(other)!r})\nctypes.CDLL('libamdhip64.so.6')"
    text = reason(both)
    assert "two HIP runtimes" in text
    assert str(other) in text
    assert LIBRARY.hip in text


def test_a_runtime_of_another_release_in_the_process(tmp_path: Path) -> None:
    """As CuPy's or PyTorch's for ROCm 7 would be: hipBLASLt here needs libamdhip64.so.6."""
    other = compiled(tmp_path, "libamdhip64.so.7", "int hipInit(unsigned flags) { return (int)flags; }")
    text = reason(f"ctypes.CDLL({str(other)!r})")
    assert "two HIP runtimes" in text
    assert str(other) in text
    assert "libamdhip64.so.6" in text


def test_two_names_of_one_runtime_are_one(tmp_path: Path) -> None:
    link = tmp_path / "libamdhip64.so"
    link.symlink_to(LIBRARY.hip)
    assert reason(f"ctypes.CDLL({str(link)!r})") == "None\n"


@pytest.mark.parametrize("mode", ["os.RTLD_NOW | os.RTLD_LOCAL", "os.RTLD_LAZY | os.RTLD_GLOBAL"])
def test_a_hipblaslt_in_the_process_is_reused(tmp_path: Path, mode: str) -> None:
    """Under another file name and without a version in it, as PyTorch's wheels bring it; loaded privately."""
    copy = tmp_path / "libhipblaslt.so"
    shutil.copyfile(LIBRARY.hipblaslt, copy)
    out = run(
        f"ctypes.CDLL({str(copy)!r}, mode={mode})\n"
        "library = n.load()\n"
        "from hipgroupgemm.native import _rocm\n"
        "print(library.hipblaslt, len(_rocm.mapped('libhipblaslt')), len(_rocm.mapped('libamdhip64')))\n"
        "with n.Handle() as h:\n"
        "    print(h.info().loaded)\n"
    )
    assert out.splitlines() == [f"{copy} 1 1", "(1, 1, 0)"]


def test_another_version_by_the_file_name() -> None:
    text = reason(HIPGROUPGEMM_NATIVE_LIBRARY=os.environ["HIPGROUPGEMM_MISMATCH"])
    assert "was built for hipBLASLt 1.2" in text
    assert "is version 1.1" in text
    assert LIBRARY.hipblaslt in text


def test_another_version_by_its_own_word(tmp_path: Path) -> None:
    """A file name that says nothing: the library is asked, before any of its classes is used."""
    copy = tmp_path / "libhipblaslt.so"
    shutil.copyfile(LIBRARY.hipblaslt, copy)
    out = run(
        f"ctypes.CDLL({str(copy)!r})\ntry:\n    n.Handle()\nexcept n.NativeError as e:\n    print(e.status, e)\n",
        HIPGROUPGEMM_NATIVE_LIBRARY=os.environ["HIPGROUPGEMM_MISMATCH"],
    )
    assert out.startswith("HGG_VERSION_MISMATCH")
    assert "built for hipBLASLt 1.2.0, but 1.1.0 is loaded" in out


def test_a_shim_of_another_abi(tmp_path: Path) -> None:
    shim = compiled(tmp_path, "libhipgroupgemm.so", "unsigned hgg_abi_version(void) { return 99; }")
    text = reason(HIPGROUPGEMM_NATIVE_LIBRARY=str(shim))
    assert "ABI version 99, this Python package wants 1" in text


def test_a_shim_that_needs_what_hipblaslt_lacks(tmp_path: Path) -> None:
    source = "extern int hipblasltOfTheFuture(void); int hgg_abi_version(void) { return hipblasltOfTheFuture(); }"
    shim = compiled(tmp_path, "libhipgroupgemm.so", source)
    text = reason(HIPGROUPGEMM_NATIVE_LIBRARY=str(shim))
    assert "does not fit" in text
    assert "(version 1.1)" in text
    assert "hipblasltOfTheFuture" in text


def test_no_shim(tmp_path: Path) -> None:
    text = reason(HIPGROUPGEMM_NATIVE_LIBRARY=str(tmp_path / "none.so"))
    assert "none.so does not exist" in text
    assert "apt install libhipblaslt-dev" in text


def test_forked_child_is_told() -> None:
    out = run(
        "handle = n.Handle()\n" + PROBLEM + "gemm = n.GroupedGemm(handle, p)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        n.Handle()\n"
        "    except n.NativeUnavailableError as e:\n"
        "        print('load', 'spawn or forkserver' in str(e))\n"
        "    for call in (gemm.algorithms, lambda: gemm.run(4096, 0), handle.info):\n"
        "        try:\n"
        "            call()\n"
        "        except n.NativeError as e:\n"
        "            print(e.status)\n"
        "    del gemm, handle\n"
        "    print('done', flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "print(handle.info().instances)\n"
        "gemm.close()\n"
        "handle.close()\n"
    )
    assert out.splitlines() == ["load True", *["HGG_FORKED"] * 3, "done", "1"]


def test_fork_before_the_first_use() -> None:
    out = run(
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print(n.Handle().info().instances, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(n.Handle().info().instances)\n"
    )
    assert out == "0\n0\n"


def test_objects_left_open_at_exit() -> None:
    """In any order, from any thread: the process ends with status 0 and says nothing."""
    assert (
        run(
            "import threading\n"
            "h = [n.Handle() for _ in range(3)]\n" + PROBLEM + "g = [n.GroupedGemm(x, p) for x in h]\n"
            "threading.Thread(target=lambda: h[0].close()).start()\n"
            "del h[1]\n"
        )
        == ""
    )


def test_collected_objects_give_everything_back() -> None:
    out = run(
        "import gc\nh = n.Handle()\n" + PROBLEM + "for _ in range(5):\n    n.GroupedGemm(h, p)\ngc.collect()\nprint(h.info().instances)\n"
    )
    assert out == "0\n"
