"""One eager engine of a tiny model for all tests of the server, and servers on real sockets."""

import pytest
import specstep
from served import running
from specstep.serving.app import create_app

ENGINE = {"drafter": "ngram", "dtype": "float32", "max_batch": 3, "max_seq_len": 192, "prefill_chunk": 16}


@pytest.fixture(scope="session")
def tiny(model_folder):
    """An engine of three rows."""
    with specstep.eager(str(model_folder), **ENGINE) as engine:
        engine.learning = False  # steps are compared
        yield engine


@pytest.fixture(scope="session")
def address(tiny):
    """A server of the tiny engine, without a key."""
    with running(create_app({"tiny": tiny})) as url:
        yield url
