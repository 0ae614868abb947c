"""Shared fixtures. The modules of helpers/ are importable by their names because of this path entry."""

import fcntl
import gc
import logging
import os
import shutil
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before OpenMP is loaded: its threads would spin at barriers, on cores that other workers need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
# The code that calls the kernels is compiled in half the time. The tests of the default engine do without.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# pytest listens to each logger that does not propagate; torch formats whole graphs for whoever listens to this one.
logging.getLogger("torch.__trace").propagate = True

# The files that take longest, longest first: workers are given one file after the other. The second needs nothing that
# the first is building.
LONG = (
    "compile/test_engine.py",
    "train/drafter/test_train.py",
    "compile/onnx/test_lower.py",
    "compile/test_faithful.py",
    "graphs/test_architectures.py",
    "runtime/tensorrt/test_session.py",
    "runtime/test_prefix_engines.py",
    "kernels/test_tree_attention.py",
    "runtime/test_onnx.py",
    "bench/test_gpu_check.py",
    "graphs/test_ladder.py",
    "test_install.py",
    "test_model_engines.py",
    "test_typing.py",
    "runtime/test_session.py",
    "compile/inductor/test_packed_weights.py",
    "graphs/drafters/test_block.py",
    "kernels/test_linear_attention.py",
    "commands/test_progress.py",
    "test_smollm2.py",
    "kernels/test_lowering.py",
    "kernels/test_instruction_sets.py",
)
ENGINE = {"drafter": "ngram", "dtype": "float32", "max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}


class CheckoutIsAFolder:
    """The checkout's root is the package. pytest would import it once more, by its folder's name, and fail where that
    is no name in Python: `specstep-main`."""

    @staticmethod
    def pytest_collect_directory(path, parent):
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def pytest_configure(config):
    config.pluginmanager.register(CheckoutIsAFolder())  # a directory's own conftest.py is not asked


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONG)}
    here = Path(__file__).parent
    items.sort(
        key=lambda item: places.get(item.path.relative_to(here).as_posix(), len(LONG))
    )  # stable: others stay as they are


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # torch, transformers and the tests stay: walking them takes 2 to 4% of the time


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture
def as_published(monkeypatch):
    """Drafters are read as their publishers write them: what one says whose weights are random decides nothing."""
    monkeypatch.setattr("specstep.compile.jit.settle_readings", lambda *given: None)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models run faster on one thread than on several, most of all on a busy machine."""
    torch.set_num_threads(1)


class OneDay(datetime):
    """The same day each time."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 29, 12, tzinfo=tz)


@pytest.fixture(autouse=True, scope="session")
def one_day():
    """Chat templates write the date, and what models with random weights say must not change from day to day."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specstep.runtime.text.chat_template.datetime", OneDay)
        patch.setattr("transformers.utils.chat_template_utils.datetime", OneDay)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_environment(shared_folder, request):
    """What a user's own cache holds, as a tuned choice, must not change a test, nor a test the cache. One for a whole
    session. The library of our C++ kernels, named by what it was compiled from, is kept from session to session."""
    cache = shared_folder / "cache"
    kept = request.config.cache.mkdir("native") if hasattr(request.config, "cache") else cache / "specstep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("OMP_NUM_THREADS", "1")  # ONNX Runtime's threads wait by spinning: one each is faster, too
        copy_new(kept, cache / "specstep")
        yield
    copy_new(cache / "specstep", kept)


@pytest.fixture(autouse=True, scope="session")
def shared_sessions():
    """Engines for ONNX Runtime that are loaded again have the sessions that are open."""
    if find_spec("onnxruntime") is None:
        yield
        return
    from shared_sessions import shared_session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxruntime.InferenceSession", shared_session)
        yield


@pytest.fixture
def own_cache(own_environment, shared_folder, tmp_path, monkeypatch):
    """A cache of one test's own -> its folder. The compiled libraries are there: each takes a minute. So is what all
    programs are linked to: 5 seconds."""
    native = shared_folder / "cache" / "specstep"
    cache = tmp_path / "cache" / "specstep"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    cache.mkdir(parents=True, exist_ok=True)
    for library in native.glob("native-*/*.so"):
        (cache / library.parent.name).mkdir()
        (cache / library.parent.name / library.name).symlink_to(library)
    for linked in native.glob("programs/*.o"):
        (cache / "programs").mkdir(exist_ok=True)
        shutil.copy(linked, cache / "programs")
    return cache


def copy_new(source, target):
    """Copy the compiled libraries that are not there yet."""
    for library in source.glob("native-*/*.so"):
        place = target / library.parent.name / library.name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            partial = place.with_name(f"{place.name}.{os.getpid()}")
            shutil.copy(library, partial)
            partial.replace(place)  # at once: other workers look for it


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """One folder for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def once(shared_folder):
    """`once(name, make)`: a folder that `make` fills, by the first worker that asks; the others wait for it."""

    def share(name, make):
        folder, note = shared_folder / name, shared_folder / f"{name}.lock"
        with note.open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not note.stat().st_size:
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                lock.write("made")
        return folder

    return share


