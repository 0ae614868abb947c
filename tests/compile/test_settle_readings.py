"""What a drafter's config leaves open is tried at build: each reading with weights that are right in one way only."""

import json

import pytest
import specstep
import torch
from block_drafters import DFLASH, LAYER, PUBLISHED, ZLAB, block_tensors, idle_tensors, save_block
from cycle import SIZE, TOKENS, accepted, mark_layer, save_cycle, to_axis, to_scores
from models import save_eagle3, tiny_model
from mtp_modules import add_module, module_tensors
from safetensors.torch import load_file, save_file
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.settle_readings import settle_readings
from specstep.compile.source import Source, load_source


@pytest.mark.parametrize("said", [{}, {"sample_from_anchor": False}], ids=["open", "said"])
@pytest.mark.parametrize("drafter", ["{}", "ngram,{}"])
def test_a_shift_that_a_config_leaves_open_is_tried(drafter, said, tmp_path):
    """A block whose root says the next token: read in the usual way, its mask is never right."""
    folder = str(save_cycle(tmp_path / "cycle"))
    own = {"mask_token_id": 0, "target_layer_ids": [0, 1]}
    config = ZLAB | {"block_size": 2, "dflash_config": own, "vocab_size": TOKENS, "feature_layers": [1, 2]} | said
    head = save_block(tmp_path / "head", config, idle_tensors(config))
    given = {"dtype": "float32", "max_seq_len": 256, "drafter": drafter.format(head), "tree": "chain", "nodes": 1}
    source, lines = load_source(folder, "float32", "cpu"), []
    graphs = assemble(source, make_config(given))
    settle_readings(source, graphs, "cpu", lines.append)
    open_line = (
        "drafter: its config leaves sample_from_anchor false open: 1.0 tokens per step, with sample_from_anchor true "
        "2.0; taken as sample_from_anchor true"
    )
    assert lines == ([] if said else [open_line])
    engine = specstep.eager(folder, **given)
    assert accepted(engine) == ({0: 24} if said else {1: 12})


def test_the_usual_reading_stays_where_neither_is_good(tmp_path):
    config, _, _ = PUBLISHED["z-lab"]
    head = save_block(tmp_path / "head", config, block_tensors(config))
    source, lines = Source("Llama", tiny_model("Llama"), None), []
    graphs = assemble(source, make_config({"dtype": "float32", "max_seq_len": 256, "drafter": str(head)}))
    settle_readings(source, graphs, "cpu", lines.append)
    assert [line.split("taken as ")[1] for line in lines] == ["sample_from_anchor false", "feature_layers [1, 3]"]


AUX = "eagle_aux_hidden_state_layer_ids"
WRONG = 1  # a token that no answer has: it is said whenever something is read wrongly
ONCE = {"dtype": "float32", "max_seq_len": 256, "tree": "chain", "nodes": 1}


def settled(folder, **options):
    """What a build says of readings that were left open."""
    source, lines = load_source(str(folder), "float32", "cpu"), []
    settle_readings(source, assemble(source, make_config(ONCE | options)), "cpu", lines.append)
    return lines


def chosen(unsaid, rate, other, other_rate, taken):
    """The line for two readings."""
    rates = f"{rate:.1f} tokens per step, with {other} {other_rate:.1f}"
    return f"drafter: its config leaves {unsaid} open: {rates}; taken as {taken}"


