"""Engines by the name of their model: built once, found again, another one for whatever makes another one."""

import gc
import inspect
import json
import os
import threading
import time

import pytest
import specstep
import specstep.kept_engines as kept_engines_module
from models import save_model
from specstep import model_engines
from specstep.cli import main
from specstep.compile import engine_key
from specstep.compile.swap import work_folder
from specstep.errors import BuildError, EngineError, InputError
from specstep.kept_engines import kept_engines
from specstep.model_engines import engine_of
from specstep.runtime import load as loading
from specstep.user_cache import cache_path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specstep" / "engines"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny Model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def builds(monkeypatch):
    """The builds that were asked for; each writes a manifest."""
    asked = []
    monkeypatch.setattr(model_engines, "_is_whole", lambda directory: (directory / "manifest.json").is_file())

    def build(name, directory, options, progress):
        asked.append((name, dict(options)))
        time.sleep(0.05)
        directory.mkdir()
        (directory / "manifest.json").write_text("{}")

    monkeypatch.setattr(model_engines, "_build", build)
    return asked


def test_a_model_is_built_once(model, builds, cache):
    said = []
    first = engine_of(model, said.append)
    assert first.parent == cache and first.name.startswith("Tiny-Model-")
    assert said == [f"{model}: builds its engine, once, into {first}"]
    assert engine_of(str(model), said.append) == first and len(said) == 1
    assert builds == [(str(model), {})]


def test_what_makes_another_engine_makes_another_directory(model, builds, tmp_path, monkeypatch):
    tables = tmp_path / "tables.bin"
    tables.write_bytes(b"1")
    ways = [{}, {"max_batch": 2}, {"max_batch": 3}, {"dtype": "float32"}, {"drafter": f"ngram,{tables}"}]
    found = [engine_of(model, given=given) for given in ways]
    assert engine_of(model, given={"max_batch": None}) == found[0]
    assert engine_of(model, defaults={"max_batch": 2}) == found[1]
    assert engine_of(model, given={"max_batch": 3}, defaults={"max_batch": 2}) == found[2]
    tables.write_bytes(b"two")
    found.append(engine_of(model, given=ways[-1]))
    (model / "model.safetensors").write_bytes(b"a fine-tune")
    found.append(engine_of(model))
    monkeypatch.setattr(engine_key, "cpu_instructions", lambda: ["avx9"])
    found.append(engine_of(model))
    monkeypatch.setattr(engine_key, "version", lambda package: "99")
    found.append(engine_of(model))
    assert len(set(found)) == len(found) == len(builds)


