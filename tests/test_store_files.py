"""The store's files: many writers, killed writers, damage, versions to come, directories that can't be used. With real processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from store_reports import config_of, report, row

import hipgroupgemm
from hipgroupgemm.operands.views import CPU
from hipgroupgemm.store import files
from hipgroupgemm.store.files import StoreFile, StoreWriteError
from hipgroupgemm.store.identity import device_kind
from hipgroupgemm.store.records import SCHEMA, new_document
from hipgroupgemm.store.store import TuningStore

ROOT = Path(hipgroupgemm.__file__).parent.parent
TESTS = Path(__file__).parent
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
    store.add(report(config_of(**settings), [row("reference", 0, median)]))
    return store.path(device_kind(CPU))


# ---- many writers --------------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from store_reports import config_of, report, row
from hipgroupgemm.store.store import TuningStore
store, number = TuningStore(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for turn in range(8):
    own = report(config_of(n=100 + 10 * number + turn), [row("reference", 0, 1.0 + number)], started="2026-01-01T00:00:00Z")
    shared = report(config_of(n=7), [row(f"backend_{number}", turn, 1.0 + turn)], started=f"2026-01-01T00:00:0{turn}Z")
    assert len(store.add(own)) == len(store.add(shared)) == 1
    assert store.lookup(own.config, __import__("hipgroupgemm").views.CPU) is not None
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
            count = len(store.records())
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
    records = TuningStore(store.directory).records()
    own = {record.config.n: record.median_ms for record in records if record.backend == "reference"}
    assert own == {100 + 10 * number + turn: 1.0 + number for number in range(6) for turn in range(8)}
    shared = {record.backend: record.rows for record in records if record.config.n == 7}
    assert shared.keys() == {f"backend_{number}" for number in range(6)}
    assert all(rows[0].algorithm.index == 0 for rows in shared.values()), "the fastest of eight runs on the same sizes"
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
    assert len(store.records()) == 30


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
    assert {record.config.n for record in store.records()} == {5, 10, 11}


def test_a_child_forked_while_another_thread_reads_or_writes_is_not_stuck(store):
    fill(store)
    held, forked = threading.Event(), threading.Event()

    def hold():
        with files._parsing, store._file(device_kind(CPU))._locked(5):
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
where = sys.argv[2]
real = getattr(os, where)
def die(*arguments, **settings):
    if where == "fsync":
        real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
if where == "write":
    import hipgroupgemm.store.files as files
    class Half(str):
        def encode(self):
            return HalfBytes(str.encode(self))
    class HalfBytes(bytes):
        pass
    dumps = files.json.dumps
    real_open = os.fdopen
    def half_open(descriptor, mode):
        file = real_open(descriptor, mode)
        class Dying:
            def __enter__(self):
                return self
            def __exit__(self, *_):
                pass
            def write(self, data):
                file.write(data[: len(data) // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return Dying()
    os.fdopen = half_open
else:
    setattr(os, where, die)
TuningStore(sys.argv[1]).add(report(config_of(n=6), [row("reference", 0, 2.0)]))
"""


@pytest.mark.parametrize("where", ["write", "fchmod", "fsync", "replace"])
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
    assert {record.config.n for record in TuningStore(store.directory).records()} == {5, 7}
    assert not caplog.records


def test_kill_9_before_the_first_file_is_there(store):
    store.directory.mkdir()
    killed = start(KILLED, store.directory, "replace")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert store.lookup(KEY, CPU) is None and store.records() == []
    fill(store)
    assert store.lookup(KEY, CPU) is not None and leftovers(store) == []


def test_a_write_that_fails_leaves_the_file_and_no_litter(store, monkeypatch, caplog):
    """A full disk, at each step of writing."""
    path = fill(store)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for step in ("fsync", "replace", "fdopen", "fchmod"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full)
            assert store.add(report(config_of(n=6), [row("reference", 0, 1.0)])) == []
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
        "latin-1": good.replace(b'"device_name": "', b'"device_name": "caf\xe9 '),
        "no object": b"[1, 2]",
        "another format": b'{"format": "something else", "schema": 1}',
        "no schema": good.replace(b'"schema": 1', b'"schema": null'),
        "configs a list": json.dumps({**json.loads(good), "configs": []}).encode(),
        "a config without results": good.replace(b'"results"', b'"resultz"'),
        "too deep": b"[" * 200_000,
        "no device": good.replace(b'"compute_units"', b'"units"'),
    }[kind]


KINDS = (
    "empty",
    "truncated",
    "one byte short",
    "binary",
    "latin-1",
    "no object",
    "another format",
    "no schema",
    "configs a list",
    "a config without results",
    "too deep",
    "no device",
)