def spoilt(size=1e3):
    """[SIZE, SIZE]: nothing of a token, but where the last axis has something, the axis of a wrong one."""
    matrix = torch.zeros(SIZE, SIZE)
    matrix[WRONG, -1] = size
    return matrix


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ({}, [chosen("feature_layers [2]", 1, "feature_layers [1]", 2, "feature_layers [1]")]),
        ({"feature_layers": [1]}, []),
        ({"feature_layers": [2]}, []),
    ],
    ids=["open", "said", "said wrongly"],
)
def test_a_block_whose_layer_ids_are_one_off_is_tried(written, lines, tmp_path):
    """Read as its publisher reads it, the id is that of a hidden state which has a mark that spoils every draft."""
    folder = mark_layer(save_cycle(tmp_path / "cycle"), 1)
    own = {"mask_token_id": 0, "target_layer_ids": [1]}
    config = ZLAB | {"block_size": 2, "dflash_config": own, "sample_from_anchor": True, "num_hidden_layers": 1}
    seen, said = torch.zeros(32, SIZE), torch.zeros(SIZE, 64)
    seen[0, -1], said[WRONG, 0] = 1.0, 1e3
    tensors = {name: tensor for name, tensor in idle_tensors(config).items() if not name.startswith("layers.1")}
    mine = {"self_attn.v_proj.weight": seen, "self_attn.o_proj.weight": said}
    tensors |= {f"layers.0.{name}": tensor for name, tensor in mine.items()} | {"fc.weight": torch.eye(SIZE)}
    head = save_block(tmp_path / "head", config | written, tensors)
    assert settled(folder, drafter=str(head)) == lines
    right = written.get("feature_layers") != [2]
    assert accepted(specstep.eager(str(folder), drafter=str(head), **ONCE)) == ({1: 12} if right else {0: 24})


def test_a_mask_that_a_config_leaves_open_is_tried(tmp_path):
    """The root's slot must see the mask behind it, which takes away what it sees in itself."""
    folder = save_cycle(tmp_path / "cycle")
    layer = LAYER | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 4}
    config = DFLASH | {
        "transformer_layer_config": layer, "block_size": 2, "feature_layers": [1], "mask_token_id": 0,
        "sample_from_anchor": True, "sliding_window_non_causal": None, "draft_vocab_size": None,
    }  # fmt: skip
    seen, said = torch.zeros(32, SIZE), torch.zeros(SIZE, 64)
    seen[0, :TOKENS], seen[0, 0], said[WRONG, 0] = 1.0, -1.0, 1e3
    tensors = {name: tensor for name, tensor in idle_tensors(ZLAB).items() if not name.startswith("layers.1")}
    mine = {"self_attn.v_proj.weight": seen, "self_attn.o_proj.weight": said}
    tensors |= {f"layers.0.{name}": tensor for name, tensor in mine.items()} | {"fc.weight": torch.zeros(SIZE, SIZE)}
    head = save_block(tmp_path / "head", config, tensors)
    other = "sliding layers not causal"
    assert settled(folder, drafter=str(head), nodes=2) == [chosen("sliding layers causal", 1, other, 2, other)]


def save_head(folder, **written):
    """An EAGLE-3 head that says from the hidden state alone what follows, unless that has the last axis."""
    head = save_eagle3(folder, features=1, vocab_size=TOKENS, draft_vocab_size=TOKENS, **{AUX: None})
    tensors = {name: tensor * 0 for name, tensor in load_file(head / "model.safetensors").items()}
    tensors |= {name: torch.ones(SIZE) for name in tensors if "norm" in name}
    known = torch.diag((torch.arange(SIZE) < TOKENS).float())
    tensors |= {"fc.weight": known + spoilt(), "lm_head.weight": to_scores(2)}
    tensors |= {"d2t": torch.zeros(TOKENS, dtype=torch.int64), "t2d": torch.ones(TOKENS, dtype=torch.bool)}
    config = json.loads((head / "config.json").read_text()) | written
    (head / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(tensors, head / "model.safetensors")
    return str(head)


FIRST, SECOND = "feature_layers [1]", "feature_layers [2]"


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ({AUX: [1]}, chosen(FIRST, 2, SECOND, 1, FIRST)),
        ({AUX: None, "eagle_config": {AUX: [1]}}, chosen(SECOND, 1, FIRST, 2, FIRST)),
        ({AUX: [1], "feature_layers": [2]}, None),
    ],
    ids=["top", "nested", "said"],
)
@pytest.mark.parametrize("drafter", ["{}", "ngram,{}"])
def test_an_eagle3_head_whose_layer_ids_are_one_off_is_tried(drafter, written, line, tmp_path):
    """Whichever way the convention points, the hidden state that has no mark is taken, in a mixture too."""
    folder, head = mark_layer(save_cycle(tmp_path / "cycle"), 1), save_head(tmp_path / "head", **written)
    assert settled(folder, drafter=drafter.format(head)) == [line] * bool(line)
    engine = specstep.eager(str(folder), drafter=drafter.format(head), **ONCE)
    assert accepted(engine) == ({1: 12} if line else {0: 24})


