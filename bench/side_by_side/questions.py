"""Which questions are asked, as token ids: the same for every engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specstep.commands.prompts import Entry, read_prompts
from specstep.errors import InputError
from specstep.progress import OnProgress

OWN = Path(__file__).parent / "questions.jsonl"


class Question(NamedTuple):
    """A prompt as token ids, through the model's chat template."""

    id: str
    category: str
    tokens: list[int]


def read_questions(file: Path, tokenizer: Any, limit: int, most_tokens: int, progress: OnProgress) -> list[Question]:
    """As many questions of a file of JSON lines as `limit` says, each category in turn. One that cannot be read, or is
    longer than `most_tokens`, is left out with a line. Raises InputError where none is left."""
    fitting = []
    for entry in read_prompts(str(file)):
        try:
            question = Question(str(entry.id), entry.category, _tokens(entry, tokenizer))
        except InputError as error:
            progress(f"warning: left out: {error}")
            continue
        if len(question.tokens) > most_tokens:
            progress(f"warning: left out: {question.id}: {len(question.tokens)} tokens, at most {most_tokens} fit")
        else:
            fitting.append(question)
    if not fitting:
        raise InputError(f"prompts: expected at least one question that fits, got none in {file}")
    return in_turn(fitting, limit)


def in_turn(questions: Sequence[Question], limit: int) -> list[Question]:
    """The first of each category, then the second of each, and so on, evenly spread over each category."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    share = -(-limit // len(groups))
    spread = [group[:: max(1, len(group) // share)] for group in groups.values()]
    turns = (group[turn] for turn in range(max(map(len, spread))) for group in spread if turn < len(group))
    return list(turns)[:limit]


def _tokens(entry: Entry, tokenizer: Any) -> list[int]:
    if isinstance(entry.prompt, InputError):
        raise entry.prompt
    prompt = entry.prompt
    if isinstance(prompt, str):
        if not tokenizer.chat_template:
            return list(tokenizer(prompt)["input_ids"])
        prompt = [{"role": "user", "content": prompt}]
    if prompt and isinstance(prompt[0], int):
        return list(prompt)
    variables = dict(entry.chat_template_kwargs)
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **variables)
    return list(ids)
