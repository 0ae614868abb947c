"""What the tests of scale-out share: prompts, and what one engine says of them. Run by `make test-scale`."""

import pytest
import specstep
from scale_prompts import ASKED


@pytest.fixture(scope="session")
def alone(engine_folder):
    """What one engine answers to each of ASKED, as token ids."""
    with specstep.load(engine_folder) as engine:
        return [
            engine.generate(one["prompt"], one["max_new_tokens"], sampling=one["sampling"], ignore_eos=True).token_ids
            for one in ASKED
        ]
