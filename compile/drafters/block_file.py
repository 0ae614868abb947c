"""Block drafters as they are published: DFlash, DFlash2, JetSpec, DSpark and Domino, by their authors, speculators or
SpecForge."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import BuildError
from ...graphs.drafters.block import BlockConfig, BlockDrafter, BlockHead
from ...graphs.drafters.correction import MARKOVS, Correction, Domino, Markov, Selector
from ..config import EngineConfig
from ..source import Source
from .block_config import is_block_config, read_block_config
from .block_fields import Corrected, PathCorrection, Selected, refused
from .eagle3_config import OWN_LAYERS
from .eagle3_file import check_target, describe_target, layer_fields, placed, write_drafter
from .published import config_of, fill, folder_of, linear, read_tensors

# What drafting does not need: a guess of how much will be accepted, and copies of what the target has.
UNUSED = ("confidence_head.", "verifier_norm.", "verifier_lm_head.", "t2d")
MASK_FILE = "mask_embedding.pt"
CODEBOOK = "correction.predecessor_codebook.weight"
DOMINO = {
    "prefix_gru.weight_ih_l0": "correction.token.weight", "prefix_gru.weight_hh_l0": "correction.state.weight",
    "embed_proj.0.weight": "correction.down.weight", "embed_proj.2.weight": "correction.up.weight",
}  # fmt: skip


def is_block(name: str) -> bool:
    """Whether a path is a block drafter: its config.json says so."""
    return is_block_config(config_of(name) or {})


def load_block(name: str, target: Source, config: EngineConfig) -> BlockDrafter:
    """A drafter from a directory, or from a weights file with config.json beside it -> its scorer, in the engine's
    dtype and on its device. Raises BuildError naming every field or tensor that does not fit."""
    return BlockDrafter(*placed(*read_block(name, target), target, config)).eval().requires_grad_(False)


def read_block(name: str, target: Source) -> tuple[BlockHead, Tensor | None]:
    """A drafter for the target, and its own embeddings where it has some. Raises BuildError."""
    check_target(name, target)
    model: Any = target.model
    text = model.config.get_text_config()
    block, correction = read_block_config(name, config_of(name) or {}, text.hidden_size, text.num_hidden_layers)
    if (folder_of(name) / MASK_FILE).exists():
        raise refused(name, MASK_FILE, "none: its mask token's row of the embedding", "one of its own")
    tensors = {_own_name(key): value for key, value in read_tensors(name).items()}
    tensors = {key: value for key, value in tensors.items() if not key.startswith(UNUSED)}
    embed, head = tensors.pop("embed_tokens.weight", None), tensors.pop("lm_head.weight", None)
    _check_tables(name, block, model, embed, head, tensors.get("d2t"))
    lm_head = model.get_output_embeddings() if head is None else linear(head)
    sizes = (lm_head.weight.shape[0], block.layer.hidden_size)
    made = BlockHead(block, lm_head, _correction(correction, tensors, *sizes), d2t="d2t" in tensors)
    fill(name, made, tensors, without=["lm_head."])
    return made, embed


def save_block(folder: Path, drafter: BlockHead, target: Source) -> None:
    """Write a drafter as SpecForge writes DSpark, whose slots see those up to their own. Raises BuildError when it
    cannot be written."""
    config, correction = drafter.config, drafter.correction
    own: dict[str, Any] = {
        "projector_type": "dspark", "mask_token_id": config.mask_token, "block_size": config.block_size,
        "target_layer_ids": [index - 1 for index in config.feature_layers],  # for other readers
    }  # fmt: skip
    if isinstance(correction, Markov):
        kind = next(name for name, made in MARKOVS.items() if type(correction) is made)
        own |= {"markov_rank": correction.markov_w1.embedding_dim, "markov_head_type": kind}
    fields = layer_fields(config.layer) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": len(config.masks),
        "rope_theta": config.layer.rope_parameters["rope_theta"],
        "num_target_layers": target.model.config.get_text_config().num_hidden_layers,
        OWN_LAYERS: list(config.feature_layers),
        "is_causal": True,
        "sample_from_anchor": True,
        "vocab_size": target.model.get_output_embeddings().weight.shape[0],
        "dflash_config": own,
        "torch_dtype": "bfloat16",
        "specstep": describe_target(target),
    }
    named = {name.replace("correction.", "markov_head."): tensor for name, tensor in drafter.state_dict().items()}
    write_drafter(folder, fields, named)


def _own_name(name: str) -> str:
    """The name that `BlockHead` has for a published tensor."""
    name = name.removeprefix("model.").removeprefix("logit_head.")
    part, _, rest = name.partition(".")
    if part == "candidate_selector":
        return f"correction.{rest}" if rest.endswith(".weight") else f"correction.{rest}.weight"
    if part == "markov_head":
        return f"correction.{rest}"
    return DOMINO.get(name, name)


def _correction(said: Corrected, tensors: dict[str, Tensor], draft_tokens: int, size: int) -> Correction | None:
    if said is None:
        return None
    if isinstance(said, PathCorrection):
        return Domino(draft_tokens, said.inner, said.memory, size, said.skipped)
    if isinstance(said, Selected):
        rows = tensors.get(CODEBOOK, torch.empty(draft_tokens, 0)).shape[0]
        return Selector(rows, draft_tokens, said.rank, size, said.among)
    rows = tensors.get("correction.markov_w1.weight", torch.empty(draft_tokens, 0)).shape[0]
    return MARKOVS[said.kind](rows, draft_tokens, said.rank, size)


def _check_tables(
    name: str, block: BlockConfig, model: Any, embed: Tensor | None, head: Tensor | None, d2t: Tensor | None
) -> None:
    """Refuse embeddings, a head and ids that do not fit. Raises BuildError."""
    size, targets = block.layer.hidden_size, model.get_output_embeddings().weight.shape[0]
    table: Tensor = model.get_input_embeddings().weight if embed is None else embed
    if table.shape[1:] != (size,):
        raise BuildError(f"drafter: {name}: embeddings: expected {size} columns, got {list(table.shape)}")
    if block.mask_token >= len(table):
        raise BuildError(
            f"drafter: {name}: config.json: mask_token_id: expected an id from 0 to {len(table) - 1}, got "
            f"{block.mask_token}"
        )
    rows = (targets if head is None else len(head)) if d2t is None else len(d2t)
    if (d2t is not None and head is None) or (head is not None and head.shape != (rows, size)):
        got = "none" if head is None else str(list(head.shape))
        raise BuildError(f"drafter: {name}: lm_head.weight: expected {[rows, size]}, got {got}")
    if rows > targets:
        raise BuildError(f"drafter: {name}: lm_head.weight: expected at most the target's {targets} tokens, got {rows}")
    if d2t is not None:
        ids = d2t + torch.arange(rows)
        if int(ids.min()) < 0 or int(ids.max()) >= targets:
            raise BuildError(f"drafter: {name}: d2t: expected target ids below {targets}, got up to {int(ids.max())}")
