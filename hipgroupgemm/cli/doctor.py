"""The command `hipgroupgemm doctor`: what this machine has for grouped GEMM, and what to install where something lacks.

Nothing heavy is imported here: packages are looked up by their metadata and imported in processes of their own, system libraries by their
files and, where that is cheap and harmless, asked for their version through ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from hipgroupgemm.backends import backend_names, get_backend
from hipgroupgemm.cli.tables import printable
from hipgroupgemm.measure.text import console_for, say
from hipgroupgemm.measure.workloads import CLASSES, MoEShape, config_of
from hipgroupgemm.native import missing_kernel_files
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.store.store import TuningStore, why_off
from hipgroupgemm.version import __version__

__all__ = ["BackendState", "Finding", "Machine", "Report", "doctor", "examine", "gfx_name", "print_report", "store_state"]

_TARGET = re.compile(r"gfx(?:[0-9a-f]{3,4})(?![0-9a-f])")
_LIBCUDA = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_SYSTEM = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib")
_WHOLE: dict[str, Any] = {"highlight": False, "soft_wrap": True}  # a long line is the terminal's to wrap: copied it is whole
_HERE = "in a checkout of hipgroupgemm"
_ROCM = f'pip install ".[rocm7]" (ROCm 7) or ".[rocm6]" (which has no CuPy), {_HERE}'
_CUDA = f'pip install ".[cuda]" (CUDA 13) or ".[cuda12]", {_HERE}'
_IMPORT_SECONDS = 120.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Show what this machine has for grouped GEMM, and what to install where something lacks."""
    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=1))
    else:
        print_report(report)


# ---- where it looks ------------------------------------------------------------------------------------------------------------


def _distributions() -> dict[str, str]:
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # a broken installation of something else is none of ours
            found.setdefault(one.metadata["Name"].lower().replace("_", "-"), one.version)
    return found


def _find_module(name: str) -> str | None:
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        if (spec := importlib.util.find_spec(name)) is not None:
            return spec.origin or next((f"{place}/__init__.py" for place in spec.submodule_search_locations or ()), None)
    return None


def _load(name: str) -> Any:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)
    return None


def _import_error(module: str) -> str:
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its import has not ended in {_IMPORT_SECONDS:.0f} s"
    words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return words[-1].strip() if done.returncode else ""


@dataclasses.dataclass
class Machine:
    """Where files, environment variables, packages and libraries are looked up. Tests simulate one.

    Attributes:
        root: the file system's root. environ: the environment. distributions: those installed, name (lower case) to version.
        find_module: module name to its file, or None; no top-level module is imported. load: path or soname to a ctypes library, or None.
        import_error: module name to why it can't be imported in a process of its own, "" where it can.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    distributions: Mapping[str, str] = dataclasses.field(default_factory=_distributions)
    find_module: Callable[[str], str | None] = _find_module
    load: Callable[[str], Any] = _load
    import_error: Callable[[str], str] = _import_error

    def path(self, absolute: str | Path) -> Path:
        """A path below the root; one that lies there already is taken as it is."""
        path = Path(absolute)
        return path if path.is_relative_to(self.root) else self.root / path.relative_to(path.anchor)

    def glob(self, directory: Path | str, pattern: str) -> list[Path]:
        """Files of a directory below the root, sorted; none where it can't be read."""
        with contextlib.suppress(OSError):
            return sorted(self.path(directory).glob(pattern))
        return []

    def read(self, path: Path | str) -> str:
        """A small file's text, "" where it can't be read."""
        with contextlib.suppress(OSError):
            return self.path(path).read_text(encoding="latin-1")
        return ""

    def packages(self, module: str, pattern: str) -> list[Path]:
        """Files in the directory of an installed package, which is not imported."""
        file = self.find_module(module)
        return self.glob(Path(file).parent, pattern) if file else []

    def folders(self, *prefixes: str | Path) -> list[Path]:
        """The lib and lib64 of prefixes; those that begin with $ are named by a variable of the environment."""
        named = [self.environ.get(str(one)[1:], "") if str(one).startswith("$") else str(one) for one in prefixes]
        return [Path(prefix, part) for prefix in named if prefix for part in ("lib", "lib64")]

    def libraries(self, folders: Sequence[str | Path], stem: str) -> list[Path]:
        """A library's files in folders, the shortest name of each first."""
        return [path for one in folders for path in sorted(self.glob(one, f"{stem}.so*"), key=lambda path: len(path.name))]

    def version(self, library: Path | str, function: str) -> int:
        """What a library's C function writes through its only argument; 0 where that can't be had."""
        loaded, value = self.load(str(library)), ctypes.c_int()
        with contextlib.suppress(AttributeError, OSError):
            if loaded is not None and getattr(loaded, function)(ctypes.byref(value)) == 0:
                return value.value
        return 0


