"""The digest of what a trace may have looked at: other weights have the same, whatever else has another."""

import copy
import functools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from models import tiny_model
from specstep.compile.inductor import origin
from specstep.compile.inductor.origin import describe_origin
from specstep.compile.traced_once.alike import Opaque
from torch import nn


def digest(model):
    return describe_origin([model])


@pytest.fixture(scope="module")
def llama():
    return tiny_model("Llama", 0)


def test_other_weights_have_the_digest_of_the_first(llama):
    other = tiny_model("Llama", 1)
    other.config._name_or_path = other.name_or_path = "another/place"
    other.generation_config.temperature = 0.3
    assert digest(llama) == digest(other) == digest(copy.deepcopy(llama))


def eps(model):
    model.model.norm.variance_epsilon *= 2


def setting(model):
    model.config.rope_parameters["rope_theta"] = 7.0


def flag(model):
    model.model.layers[1].self_attn.is_causal = False


def kind(model):
    model.model.layers[2].mlp.act_fn = nn.GELU()


def hook(model):
    model.model.norm.register_forward_hook(functools.partial(torch.add, alpha=2))


def buffer(model):
    model.model.rotary_emb.inv_freq[3] *= 1.0001


def few_values(model):
    model.model.norm.weight.data.fill_(1.5)


def shape(model):
    model.lm_head = nn.Linear(model.config.hidden_size, 7, bias=False)


def dtype(model):
    model.model.layers[0].mlp.to(torch.bfloat16)


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def names(model):
    model.names = {"one", "two"}


def mode(model):
    model.model.layers[0].train()


def code(model):
    model.model.norm.forward = functools.partial(torch.mul, 2)


def bound(model):
    model.look_up = {"one": 1}.get


CHANGES = [bound, eps, setting, flag, kind, hook, buffer, few_values, shape, dtype, tie, names, mode, code]


@pytest.mark.parametrize("change", CHANGES)
def test_what_code_may_look_at_changes_it(llama, change):
    changed = copy.deepcopy(llama)
    change(changed)
    assert digest(changed) != digest(llama)
    again = copy.deepcopy(llama)
    change(again)
    assert digest(again) == digest(changed)


def test_what_a_bound_function_reads_counts(llama):
    digests = []
    for held in ({"one": 1}, {"one": 2}):
        model = copy.deepcopy(llama)
        model.look_up = held.get
        digests.append(digest(model))
    assert digests[0] != digests[1]


def test_two_names_of_one_object_are_not_two_objects():
    one = nn.Linear(2, 2)
    shared, apart = nn.ModuleList([one, one]), nn.ModuleList([one, copy.deepcopy(one)])
    assert digest(shared) != digest(apart)


class Foreign:
    """Somebody's, as its module has a name that nobody knows."""


Foreign.__module__ = "somebody"


def somebodys():
    pass


somebodys.__module__ = "somebody"


def unfinished():
    def inner():
        return later

    if inner is None:
        later = 1
    return inner


UNKNOWN = [
    Foreign(), Foreign, somebodys, SimpleNamespace(inner=[Foreign()]), {Foreign()}, iter(()), object(),
    [Foreign()].index, unfinished(),
]  # fmt: skip


@pytest.mark.parametrize("held", UNKNOWN)
def test_what_nobody_knows_has_no_digest(held):
    module = nn.Linear(2, 2)
    module.held = held
    with pytest.raises(Opaque):
        digest(module)


def test_it_is_the_same_in_each_process():
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from models import tiny_model\n"
        "from specstep.compile.inductor.origin import describe_origin\n"
        "model = tiny_model('Qwen3Moe', 0); model.names = {'one', 'two', 'three', 'four'}\n"
        "print(describe_origin([model]))"
    )
    command = [sys.executable, "-c", program, *sys.path]
    told = {
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1 and len(told.pop().strip()) == 64


def test_the_code_of_the_model_is_in_it(llama, monkeypatch):
    before, read = digest(llama), []

    def other(file):
        read.append(file.name)
        return b"other"

    monkeypatch.setattr(origin, "_digest", other)
    assert digest(llama) != before
    assert {"modeling_llama.py", "masking_utils.py", "modeling_rope_utils.py", "activations.py"} <= {*read}
