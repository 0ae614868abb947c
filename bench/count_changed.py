"""Whether any of our engines, in a batch and with any number of threads, changes an answer: texts compared.

    specstep build MODEL -o PLAIN --drafter none
    specstep build MODEL -o DRAFTED --drafter default
    python bench/count_changed.py PLAIN DRAFTED --prompts FILE --limit 100 --threads 1,2

Each engine answers with all its rows in use, greedily, with each number of threads. Expected: none changes. What
drafts change in the engines of other projects is a column of `make bench`.
"""

import argparse

import specstep
import torch
from side_by_side.summary import changed
from specstep.commands.prompts import read_prompts


def fits(engine, prompt):
    try:
        return engine.request(prompt.prompt) is not None
    except specstep.InputError as error:
        print(f"left out: {prompt.id}: {error}", flush=True)
        return False


def answers(engine, prompts, new_tokens):
    """The token ids of each answer, by the prompt's id."""
    results = engine.generate([prompt.prompt for prompt in prompts], new_tokens)
    return {prompt.id: list(result.token_ids) for prompt, result in zip(prompts, results, strict=True)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--prompts", required=True, help="as of `specstep generate --prompts`")
    parser.add_argument("--limit", type=int, default=100, help="prompts, evenly spread over the file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", default=str(torch.get_num_threads()), help="one number or several, with commas")
    options = parser.parse_args()
    prompts = read_prompts(options.prompts)
    prompts = prompts[:: max(1, len(prompts) // options.limit)][: options.limit]
    with specstep.load(options.engines[0]) as engine:
        prompts = [prompt for prompt in prompts if fits(engine, prompt)]
    expected, total = None, 0
    for directory in options.engines:
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            with specstep.load(directory) as engine:
                got = answers(engine, prompts, options.max_new_tokens)
            expected = got if expected is None else expected
            differing = changed(expected, got)
            total += len(differing)
            changes = f"{len(differing)} of {len(prompts)} change {differing[:8]}"
            print(f"{directory}, {threads} threads: {changes}", flush=True)
    raise SystemExit(total > 0)


if __name__ == "__main__":
    main()
