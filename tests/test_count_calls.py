"""A warm call stays cheap in Python: the limits of tools/count_calls.py hold for NumPy."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_a_warm_call_makes_few_calls():
    command = [sys.executable, ROOT / "tools" / "count_calls.py"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("calls,") == 3
