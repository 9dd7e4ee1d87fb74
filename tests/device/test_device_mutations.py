"""The comparison with the model is worth something only if wrong kernels fail it: here are wrong ones."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from device_host import judge
from device_host.build import DEVICE, compile_host
from device_host.cases import draw_case
from device_host.check import draw

# name: (file, right text, wrong text)
MUTATIONS = {
    "sizes limited to R": ("scan.h", "extent | kWrong : extent + 1", "extent | kWrong : extent"),
    "sizes summed in 32 bits": ("scan.h", "return before + after;", "return before + (hgg_u32)after;"),
    "batches run on": ("scan.h", "if (after & kHead) return after;", ""),
    "no carry": ("scan.h", "if (window.first != 0) prefix =", "if (window.first == 1) prefix ="),
    "totals of too many warps": ("scan.h", "w < t / kWarp ? total[w]", "w <= t / kWarp ? total[w]"),
    "lower batches not asked for faults": ("scan.h", "if (from == 0) break;", "if (true) break;"),
    "fault not kept": ("scan.h", "!= HGG_FAULT_NONE) return;", "== 77) return;"),
    "wrong left": ("scan.h", "shared.left = a.ragged_extent - before;", "shared.left = a.ragged_extent;"),
    "no barrier": (
        "scan.h",
        "HGG_PHASE(t) { publish_total(shared.total, HGG_OWN(mine, t), t); }\n    HGG_PHASE(t) {",
        "HGG_PHASE(t) { publish_total(shared.total, HGG_OWN(mine, t), t);",
    ),
    "addresses in 32 bits": (
        "scan.h",
        "base + group * (hgg_u64)group_stride",
        "base + (hgg_u32)(group * (hgg_u64)group_stride)",
    ),
    "empty groups past the end": (
        "records.h",
        "const hgg_u64 row = rows ? start : 0;",
        "const hgg_u64 row = start;",
    ),
    "empty slabs keep tiles": ("records.h", "rows ? a.record.n : 0", "a.record.n"),
    "alpha of the template": ("records.h", "(a.flags & HGG_OVERRIDE_ALPHA)", "(a.flags & 128)"),
    "end of a chunk lost": ("records.h", "if (t >= 4 && t < 4 + tail)", "if (t >= 4 && t < 3 + tail)"),
    "a word too many": ("records.h", "if (t >= 4 && t < 4 + tail)", "if (t >= 4 && t < 5 + tail)"),
    "tiles not cut": ("tiles.h", "minimum((hgg_i64)a->block_rows, r.end - first)", "a->block_rows"),
    "tiles of the last window": ("tiles.h", "base += tiles;", ""),
    "ties round up": ("numbers.h", "(bits + 0x7fffu + ((bits >> 16) & 1u))", "(bits + 0x8000u)"),
    "fp16 subnormal numbers lost": ("numbers.h", "if (rest < 0x33000000u)", "if (rest < 0x38800000u)"),
    "rows before the offset": ("uncovered.h", "Rows{0, covered}", "Rows{0, 0}"),
    "end of a line lost": ("uncovered.h", "left + skipped < to", "left + skipped + 1 < to"),
    "c read when beta is 0": ("uncovered.h", "if (!reads) return Storage(0);", ""),
}
SECONDS = 120


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    many = partial(draw_case, count=2100)
    path = tmp_path_factory.mktemp("drawn") / "drawn.pickle"
    path.write_bytes(pickle.dumps(draw(9, 303, [draw_case] * 100 + [many])))
    return path


def judged(drawn: Path, library: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(judge.__file__), str(drawn), str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)


def test_the_kernels_as_they_are_pass(drawn: Path, tmp_path: Path) -> None:
    done = judged(drawn, compile_host(tmp_path, options=("-O1",)))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_seen(drawn: Path, tmp_path: Path, name: str) -> None:
    file, right, wrong = MUTATIONS[name]
    device = tmp_path / "device"
    shutil.copytree(DEVICE, device)
    text = (device / file).read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{right!r} is in {file} {text.count(right)} times"
    (device / file).write_text(text.replace(right, wrong), encoding="utf-8")
    done = judged(drawn, compile_host(tmp_path, device, options=("-O1", "-w")))
    # Reading c where beta is 0 ends in the address that is there to be caught: a crash.
    crashed = done.returncode == -11 and name == "c read when beta is 0"
    assert crashed or (done.returncode == 1 and "got 0x" in done.stdout), done.stdout + done.stderr
