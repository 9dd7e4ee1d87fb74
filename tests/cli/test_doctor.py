"""The doctor, on simulated machines: files, packages and libraries of AMD, NVIDIA and bare hosts."""

import json
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console
from store_reports import config_of, row
from store_reports import report as store_report

from hipgroupgemm.cli import cli
from hipgroupgemm.cli.doctor import BackendState, Finding, Machine, Report, examine, gfx_name, print_report
from hipgroupgemm.tuning.keep import keep


class FakeFunction:
    """A C function that writes a number where its first argument points to."""

    def __init__(self, value: int, status: int = 0) -> None:
        self.value, self.status = value, status

    def __call__(self, *arguments) -> int:
        for argument in arguments:
            target = getattr(argument, "_obj", None)
            if target is not None:
                target.value = self.value
                break
        return self.status


class FakeCuda:
    """libcuda with one H200."""

    cuInit = staticmethod(lambda flags: 0)
    cuDeviceGetCount = FakeFunction(1)
    cuDriverGetVersion = FakeFunction(12080)

    @staticmethod
    def cuDeviceGetName(buffer, length, index) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    @staticmethod
    def cuDeviceGetAttribute(pointer, attribute, index) -> int:
        pointer._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def machine(root, *, libraries=None, distributions=None, modules=None, environ=None, broken=None) -> Machine:
    libraries, modules = libraries or {}, modules or {}
    return Machine(
        root,
        environ or {},
        distributions or {},
        modules.get,
        lambda name: next((library for key, library in libraries.items() if key in name), None),
        lambda module: (broken or {}).get(module, ""),
    )


def touch(root, *paths: str) -> None:
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")


def add_gpu(root, version: int, node: int = 1) -> None:
    touch(root, f"sys/class/kfd/kfd/topology/nodes/{node}/properties", "sys/class/kfd/kfd/topology/nodes/0/properties", "dev/kfd")
    (root / "sys/class/kfd/kfd/topology/nodes/0/properties").write_text("cpu_cores_count 64\ngfx_target_version 0\n")
    (root / f"sys/class/kfd/kfd/topology/nodes/{node}/properties").write_text(f"simd_count 1216\ngfx_target_version {version}\n")


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (90008, "gfx908"), (110001, "gfx1101"), (120001, "gfx1201")],
)
def test_gfx_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_bare_machine(tmp_path) -> None:
    report = examine(machine(tmp_path))
    assert not any(finding.found for finding in report.findings)
    assert all(finding.remedy for finding in report.findings)
    assert "none is needed on a CPU" in report.finding("GPU").remedy
    for name in (
        "HIP runtime",
        "hipBLASLt",
        "CUDA driver",
        "CUDA runtime",
        "CuPy",
        "Triton",
        "torch",
        "JAX",
        "cffi",
        "HIP Python",
        "cuda-core",
    ):
        assert not report.finding(name).found
    remedy = report.finding("CuPy").remedy  # as the README says it: the package is on no index
    assert 'pip install ".[rocm7]"' in remedy and 'pip install ".[cuda]"' in remedy and "in a checkout of hipgroupgemm" in remedy
    assert not any("hipgroupgemm[" in finding.remedy for finding in report.findings)
    assert "pip install matplotlib" in report.finding("matplotlib").remedy
    assert BackendState("reference", "cpu", "") in report.backends
    with pytest.raises(KeyError):
        report.finding("GPU kernels")


