"""The compile cache: concurrent processes, damage, directories that can't be used."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hipgroupgemm.runtime import cache, directories
from hipgroupgemm.runtime.cache import CompileCache, cache_key


def code_for(key: str, nbytes: int = 100_000) -> bytes:
    return random.Random(key).randbytes(nbytes)


def test_keys_differ_in_every_part() -> None:
    base = {
        "source": "a",
        "options": ["-O3"],
        "architecture": "sm_90",
        "compiler": "nvrtc 13.0",
        "headers": {"h": "x"},
    }
    changes = [
        {"source": "b"},
        {"source": b"a\0"},
        {"options": ["-O3", "-g"]},
        {"options": ["-O", "3"]},
        {"options": []},
        {"architecture": "sm_90a"},
        {"compiler": "nvrtc 13.1"},
        {"headers": {"h": "y"}},
        {"headers": {"hx": ""}},
        {"headers": None},
        {"options": [], "architecture": "sm_90-O3"},
    ]
    keys = [cache_key(**{**base, **change}) for change in [{}, *changes]]  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "__version__", "0")
        keys.append(cache_key(**base))  # type: ignore[arg-type]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)
    assert cache_key(**base) == keys[0]  # type: ignore[arg-type]
    assert cache_key(**{**base, "source": b"a"}) == keys[0]  # type: ignore[arg-type]


def test_round_trip(tmp_path: Path) -> None:
    store = CompileCache(tmp_path / "deep" / "cache")
    key = cache_key("x", [], "a", "c")
    assert store.get(key) is None
    assert store.put(key, b"code") and store.get(key) == b"code"
    assert CompileCache(tmp_path / "deep" / "cache").get(key) == b"code"
    empty = cache_key("y", [], "a", "c")
    assert store.put(empty, b"") and store.get(empty) == b""
    for _ in range(2):
        store.discard(key)
        store.discard(empty)
    assert store.get(key) is None
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "flipped", "header", "renamed", "text"])
def test_damage_is_noticed(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = CompileCache(tmp_path)
    key, other = cache_key("x", [], "a", "c"), cache_key("y", [], "a", "c")
    store.put(key, code_for(key))
    path = store.path(key)
    assert path is not None
    data = bytearray(path.read_bytes())
    if damage == "empty":
        data.clear()
    elif damage == "cut":
        del data[random.randrange(1, len(data)) :]
    elif damage == "longer":
        data += b"\0"
    elif damage == "flipped":
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif damage == "header":
        data[0:1] = b"H"
    elif damage == "renamed":
        store.put(other, code_for(other))
        other_path = store.path(other)
        assert other_path is not None
        data[:] = other_path.read_bytes()
    else:
        data[:] = b"not ours"
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "hipgroupgemm.cache"):
        assert store.get(key) is None
    assert "damaged" in caplog.text and not path.exists()
    assert store.put(key, b"new") and store.get(key) == b"new"


WORKER = """
import random, sys, time
from hipgroupgemm.runtime.cache import CompileCache, cache_key
store = CompileCache(sys.argv[1])
role = sys.argv[2]
keys = [cache_key(str(i), [], "a", "c") for i in range(3)]
hits = builds = misses = 0
start = time.monotonic()
# for a second and a half, and on a busy machine until it has seen what it is to see
while role == "vandal" or time.monotonic() < start + 1.5 or (not (hits and builds and misses) and time.monotonic() < start + 60):
    key = random.choice(keys)
    expected = random.Random(key).randbytes(100_000)
    if role == "vandal":  # a program that writes where it should not, and not in one step
        path = store.path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(expected[: random.randrange(200)])
        time.sleep(0.01)
        continue
    if random.random() < 0.3:
        assert store.put(key, expected)
        builds += 1
    code = store.get(key)
    misses += code is None or role == "worker"
    if code is not None:
        assert code == expected, "another entry's bytes, or part of them"
        hits += 1
