"""The store's files: many writers, killed writers, damage, versions to come, directories that can't be used. With real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from store_reports import config_of, report, row

import hipgroupgemm
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.store import files
from hipgroupgemm.store.files import SCHEMA, StoreWriteError
from hipgroupgemm.store.identity import device_kind
from hipgroupgemm.store.store import TuningStore
from hipgroupgemm.tuning.keep import keep

ROOT = Path(hipgroupgemm.__file__).parent.parent
TESTS = ROOT / "tests"
KEY = config_of().key()


@pytest.fixture
def store(tuning_store):
    return TuningStore(tuning_store)


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())


def start(code, *arguments):
    """A Python process that can import the package and the tests' helpers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(TESTS))), "PYTHONWARNINGS": "error"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process, text=None):
    out, err = process.communicate(text, timeout=120)
    assert process.returncode == 0, err
    assert not err, err
    return out


def leftovers(store):
    """Everything in the store's directory but its files and their locks."""
    return sorted(name for name in os.listdir(store.directory) if not name.endswith((".json", ".lock")))


def fill(store, median=1.0, **settings):
    keep(report(config_of(**settings), [row("reference", 0, median)]), store)
    return store.path(device_kind(CPU))


# ---- many writers --------------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from store_reports import config_of, report, row
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.store.store import TuningStore
from hipgroupgemm.tuning.keep import keep
store, number = TuningStore(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for turn in range(8):
    own = report(config_of(n=100 + 10 * number + turn), [row("reference", 0, 1.0 + number)], started="2026-01-01T00:00:00Z")
    shared = report(config_of(n=7), [row(f"backend_{number}", turn, 1.0 + turn)], started=f"2026-01-01T00:00:0{turn}Z")
    assert keep(own, store) and keep(shared, store)
    assert store.lookup(own.config, CPU) is not None
"""


def test_many_processes_write_and_none_loses_anything(store):
    writers = [start(WRITER, store.directory, number) for number in range(6)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    seen, done = set(), threading.Event()

    def read():
        """A reader among the writers sees whole documents that only grow."""
        last = 0
        while not done.is_set():
            count = len(store.results())
            assert count >= last, f"{count} results after {last}"
            last = count
            seen.add(count)

    reader = threading.Thread(target=read)
    reader.start()
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    try:
        for writer in writers:
            finish(writer)
    finally:
        done.set()
        reader.join()
    assert len(seen) > 1
    records = TuningStore(store.directory).results()
    own = {result.config.n: result.median_ms for result in records if result.backend == "reference"}
    assert own == {100 + 10 * number + turn: 1.0 + number for number in range(6) for turn in range(8)}
    shared = {result.backend: result.algorithm.index for result in records if result.config.n == 7}
    assert shared == {f"backend_{number}": 7 for number in range(6)}, "the last of eight runs"
    assert leftovers(store) == []


def test_threads_of_one_process_write_and_none_loses_anything(store):
    def write(number):
        for turn in range(5):
            fill(store if turn % 2 else TuningStore(store.directory), n=100 + 10 * number + turn)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.results()) == 30


def _add_in_child(directory, n):
    fill(TuningStore(directory), n=n)
    assert TuningStore(directory).lookup(KEY, CPU).median_ms == 1.0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_read_and_write(store, method):
    fill(store)
    assert store.lookup(KEY, CPU) is not None
    context = multiprocessing.get_context(method)
    children = [context.Process(target=_add_in_child, args=(store.directory, 10 + number)) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert {result.config.n for result in store.results()} == {5, 10, 11}


def test_a_child_forked_while_another_thread_reads_or_writes_is_not_stuck(store):
    fill(store)
    held, forked = threading.Event(), threading.Event()

    def hold():
        with FileLock(store.path(device_kind(CPU)).with_name(f".{store.path(device_kind(CPU)).name}.lock")):
            held.set()
            forked.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        try:
            signal.alarm(20)
            os._exit(0 if TuningStore(store.directory).lookup(KEY, CPU) is not None else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    forked.set()
    holder.join()
    assert status == 0
    fill(store, n=6)


# ---- killed writers ------------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from store_reports import config_of, report, row
from hipgroupgemm.store.store import TuningStore
from hipgroupgemm.tuning.keep import keep
where = sys.argv[2]
real = getattr(os, where)
def die(*arguments, **settings):
    if where == "fdopen":
        os.write(arguments[0], b"{half of it")
    elif where == "fsync":
        real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, where, die)
keep(report(config_of(n=6), [row("reference", 0, 2.0)]), TuningStore(sys.argv[1]))
"""


@pytest.mark.parametrize("where", ["fdopen", "fsync", "replace"])
def test_kill_9_in_the_middle_of_writing_loses_nothing(store, where, caplog):
    path = fill(store)
    before = path.read_bytes()
    killed = start(KILLED, store.directory, where)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(leftovers(store)) == 1, "the temporary file of the killed writer"
    assert store.lookup(KEY, CPU).median_ms == 1.0
    began = time.monotonic()
    fill(store, n=7)
    assert time.monotonic() - began < 10, "its lock went with it"
    assert leftovers(store) == []
    assert {result.config.n for result in TuningStore(store.directory).results()} == {5, 7}
    assert not caplog.records


def test_kill_9_before_the_first_file_is_there(store):
    store.directory.mkdir()
    killed = start(KILLED, store.directory, "replace")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert store.lookup(KEY, CPU) is None and store.results() == []
    fill(store)
    assert store.lookup(KEY, CPU) is not None and leftovers(store) == []


def test_a_write_that_fails_leaves_the_file_and_no_litter(store, monkeypatch, caplog):
    """A full disk, at each step of writing."""
    path = fill(store)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for step in ("fsync", "replace", "fdopen"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full)
            assert not keep(report(config_of(n=6), [row("reference", 0, 1.0)]), store)
        assert path.read_bytes() == before and leftovers(store) == [], step
    assert caplog.text.count("No space left on device") == len(caplog.records) == 1, "one warning"
    assert "what was tuned is not stored" in caplog.text and "HIPGROUPGEMM_TUNING_STORE" in caplog.text


# ---- damage --------------------------------------------------------------------------------------------------------------------


def damaged(kind, good):
    return {
        "empty": b"",
        "truncated": good[: len(good) // 2],
        "one byte short": good.rstrip()[:-1],
        "binary": bytes(range(256)),
        "no object": b"[1, 2]",
        "another format": b'{"format": "something else", "schema": 2, "results": {}}',
        "no schema": good.replace(b'"schema": 2', b'"schema": null'),
        "a later schema": good.replace(b'"schema": 2', b'"schema": 99'),
        "results a list": json.dumps({**json.loads(good), "results": []}).encode(),
        "too deep": b"[" * 200_000,
    }[kind]


KINDS = (
    *("empty", "truncated", "one byte short", "binary", "no object", "another format", "no schema", "a later schema"),
    *("results a list", "too deep"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_passed_over_and_never_lost(store, kind, caplog):
    path = fill(store)
    bad = damaged(kind, path.read_bytes())
    for number in (1, 2):
        path.write_bytes(bad)
        files._warned.clear()
        caplog.clear()
        fresh = TuningStore(store.directory)
        for _ in range(2):
            assert fresh.lookup(KEY, CPU) is None and fresh.results() == []
        assert path.read_bytes() == bad, "readers change nothing"
        (text,) = [entry.getMessage() for entry in caplog.records]
        assert "going on without it" in text and str(path) in text
        fill(fresh, n=6)
        assert [result.config.n for result in fresh.results()] == [6]
        aside = path.with_name(f"{path.name}.broken-{number}")
        assert aside.read_bytes() == bad
        assert f"it was set aside as {aside.name}" in caplog.text
    assert len(leftovers(store)) == 2


def test_files_of_an_earlier_schema_are_left_alone(store, caplog):
    store.directory.mkdir(mode=0o700)
    old = store.directory / store.path(device_kind(CPU)).name.replace(f".v{SCHEMA}.", ".v1.")
    old.write_text('{"format": "hipgroupgemm tuning store", "schema": 1, "device": {}, "configs": {}}')
    before = old.read_bytes()
    assert store.lookup(KEY, CPU) is None and store.results() == [] and store.ignored() == [old.name]
    fill(store)
    assert store.lookup(KEY, CPU) is not None and len(store.results()) == 1
    store.remove(lambda _: True)
    assert old.read_bytes() == before and not caplog.records


def test_results_of_another_device_in_a_file_are_none_of_its(store):
    path = fill(store)
    path.write_text(path.read_text().replace('"compute_units"', '"compute_units": 1, "was"'))
    assert TuningStore(store.directory).lookup(KEY, CPU) is None


# ---- directories that can't be used --------------------------------------------------------------------------------------------


@pytest.fixture
def unwritable(store, monkeypatch):
    """As a read-only file system is: root would get past permissions."""
    real_open, real_mkdir = os.open, os.mkdir

    def refuse(path, flags, *rest, **settings):
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(store.directory)):
            raise OSError(30, "Read-only file system", str(path))
        return real_open(path, flags, *rest, **settings)

    def refuse_mkdir(path, *rest, **settings):
        if str(path).startswith(str(store.directory)):
            raise OSError(30, "Read-only file system", str(path))
        return real_mkdir(path, *rest, **settings)

    def deny():
        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(os, "mkdir", refuse_mkdir)

    return deny


def test_a_read_only_directory_is_read_and_costs_one_warning_when_tuned(store, unwritable, caplog):
    path = fill(store)
    before = path.read_bytes()
    unwritable()
    assert store.lookup(KEY, CPU).median_ms == 1.0
    for _ in range(3):
        assert not keep(report(config_of(), [row("reference", 0, 0.5)]), store)
    assert path.read_bytes() == before and len(caplog.records) == 1 and "what was tuned is not stored" in caplog.text
    with pytest.raises(StoreWriteError, match="can't be written"):
        store.remove(lambda _: True)


def test_a_directory_that_cannot_be_made(store, unwritable, caplog):
    unwritable()
    assert store.lookup(KEY, CPU) is None
    assert not keep(report(config_of(), [row("reference", 0, 0.5)]), store)
    assert "Read-only file system" in caplog.text


def test_a_file_in_the_place_of_the_directory(tmp_path, caplog):
    (tmp_path / "file").write_text("mine")
    store = TuningStore(tmp_path / "file")
    assert store.lookup(KEY, CPU) is None and store.results() == []
    assert not keep(report(config_of(), [row("reference", 0, 0.5)]), store)
    assert (tmp_path / "file").read_text() == "mine" and len(caplog.records) == 1


def test_a_directory_in_the_place_of_the_file(store, caplog):
    path = fill(store)
    path.unlink()
    path.mkdir()
    for _ in range(2):
        assert store.lookup(KEY, CPU) is None
        assert not keep(report(config_of(), [row("reference", 0, 0.5)]), store)
    assert len(caplog.records) == 2 and path.is_dir()


def test_without_filelock_the_store_is_read_and_tuning_goes_on(store, monkeypatch, caplog):
    fill(store)
    monkeypatch.setitem(sys.modules, "filelock", None)
    assert store.lookup(KEY, CPU) is not None
    assert not keep(report(config_of(), [row("reference", 0, 0.5)]), store)
    assert "pip install filelock" in caplog.text


def test_a_lock_that_nobody_gives_back(store, monkeypatch, caplog):
    fill(store)
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.2)
    path = store.path(device_kind(CPU))
    with FileLock(path.with_name(f".{path.name}.lock")):
        assert store.lookup(KEY, CPU) is not None, "readers take no lock"
        assert not keep(report(config_of(), [row("reference", 0, 0.5)]), store)
    assert "Timeout" in caplog.text and len([entry for entry in caplog.records if entry.name == "hipgroupgemm.tuning"]) == 1
    fill(store, 0.25)
    assert store.lookup(KEY, CPU).median_ms == 0.25


def test_a_store_is_made_for_its_user_alone(tmp_path):
    path = fill(TuningStore(tmp_path / "deep" / "private"))
    assert path.parent.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    assert path.with_name(f".{path.name}.lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["directory", "file"])
@pytest.mark.parametrize("how", ["writable by the group", "writable by all", "another user's"])
def test_what_others_could_have_written_is_not_read(store, what, how, monkeypatch, caplog):
    """Another user could name kernels there. It is said once, and nothing is written to such a place."""
    path = fill(store)
    place = path if what == "file" else store.directory
    if how == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        if os.getuid() == 0:
            os.chown(place, 65534, -1)
    else:
        os.chmod(place, 0o720 if "group" in how else 0o702)
    fresh = TuningStore(store.directory)
    for _ in range(2):
        assert fresh.lookup(KEY, CPU) is None and fresh.results() == []
    (text,) = [entry.getMessage() for entry in caplog.records]
    assert "who could have put anything there" in text and str(place) in text
    assert not keep(report(config_of(), [row("reference", 0, 0.5)]), fresh)
    assert "what was tuned is not stored" in caplog.text
