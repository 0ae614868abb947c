"""What the n-gram drafter earns and costs: tokens per step over recorded greedy answers, and the compiled draft's time.

    specstep generate ENGINE --prompts FILE --json > answers.jsonl     (ids as CATEGORY/NUMBER give a row per category)
    python bench/bench_ngram.py answers.jsonl --model MODEL --drafter default --tree 7,4,7 --tree 8,4,15

A node is accepted when it is the recorded next token, which is what a greedy target does: no target is run.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from statistics import median

import torch
from specstep.compile.ngram_file import load_tables, shipped_tables
from specstep.compile.source import load_source
from specstep.graphs.drafters.drafter import Drafter
from specstep.graphs.drafters.ngram import Ngram
from specstep.graphs.tree import DynamicTree
from specstep.kernels.tree_layout.reference import tree_layout, unpack_bits


class Draft(torch.nn.Module):
    """The drafter alone, flat: history [B, S], lengths [B], a cache that says how many slots are in use."""

    def __init__(self, drafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, history, lengths, cache):
        tree, _ = self.drafter({"history": history, "lengths": lengths}, [cache], [cache])
        return tuple(tree)


@torch.no_grad()
def accepted(drafter, prompt, answer):
    """Accepted draft tokens [len(answer)] if a step started at each place of an answer: all places as one batch."""
    text, slots = torch.tensor(prompt + answer), max(64, len(prompt + answer) + drafter.depth + 2)
    lengths = torch.arange(len(prompt) - 1, len(text) - 1)
    history = torch.nn.functional.pad(text, (0, slots - len(text))).expand(len(answer), -1)
    history = history.where(torch.arange(slots) <= lengths[:, None], -7)  # the drafter must not see the future
    tokens, parents, valid = Draft(drafter)(history, lengths, torch.zeros(1, 1, slots, 1))
    ancestors, depths = tree_layout(parents, valid)[:2]
    ancestors = unpack_bits(ancestors, tokens.shape[1])  # [B, T, T]
    truth = torch.nn.functional.pad(text, (0, drafter.depth + 1), value=-9)[lengths[:, None] + depths]
    right = valid & ((tokens == truth) | (depths == 0))
    whole = (right[:, None] | ~ancestors).all(-1)
    return (depths * whole).amax(1).tolist()


def tokens_per_step(drafter, answers):
    """{category: tokens per step}, and of all."""
    tokens, steps = Counter(), Counter()
    for answer in answers:
        reach, place = accepted(drafter, answer["prompt_token_ids"], answer["token_ids"]), 0
        for name in ("all", str(answer["id"]).split("/")[0]):
            tokens[name] += len(reach)
        while place < len(reach):
            place += 1 + reach[place]
            steps.update(("all", str(answer["id"]).split("/")[0]))
    return {name: round(tokens[name] / steps[name], 2) for name in tokens}


def draft_times(drafter, answers, slots=(256, 1024, 2048)):
    """{slots in use: microseconds} of the compiled draft, medians."""
    steps = torch.export.Dim("steps", min=1, max=max(slots) // 64)
    inputs = (torch.zeros(1, max(slots) + 64, dtype=torch.int64), torch.tensor([100]), torch.zeros(1, 1, 128, 1))
    exported = torch.export.export(Draft(drafter), inputs, dynamic_shapes=({}, {}, {2: 64 * steps}), strict=False)
    text = torch.tensor([token for answer in answers for token in answer["prompt_token_ids"] + answer["token_ids"]])
    text, times = text.repeat(1 + (max(slots) + 64) // len(text))[None, : max(slots) + 64].contiguous(), {}
    with tempfile.TemporaryDirectory() as folder:
        options = {"cpp.dynamic_threads": True}
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=f"{folder}/d.pt2", inductor_configs=options
        )
        compiled = torch._inductor.aoti_load_package(path)
        for used in slots:
            spent = []
            for _ in range(500):
                started = time.perf_counter()
                compiled(text, torch.tensor([used - 32]), torch.zeros(1, 1, used, 1))
                spent.append(1e6 * (time.perf_counter() - started))
            times[used] = round(median(spent))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", help="what `specstep generate --json` printed")
    parser.add_argument("--model", required=True, help="the model that answered")
    parser.add_argument("--drafter", default="default", help="ngram, default, or a file of tables")
    parser.add_argument("--tree", action="append", help="depth,top_k,nodes; may be given again (default: 7,4,7)")
    parser.add_argument("--time", action="store_true", help="compile the draft and time it too")
    options = parser.parse_args()
    source = load_source(options.model, "bfloat16", "cpu")
    file = {"ngram": None, "default": shipped_tables(source)}.get(options.drafter, options.drafter)
    scorer = Ngram(load_tables(file, source) if file else None)
    with open(options.answers) as lines:
        answers = [json.loads(line) for line in lines]
    for tree in options.tree or ["7,4,7"]:
        drafter = Drafter(scorer, DynamicTree(*map(int, tree.split(","))))
        print(
            tree, tokens_per_step(drafter, answers), draft_times(drafter, answers) if options.time else "", flush=True
        )


if __name__ == "__main__":
    main()
