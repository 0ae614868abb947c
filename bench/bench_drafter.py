"""What a drafter earns: tokens per step over recorded answers, for one tree after another, without the target.

    specstep generate ENGINE --prompts FILE --json > answers.jsonl   (ids as CATEGORY/NUMBER give a column per category)
    python bench/bench_drafter.py answers.jsonl --model MODEL --drafter default --tree 7,4,7 --tree 8,4,15

Answers that were sampled, with `--temperature T --seed N`, are replayed with the same `--temperature`, and without it
to see what drafts would give that are blind to the noise.

What it costs is another matter: `specstep tune` and `make bench` time whole engines.
"""

import argparse
import json
from collections import defaultdict

from replay import replay
from specstep.compile.config import EngineConfig
from specstep.compile.drafters.choose import make_drafter
from specstep.compile.source import load_source


def tokens_per_step(source, drafter, answers, temperature):
    """{category: tokens per step}, and of all."""
    steps = defaultdict(list)
    for name, counts in replay(source, drafter, answers, temperature=temperature).items():
        for category in ("all", str(name).split("/")[0]):
            steps[category] += counts
    return {category: round(sum(counts) / len(counts), 2) for category, counts in steps.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", help="what `specstep generate --json` printed")
    parser.add_argument("--model", required=True, help="the model that answered")
    parser.add_argument("--drafter", default="default", help="as of `specstep build`")
    parser.add_argument("--tree", action="append", help="depth,top_k,nodes; may be given again (default: 7,4,7)")
    parser.add_argument("--limit", type=int, help="answers to replay, evenly spread (default: all)")
    parser.add_argument("--temperature", type=float, default=0.0, help="with which they were sampled (default: 0)")
    options = parser.parse_args()
    source = load_source(options.model, "bfloat16", "cpu")
    with open(options.answers) as lines:
        answers = [json.loads(line) for line in lines]
    answers = answers[:: max(1, len(answers) // (options.limit or len(answers)))]
    for tree in options.tree or ["7,4,7"]:
        depth, top_k, nodes = map(int, tree.split(","))
        config = EngineConfig(drafter=options.drafter, tree="dynamic", depth=depth, top_k=top_k, nodes=nodes)
        found = tokens_per_step(source, make_drafter(source, config), answers, options.temperature)
        print(tree, found, flush=True)


if __name__ == "__main__":
    main()
