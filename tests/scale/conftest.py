"""What the tests of scale-out share: prompts, and what one engine says of them. Run by `make test-scale`."""

import os
from pathlib import Path

import pytest
import specstep
from scale_prompts import ASKED


@pytest.fixture(scope="session", autouse=True)
def breaks(tmp_path_factory):
    """A file: the engine of the process whose number it holds breaks, if the process was started with this."""
    place = tmp_path_factory.mktemp("breaks") / "process"
    path = os.pathsep.join(filter(None, [str(Path(__file__).with_name("breaking")), os.environ.get("PYTHONPATH", "")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("SPECSTEP_TEST_BREAKS", str(place))
        yield place


@pytest.fixture(scope="session")
def alone(engine_folder):
    """What one engine answers to each of ASKED, as token ids."""
    with specstep.load(engine_folder) as engine:
        return [
            engine.generate(one["prompt"], one["max_new_tokens"], sampling=one["sampling"], ignore_eos=True).token_ids
            for one in ASKED
        ]
