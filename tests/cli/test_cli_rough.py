"""The command line where things are rough: outputs that are no files, operands without room, odd digits."""

from __future__ import annotations

import csv
import json
import os
import stat
import threading

import pytest
from click.testing import CliRunner

from hipgroupgemm.cli import cli
from hipgroupgemm.measure.harness import HostHarness
from hipgroupgemm.measure.roofline import Roofline


@pytest.fixture(autouse=True)
def given_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second to measure."""
    monkeypatch.setattr(HostHarness, "roofline", lambda *_: Roofline(1e11, 1e10, "a product", "a copy"))


def bench(*arguments: str):
    return CliRunner().invoke(cli, ["bench", "--shape", "48,12,10,4", "--repetitions", "2", "--device", "cpu", *arguments])


def test_what_is_no_file_is_written_into_and_links_are_followed(tmp_path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "target.json"
    os.mkfifo(pipe)
    link.symlink_to(target)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    result = bench("--class", "fwd_wi", "--csv", str(pipe), "--json", str(link))
    assert result.exit_code == 0
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(30)
    assert len(list(csv.DictReader(read[0].splitlines()))) == 4
    assert link.is_symlink()
    assert len(json.loads(target.read_text())["rows"]) == 4


def test_operands_that_do_not_fit_are_rows_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = HostHarness.operands

    def make(harness, config, **rest):
        if config.k == 12:  # fwd_wi
            raise MemoryError("no room for 954 GiB")
        return made(harness, config, **rest)

    monkeypatch.setattr(HostHarness, "operands", make)
    result = bench("--class", "fwd_wi", "--class", "fwd_wo")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "reference" in line]
    assert any("out of memory" in line for line in lines)
    assert any("fwd_wo" in line and "out of memory" not in line for line in lines)


def test_bytes_are_decimal() -> None:
    result = CliRunner().invoke(cli, ["list", "--shape", "48,12,10,4", "--max-workspace", "²"])
    assert result.exit_code == 2
    assert "wanted a number of bytes" in result.output
