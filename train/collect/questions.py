"""Questions that an instruction-tuned model asks itself: the user's turn sampled from the chat template's prefix.

Source: Magpie (arXiv 2406.08464). A model that is given what stands before a user's turn, and no turn, writes one; a
few words to begin with vary them.
"""

import random
from collections.abc import Callable, Iterator

import torch

from ...compile.source import Source
from ...errors import InputError
from .sampling import sample

LONGEST, SHORTEST = 160, 12  # tokens, characters
MARK = "the user's words"
# One in so many questions begins freely, so that the model's own taste shows; the others begin with one of these.
FREELY = 6
OPENINGS = (
    """
Why do|Why is|How do I|How does|How can I|How many|What is|What are the|What would happen if|When did|Where is|Who was
Which is better|Can you|Could you explain|Is it true that|Explain|Explain to a child|Describe|Define|Compare|List
Give me three|Give an example of|Tell me about|Tell me a story about|Write a short story about|Write a poem about
Write an email to|Write a letter to|Write a paragraph on|Write a Python function that|Write a SQL query|Write code to
Fix this code|What does this code do|Debug|Summarize|Summarize the following text|Rewrite this sentence|Rephrase
Correct the grammar|Translate to French|Translate into English|Translate the following|Complete the sentence
Classify|Is the sentiment of this review|Extract the names from|Answer the question based on the context|Given that
Solve|Calculate|If a train|A shop sells|There are|What is the sum of|What is the derivative of|Prove that
Convert|Plan a|Suggest|Recommend|I want to|I need help with|I am planning|My friend|My boss|Imagine you are|Act as
Create a table of|Make a list of|Design a|Brainstorm|Outline|Draft|Help me|Pretend|Tips for|Pros and cons of|Hello
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


def ask(
    source: Source, rows: int, seed: int, tick: Callable[[int], None] = lambda tokens: None, temperature: float = 1.0
) -> Iterator[str]:
    """Questions without end, `rows` sampled at a time; the same seed gives the same ones. Raises InputError for a model
    whose chat template does not say what comes before a user's turn."""
    prefix, stop_ids = user_prefix(source)
    choose, generator = random.Random(seed), torch.Generator(source.model.device).manual_seed(seed)
    special = set(source.tokenizer.all_special_ids)
    while True:
        openings = [choose.choice(OPENINGS) if choose.randrange(FREELY) else "" for _ in range(rows)]
        starts = source.tokenizer([prefix + opening for opening in openings], add_special_tokens=False)["input_ids"]
        limits, temperatures = [LONGEST] * rows, [temperature] * rows
        turns = sample(
            source, starts, limits, temperatures=temperatures, stop_ids=stop_ids, generator=generator, tick=tick
        )
        for opening, turn in zip(openings, turns, strict=True):
            ended, inside = turn[-1] in stop_ids, turn[:-1]
            question = (opening + source.tokenizer.decode(inside)).strip()
            if ended and len(question) >= SHORTEST and not special & set(inside):
                yield question


def user_prefix(source: Source) -> tuple[str, list[int]]:
    """What the chat template puts before a user's words, and the tokens that end them. Raises InputError."""
    tokenizer = source.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise InputError(
            f"model: expected an instruction-tuned one with a chat template, got {source.name}; give prompts of your "
            "own with --prompts"
        )
    turn = [{"role": "user", "content": MARK}]
    before, found, after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).partition(
        MARK
    )
    ends = tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
    if not ends:
        raise InputError(
            f"model: expected a chat template that ends a user's turn, got {source.name}'s; give --prompts"
        )
    return before, sorted({ends[0], *source.stop_ids})