def test_complete_amd_machine(tmp_path) -> None:
    add_gpu(tmp_path, 90402)
    touch(
        tmp_path,
        "opt/rocm/lib/libamdhip64.so.7",
        "opt/rocm/lib/libhipblaslt.so.1.1.70200",
        "opt/rocm/lib/hipblaslt/library/TensileLibrary_BB_BB_HA_Bias_SAV_UA_Type_BB_HPA_Contraction_l_Ailk_Bljk_Cijk_Dijk_gfx942.dat",
        "opt/rocm/lib/hipblaslt/library/Kernels.so-000-gfx90a.hsaco",
        "site/hipgroupgemm/native/libhipgroupgemm.so",
    )
    modules = {name: str(tmp_path / f"site/{name}/__init__.py") for name in ("cupy", "triton", "hip", "hipgroupgemm")}
    report = examine(
        machine(
            tmp_path,
            libraries={"libamdhip64": type("Hip", (), {"hipRuntimeGetVersion": FakeFunction(70_226_015)})},
            distributions={"cupy-rocm-7-0": "14.0.1", "triton": "3.6.0", "hip-python": "7.2.0", "cupy-nonsense": "1"} | {},
            modules=modules,
        )
    )
    assert report.finding("AMD gfx942").found
    assert report.finding("HIP runtime").version == "7.2.26015"
    assert report.finding("hipBLASLt").version == "1.1.70200"
    assert report.finding("hipBLASLt kernels for gfx942").found
    assert report.finding("hipgroupgemm's native part").found
    assert report.finding("Triton").version == "3.6.0"
    assert report.finding("HIP Python").version == "7.2.0"
    assert not report.finding("CuPy").found  # two builds of it
    assert "pip uninstall all of them" in report.finding("CuPy").remedy
    assert {state.device for state in report.backends} == {"cpu", "rocm:0"}
    refusal = next(state for state in report.backends if state == BackendState("reference", "rocm:0", state.reason))
    assert "CPU" in refusal.reason


def test_kernels_of_another_gpu_are_not_enough(tmp_path) -> None:
    add_gpu(tmp_path, 90402)
    touch(
        tmp_path,
        "usr/lib64/libhipblaslt.so.1",
        "usr/lib64/hipblaslt/library/TensileLibrary_gfx90a.dat",
        "usr/lib64/hipblaslt/library/gfx1100/Kernels_gfx1100.co",
        "usr/lib64/hipblaslt/library/TensileLibrary_gfx9421.dat",  # no such target: no prefix counts
        "elsewhere/library/extop_gfx942.co",
    )
    finding = examine(machine(tmp_path)).finding("hipBLASLt kernels for gfx942")
    assert not finding.found
    assert finding.detail == "there are kernels for gfx1100, gfx90a, gfx9421"
    assert "HIPBLASLT_TENSILE_LIBPATH" in finding.remedy
    named = machine(tmp_path, environ={"HIPBLASLT_TENSILE_LIBPATH": "/elsewhere/library"})
    assert examine(named).finding("hipBLASLt kernels for gfx942").found


def test_rocm_in_a_place_of_its_own_and_in_wheels(tmp_path) -> None:
    touch(tmp_path, "data/rocm/lib/libamdhip64.so.6.4.43483", "data/rocm/.info/version")
    (tmp_path / "data/rocm/.info/version").write_text("6.4.3-127\n")
    report = examine(machine(tmp_path, environ={"ROCM_PATH": "/data/rocm"}))
    assert report.finding("HIP runtime").version == "6.4.3-127"
    assert "data/rocm/lib/libamdhip64.so" in report.finding("HIP runtime").detail
    touch(tmp_path, "site/_rocm_sdk_core/lib/libamdhip64.so.7", "site/_rocm_sdk_libraries_gfx94X/lib/libhipblaslt.so.1")
    touch(tmp_path, "site/_rocm_sdk_libraries_gfx94X/lib/hipblaslt/library/T_gfx942.dat")
    report = examine(machine(tmp_path, modules={"_rocm_sdk_core": str(tmp_path / "site/_rocm_sdk_core/__init__.py")}))
    assert report.finding("HIP runtime").found
    assert report.finding("hipBLASLt").found
    assert report.finding("hipBLASLt kernels").detail == "for gfx942"


