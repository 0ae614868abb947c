"""Models as PARD-2 publishes them."""

import json

import torch

MASK, SCALE, HIDDEN = 311, 0.5, 48
FIELDS = {
    "pard2": True, "spd_type": "pard2", "pard_token": MASK, "pard2_scale": SCALE, "pard2_target_dim": 2 * HIDDEN,
    "pard2_target_layers": [-1, -3], "pard2_proj_bias": False,
}  # fmt: skip


def save_pard2(folder, weight, **fields):
    """Make a model that is there one that reads two hidden states of its target, as it is published."""
    file = folder / "config.json"
    given = json.loads(file.read_text()) | FIELDS | fields
    file.write_text(json.dumps({field: value for field, value in given.items() if value is not None}))
    torch.save({"target_proj.weight": weight}, folder / "warp_model.bin")
    return folder