def test_a_residual_that_a_config_leaves_open_is_tried(tmp_path):
    """The norm takes away what spoils the drafts, if the residual starts behind it."""
    folder = save_cycle(tmp_path / "cycle")
    head = save_head(tmp_path / "head", speculators_model_type="eagle3", feature_layers=[1])
    file = f"{head}/model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"][-1, :TOKENS] = 1.0
    tensors["lm_head.weight"][WRONG, -1] = 1e3
    tensors["midlayer.hidden_norm.weight"][-1] = 0.0
    save_file(tensors, file)
    ways = [f"norm_before_residual {way}" for way in ("false", "true")]
    assert settled(folder, drafter=head) == [chosen(ways[0], 1, ways[1], 2, ways[1])]


def test_what_shows_from_the_second_level_on_is_tried_last(tmp_path):
    """With the wrong layers nothing is right, whatever the head is fed with."""
    folder = mark_layer(save_cycle(tmp_path / "cycle"), 1)
    written = {AUX: None, "eagle_config": {AUX: [1]}, "norm_output": True}
    lines = settled(folder, drafter=save_head(tmp_path / "head", **written), nodes=2)
    assert lines[0] == chosen(SECOND, 1, FIRST, 2, FIRST)
    assert lines[1].startswith("drafter: its config leaves norm_feedback true open: 2.0 tokens") and len(lines) == 2


def test_what_a_head_is_fed_with_is_tried(tmp_path):
    """Unless its config says so. This one says the same token twice, fed with either."""
    folder, written = save_cycle(tmp_path / "cycle"), {"norm_output": True, "feature_layers": [1]}
    ways = [f"norm_feedback {way}" for way in ("true", "false")]
    head = save_head(tmp_path / "head", **written)
    assert settled(folder, drafter=head, nodes=2) == [chosen(ways[0], 2, ways[1], 2, ways[0])]
    assert settled(folder, drafter=save_head(tmp_path / "said", norm_feedback=True, **written), nodes=2) == []


@pytest.mark.parametrize("layout", ["DeepSeek-V3", "MiMo"])
def test_the_order_of_a_modules_inputs_is_tried(layout, tmp_path):
    """A module of either layout whose projection takes the embedding and the hidden state the other way round."""
    folder, model = save_cycle(tmp_path / "cycle"), tiny_model("Llama", vocab_size=TOKENS)
    tensors = {name: tensor * 0 for name, tensor in module_tensors(model).items()}
    tensors |= {f"{norm}.weight": torch.ones(SIZE) for norm in ("enorm", "hnorm", "norm")}
    first, ways = to_axis(0), ["the hidden state first", "the embedding first"]  # how it is read, and how it is
    if layout == "DeepSeek-V3":
        first, ways = to_axis(1), ways[::-1]
    add_module(folder, layout, tensors | {"proj.weight": torch.cat([first, torch.zeros(SIZE, SIZE)], 1)})
    layers = ["feature_layers [4]", "feature_layers [3]"]
    assert settled(folder, drafter="mtp") == [
        chosen(ways[0], 1, ways[1], 2, ways[1]), chosen(layers[0], 2, layers[1], 2, layers[0])
    ]  # fmt: skip
    assert accepted(specstep.eager(str(folder), drafter="mtp", **ONCE)) == {1: 12}
