"""Compare what we read from GGUF files with llama.cpp: greedy tokens and log-probabilities, an architecture a line.

    python bench/gguf_reference.py                     # a tiny random model of each architecture that is read
    python bench/gguf_reference.py qwen3 "phi3 longrope"
    python bench/gguf_reference.py FILE.gguf           # a file of one's own, with its own blocks

llama.cpp's server writes greedily after a prompt of 24 tokens, and says the log-probability of every token of the
vocabulary at each step. Our model reads the same tokens in one pass, in float32, weights widened. The error of a step:
the norm of the difference over the norm of the logits, both with their mean taken away.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from script import run_script

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

PROMPT, STEPS = 24, 16
WHOLE = {"cache-type-k": "f32", "cache-type-v": "f32", "flash-attn": "off"}  # nothing is rounded that a file has not
# Where llama.cpp computes something else than what the model was trained with.
DIFFERENT = {
    "mistral": "llama.cpp leaves out the window",
    "phi3": "llama.cpp leaves out the window",
    "phi3 longrope": "llama.cpp takes the long table: its least context is 256",
    "olmo3 of 2025": "llama.cpp multiplies yarn's own factor with what converters of 2025 wrote, which is the whole",
    "qwen2 yarn": "llama.cpp ignores rope.scaling.yarn_attn_factor",
    "gpt-oss": "llama.cpp rounds the bounds of yarn",
    "exaone4": "llama.cpp reads the windows of the large model alone",
    "falcon-mamba": "llama.cpp norms steps, keys and queries with the epsilon of the layers' norms",
    "command-r": "llama.cpp reads the head norms of the large model alone",
}


class Compared(NamedTuple):
    """error: the largest of a step. same: steps whose likeliest token is llama.cpp's."""

    error: float
    same: int


def compare(file: Path, steps: int = STEPS) -> Compared:
    """Have llama.cpp write after a prompt, and ours read the same. Raises BuildError, and RuntimeError for a file that
    llama.cpp does not read."""
    import torch
    from specstep.compile.source import load_source

    model = load_source(str(file), "float32", "cpu").model
    size = model.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(2, min(size, 300), (PROMPT,), generator=draw).tolist()
    tokens, theirs = _llama_cpp(file, prompt, steps, size)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, PROMPT - 1 :]
    known = theirs.isfinite().all(dim=0)  # the tokenizer may have fewer tokens than the model rows
    ours = _centred(logits.double()[:, known])
    errors = (ours - _centred(theirs[:, known])).norm(dim=1) / ours.norm(dim=1)
    same = logits.argmax(dim=1) == torch.tensor(tokens)
    return Compared(float(errors.max()), int(same.sum()))


def _centred(logits: Any) -> Any:
    return logits - logits.mean(dim=1, keepdim=True)


def _llama_cpp(file: Path, prompt: list[int], steps: int, size: int) -> tuple[list[int], Any]:
    """The tokens, and log-probabilities [steps, size] float64. Raises RuntimeError."""
    import torch
    from side_by_side.engines import AS_IT_IS, Contender, Settings
    from side_by_side.peer_llama_cpp import Runner

    settings = Settings(str(file), 2, 2 * (PROMPT + steps), 1, (), file.parent)
    runner = Runner(Contender("llama.cpp", AS_IT_IS, "none", WHOLE), file, settings, subprocess.DEVNULL)
    tokens: list[int] = []
    found = torch.full((steps, size), float("nan"), dtype=torch.float64)
    try:
        for step in range(steps):
            said = runner.log_probs([*prompt, *tokens], size)
            found[step, [*said]] = torch.tensor([*said.values()], dtype=torch.float64)
            tokens.append(int(found[step].nan_to_num(-torch.inf).argmax()))
    finally:
        runner.close()
    return tokens, found


def table(found: dict[str, Compared | str], steps: int = STEPS) -> str:
    """As Markdown; a text is why nothing was compared."""
    lines = ["| file | off by | the same token | |", "|---|---:|---:|---|"]
    for name, one in found.items():
        cells = ("", "", one) if isinstance(one, str) else (f"{one.error:.0e}", f"{one.same} of {steps}", "")
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {cells[2] or DIFFERENT.get(name, '')} |")
    return "\n".join(lines)


def run(names: Sequence[str], progress: Any) -> dict[str, Compared | str]:
    """Compare files, and the tiny models that are named; all of them where nothing is. Raises InputError."""
    from gguf_case import case_model, save_case
    from gguf_cases import CASES
    from specstep.errors import InputError

    found: dict[str, Compared | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or CASES:
            progress(f"{name}: {len(found) + 1} of {len(names or CASES)}")
            if not (name in CASES or name.endswith(".gguf")):
                raise InputError(f"name: expected a file, or one of {', '.join(CASES)}, got {name}")
            try:
                case = CASES.get(name)
                file = save_case(Path(folder) / "tiny.gguf", case, case_model(case)) if case else Path(name)
                found[name] = compare(file)
            except RuntimeError as error:
                found[name] = DIFFERENT.get(name, str(error))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print the table -> exit status, see `run_script`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="a tiny model's name, or a file; default: every tiny model")
    given = parser.parse_args(arguments)
    return run_script("gguf_reference", 2, lambda progress: print(table(run(given.name, progress))))


if __name__ == "__main__":
    raise SystemExit(main())
