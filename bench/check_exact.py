"""Whether an engine says what transformers says: its greedy answers, each token judged by the model itself.

    specstep build MODEL -o ENGINE --dtype float32
    python bench/check_exact.py ENGINE --model MODEL --prompts FILE --limit 100

transformers reads prompt and answer in one pass; the answer is greedy when every token is the likeliest after those
before it. In float32 two orders of summation may still part where two tokens are equally likely: such places are shown
with the gap between their logits.
"""

import argparse

import specstep
import torch
from specstep.commands.prompts import read_prompts
from specstep.compile.source import load_source


@torch.no_grad()
def first_difference(model, prompt, answer):
    """(place, the model's token, the answer's, how much likelier in logits) of the first token that is not greedy."""
    logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    best = logits.argmax(-1).tolist()
    for place, (mine, its) in enumerate(zip(best, answer, strict=True)):
        if mine != its:
            return place, mine, its, float(logits[place, mine] - logits[place, its])
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="as of `specstep generate --prompts`")
    parser.add_argument("--limit", type=int, default=100, help="prompts, evenly spread over the file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    engine = specstep.load(options.engine)
    model = load_source(options.model, "float32", "cpu").model
    prompts = read_prompts(options.prompts)
    prompts = prompts[:: max(1, len(prompts) // options.limit)][: options.limit]
    tokens = odd = steps = 0
    for number, prompt in enumerate(prompts, 1):
        [result] = engine.generate([prompt.prompt], options.max_new_tokens, chat=isinstance(prompt.prompt, str))
        tokens, steps = tokens + len(result.token_ids), steps + result.stats["steps"]
        difference = first_difference(model, result.prompt_token_ids, result.token_ids)
        if difference:
            odd += 1
            print(f"{prompt.id}: token {difference[0]}: expected {difference[1]}, got {difference[2]}, "
                  f"{difference[3]:.2e} less likely", flush=True)  # fmt: skip
        if number % 10 == 0:
            print(f"{number} prompts, {tokens} tokens, {tokens / steps:.2f} per step, {odd} differ", flush=True)


if __name__ == "__main__":
    main()
