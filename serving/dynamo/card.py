"""What Dynamo's frontend reads of a model: its tokenizer, chat template and limits, as files like a checkpoint's."""

import json
from pathlib import Path

from ...runtime.engine import Engine
from ...runtime.text.tokenizer import CHAT_TEMPLATE, TOKENIZER


def write_card(engine: Engine, folder: Path) -> None:
    """Write them into a folder from the engine's own, so that text and engine belong together. Raises InputError for an
    engine without a tokenizer."""
    text, spec = engine.tokenizer, engine.spec
    text.tokenizer.save(str(folder / TOKENIZER))
    ends = {"eos_token_id": list(spec.stop_ids)}
    # Which model it is matters to no frontend, but there must be one.
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": spec.max_seq_len,
        "vocab_size": spec.vocab_size,
        **ends,
    }
    template = {} if text.chat_template is None else {"chat_template": text.chat_template}
    if text.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(text.chat_template, encoding="utf-8")
    for name, data in (
        ("config", config),
        ("generation_config", ends),
        ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast", **text.special, **template}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