# ---- what it finds -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Finding:
    """One part of the machine: whether it is there and of use, what is known of it, and exactly what to do where it is missing."""

    area: str
    name: str
    found: bool
    version: str = ""
    detail: str = ""
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class BackendState:
    """Whether a backend runs on a device: reason is "" or why not."""

    backend: str
    device: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings, which backends run where, and the tuning store (None: not looked at): its `directory` ("" where it is off), why it is
    `off`, how many `results` it holds, and `trouble` with reading it."""

    findings: list[Finding]
    backends: list[BackendState]
    store: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        data = dataclasses.asdict(self)
        return {**data, "tuning_store": data.pop("store")}

    def finding(self, name: str) -> Finding:
        """The finding of that name; KeyError where there is none."""
        return {finding.name: finding for finding in self.findings}[name]


def store_state() -> dict[str, Any]:
    """What `Report` has of the tuning store. Raises nothing."""
    store = TuningStore()
    place, off = store.directory, "" if store.directory is not None else why_off()
    trouble = "is no directory" if place is not None and os.path.exists(place) and not os.path.isdir(place) else ""
    return {"directory": str(place or ""), "off": off, "results": len(store.results()), "trouble": trouble}


def examine(machine: Machine | None = None) -> Report:
    """Looks at everything. Never raises for what the machine lacks."""
    machine = machine or Machine()
    amd, nvidia = _amd_targets(machine), _nvidia_gpus(machine)
    findings = [
        *_gpu_findings(machine, amd, nvidia),
        *_rocm_findings(machine, list(dict.fromkeys(target for target, _ in amd))),
        *_cuda_findings(machine, bool(nvidia)),
        *_python_findings(machine, bool(amd), bool(nvidia)),
    ]
    return Report(findings, _backend_states(bool(amd), bool(nvidia)), store_state())


def _either(area: str, name: str, there: object, version: str, where: object, absent: str, remedy: str) -> Finding:
    return Finding(area, name, True, version, str(where)) if there else Finding(area, name, False, "", absent, remedy)


def gfx_name(version: int) -> str:
    """The target's name of the kernel driver's gfx_target_version: 90402 is gfx942, 90010 is gfx90a, 120001 is gfx1201."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _amd_targets(machine: Machine) -> list[tuple[str, str]]:
    """(gfx target, where it is known from) of every GPU of the kernel's compute driver."""
    found = []
    for node in machine.glob("/sys/class/kfd/kfd/topology/nodes", "*/properties"):
        match = re.search(r"^gfx_target_version (\d+)$", machine.read(node), re.MULTILINE)
        if match and int(match[1]):  # CPU nodes have version 0
            found.append((gfx_name(int(match[1])), f"KFD node {node.parent.name}"))
    return found


def _nvidia_gpus(machine: Machine) -> list[tuple[str, str]]:
    """(name, compute capability or "") of every NVIDIA GPU, by the driver's library, else by its files."""
    driver = machine.load(_LIBCUDA)
    found: list[tuple[str, str]] = []
    count = ctypes.c_int()
    if driver is not None and driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for index in range(count.value):
            name, major, minor = ctypes.create_string_buffer(128), ctypes.c_int(), ctypes.c_int()
            driver.cuDeviceGetName(name, 128, index)
            driver.cuDeviceGetAttribute(ctypes.byref(major), 75, index)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, index)
            found.append((name.value.decode(errors="replace"), f"{major.value}.{minor.value}"))
        return found
    for file in machine.glob("/proc/driver/nvidia/gpus", "*/information"):
        match = re.search(r"^Model:\s*(.+)$", machine.read(file), re.MULTILINE)
        found.append((match[1].strip() if match else "NVIDIA GPU", ""))
    return found


