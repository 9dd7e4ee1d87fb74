"""The command line: what it prints, writes, refuses and exits with; for real in subprocesses where that matters."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner

import hipgroupgemm
from hipgroupgemm import MatmulAlgorithm, register_backend, unregister_backend
from hipgroupgemm.backends.reference import ReferenceBackend, numpy_view
from hipgroupgemm.benchmark import command
from hipgroupgemm.cli import cli, main
from hipgroupgemm.measure.harness import HostHarness
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.measure.workloads import CLASSES, PRESETS
from hipgroupgemm.operands.views import CPU, Device

SHAPE = ["--shape", "48,12,10,4"]
QUICK = ["--repetitions", "2", "--device", "cpu"]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooflines take a second to measure; where they are not what is tested, they are given."""
    monkeypatch.setattr(HostHarness, "roofline", lambda *_: Roofline(1e11, 1e10, "a product", "a copy"))


def invoke(*arguments: str):
    return CliRunner().invoke(cli, list(arguments))


def bench(*arguments: str):
    return invoke("bench", *QUICK, *arguments)


def rows_of(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def words(text: str) -> str:
    """Error texts are wrapped: one blank a gap, no frame."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


class Wrong(ReferenceBackend):
    """Computes, then spoils one element of out."""

    name = "wrong"

    def prepare(self, config, device, algorithm, stream):
        inner = super().prepare(config, device, algorithm, stream)

        class Executable(type(inner)):
            def execute(self, arguments) -> None:
                inner.execute(arguments)
                numpy_view(arguments.pointers["out"], (1,), (4,), np.dtype(np.float32))[0] += 1

        return Executable(config, algorithm)


class Choosy(ReferenceBackend):
    """Has three algorithms on the CPU, refuses weight gradients."""

    name = "choosy"

    def can_handle(self, config, device):
        return "it takes no [weight] gradients" if config.ragged_mode.name == "CONTRACTING" else super().can_handle(config, device)

    def algorithms(self, config, device, limits):
        return [MatmulAlgorithm("choosy", index, f"tile_{index}", index << 20, index != 1) for index in range(3)]


@pytest.fixture(params=[Wrong, Choosy])
def backend(request):
    register_backend(request.param(), ("cpu",))
    yield request.param.name
    unregister_backend(request.param.name)


wrong = pytest.mark.parametrize("backend", [Wrong], indirect=True)
choosy = pytest.mark.parametrize("backend", [Choosy], indirect=True)


# ---- the group -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["--help", "list --models", "list --shape 9,8,7,6 --device cpu --json", "doctor --json", "store path"])
def test_a_full_disk_is_an_error_and_no_traceback(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hipgroupgemm", *command.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "Error: standard output: No space left on device\n"


@pytest.mark.usefixtures("fast")
def test_a_file_on_a_full_disk_is_named() -> None:
    for line in (["bench", *QUICK, "--csv"], ["sweep", "--device", "cpu", "--no-store", "--json"]):
        done = invoke(*line, "/dev/full", *SHAPE, "--class", "fwd_wi")
        assert done.exit_code == 1 and "No space left on device: '/dev/full'" in done.output


@pytest.mark.usefixtures("fast")
def test_all_classes_are_all() -> None:
    for line in (["bench", *QUICK, "--baseline", "none"], ["list", "--device", "cpu"], ["sweep", "--device", "cpu", "--no-store"]):
        done = invoke(*line, *SHAPE, "--class", "all")
        assert done.exit_code == 0, done.output
        assert all(name in done.output for name in CLASSES)


@pytest.mark.usefixtures("fast")
def test_a_refusal_is_said_once() -> None:
    done = bench(*SHAPE, "--shape", "24,8,6,2", "--backend", "triton", "--baseline", "none")
    assert done.exit_code == 1
    (line,) = [line for line in done.output.splitlines() if "runs on GPUs" in line]
    classes = ", ".join(CLASSES)
    assert line == f"triton, 48,12,10,4 {classes}; 24,8,6,2 {classes}: refused: runs on GPUs, not on cpu"


def test_version_and_help() -> None:
    assert invoke("--version").output == f"hipgroupgemm {hipgroupgemm.__version__}\n"
    text = invoke("--help").output
    assert all(name in text for name in ("bench", "list", "doctor"))
    for name in (
        "--model",
        "--suite",
        "--class",
        "--shape",
        "--dtype",
        "--distribution",
        "--backend",
        "--scale",
        "--csv",
        "--json",
        "--plot",
    ):
        assert name in invoke("bench", "--help").output


def test_help_and_package_import_nothing_heavy() -> None:
    code = (
        "import sys, hipgroupgemm.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'rich.progress', 'matplotlib', 'hipgroupgemm.benchmark', 'msgspec', 'cupy', 'torch', 'jax'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    code = "import sys, hipgroupgemm; sys.exit(', '.join({'click', 'rich', 'matplotlib', 'hipgroupgemm.cli'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_main_exits_as_the_command_did(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, code in [(["--version"], 0), (["bench", "--model", "gpt"], 2), (["frobnicate"], 2)]:
        with pytest.raises(SystemExit) as info:
            main(arguments)
        assert info.value.code == code
    assert "No such command 'frobnicate'" in capsys.readouterr().err
    monkeypatch.setattr("hipgroupgemm.cli.doctor.examine", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit) as info:
        main(["doctor"])
    assert info.value.code == 130


# ---- bench -----------------------------------------------------------------------------------------------------------------------


def test_bench_for_real(tmp_path) -> None:
    """The installed command on a tiny shape: table, CSV, JSON, plot, and what they say of the machine."""
    outputs = [tmp_path / name for name in ("a.csv", "a.json", "a.png")]
    names = [part for pair in zip(("--csv", "--json", "--plot"), map(str, outputs), strict=True) for part in pair]
    code = [sys.executable, "-m", "hipgroupgemm", "bench", *SHAPE, *QUICK, "--seed", "5", "--distribution", "zipf", *names]
    done = subprocess.run(code, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for word in (
        "fwd_wi",
        "wgrad_wo",
        "reference",
        "padded_dot",
        "padded_batch",
        "loop",
        "numpy_matmul_a_group",
        "M=48 K=12 N=10 E=4",
        "zipf",
    ):
        assert word in done.stdout
    assert f"wrote {outputs[0]}" in done.stdout
    assert "[6/6] 48,12,10,4 wgrad_wo zipf: reference" in done.stderr  # no terminal: plain lines
    rows = rows_of(outputs[0])
    assert len(rows) == 24
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["ragged_dot_class"] for row in rows} == set(CLASSES)
    data = json.loads(outputs[1].read_text())
    assert (data["seed"], data["operand_dtype"], data["requested_scale"], data["interrupted"]) == (5, "float32", 1, False)
    assert data["device"].startswith("cpu: ")
    assert data["versions"]["numpy"] == np.__version__
    assert re.match(r"\d{4}-\d\d-\d\dT", data["date"])
    assert data["ceilings"]["flops"] > 1e8
    assert data["ceilings"]["bandwidth"] > 1e8
    assert rows[0]["device"] == data["device"]
    assert outputs[2].read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("fast")
def test_models_are_scaled_and_the_table_says_so(tmp_path) -> None:
    result = bench("--model", "qwen3-30b-a3b", "--class", "fwd_wi", "--scale", "32", "--csv", str(tmp_path / "a.csv"), "--baseline", "loop")
    assert result.exit_code == 0, result.output
    assert "qwen3-30b-a3b M=320 K=64 N=24 E=128" in words(result.output)
    assert "scaled: M, K and N are 1/32 of the model's" in words(result.output)
    assert "--scale 1 runs them in full" in words(result.output)
    rows = rows_of(tmp_path / "a.csv")
    assert [(row["backend"], row["scale"], row["m"], row["speedup"]) for row in rows] == [
        ("reference", "32", "320", ""),
        ("loop", "32", "320", ""),
    ]


@pytest.mark.usefixtures("fast")
def test_scaling_is_automatic_and_can_be_turned_off() -> None:
    shape = ["--shape", "8192,512,512,64", "--class", "fwd_wi", "--baseline", "none"]
    result = bench(*shape, "--scale", "auto")
    assert "1/4 of 8192,512,512,64's" in words(result.output)  # 275 GFLOP padded, at most 10 are run
    result = bench(*shape, "--scale", "2")
    assert "M=4096 K=256 N=256 E=64" in words(result.output)
    result = bench(*shape)  # what was asked for is what is run
    assert "M=8192 K=512 N=512 E=64" in words(result.output)
    assert "caled" not in result.output
    result = bench("--model", "deepseek3-test-mi300", "--class", "fwd_wi", "--baseline", "none")
    assert "1/2 of the model's" in words(result.output)


def test_default_request_is_all_presets_and_stays_small() -> None:
    request = command.Request(list(PRESETS.values()), list(CLASSES.values()))
    jobs = command.plan_jobs(request, CPU)
    assert len(jobs) == 66
    assert max(job.shape.padded_flops for job in jobs) <= 10**10
    assert all(job.sizes.sum() == job.shape.m for job in jobs)
    assert {job.shape.scale for job in command.plan_jobs(request, Device("cuda"))} == {1}


@pytest.mark.usefixtures("fast")
def test_dtypes_models_and_suites() -> None:
    result = bench("--model", "deepseek3-test", "--class", "fwd_wo", "--dtype", "bfloat16", "--scale", "32", "--backend", "reference")
    assert result.exit_code == 0, result.output
    assert "deepseek3-test-mi300" in result.output
    assert "deepseek3-test-mi350" in result.output
    assert "bfloat16" in result.output
    result = bench("--suite", "table12", "--class", "wgrad_wi", "--scale", "256", "--baseline", "loop")
    assert result.exit_code == 0, result.output
    assert result.output.count("wgrad_wi") >= 22


@pytest.mark.usefixtures("fast")
@wrong
def test_a_wrong_backend_fails_the_command(backend: str, tmp_path) -> None:
    result = bench(*SHAPE, "--backend", backend, "--backend", "reference", "--json", str(tmp_path / "a.json"))
    assert result.exit_code == 1
    assert "WRONG" in result.output
    assert "6 of 30 rows are wrong or failed" in result.output
    assert "elements are wrong" in result.output
    status = {(row["backend"], row["status"]) for row in json.loads((tmp_path / "a.json").read_text())["rows"]}
    assert status == {("wrong", "wrong"), *((name, "ok") for name in ("reference", "padded_dot", "padded_batch", "loop"))}
    assert bench(*SHAPE, "--backend", "reference").exit_code == 0


@pytest.mark.usefixtures("fast")
@choosy
def test_a_named_backend_that_runs_nothing_fails_the_command(backend: str) -> None:
    result = bench(*SHAPE, "--class", "wgrad_wi", "--backend", backend)
    assert result.exit_code == 1
    assert "refused: it takes no [weight] gradients" in result.output
    result = bench(*SHAPE, "--backend", backend)
    assert result.exit_code == 0
    assert "tile_0" in result.output


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--model", "gpt"], "'--model': model 'gpt': no such preset; there are mixtral-8x7b"),
        (["--shape", "1,2,3"], "'--shape': shape '1,2,3': wanted four integers M,K,N,E"),
        (["--shape", "1,2,3,0"], "e=0: wanted at least 1"),
        (["--class", "fwd"], "'fwd' is not one of 'fwd_wi'"),
        (["--dtype", "int8"], "'int8': no such element type; there are bfloat16, float16"),
        (["--backend", "cublas"], "'cublas': no such backend; there are hipblaslt, triton, reference"),
        (["--scale", "half"], "'half': wanted auto or a divisor of at least 1"),
        (["--scale", "²"], "'²': wanted auto or a divisor of at least 1"),
        (["--shape", "2147483648,1,1,1"], "m=2147483648: wanted at most 2147483647"),
        (["--scale", "0"], "'0': wanted auto or a divisor of at least 1"),
        (["--repetitions", "0"], "0 is not in the range x>=1"),
        (["--suite", "table13"], "'table13' is not one of 'table12'"),
        (["--plot", "a.txt"], "wanted a name that ends in .png, .svg, .pdf"),
        (["--csv", "-", "--json", "-"], "standard output was given for two outputs"),
        (["--csv", "same.txt", "--json", "same.txt"], "same.txt was given for two outputs"),
        (["--plot", "-"], "wanted a name that ends in .png, .svg, .pdf"),
        (["--device", "tpu"], "device='tpu': must be"),
        (["--device", "cpu:1"], "device='cpu:1': must be"),
        (["--csv", "no/where/a.csv"], "there is no directory no/where"),
        (["--csv", "/proc/a.csv"], "/proc/a.csv: no file can be made in /proc"),
        (["--baseline", "none", "--baseline", "loop"], "none was given along with others"),
    ],
)
def test_bad_input_is_refused_before_any_work(arguments: list[str], pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it ran"))
    result = bench(*arguments)
    assert result.exit_code == 2
    assert pattern in words(result.output)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = bench(*SHAPE, "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert "pip install matplotlib" in words(result.output)


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for command_line in (
        ["bench", "--device", "gpu"],
        ["bench", "--device", "cuda:1"],
        ["bench", "--device", "rocm"],
        ["list", "--device", "gpu"],
    ):
        result = invoke(*command_line, *SHAPE)
        assert result.exit_code == 2
        assert "'--device'" in result.output or "--device:" in result.output
        assert "no GPU was found" in result.output or "here, only the CPU" in words(result.output)


# ---- distributions from files ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", ["sizes.json", "sizes.npy", "sizes.txt"])
def test_real_group_sizes(name: str, tmp_path) -> None:
    vectors, path = [[40, 0, 8, 0], [1, 2, 3, 4]], tmp_path / name
    if name.endswith("npy"):
        np.save(path, vectors)
    else:
        path.write_text(json.dumps(vectors) if name.endswith("json") else "40 0 8 0\n1 2 3 4\n")
    result = bench(*SHAPE, "--distribution", str(path), "--csv", str(tmp_path / "a.csv"))
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "a.csv")
    assert {(row["distribution"], row["rows"]) for row in rows} == {(f"{name}[0]", "48"), (f"{name}[1]", "10")}
    assert "10 of 48 rows in groups" in words(result.output)


@pytest.mark.usefixtures("fast")
def test_real_group_sizes_are_scaled_with_the_shape(tmp_path) -> None:
    (tmp_path / "s.json").write_text("[100, 300, 0, 112]")
    files = ["--distribution", str(tmp_path / "s.json"), "--csv", str(tmp_path / "a.csv")]
    result = bench("--shape", "512,64,64,4", "--scale", "4", "--class", "fwd_wi", *files)
    assert result.exit_code == 0, result.output
    assert {(row["m"], row["rows"], row["distribution"]) for row in rows_of(tmp_path / "a.csv")} == {("128", "128", "s.json")}


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("[1, 2, 3]", "has 3 sizes, but 48,12,10,4 has E = 4 groups"),
        ("[40, 9, 0, 0]", "sum to 49, but 48,12,10,4 has only M = 48 rows"),
        ("[1, 2", "not JSON"),
        ("[1, 2, -3, 4]", "group 2: got -3, wanted an integer"),
        (None, "wanted balanced, zipf, dirichlet or a file, and there is no such file"),
    ],
)
def test_group_sizes_that_do_not_fit(content: str | None, pattern: str, tmp_path) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    result = bench(*SHAPE, "--distribution", str(path))
    assert result.exit_code == 2
    assert "Invalid value for --distribution" in words(result.output)
    assert pattern in words(result.output)
    assert not isinstance(result.exception, (ValueError, OSError))


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------------------


def _interrupt(arguments: list[str], after: str, times: int = 1) -> tuple[int, str, str]:
    """Runs the command and sends SIGINT once stderr has had `times` lines that contain `after`."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "hipgroupgemm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    out: list[str] = []
    reader = threading.Thread(target=lambda: out.append(process.stdout.read()))
    reader.start()
    try:
        for line in process.stderr:
            lines.append(line)
            if sum(after in one for one in lines) == times:
                process.send_signal(signal.SIGINT)
                break
        lines += process.stderr.readlines()
        code = process.wait(60)
    finally:
        process.kill()
        reader.join()
        process.stderr.close()
        process.stdout.close()
    return code, out[0], "".join(lines)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_ctrl_c_keeps_finished_rows(tmp_path) -> None:
    paths = [tmp_path / name for name in ("a.csv", "a.json", "a.png")]
    arguments = ["bench", "--model", "qwen3-30b-a3b", "--repetitions", "60", "--device", "cpu", "--scale", "64", "--baseline", "loop"]
    arguments += ["--csv", str(paths[0]), "--json", str(paths[1]), "--plot", str(paths[2])]
    code, out, err = _interrupt(arguments, "/6] qwen3-30b-a3b", times=2)
    assert code == 130, err
    assert "Traceback" not in err
    rows = rows_of(paths[0])
    assert 4 <= len(rows) < 12
    assert len(rows) == 2 * sum("/6] " in line for line in err.splitlines())
    assert {row["status"] for row in rows} == {"ok"}
    assert f"Stopped. {len(rows)} finished rows were kept." in out
    assert "fwd_wo" in out
    assert "wgrad_wo" not in out
    data = json.loads(paths[1].read_text())
    assert data["interrupted"] is True
    assert len(data["rows"]) == len(rows)
    assert paths[2].stat().st_size > 1000


@pytest.mark.usefixtures("fast")
def test_ctrl_c_before_the_first_row(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(HostHarness, "roofline", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    result = bench(*SHAPE, "--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 130
    assert "Stopped. 0 finished rows were kept." in result.output
    assert rows_of(tmp_path / "a.csv") == []
    assert not (tmp_path / "a.png").exists()
    assert "was not written" in result.output


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_terminal_gets_a_bar_with_the_time_left() -> None:
    import pty

    ours, theirs = pty.openpty()
    arguments = ["bench", *SHAPE, "--repetitions", "15", "--device", "cpu", "--baseline", "loop"]
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hipgroupgemm", *arguments], stdout=subprocess.PIPE, stderr=theirs, text=True, env=environ
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    out = process.communicate(timeout=60)[0]
    os.close(ours)
    assert process.returncode == 0
    text = seen.decode(errors="replace")
    assert "left" in text
    assert "0/6" in text
    assert re.search(r"0:0\d:\d\d", text)
    assert "[1/6]" not in text
    assert "padded" in out


# ---- list ------------------------------------------------------------------------------------------------------------------------


def test_list_allocates_nothing_and_prints_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "empty", lambda *_, **__: pytest.fail("it allocated"))
    result = invoke("list", "--model", "mixtral-8x7b-large", "--class", "fwd_wi", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "numpy_matmul_a_group" in result.output
    assert "M=40960 K=8192 N=28672 E=64, float32 -> float32, NON_CONTRACTING on cpu" in words(result.output)


@choosy
def test_list_limits_and_refusals(backend: str) -> None:
    base = ["list", *SHAPE, "--device", "cpu", "--backend", backend, "--json"]
    found = json.loads(invoke(*base, "--class", "fwd_wi").output)[0]
    assert [one["name"] for one in found["algorithms"]] == ["tile_0", "tile_1", "tile_2"]
    second = {"backend": "choosy", "index": 1, "name": "tile_1", "workspace_size": 1 << 20, "deterministic": False}
    assert found["algorithms"][1] == second | {"batch_invariant": False}
    assert (found["M"], found["K"], found["N"], found["E"], found["class"], found["dtype"]) == (48, 12, 10, 4, "fwd_wi", "float32")
    for limit, count in [("1MiB", 2), ("1048575", 1), ("0", 1), ("2 m", 3), ("1g", 3)]:
        assert len(json.loads(invoke(*base, "--class", "fwd_wi", "--max-workspace", limit).output)[0]["algorithms"]) == count
    assert len(json.loads(invoke(*base, "--class", "fwd_wi", "--max-algorithms", "1").output)[0]["algorithms"]) == 1
    refused = invoke(*base, "--class", "wgrad_wi")
    assert refused.exit_code == 1
    assert json.loads(refused.output)[0]["refusals"] == {"choosy": "it takes no [weight] gradients"}
    text = invoke("list", *SHAPE, "--device", "cpu", "--class", "wgrad_wi")
    assert text.exit_code == 0  # the reference can
    assert "choosy refuses: it takes no [weight] gradients" in text.output


def test_list_for_a_device_that_is_not_here() -> None:
    result = invoke("list", *SHAPE, "--class", "fwd_wi", "--device", "rocm", "--backend", "reference")
    assert result.exit_code == 1
    assert "bfloat16" in result.output
    assert "reference refuses: it computes on the CPU, the operands are on rocm:0" in words(result.output)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ([], "Which problem? Give --shape M,K,N,E or --model NAME; --models prints"),
        ([*SHAPE, "--device", "tpu"], "device='tpu': must be"),
        ([*SHAPE, "--max-workspace", "much"], "'much': wanted a number of bytes"),
        ([*SHAPE, "--max-workspace", "3 mb2"], "'3 mb2': wanted a number of bytes"),
        ([*SHAPE, "--backend", "cublas"], "'cublas': no such backend"),
    ],
)
def test_list_bad_input(arguments: list[str], pattern: str) -> None:
    result = invoke("list", *arguments)
    assert result.exit_code == 2
    assert pattern in words(result.output)
