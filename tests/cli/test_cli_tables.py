"""Tables at any width, names that are whole, and commands without standard streams."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

import hipgroupgemm
from hipgroupgemm.backends import register_backend, unregister_backend
from hipgroupgemm.backends.base import MatmulAlgorithm
from hipgroupgemm.backends.reference import ReferenceBackend
from hipgroupgemm.cli import listing
from hipgroupgemm.cli.tables import print_table, printable

ROOT = os.path.dirname(os.path.dirname(hipgroupgemm.__file__))
KERNEL = "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT{}x128x64_MI16x16x1_SN_LDSB1_AFC1_AFEM1_ASEM1_CLR1_CADS0_GRVWA8_WG64_4_1"


class Long(ReferenceBackend):
    """Has kernels with names as hipBLASLt's, which differ in the middle."""

    name = "long_names"

    def algorithms(self, config, device, limits):
        return [MatmulAlgorithm(self.name, 40_000 + tile, KERNEL.format(tile), 32 << 20, True) for tile in (64, 128, 256)]


def shown(width: int, **settings) -> str:
    stream = io.StringIO()
    print_table(Console(file=stream, width=width, color_system=None), **settings)
    return stream.getvalue()


@pytest.mark.parametrize("width", [30, 60, 80, 144, 300])
def test_nothing_is_cut_at_any_width(width: int, rng) -> None:
    rows = [[str(number), KERNEL.format(number), "320 MiB", "yes"] for number in rng.integers(1, 10**6, 5)]
    text = shown(
        width, title="A title that is longer than a narrow terminal", columns=("index", "name", "bytes", "yes"), rows=rows, name="name"
    )
    whole = "".join(text.split())
    assert "…" not in text
    for row in rows:
        assert all("".join(cell.split()) in whole for cell in row)
    if width >= 60:
        assert all(len(line) <= width for line in text.splitlines() if "Cijk" not in line)


@pytest.mark.parametrize("width", [60, 80, 110, 144])
def test_list_tells_candidates_apart(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend(Long(), ("cpu",))
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None)
    monkeypatch.setattr(listing, "console_for", lambda: console)
    arguments = ["--shape", "48,12,10,4", "--class", "fwd_wi", "--device", "cpu", "--backend", "long_names"]
    try:
        with pytest.raises(SystemExit):
            listing.list_algorithms(arguments)
        with pytest.raises(SystemExit):
            listing.list_algorithms(["--models"])
    finally:
        unregister_backend("long_names")
    text = stream.getvalue()
    assert all(KERNEL.format(tile) in text for tile in (64, 128, 256))
    lines = stream.getvalue().splitlines()
    assert "…" not in text and any("mixtral-8x7b-published" in line and "14336" in line for line in lines), "a preset is on one line"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("a\x1b[31m\x07b\ud800\n") == "a\\x1b[31m\\x07b\\ud800\\n" and printable("größe") == "größe"


@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-", "1>&-", "2>&-", "0<&-"])
@pytest.mark.parametrize("command", ["bench --class fwd_wi --baseline none --repetitions 1 --device cpu", "list --device cpu", "doctor"])
def test_commands_without_standard_streams(closed: str, command: str, tmp_path) -> None:
    """As under some crons. A file that is opened must not get the number of a stream that others write to."""
    path = tmp_path / "out.json"
    name = command.split(maxsplit=1)[0]
    extra = f" --shape 48,12,10,4 --json {path}" if name == "bench" else " --shape 48,12,10,4" if name == "list" else ""
    line = f"{sys.executable} -m hipgroupgemm {command}{extra} {closed}"
    done = subprocess.run(
        ["sh", "-c", line], env={**os.environ, "PYTHONPATH": ROOT}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if name == "bench":
        assert json.loads(path.read_text())["rows"][0]["status"] == "ok"


def test_without_msgspec_a_sweep_says_so_and_the_rest_runs() -> None:
    code = "import sys; sys.modules['msgspec'] = None; from hipgroupgemm.cli import main; main(sys.argv[1:])"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": ROOT}
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

    done = run("sweep", "--shape", "48,12,10,4")
    assert done.returncode == 1 and "sweep needs msgspec, which is not installed: pip install msgspec" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("list", "--shape", "48,12,10,4", "--device", "cpu").returncode == 0
    done = run("store", "ls")
    assert done.returncode == 2 and "msgspec is not installed" in " ".join(done.stderr.split())
