"""One rank of an engine, run by itself: what it has after some steps, as a file."""

import sys
from pathlib import Path

import numpy as np
from specstep.kernels.communicator import Communicator
from specstep.runtime.engine_file import read_manifest
from specstep.runtime.inductor.aoti import load_libraries, open_programs
from specstep.runtime.inductor.torch_session import TorchSession

PROMPTS, STEPS, SLOTS = [[5, 9, 9, 4] * 3, [7, 8]], 6, 64


def steps(session):
    """Everything a session has after a few steps of two rows, and the reports of those steps."""
    for prompt in PROMPTS:
        session.admit(prompt, 60, [])
    reports = [session.replay(2, SLOTS, session.spec.nodes, 0) for _ in range(STEPS)]
    return session.read(2, SLOTS) | {"reports": np.array(reports)}


def main(directory, rank, memory, output):
    manifest = read_manifest(directory)
    load_libraries(Path(directory), manifest)
    session = TorchSession(manifest.spec, *open_programs(Path(directory), manifest.spec, int(rank)))
    with Communicator(int(memory), int(rank), manifest.spec.ranks).bound():
        np.savez(output, **steps(session))


if __name__ == "__main__":
    main(*sys.argv[1:])
