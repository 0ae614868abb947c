"""Which keywords of JSON schemas are kept: the cases of a JSON-Schema-Test-Suite against the grammars of schemas.

A document that a schema takes is written with its keys in the schema's order, the one in which an output has them.
Prints a table and ends with 1 where a grammar takes a document that its schema forbids.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specstep.errors import InputError
from specstep.runtime.asked.grammar import Grammar
from specstep.runtime.asked.structured import checked_structured
from specstep.runtime.text.tokenizer import EngineTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "</s>"


def byte_tokenizer() -> EngineTokenizer:
    """A token for each byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return EngineTokenizer(tokenizer, None, {})


class Schemas:
    """Grammars of schemas over bytes."""

    def __init__(self) -> None:
        self._text = byte_tokenizer()
        self._end = self._text.special_names[END]

    def grammar(self, schema: Any) -> Grammar:
        """Raises InputError for one that is refused."""
        asked = checked_structured("structured", {"json": schema})
        return Grammar(self._text, self._end + 1, [self._end], asked)

    def takes(self, grammar: Grammar, document: str) -> bool:
        """Whether an output may be this text."""
        matcher, tokens = grammar._start.deep_copy(), self._text.encode_part(document)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def in_order(data: Any, schema: Any) -> Any:
    """A document with its keys in the order in which the schema lists them."""
    if isinstance(data, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [in_order(each, items) for each in data]
    if not isinstance(data, dict):
        return data
    known = schema.get("properties", {}) if isinstance(schema, dict) else {}
    keys = [key for key in known if key in data] + [key for key in data if key not in known]
    return {key: in_order(data[key], known.get(key)) for key in keys}


def results(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Keyword, what became of a case, and which it is."""
    schemas = Schemas()
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            name, schema = f"{file.stem}: {group['description']}", group["schema"]
            try:
                grammar = schemas.grammar(schema)
            except InputError as error:
                yield from ((file.stem, "refused", f"{name}: {error}") for _ in group["tests"])
                continue
            for test in group["tests"]:
                document = json.dumps(in_order(test["data"], schema), ensure_ascii=False)
                taken = schemas.takes(grammar, document)
                outcome = "kept" if taken == test["valid"] else "wrong" if taken else "narrower"
                yield file.stem, outcome, f"{name}: {test['description']}: {document}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="such as JSON-Schema-Test-Suite/tests/draft2020-12")
    parser.add_argument("--show", choices=["refused", "narrower", "wrong"], help="list these cases, and no table")
    options = parser.parse_args()
    found = list(results(options.folder))
    if not found:
        parser.error(f"{options.folder}: expected files of cases, found none")
    if options.show:
        for case in dict.fromkeys(case for _, outcome, case in found if outcome == options.show):
            print(case)
    else:
        print("| cases of | kept | narrower | refused | wrong |\n|---|---|---|---|---|")
        for keyword in dict.fromkeys(keyword for keyword, _, _ in found):
            counts = Counter(outcome for of, outcome, _ in found if of == keyword)
            print(f"| {keyword} |", *(f"{counts[each]} |" for each in ("kept", "narrower", "refused", "wrong")))
    return int(any(outcome == "wrong" for _, outcome, _ in found))


if __name__ == "__main__":
    sys.exit(main())
