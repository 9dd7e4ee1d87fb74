"""The compile cache: concurrent processes, damage, directories that can't be used."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hipgroupgemm.runtime import cache
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
        "package_version": "1",
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
        {"package_version": "2"},
        {"package_version": None},
        {"options": [], "architecture": "sm_90-O3"},
    ]
    keys = [cache_key(**{**base, **change}) for change in [{}, *changes]]  # type: ignore[arg-type]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)
    assert cache_key(**base) == keys[0]  # type: ignore[arg-type]
    assert cache_key(**{**base, "source": b"a"}) == keys[0]  # type: ignore[arg-type]


def test_round_trip(tmp_path: Path) -> None:
    store = CompileCache(tmp_path / "deep" / "cache")
    key = cache_key("x", [], "a", "c")
    assert store.get(key) is None
    built: list[int] = []

    def build() -> bytes:
        built.append(1)
        return b"code"

    assert store.get_or_build(key, build) == b"code" == store.get_or_build(key, build)
    assert len(built) == 1 and CompileCache(tmp_path / "deep" / "cache").get(key) == b"code"
    empty = cache_key("y", [], "a", "c")
    assert store.put(empty, b"") and store.get(empty) == b""
    assert store.clear() == 2 and store.get(key) is None
    store.discard(key)
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
    assert store.get_or_build(key, lambda: b"new") == b"new" == store.get(key)


WORKER = """
import random, sys, time
from hipgroupgemm.runtime.cache import CompileCache, cache_key
store = CompileCache(sys.argv[1])
vandal = sys.argv[2] == "vandal"
keys = [cache_key(str(i), [], "a", "c") for i in range(3)]
hits = builds = 0
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    key = random.choice(keys)
    expected = random.Random(key).randbytes(100_000)
    if vandal:  # a program that writes where it should not, and not in one step
        path = store.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(expected[: random.randrange(200)])
        time.sleep(0.01)
        continue
    if random.random() < 0.3:
        assert store.put(key, expected)
        builds += 1
    code = store.get(key)
    if code is not None:
        assert code == expected, "another entry's bytes, or part of them"
        hits += 1
print(hits, builds)
"""


@pytest.mark.parametrize("vandals", [0, 1])
def test_processes_at_once(tmp_path: Path, vandals: int) -> None:
    roles = ["worker"] * 4 + ["vandal"] * vandals
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), role, "1.5"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in roles
    ]
    results = [process.communicate(timeout=60) for process in running]
    for process, (_, stderr) in zip(running, results, strict=True):
        assert process.returncode == 0, stderr
    counts = [tuple(map(int, out.split())) for out, _ in results[:4]]
    assert all(hits > 0 and builds > 0 for hits, builds in counts)
    if vandals:
        assert any("damaged" in stderr for _, stderr in results[:4])
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
        assert store.get_or_build(key, lambda: b"code") == b"code"
        assert not store.put(key, b"code")
        assert store.get(key) is None
        assert store.clear() == 0
    assert len(caplog.records) == 1 and cache.ENVIRONMENT_VARIABLE in caplog.text  # said once


def test_entry_that_cannot_be_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CompileCache(tmp_path)
    key = cache_key("x", [], "a", "c")
    path = store.path(key)
    assert path is not None
    (path / "a directory in its place").mkdir(parents=True)
    assert store.get_or_build(key, lambda: b"code") == b"code"
    assert not store.put(key, b"code")
    assert not list(tmp_path.rglob("*.tmp"))


def test_no_directory() -> None:
    store = CompileCache(None)
    assert store.get_or_build("0" * 64, lambda: b"code") == b"code"
    assert store.get("0" * 64) is None and store.path("0" * 64) is None and store.clear() == 0


@pytest.mark.parametrize("with_platformdirs", [False, True])
def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_platformdirs: bool) -> None:
    if not with_platformdirs:
        monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.delenv(cache.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.default_directory() == tmp_path / ".cache" / "hipgroupgemm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_directory() == tmp_path / "xdg" / "hipgroupgemm"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "named"))
    first = cache.default_cache()
    assert first.directory == tmp_path / "named" and cache.default_cache() is first
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, "~/other")
    assert cache.default_cache().directory == tmp_path / "other"


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setitem(sys.modules, "platformdirs", None)
    for variable in (cache.ENVIRONMENT_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache.default_directory() is None
    assert cache.default_cache().get_or_build("0" * 64, lambda: b"code") == b"code"


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