@pytest.fixture(scope="session")
def model_folder(once):
    """A tiny Llama with a tokenizer."""
    from models import save_model

    return once("model", lambda folder: save_model(folder, tokenizer=True))


@pytest.fixture(scope="session")
def drafter_folder(once):
    """A smaller Llama with the same tokenizer and other weights."""
    from models import save_model

    options = {"seed": 1, "num_hidden_layers": 2, "hidden_size": 32}
    return once("drafter", lambda folder: save_model(folder, tokenizer=True, **options))


@pytest.fixture(scope="session")
def onnx_folder(model_folder, once):
    """The same engine as `engine_folder`, for ONNX Runtime."""
    import specstep

    return once("onnx", lambda folder: specstep.build(str(model_folder), folder, backend="onnx", **ENGINE))


@pytest.fixture(scope="session")
def head_folder(once):
    """An EAGLE-3 head for the tiny Llama."""
    from models import save_eagle3

    return once("head", save_eagle3)


@pytest.fixture(scope="session")
def published_heads(once):
    """Heads of other families for the tiny Llama, as the option --drafter takes them."""
    from block_drafters import PUBLISHED, block_tensors, save_block
    from eagle_heads import eagle_tensors, save_authors
    from models import tiny_model
    from position_heads import medusa_tensors, mlp_tensors, save_medusa, save_mlp

    def make(folder):
        save_authors(folder / "eagle", eagle_tensors(tiny_model("Llama").get_input_embeddings().weight))
        save_medusa(folder / "medusa", medusa_tensors(layers=1))
        save_mlp(folder / "mlp", mlp_tensors())
        for name, said in (("speculators-dspark", {}), ("DFlash2", {"sample_from_anchor": False})):
            config, tables, _ = PUBLISHED[name]
            config = config | said | {"feature_layers": [1, 3]}  # nothing is left for builds to try
            save_block(folder / name, config, block_tensors(config, tables))

    folder = once("published", make)
    return ",".join(str(folder / name) for name in ("eagle", "medusa", "mlp", "speculators-dspark", "DFlash2"))


@pytest.fixture(scope="session")
def onnx_head_folder(model_folder, head_folder, once):
    """An engine for ONNX Runtime: two rows, drafts of the head."""
    import specstep

    options = ENGINE | {"backend": "onnx", "drafter": str(head_folder)}
    return once("onnx-head", lambda folder: specstep.build(str(model_folder), folder, **options))


@pytest.fixture(scope="session")
def engine_folder(model_folder, once):
    """A compiled engine of the tiny model: two rows, n-gram drafts."""
    import specstep

    return once("engine", lambda folder: specstep.build(str(model_folder), folder, **ENGINE))


@pytest.fixture(scope="session")
def wheel(once):
    """The package as pip builds it."""
    from installed import build_wheel

    return next(once("wheel", build_wheel).glob("*.whl"))


@pytest.fixture(scope="session")
def environment(wheel, once):
    """The programs of an environment with the package and its base requirements alone."""
    from installed import make_environment

    return once("environment", lambda folder: make_environment(wheel, folder)) / "bin"