print(hits, builds)
"""


@pytest.mark.parametrize("vandals", [0, 1])
def test_processes_at_once(tmp_path: Path, vandals: int) -> None:
    def start(role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(tmp_path), role]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    vandal = [start("vandal") for _ in range(vandals)]
    running = [start("victim" if vandals else "worker") for _ in range(4)]
    results = [process.communicate(timeout=100) for process in running]
    for process in vandal:
        process.kill()
        process.communicate()
    for process, (_, stderr) in zip(running, results, strict=True):
        assert process.returncode == 0, stderr
    counts = [tuple(map(int, out.split())) for out, _ in results]
    assert all(hits > 0 and builds > 0 for hits, builds in counts)
    if vandals:
        assert any("damaged" in stderr for _, stderr in results)
    else:
        assert not any(stderr for _, stderr in results)
        store = CompileCache(tmp_path)
        for key in (cache_key(str(i), [], "a", "c") for i in range(3)):
            assert store.get(key) == code_for(key)
    assert not list(tmp_path.rglob("*.tmp"))


def test_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = CompileCache(tmp_path / "file" / "cache")
    key = cache_key("x", [], "a", "c")
    with caplog.at_level(logging.WARNING, "hipgroupgemm.cache"):
        assert not store.put(key, b"code")
        assert store.get(key) is None
    assert len(caplog.records) == 1 and directories.CACHE_VARIABLE in caplog.text  # said once


def test_entry_that_cannot_be_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CompileCache(tmp_path)
    key = cache_key("x", [], "a", "c")
    path = store.path(key)
    assert path is not None
    (path / "a directory in its place").mkdir(parents=True)
    assert not store.put(key, b"code")
    assert not list(tmp_path.rglob("*.tmp"))


def test_no_directory() -> None:
    store = CompileCache(None)
    assert not store.put("0" * 64, b"code") and store.get("0" * 64) is None and store.path("0" * 64) is None


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(directories.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert directories.cache_directory() == tmp_path / ".cache" / "hipgroupgemm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert directories.cache_directory() == tmp_path / "xdg" / "hipgroupgemm"
    monkeypatch.setenv(directories.CACHE_VARIABLE, str(tmp_path / "named"))
    first = cache.default_cache()
    assert first.directory == tmp_path / "named" and cache.default_cache() is first
    monkeypatch.setenv(directories.CACHE_VARIABLE, "~/other")
    assert cache.default_cache().directory == tmp_path / "other"


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in (directories.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert directories.cache_directory() is None
    assert not cache.default_cache().put("0" * 64, b"code")


def test_private_directory(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = CompileCache(tmp_path / "cache")
        key = cache_key("x", [], "a", "c")
        store.put(key, b"code")
    finally:
        os.umask(before)
    path = store.path(key)
    assert path is not None
    # code that others could replace would run in this user's processes
    for place in (path, path.parent, path.parent.parent, tmp_path / "cache"):
        assert place.stat().st_mode & 0o022 == 0, place


@pytest.mark.parametrize("place", ["directory", "code", "file"])
@pytest.mark.parametrize("trouble", ["another user's", "open to others"])
def test_code_that_others_could_have_written_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: str, trouble: str
) -> None:
    directory = tmp_path / "cache"
    key = cache_key("x", [], "a", "c")
    assert CompileCache(directory).put(key, b"code") and directory.stat().st_mode & 0o777 == 0o700
    store = CompileCache(directory)
    assert store.get(key) == b"code"
    path = store.path(key)
    assert path is not None
    target = {"directory": directory, "code": directory / "code", "file": path}[place]
    if trouble == "open to others":
        target.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(target, 12345, -1)
    else:
        real = os.stat(target).st_ino
        theirs = directories.require_trusted

        def require(path: Path, found: os.stat_result | None = None) -> None:
            found = path.stat() if found is None else found
            if found.st_ino == real:
                found = os.stat_result((*found[:4], 12345, *found[5:10]))
            theirs(path, found)

        monkeypatch.setattr(directories, "require_trusted", require)
        monkeypatch.setattr(cache, "require_trusted", require)
    with caplog.at_level(logging.WARNING, "hipgroupgemm.cache"):
        assert store.get(key) is None
        assert store.put(key, b"own") is (place == "file") and store.get(key) == (b"own" if place == "file" else None)
    assert len(caplog.records) == 1 and str(target) in caplog.text  # said once
    assert caplog.text.count("who could have put anything there") == 1
    if place != "file":
        assert path.read_bytes().endswith(b"code")  # and nothing is written there


@pytest.mark.parametrize("variable", [directories.CACHE_VARIABLE, "HOME"])
def test_caches_on_dev_null(variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in (directories.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "/dev/null")
    with caplog.at_level(logging.WARNING, "hipgroupgemm.cache"):
        for key in ("0" * 64, "1" * 64):
            assert cache.default_cache().get(key) is None and not cache.default_cache().put(key, b"code")
    assert len(caplog.records) == 1 and "/dev/null" in caplog.text


def test_a_directory_for_programs_that_must_write_somewhere(tmp_path: Path) -> None:
    code = """
import os
from hipgroupgemm.runtime.directories import temporary_directory
path = temporary_directory()
(path / "x").write_text("1")
assert path == temporary_directory() and path.stat().st_mode & 0o077 == 0
if os.fork() == 0:
    raise SystemExit(0)
os.wait()
assert path.exists()
print(path)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert not Path(run.stdout.strip()).exists()