def _gpu_findings(machine: Machine, amd: Sequence[tuple[str, str]], nvidia: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    for target, where in amd:
        kfd, trouble, remedy = machine.path("/dev/kfd"), "", ""
        if not kfd.exists():
            trouble = ", but there is no /dev/kfd"
            remedy = "in a container, run it with --device /dev/kfd --device /dev/dri; else load the driver: sudo modprobe amdgpu"
        elif not os.access(kfd, os.R_OK | os.W_OK):
            trouble = ", but /dev/kfd may not be opened"
            remedy = "give your user /dev/kfd and /dev/dri: sudo usermod -aG render,video $USER, then log in again"
        yield Finding("GPU", f"AMD {target}", not trouble, "", where + trouble, remedy)
    for name, capability in nvidia:
        full_name = name if name.startswith("NVIDIA") else f"NVIDIA {name}"
        yield Finding("GPU", full_name, True, "", f"compute capability {capability}" if capability else "")
    if not amd and not nvidia:
        remedy = "none is needed on a CPU; for a GPU install its kernel driver: amdgpu-dkms (AMD) or NVIDIA's driver"
        yield Finding("GPU", "GPU", False, "", "neither an AMD nor an NVIDIA GPU is visible", remedy)


def _rocm_folders(machine: Machine) -> list[str | Path]:
    """Where ROCm's libraries lie: what the environment names, /opt/rocm*, the distribution's directories, wheels."""
    named = machine.folders("$ROCM_PATH", "$ROCM_HOME", "$HIP_PATH")
    path = [part for part in machine.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    wheels = [one for module in ("_rocm_sdk_core", "_rocm_sdk_devel", "torch") for one in machine.packages(module, "lib")]
    wheels += machine.packages("_rocm_sdk_core", "../_rocm_sdk_libraries*/lib")  # a family's have a package of their own
    return [*named, *path, *machine.folders("/opt/rocm", *machine.glob("/opt", "rocm-*")), *_SYSTEM, *wheels]


def _number_in_name(path: Path) -> str:
    """The version at the end of a library's real name: libamdhip64.so.7.2.70200 has 7.2.70200."""
    return Path(os.path.realpath(path)).name.partition(".so.")[2]


def _rocm_findings(machine: Machine, targets: Sequence[str]) -> Iterator[Finding]:
    folders = _rocm_folders(machine)
    wanted, version = "" if targets else "only needed for AMD GPUs: ", ""
    hip, blaslt = next(iter(machine.libraries(folders, "libamdhip64")), None), machine.libraries(folders, "libhipblaslt")
    if hip is not None:
        value, release = machine.version(hip, "hipRuntimeGetVersion"), machine.read(hip.parent.parent / ".info" / "version").strip()
        version = f"{value // 10_000_000}.{value // 100_000 % 100}.{value % 100_000}" if value else release or _number_in_name(hip)
    remedy = f"{wanted}apt install hip-runtime-amd (AMD's repository), dnf install hip-runtime-amd, or apt install libamdhip64-dev (Debian)"
    yield _either("ROCm", "HIP runtime", hip, version, hip, "no libamdhip64.so", remedy)
    remedy = f"{wanted}apt install hipblaslt hipblaslt-dev (AMD's repository), dnf install hipblaslt, or apt install libhipblaslt1 (Debian)"
    number, where = (_number_in_name(blaslt[0]), blaslt[0]) if blaslt else ("", None)
    yield _either("ROCm", "hipBLASLt", blaslt, number, where, "no libhipblaslt.so", remedy)
    yield from _kernel_findings(machine, blaslt, targets)
    shim = next(iter(machine.packages("hipgroupgemm", "native/libhipgroupgemm.so")), None)
    build = "pip install --force-reinstall --no-deps ."
    remedy = f"{wanted}install hipBLASLt's headers (hipblaslt-dev) and g++, then in a checkout of hipgroupgemm: {build}"
    yield _either("ROCm", "hipgroupgemm's native part", shim, "", shim, "not built: the hipblaslt backend needs it", remedy)


def _kernel_findings(machine: Machine, blaslt: Sequence[Path], targets: Sequence[str]) -> Iterator[Finding]:
    """hipBLASLt's kernel files name their target; without those of the GPU's it has not one algorithm."""
    named = machine.environ.get("HIPBLASLT_TENSILE_LIBPATH")
    have: dict[str, Path] = {}
    for place in [machine.path(named)] if named else [path.parent / "hipblaslt" / "library" for path in blaslt]:
        for file in machine.glob(place, "**/*gfx*"):
            for target in _TARGET.findall(file.name):
                have.setdefault(target, place)
    listed = ", ".join(sorted(have)) or "no target"
    for target in targets:
        missing = [Path(path).name for path in missing_kernel_files(str(have[target]), target)] if target in have else []
        text = f"there are kernels for {listed}"
        remedy = (
            f"install a hipBLASLt that has them: apt install hipblaslt from AMD's repository (Debian's own has none for {target}), "
            "or name their directory in HIPBLASLT_TENSILE_LIBPATH"
        )
        if missing:
            text = f"{have[target]} lacks {len(missing)} files that its catalogue lists, such as {missing[0]}: their algorithms fail"
            remedy = "install it again: apt install --reinstall hipblaslt"
        there = target in have and not missing
        yield _either("ROCm", f"hipBLASLt kernels for {target}", there, "", have.get(target), text, remedy)
    if not targets and (blaslt or have):
        text = f"for {listed}"
        yield _either("ROCm", "hipBLASLt kernels", have, "", text, text, "apt install hipblaslt (AMD's repository)")


def _cuda_findings(machine: Machine, gpu: bool) -> Iterator[Finding]:
    wanted = "" if gpu else "only needed for NVIDIA GPUs: "

    def version(library: Path | str, function: str) -> str:
        value = machine.version(library, function)
        return f"{value // 1000}.{value % 1000 // 10}" if value else ""

    driver = version(_LIBCUDA, "cuDriverGetVersion")
    remedy = f"{wanted}install NVIDIA's driver (apt install nvidia-driver, dnf install nvidia-driver); in a container, run with --gpus all"
    yield _either("CUDA", "CUDA driver", driver, driver, "the newest CUDA that it serves", "no libcuda.so.1", remedy)
    usual = machine.folders("$CUDA_PATH", "$CUDA_HOME", "/usr/local/cuda")
    runtime = next(iter(machine.libraries([*usual, _SYSTEM[0], *machine.packages("nvidia", "*/lib")], "libcudart")), None)
    package = "'cupy-cuda12x[ctk]'" if driver.partition(".")[0] == "12" else "'cupy-cuda13x[ctk]'"
    remedy = f"{wanted}pip install {package}, or install the CUDA toolkit"
    found = "" if runtime is None else version(runtime, "cudaRuntimeGetVersion")
    yield _either("CUDA", "CUDA runtime", runtime, found, runtime, "no libcudart.so", remedy)


def _python_findings(machine: Machine, amd: bool, nvidia: bool) -> list[Finding]:
    gpu_extra = _ROCM if amd and not nvidia else _CUDA if nvidia and not amd else f"{_ROCM}; or {_CUDA}"
    for_gpu = gpu_extra if amd or nvidia else f"only needed for GPUs: {gpu_extra}"
    for_amd, for_nvidia = "" if amd else "only needed for AMD GPUs: ", "" if nvidia else "only needed for NVIDIA GPUs: "
    cupy = sorted(one for one in machine.distributions if re.match(r"(amd-)?cupy(-|$)", one))
    hip = ("HIP Python", "hip", True, ["hip-python"], for_amd + _ROCM)
    if "hip-python" not in machine.distributions and machine.find_module("rocm") is not None:
        hip = ("HIP Python", "rocm.bindings", True, ["rocm-bindings"], for_amd + _ROCM)
    packages = [  # (name, module, imported for proof, distributions, what to do)
        ("NumPy", "numpy", False, ["numpy"], "pip install numpy"),
        ("ml_dtypes", "ml_dtypes", False, ["ml-dtypes"], "pip install ml_dtypes"),
        ("cffi", "cffi", False, ["cffi"], "pip install cffi (the hipblaslt backend needs it)"),
        ("filelock", "filelock", False, ["filelock"], "pip install filelock (stored tuning results need it)"),
        ("msgspec", "msgspec", False, ["msgspec"], "pip install msgspec (stored tuning results and sweeps need it)"),
        ("CuPy", "cupy", True, cupy, for_gpu),
        ("Triton", "triton", True, ["triton", "pytorch-triton-rocm", "pytorch-triton", "triton-rocm"], for_gpu),
        hip,
        ("cuda-core", "cuda.core", True, ["cuda-core"], for_nvidia + _CUDA),
        ("torch", "torch", False, ["torch"], "only needed for torch tensors: https://pytorch.org/get-started/locally says which wheel"),
        ("JAX", "jax", False, ["jax"], "only needed for JAX arrays: pip install jax (CPU), 'jax[cuda13]', or AMD's jax-rocm7-plugin"),
        ("matplotlib", "matplotlib", False, ["matplotlib"], "only needed for plots (--plot): pip install matplotlib"),
    ]

    def find(package: tuple[str, str, bool, list[str], str]) -> Finding:
        name, module, proof, names, remedy = package
        installed = [one for one in names if one in machine.distributions]
        there = name == "cuda-core" or machine.find_module(module.partition(".")[0]) is not None
        if not there or not (installed or module == "rocm.bindings"):
            return Finding("Python", name, False, "", "not installed", remedy)
        version, trouble = next((machine.distributions[one] for one in installed), ""), ""
        detail = "" if installed == names[:1] and name != "CuPy" else ", ".join(installed) or module
        if len(installed) > 1 and name == "CuPy":
            trouble, remedy = f"{detail}: several builds of CuPy overwrite each other", f"pip uninstall all of them, then {gpu_extra}"
        elif len(installed) > 1:
            trouble = f"{detail}: they overwrite each other; torch for ROCm needs its own, {installed[1]}"
            remedy = f"pip uninstall -y {' '.join(installed)}, then pip install --force-reinstall --no-deps the one that torch asks for"
        elif broken := machine.import_error(module) if proof else "":
            trouble = f"can't be imported: {broken}"
        return Finding("Python", name, not trouble, version, trouble or detail, remedy if trouble else "")

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(find, packages))


def _backend_states(amd: bool, nvidia: bool) -> list[BackendState]:
    states = []
    for device in [CPU, *([Device("rocm")] if amd else []), *([Device("cuda")] if nvidia else [])]:
        config = config_of(CLASSES["fwd_wi"], MoEShape(256, 128, 64, 4), "float32" if device.kind == "cpu" else "bfloat16")
        for name in backend_names():
            try:
                reason = get_backend(name).can_handle(config, device) or ""
            except Exception as error:  # a backend that can't even be asked is a finding, not the end of the report
                reason = f"{type(error).__name__}: {error}"
            states.append(BackendState(name, str(device), reason))
    return states


def print_report(report: Report) -> None:
    """The report for a person. What to do stands on a line of its own that is never broken, so that commands can be copied."""
    console, area = console_for(), ""
    console.print(f"hipgroupgemm {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}", **_WHOLE)
    width = max((len(finding.name) for finding in report.findings), default=0)
    for finding in report.findings:
        if finding.area != area:
            area = finding.area
            console.print(f"\n[bold]{area}[/]")
        optional = "only needed" in finding.remedy or "none is needed" in finding.remedy
        state = "found" if finding.found else "absent" if optional else "broken" if finding.version else "missing"
        style = "green" if finding.found else "dim" if optional else "yellow"
        about = printable("  ".join(part for part in (finding.version, finding.detail) if part))
        console.print(f"  [{style}]{state:<7}[/]  {escape(f'{finding.name:<{width}}  {about}'.rstrip())}", **_WHOLE)
        if finding.remedy:
            say(f"           {finding.remedy}", console=console)
    console.print("\n[bold]Backends[/]")
    for one in report.backends:
        say(printable(f"  {one.backend} on {one.device}: {f'does not run: {one.reason}' if one.reason else 'runs'}"), console=console)
    if (store := report.store) is not None:
        console.print("\n[bold]Tuning store[/]")
        count = f"{store['results'] or 'no'} result{'' if store['results'] == 1 else 's'}"
        text = f"off ({store['off']})" if store["off"] else f"{store['directory']}: {store['trouble'] or count}"
        say(printable(f"  {text}"), console=console)
