"""`make gpu-check`: the equality tests and the kernels' timings on this machine's NVIDIA GPU, kept as JSON.

python bench/gpu_check.py [--out bench/results]

The most telling part comes first. Each is written when it is done, has a time limit, and stops no other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parent.parent
ENGINES = "tests/test_gpu.py"
PARTS: dict[str, tuple[float, list[str]]] = {  # seconds that a part may take, and what pytest runs of it
    "kernels": (150, ["tests/kernels"]),
    "engines": (150, [ENGINES, "-k", "engine_equals_transformers"]),
    "low precision": (60, [ENGINES, "-k", "low_precision"]),
    "tensorrt": (60, [ENGINES, "-k", "tensorrt"]),
    "the rest": (60, [ENGINES, "-k", "not engine_equals_transformers and not low_precision and not tensorrt"]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all passed, 1 something failed, 2 there is no GPU to check on."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", default=str(ROOT / "bench" / "results"), help="folder for the JSON")
    out = Path(options.parse_args(arguments).out)
    if not torch.cuda.is_available():
        print("gpu-check: expected an NVIDIA GPU that torch can use, found none; nothing was checked", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parts": {},
    }
    for name, (seconds, tests) in PARTS.items():
        result["parts"][name] = run_part(tests, seconds)
        (out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {json.dumps(result['parts'][name])}", flush=True)
    subprocess.run([sys.executable, "bench/bench_kernels.py"], cwd=ROOT, check=False)
    return int(any(part["failed"] for part in result["parts"].values()))


def run_part(tests: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run tests -> how many passed and were skipped, the names of those that failed, and the time they took. What does
    not end in time, or ends without a report, is a failure, too."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *tests, f"--junitxml={report}"]
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = f"more than {seconds:.0f} s"
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.is_file() else []
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in wrong]
    if not failed and status not in (0, 5):  # 5: there was nothing to run
        failed = [f"pytest ended with {status}"]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(wrong) - skipped
    return {"passed": passed, "skipped": skipped, "failed": failed, "seconds": round(time.time() - started, 1)}


if __name__ == "__main__":
    sys.exit(main())