def test_two_at_once_build_once(model, builds, monkeypatch):
    said, build = [], model_engines._build

    def build_while_another_waits(*arguments):
        deadline = time.monotonic() + 60
        while not any("waiting for another process" in line for line in said) and time.monotonic() < deadline:
            time.sleep(0.01)
        build(*arguments)

    monkeypatch.setattr(model_engines, "_build", build_while_another_waits)
    threads = [threading.Thread(target=engine_of, args=(model, said.append)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and any("waiting for another process" in line for line in said)


def test_an_engine_directory_is_taken_as_it_is(tmp_path, builds):
    (tmp_path / "manifest.json").write_text("{}")
    assert engine_of(tmp_path) == tmp_path and engine_of(tmp_path, defaults={"max_batch": 8}) == tmp_path
    with pytest.raises(InputError, match="max_batch: expected none with an engine directory, whose build chose it"):
        engine_of(tmp_path, given={"max_batch": 2})
    assert not builds


def test_the_model_of_an_adapter_and_the_module_of_a_drafter_count(model, builds, tmp_path, monkeypatch):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": model.name}))
    (tmp_path / "drafter_of_mine.py").write_text("one = 1")
    monkeypatch.syspath_prepend(tmp_path)
    given = {"drafter": "drafter_of_mine:one"}
    found = [engine_of(adapter), engine_of(adapter, given=given)]
    (tmp_path / "drafter_of_mine.py").write_text("one, two = 1, 2")
    found.append(engine_of(adapter, given=given))
    (model / "model.safetensors").write_bytes(b"another model")
    found.append(engine_of(adapter))
    assert len(set(found)) == len(found) == len(builds)


@pytest.mark.parametrize("name", ["empty", "missing", "missing/deep.gguf", "n" * 300, "~nobody/x"])
def test_a_path_that_is_no_model_ends_in_one_line(tmp_path, name, builds):
    (tmp_path / "empty").mkdir()
    with pytest.raises((EngineError, BuildError, InputError), match=f"expected .*{name[:20]}") as error:
        specstep.load(name if name.startswith("~") else tmp_path / name)
    assert "\n" not in str(error.value) and not builds


def test_an_engine_that_is_missing_among_others_is_no_hub_id(tmp_path, builds, monkeypatch):
    (tmp_path / "engines" / "one").mkdir(parents=True)
    (tmp_path / "engines" / "one" / "manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="engine: expected one that is there, got engines/two; there are others in"):
        engine_of("engines/two")
    assert engine_of("engines/one").name == "one" and not builds


def test_a_gpu_is_built_for_where_one_is_asked_for(model, builds, tmp_path):
    engine_of(model, device="cuda:1")
    (tmp_path / "manifest.json").write_text("{}")
    assert engine_of(tmp_path, device="cuda:1") == tmp_path
    with pytest.raises(InputError, match="device: expected cuda or one GPU as cuda:1, got 'gpu'"):
        engine_of(model, device="gpu")
    assert builds == [(str(model), {"device": "cuda"})]


def test_one_model_has_one_engine_however_it_is_named(model, builds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (model / ".cache").mkdir()
    (model / "notes.md").write_text("not read")
    names = [str(model), model.name, f"./{model.name}/", f"{model.name}/../{model.name}"]
    assert len({engine_of(name) for name in names}) == 1 and len(builds) == 1


def test_what_is_there_is_run_from_a_cache_that_cannot_be_written(model, builds, monkeypatch):
    found = engine_of(model)
    monkeypatch.setattr(model_engines.os, "utime", lambda path: (_ for _ in ()).throw(PermissionError()))
    monkeypatch.setattr(model_engines.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError()))
    assert engine_of(model) == found


def test_an_option_that_build_does_not_have_is_refused_before_a_build(model):
    with pytest.raises(BuildError, match=r"options: expected some of .*, got max_batchs"):
        engine_of(model, given={"max_batchs": 2})


def test_a_name_that_stands_for_nothing_is_refused_by_name(builds):
    with pytest.raises(BuildError, match=r"model: expected a model directory, a \.gguf file, .* got 'nothing'"):
        engine_of("nothing")
    assert not builds


def test_a_build_that_fails_leaves_its_reason_and_nothing_else(model, cache):
    with pytest.raises(BuildError, match=r"model: .*Tiny Model: expected a causal language model, got"):
        engine_of(model)
    assert not [path for path in cache.iterdir() if not path.name.startswith(".")]


def test_a_build_that_is_killed_is_told_from_one_that_fails(model, monkeypatch):
    monkeypatch.setattr(model_engines, "BUILD", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(BuildError, match="ended by signal 9; is there enough memory for it"):
        engine_of(model)


def test_a_cache_that_cannot_be_written_is_named(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cache: expected a folder to write engines to, got .*set XDG_CACHE_HOME"):
        engine_of(model)


def test_options_become_words_of_the_command_line(model):
    given = {"max_batch": 2, "plugins": False, "compute_capability": ("8.9", "12.0"), "drafter": "ngram"}
    assert model_engines._words(given) == [
        "--max-batch=2", "--no-plugins", "--compute-capability", "8.9", "12.0", "--drafter=ngram"
    ]  # fmt: skip
    with pytest.raises(InputError, match="drafter: expected a name, got object"):
        model_engines._words({"drafter": object()})


def test_load_takes_what_the_runtime_takes():
    ours, theirs = (dict(inspect.signature(load).parameters) for load in (model_engines.load, loading.load))
    ours.pop("build")
    assert list(ours)[1:] == list(theirs)[1:]
    assert [one.default for one in ours.values()] == [one.default for one in theirs.values()]


def test_the_list_has_the_last_used_first_and_removes(model, builds, capsys):
    first, second = engine_of(model), engine_of(model, given={"max_batch": 2})
    os.utime(second, (1e9, 1e9))
    assert [kept.directory for kept in kept_engines()] == [first, second]
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first.name) and lines[1].startswith(second.name) and lines[2].startswith("2 engines, ")
    assert lines[3].startswith("0 compiled programs, 0 MiB, in ")
    cache_path("programs").mkdir(exist_ok=True)
    for kept in cache_path("programs").iterdir():
        kept.unlink()
    for name in ("a.pt2", "a.lowering", "a.o"):
        cache_path("programs", name).write_bytes(bytes(2**20))
    assert main(["cache", "--remove", "other"]) == 2
    assert "remove: expected names of the list" in capsys.readouterr().err
    assert main(["cache", "--remove", second.name]) == 0 and not second.exists() and first.exists()
    cache_path("native-1").mkdir()
    cache_path("native-1", "libspecstep.so").write_bytes(bytes(2**20))
    left = [cache_path("engines", f".{name}.specstep-0a1b2c3d") for name in (first.name, "killed")]
    for folder in left:
        folder.mkdir()
    with work_folder(cache_path("engines", "running")) as running:
        assert main(["cache", "--clear"]) == 0 and not kept_engines()
        assert running.exists() and not any(folder.exists() for folder in left)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5].startswith("0 engines, 0 of 65,536 MiB, in ") and not [*cache_path("programs").iterdir()]
    assert lines[-4].startswith("1 compiled programs, 1 MiB, removed, in ")
    assert lines[-3].startswith("1 interfaces of programs, 1 MiB, removed, in ")
    assert lines[-2].startswith("1 lowered engines, 1 MiB, removed, in ")
    assert lines[-1].startswith("1 libraries of kernels, 1 MiB, removed, in ") and not [*cache_path().glob("*/*.so")]


def test_kept_engines_have_a_bound(model, builds, monkeypatch):
    """The last used stay, and the new one, however large it is."""
    old, older = engine_of(model), engine_of(model, given={"max_batch": 2})
    for directory, used in ((old, 2e9), (older, 1e9)):
        os.utime(directory, (used, used))
    [size] = {kept.size for kept in kept_engines()}
    said = []
    monkeypatch.setattr(kept_engines_module, "MOST_BYTES", 2 * size)
    new = engine_of(model, said.append, given={"max_batch": 3})
    assert old.exists() and new.exists() and not older.exists()
    assert sum(line.startswith(f"removed {older.name}, 0 MiB, last used 2001-09-") for line in said) == 1
    monkeypatch.setattr(kept_engines_module, "MOST_BYTES", 0)
    newest = engine_of(model, given={"max_batch": 4})
    assert [kept.directory for kept in kept_engines()] == [newest]


def test_a_model_generates_what_its_engine_does(own_cache, tmp_path, capsys):
    folder = save_model(tmp_path / "tiny", tokenizer=True, num_hidden_layers=1)
    given = {"backend": "onnx", "dtype": "float32", "drafter": "none", "max_seq_len": 64, "prefill_chunk": 16}
    said = []
    with specstep.load(folder, build=given, progress=said.append) as built:
        expected = built.generate([5, 6, 7], 20).token_ids
    assert any("builds its engine, once" in line for line in said)
    assert any("comparing the traced model with transformers" in line for line in said)
    said.clear()
    [kept] = kept_engines()
    with specstep.load(folder, build=given, progress=said.append) as again:
        assert again.generate([5, 6, 7], 20).token_ids == expected
    assert not any("engine" in line for line in said)
    (kept.directory / "weights.safetensors").write_bytes(b"cut off")
    with specstep.load(folder, build=given, progress=said.append) as mended:
        assert mended.generate([5, 6, 7], 20).token_ids == expected
    assert any("builds its engine, once" in line for line in said)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_looked_for_again_behind_a_load(enabled, tmp_path, monkeypatch):
    seen = []

    def fails(*given, **options):
        seen.append(gc.isenabled())
        raise EngineError("engine: none")

    monkeypatch.setattr(loading, "load", fails)
    monkeypatch.setattr(model_engines, "engine_of", lambda *given, **options: tmp_path)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(EngineError):
            specstep.load(tmp_path)
        assert seen == [False] and gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