def test_a_gpu_that_may_not_be_opened(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(tmp_path, 90500)
    monkeypatch.setattr("os.access", lambda *_: False)
    finding = examine(machine(tmp_path)).finding("AMD gfx950")
    assert not finding.found and "may not be opened" in finding.detail
    assert "usermod -aG render,video" in finding.remedy
    (tmp_path / "dev/kfd").unlink()
    finding = examine(machine(tmp_path)).finding("AMD gfx950")
    assert not finding.found and "there is no /dev/kfd" in finding.detail
    assert "usermod" not in finding.remedy and "--device /dev/kfd" in finding.remedy


def test_a_package_that_cannot_be_imported_is_not_found(tmp_path) -> None:
    modules = {"cupy": str(tmp_path / "cupy/__init__.py"), "triton": str(tmp_path / "triton/__init__.py")}
    found = {"distributions": {"cupy-cuda13x": "14.0", "triton": "3.6.0"}, "modules": modules}
    why = "ImportError: libcublas.so.13: cannot open shared object file"
    report = examine(machine(tmp_path, broken={"cupy": why}, **found))
    assert not report.finding("CuPy").found and why in report.finding("CuPy").detail and report.finding("CuPy").version == "14.0"
    assert report.finding("Triton").found
    assert examine(machine(tmp_path, **found)).finding("CuPy").found


def test_imports_are_tried_in_processes_of_their_own(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_here.py").write_text("import sys\nprint('noise', file=sys.stderr)\nraise ImportError('no such luck')\n")
    (tmp_path / "crashes_here.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    real = Machine()
    assert real.import_error("broken_here") == "ImportError: no such luck" and real.import_error("json") == ""
    assert real.import_error("crashes_here") == "exit status 3" and "broken_here" not in sys.modules


def test_a_registrys_triton_over_torchs_own_is_named(tmp_path) -> None:
    add_gpu(tmp_path, 90402)
    modules = {"triton": str(tmp_path / "triton/__init__.py")}
    one = examine(machine(tmp_path, distributions={"pytorch-triton-rocm": "3.5.0"}, modules=modules)).finding("Triton")
    assert one.found and one.version == "3.5.0" and "pytorch-triton-rocm" in one.detail
    both = {"pytorch-triton-rocm": "3.5.0", "triton": "3.9.0"}
    two = examine(machine(tmp_path, distributions=both, modules=modules)).finding("Triton")
    assert not two.found and "they overwrite each other" in two.detail
    assert "pip uninstall -y triton pytorch-triton-rocm" in two.remedy


def test_kernel_files_missing_behind_a_catalogue_are_seen(tmp_path) -> None:
    add_gpu(tmp_path, 90402)
    place = "opt/rocm/lib/hipblaslt/library"
    touch(tmp_path, "opt/rocm/lib/libhipblaslt.so.1", f"{place}/TensileLibrary_A_gfx942.dat", f"{place}/TensileLibrary_A_gfx942.co")
    touch(tmp_path, f"{place}/TensileLibrary_B_gfx942.dat")
    (tmp_path / place / "TensileLibrary_lazy_gfx942.dat").write_bytes(b"\x82\xb7TensileLibrary_A_gfx942\xb7TensileLibrary_B_gfx942\x00")
    finding = examine(machine(tmp_path)).finding("hipBLASLt kernels for gfx942")
    assert not finding.found and "lacks 1 files that its catalogue lists, such as TensileLibrary_B_gfx942.co" in finding.detail
    (tmp_path / place / "TensileLibrary_B_gfx942.hsaco").write_text("")
    assert examine(machine(tmp_path)).finding("hipBLASLt kernels for gfx942").found


def test_nvidia_machine(tmp_path) -> None:
    touch(tmp_path, "usr/local/cuda/lib64/libcudart.so.12")
    libraries = {"libcuda.so.1": FakeCuda, "libcudart": type("Runtime", (), {"cudaRuntimeGetVersion": FakeFunction(12060)})}
    report = examine(machine(tmp_path, libraries=libraries, distributions={"cuda-core": "0.4.0"}))
    assert report.finding("NVIDIA H200").detail == "compute capability 9.0"
    assert report.finding("CUDA driver").version == "12.8"
    assert report.finding("CUDA runtime").version == "12.6"
    assert report.finding("cuda-core").version == "0.4.0"
    assert report.finding("CuPy").remedy.startswith('pip install ".[cuda]"')
    assert "only needed" not in report.finding("Triton").remedy
    assert "only needed for AMD GPUs" in report.finding("HIP runtime").remedy
    assert {state.device for state in report.backends} == {"cpu", "cuda:0"}
    without = examine(machine(tmp_path / "empty", libraries={"libcuda.so.1": FakeCuda}))
    assert "cupy-cuda12x[ctk]" in without.finding("CUDA runtime").remedy


def test_nvidia_driver_files_without_its_library(tmp_path) -> None:
    touch(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information")
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information").write_text("Model: \t\t NVIDIA A100\nIRQ: 3\n")
    report = examine(machine(tmp_path))
    assert report.finding("NVIDIA A100").found
    assert not report.finding("CUDA driver").found


def test_failing_libraries_are_no_version(tmp_path) -> None:
    touch(tmp_path, "opt/rocm-7.1.0/lib/libamdhip64.so.7.1.25424")
    broken = type("Broken", (), {"hipRuntimeGetVersion": FakeFunction(0, status=100)})
    report = examine(
        machine(tmp_path, libraries={"libamdhip64": broken, "libcuda": type("Empty", (), {"cuInit": staticmethod(lambda flags: 999)})})
    )
    assert report.finding("HIP runtime").version == "7.1.25424"
    assert not report.finding("CUDA driver").found


def test_a_backend_that_can_not_be_asked_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def explode(name: str):
        raise ImportError("no such shim")

    monkeypatch.setattr("hipgroupgemm.cli.doctor.get_backend", explode)
    states = examine(machine(tmp_path)).backends
    assert states
    assert all(state.reason == "ImportError: no such shim" for state in states)


def test_the_real_machine() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["NumPy"]["found"]
    assert found["NumPy"]["version"] == __import__("numpy").__version__
    assert {"backend": "reference", "device": "cpu", "reason": ""} in report["backends"]
    text = CliRunner().invoke(cli, ["doctor"])
    assert text.exit_code == 0
    assert "reference on cpu: runs" in text.output
    assert "NumPy" in text.output


def test_doctor_imports_no_framework() -> None:
    import subprocess
    import sys

    code = (
        "import sys, hipgroupgemm.cli.doctor as d; d.examine()\n"
        "sys.exit(', '.join({'cupy', 'torch', 'jax', 'triton', 'hip', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("columns", [40, 80])
def test_remedies_are_whole_lines_at_any_width(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal and in a pipe: what is to be copied is on one line, and no line is filled up with blanks."""
    remedy = "only needed for AMD GPUs: pip install 'hipgroupgemm[rocm]', which is a long line on a narrow terminal of eighty columns"
    report = Report(
        [
            Finding("ROCm", "hipBLASLt", True, "1.2", "/opt/rocm/lib/libhipblaslt.so"),
            Finding("Python", "CuPy", False, "", "not installed [at all]", remedy),
        ],
        [BackendState("hipblaslt", "rocm:0", "no [thing]")],
    )
    terminal = Console(width=columns, force_terminal=True, color_system=None)
    for console in (None, terminal):
        if console is not None:
            monkeypatch.setattr("hipgroupgemm.cli.doctor.console_for", lambda: terminal)
            terminal.file = sys.stdout
        print_report(report)
        lines = capsys.readouterr().out.splitlines()
        assert f"           {remedy}" in lines
        assert "  absent   CuPy       not installed [at all]" in lines
        assert "  found    hipBLASLt  1.2  /opt/rocm/lib/libhipblaslt.so" in lines
        assert "  hipblaslt on rocm:0: does not run: no [thing]" in lines
        assert all(line == line.rstrip() for line in lines)


def test_building_again_is_said_in_words_that_work(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hipgroupgemm.native import _loader

    command = "pip install --force-reinstall --no-deps ."
    assert examine(machine(tmp_path)).finding("hipgroupgemm's native part").remedy.endswith(f"in a checkout of hipgroupgemm: {command}")
    monkeypatch.setenv("HIPGROUPGEMM_NATIVE_LIBRARY", str(tmp_path / "libhipgroupgemm.so"))
    monkeypatch.setattr(_loader, "_library", None)
    assert f"`{command}` in a checkout" in (_loader.unavailable_reason() or "")


def test_the_tuning_store_is_told_of(tmp_path, tuning_store, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def told() -> str:
        report = examine(machine(tmp_path))
        print_report(report)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2:-1] == ["Tuning store"] and report.as_dict()["tuning_store"]["results"] == report.store["results"]
        return lines[-1].strip()

    assert told() == f"{tuning_store}: no results" and not tuning_store.exists()
    for count, words in enumerate(("1 result", "2 results"), 1):
        assert keep(store_report(config_of(n=count), [row("reference", 0, 1.0)]))
        assert told() == f"{tuning_store}: {words}"
    for value in ("off", "0"):
        monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", value)
        assert told() == f"off (HIPGROUPGEMM_TUNING_STORE={value})"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", str(tmp_path / "file"))
    assert told() == f"{tmp_path / 'file'}: is no directory"
