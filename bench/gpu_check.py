"""`make gpu-check`: the equality tests and the kernels' timings on this machine's NVIDIA GPU, kept as JSON.

python bench/gpu_check.py [--out bench/results]
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Exit status: 0 all passed, 1 something failed, 2 there is no GPU to check on."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", default=str(ROOT / "bench" / "results"), help="folder for the JSON")
    out = Path(options.parse_args().out)
    if not torch.cuda.is_available():
        print("gpu-check: expected an NVIDIA GPU that torch can use, found none; nothing was checked", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    report = out / "gpu_check.xml"
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_gpu.py", "tests/kernels", f"--junitxml={report}"]
    started = time.time()
    status = subprocess.run(command, cwd=ROOT).returncode
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    report.unlink()
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": round(time.time() - started, 1),
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }
    (out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    subprocess.run([sys.executable, "bench/bench_kernels.py"], cwd=ROOT, check=False)
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
