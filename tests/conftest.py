"""Shared fixtures. `models` is importable as a plain module because of this path entry."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models run faster on one thread than on several, most of all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_environment(tmp_path_factory):
    """What a user's own cache holds, as a tuned choice, must not change a test, nor a test the cache. One for a whole
    session (and each worker of it): the library of our ops is compiled into it once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")  # ONNX Runtime's threads wait by spinning: one each is faster, too
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny Llama with a tokenizer."""
    from models import save_model

    return save_model(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="session")
def drafter_folder(tmp_path_factory):
    """A smaller Llama with the same tokenizer and other weights."""
    from models import save_model

    return save_model(tmp_path_factory.mktemp("drafter"), tokenizer=True, seed=1, num_hidden_layers=2, hidden_size=32)


@pytest.fixture(scope="session")
def onnx_folder(model_folder, tmp_path_factory):
    """The same engine as `engine_folder`, for ONNX Runtime."""
    import specstep

    folder = tmp_path_factory.mktemp("engines") / "onnx"
    options = {"max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}
    return specstep.build(str(model_folder), folder, drafter="ngram", backend="onnx", **options)


@pytest.fixture(scope="session")
def engine_folder(model_folder, tmp_path_factory):
    """A compiled engine of the tiny model: two rows, n-gram drafts."""
    import specstep

    folder = tmp_path_factory.mktemp("engines") / "tiny"
    return specstep.build(
        str(model_folder), folder, drafter="ngram", dtype="float32", max_batch=2, max_seq_len=192, prefill_chunk=16
    )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The package as pip builds it."""
    from installed import build_wheel

    return build_wheel(tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    """The programs of an environment with the package and its base requirements alone."""
    from installed import make_environment

    return make_environment(wheel, tmp_path_factory.mktemp("environment"))
