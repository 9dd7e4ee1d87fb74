"""What `make bench` runs: all presets' six ragged-dot classes on this machine, checked, beside the baselines; two ratios; plots."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OUT = Path(__file__).resolve().parent / "out"
RATIO_SECONDS = 5.0  # for each of them


IMPORT = """
import time
import numpy, ml_dtypes, cffi
start = time.process_time()
import hipgroupgemm
print((time.process_time() - start) * 1000)
"""


def import_milliseconds(runs: int = 5) -> float:
    """The least time (CPU, ms) that importing the package took beyond numpy, ml_dtypes and cffi, with its bytecode cached."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as cache:
        environment["PYTHONPYCACHEPREFIX"] = cache
        done = [
            subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, env=environment, check=True) for _ in range(runs)
        ]
    return min(float(process.stdout) for process in done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="directory of the results (default: bench/out)")
    parser.add_argument("--model", action="append", help="only this preset (hipgroupgemm list --models); may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    from ratios import measure_ratios

    from hipgroupgemm.benchmark.command import Request, measure, plot_note, print_result
    from hipgroupgemm.benchmark.plots import row_panels, write_panels
    from hipgroupgemm.benchmark.rows import write_rows
    from hipgroupgemm.measure.text import console_for
    from hipgroupgemm.measure.workloads import CLASSES, PRESETS, presets_of

    try:
        shapes = [shape for name in options.model or PRESETS for shape in presets_of(name)]
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    request = Request(shapes, list(CLASSES.values()), backends=["reference"], seed=options.seed, device="cpu")
    result = measure(request)
    ratios = []
    if not result.interrupted:
        try:
            ratios = measure_ratios(RATIO_SECONDS, options.seed)
        except KeyboardInterrupt:
            result.interrupted = True

    console = console_for()
    print_result(console, result)
    for ratio in ratios:
        console.print(ratio.describe(), highlight=False, soft_wrap=True)
    console.print(f"import hipgroupgemm: {import_milliseconds():.0f} ms (wanted at most 30)", highlight=False)
    more = {**result.record(), "ratios": [ratio.as_dict() for ratio in ratios]}
    write_rows(result.rows, result.context, options.out / "ragged_dot.csv", options.out / "ragged_dot.json", more, console)
    for name, field in (("speedup", "speedup"), ("floor", "floor_fraction")):
        paths = [options.out / f"{name}{suffix}" for suffix in (".png", ".svg")]
        write_panels(paths, row_panels(result.rows, [field]), plot_note(result), console)
    faults = [fault for ratio in ratios for fault in ratio.faults]
    for fault in faults:
        console.print(fault, style="bold red", markup=False)
    checked = sum(row.status == "ok" for row in result.rows)
    seconds = time.monotonic() - started
    console.print(
        f"{checked} of {len(result.rows)} rows checked and right, {seconds:.0f} s; results and plots are in {options.out}", soft_wrap=True
    )
    return 1 if faults else result.exit_code(request.backends)


if __name__ == "__main__":
    sys.exit(main())