@pytest.mark.parametrize("by", ["lookup", "records", "add"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_set_aside_and_never_lost(store, kind, by, caplog):
    path = fill(store)
    bad = damaged(kind, path.read_bytes())
    for number in (1, 2):
        path.write_bytes(bad)
        caplog.clear()
        fresh = TuningStore(store.directory)
        if by == "add":
            fill(fresh, n=6)
            assert [record.config.n for record in fresh.records()] == [6]
        else:
            for _ in range(2):
                assert not (fresh.lookup(KEY, CPU) if by == "lookup" else fresh.records())
            assert not path.exists()
        aside = path.with_name(f"{path.name}.broken-{number}")
        assert aside.read_bytes() == bad
        (text,) = [entry.getMessage() for entry in caplog.records]
        assert "it was set aside as" in text and aside.name in text
    fill(store)
    assert store.lookup(KEY, CPU) is not None
    assert len(leftovers(store)) == 2


def test_a_file_that_was_mended_meanwhile_is_not_set_aside(store, monkeypatch):
    path = fill(store)
    good = path.read_bytes()
    path.write_bytes(good[:100])
    file = StoreFile(path, device_kind(CPU))
    real = file._set_aside

    def mend_first(reason):
        path.write_bytes(good)
        real(reason)

    monkeypatch.setattr(file, "_set_aside", mend_first)
    file.document()
    assert path.read_bytes() == good and leftovers(store) == []
    assert file.document() is not None


def test_a_broken_file_in_a_directory_that_cannot_be_written_is_passed_over(store, monkeypatch, caplog):
    path = fill(store)
    path.write_bytes(b"{")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    for _ in range(3):
        assert store.lookup(KEY, CPU) is None
    assert path.read_bytes() == b"{"
    assert caplog.records[0].getMessage().endswith("it is not used") and len(caplog.records) == 1


# ---- versions to come, other devices -------------------------------------------------------------------------------------------


def test_a_file_of_a_later_schema_is_left_alone(store, caplog):
    path = fill(store)
    later = json.dumps({"format": "hipgroupgemm tuning store", "schema": SCHEMA + 1, "everything": "else"}).encode()
    path.write_bytes(later)
    for _ in range(2):
        assert store.lookup(KEY, CPU) is None and store.records() == []
        assert store.add(report(config_of(), [row("reference", 0, 1.0)])) == []
    assert path.read_bytes() == later and leftovers(store) == []
    texts = [entry.getMessage() for entry in caplog.records]
    assert len(texts) == 2, "one for reading, one for storing"
    assert all(f"has schema {SCHEMA + 1}, this version of hipgroupgemm knows {SCHEMA}" in text for text in texts)
    with pytest.raises(StoreWriteError, match="is left as it is; upgrade hipgroupgemm"):
        StoreFile(path, device_kind(CPU)).update(lambda _: True)
    beside = path.with_name(path.name.replace(f".v{SCHEMA}.", f".v{SCHEMA + 1}."))
    path.rename(beside)
    fill(store)
    assert store.lookup(KEY, CPU) is not None and beside.read_bytes() == later, "under its own name it is in nobody's way"


def test_a_file_of_another_device_is_left_alone(store, caplog):
    path = fill(store)
    other = json.dumps(new_document(type(device_kind(CPU))("rocm", "gfx942", 304))).encode()
    path.write_bytes(other)
    assert store.lookup(KEY, CPU) is None
    assert store.add(report(config_of(), [row("reference", 0, 1.0)])) == []
    assert path.read_bytes() == other
    assert "is of rocm gfx942, 304 CUs, not of cpu" in caplog.text and "is of another device" in caplog.text


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
        assert store.add(report(config_of(), [row("reference", 0, 0.5)])) == []
    assert path.read_bytes() == before and len(caplog.records) == 1 and "what was tuned is not stored" in caplog.text
    with pytest.raises(StoreWriteError, match="can't be written"):
        store.remove(lambda _: True)


def test_a_directory_that_cannot_be_made(store, unwritable, caplog):
    unwritable()
    assert store.lookup(KEY, CPU) is None
    assert store.add(report(config_of(), [row("reference", 0, 0.5)])) == []
    assert "Read-only file system" in caplog.text


def test_a_file_in_the_place_of_the_directory(tmp_path, caplog):
    (tmp_path / "file").write_text("mine")
    store = TuningStore(tmp_path / "file")
    assert store.lookup(KEY, CPU) is None and store.records() == []
    assert store.add(report(config_of(), [row("reference", 0, 0.5)])) == []
    assert (tmp_path / "file").read_text() == "mine" and len(caplog.records) == 1


def test_a_directory_in_the_place_of_the_file(store, caplog):
    path = fill(store)
    path.unlink()
    path.mkdir()
    for _ in range(2):
        assert store.lookup(KEY, CPU) is None
        assert store.add(report(config_of(), [row("reference", 0, 0.5)])) == []
    assert len(caplog.records) == 2 and path.is_dir()


def test_without_filelock_the_store_is_read_and_tuning_goes_on(store, monkeypatch, caplog):
    fill(store)
    monkeypatch.setitem(sys.modules, "filelock", None)
    assert store.lookup(KEY, CPU) is not None
    assert store.add(report(config_of(), [row("reference", 0, 0.5)])) == []
    assert "pip install filelock" in caplog.text


def test_a_lock_that_nobody_gives_back(store, monkeypatch, caplog):
    fill(store)
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.2)
    with store._file(device_kind(CPU))._locked(5):
        assert store.lookup(KEY, CPU) is not None, "readers take no lock"
        assert store.add(report(config_of(), [row("reference", 0, 0.5)])) == []
    assert "Timeout" in caplog.text and len([entry for entry in caplog.records if entry.name == "hipgroupgemm.tuning"]) == 1
    fill(store, 0.25)
    assert store.lookup(KEY, CPU).median_ms == 0.25


def test_who_may_use_the_files_is_the_directorys_say(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    private, shared = TuningStore(tmp_path / "deep" / "private"), TuningStore(tmp_path / "shared")
    path = fill(private)
    assert path.parent.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    shared.directory.mkdir()
    os.chmod(shared.directory, 0o775)
    path = fill(shared)
    assert path.stat().st_mode & 0o777 == 0o664, "its group may tune as well"
    assert path.with_name(f".{path.name}.lock").stat().st_mode & 0o777 == 0o664
