"""Write a GGUF file with the shape of a published model and random weights: to time a model whose file is not at hand.

    python bench/random_gguf.py qwen3.5-0.8b q8_0 models/qwen.gguf
    specstep build models/qwen.gguf -o engines/qwen --drafter ngram --nodes 8 && specstep profile engines/qwen

Its texts mean nothing; its tokenizer has a token per byte, and names for the rest.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from script import run_script

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

Values = dict[str, Any]
# name -> the case of tests/helpers/gguf_cases.py that it is like, its configuration, and what its file says of it.
SHAPES: dict[str, tuple[str, Values, Values]] = {
    "qwen3.5-0.8b": (
        "qwen35",
        {
            "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True,
            "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
        {
            "attention.key_length": 256, "attention.value_length": 256, "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": 4, "ssm.state_size": 128,
            "ssm.group_count": 16, "ssm.time_step_rank": 16, "ssm.inner_size": 2048, "full_attention_interval": 4,
            "attention.recurrent_layers": [True, True, True, False] * 6,
        },
    ),
    "lfm2-350m": (
        "lfm2",
        {
            "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 4608, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
            "max_position_embeddings": 4096, "conv_L_cache": 3, "norm_eps": 1e-5,
            "layer_types": [
                "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
            ],
            "rope_parameters": {"rope_theta": 1e6},
        },
        {
            "shortconv.l_cache": 3, "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.head_count_kv": [8 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(16)],
        },
    ),
}  # fmt: skip


def write(name: str, precision: str, path: Path, progress: Callable[[str], None]) -> None:
    """Write the file. precision: of `side_by_side.gguf_file.TYPES`."""
    from gguf_case import case_model, metadata, named_tensors
    from gguf_cases import CASES
    from gguf_files import byte_words, write_gguf
    from gguf_hybrids import delta
    from side_by_side.gguf_file import convert

    like, changes, keys = SHAPES[name]
    case = CASES[like]._replace(changes=CASES[like].changes | changes, keys=CASES[like].keys | keys)
    if like == "qwen35":  # a value head for each key head: nothing is in another order
        case = case._replace(convert=delta)
    progress(f"{name}: random weights")
    model = case_model(case)
    tensors = {part: case.convert(model, part, tensor) for part, tensor in named_tensors(case, model).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        words = byte_words(model.config.vocab_size)
        whole = write_gguf(
            Path(folder) / "whole.gguf", case.architecture, metadata(case, model), tensors, tokenizer=False, whole=words
        )
        convert(whole, precision, path, progress)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status, see `run_script`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("precision", choices=("bf16", "q8_0", "q4_0"))
    parser.add_argument("path", metavar="FILE", type=Path)
    given = parser.parse_args(arguments)
    return run_script("random_gguf", 2, lambda progress: write(given.shape, given.precision, given.path, progress))


if __name__ == "__main__":
    sys.exit(main())
