"""A router's view of a replica's prefix cache, made of its events alone, as llm-d and Dynamo make one."""

import json


class Reader:
    """Follows batches in vLLM's shapes. Refuses what such a reader could not follow."""

    def __init__(self):
        self.blocks = {}  # hash -> the tokens of the block and of all before it
        self.cleared = 0

    def apply(self, batch):
        """One batch, as it is sent."""
        for event in batch["events"]:
            getattr(self, "_" + event["type"])(event)

    def _AllBlocksCleared(self, event):
        self.blocks.clear()
        self.cleared += 1

    def _BlockRemoved(self, event):
        for each in event["block_hashes"]:
            del self.blocks[each]

    def _BlockStored(self, event):
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(event["block_hashes"])
        before = () if parent is None else self.blocks[parent]
        for place, each in enumerate(event["block_hashes"]):
            assert 0 <= each < 2**63 and each not in self.blocks
            before = self.blocks[each] = before + tuple(tokens[place * size : (place + 1) * size])


def kept(engine):
    """What the prefix cache of an engine has: the tokens of each block and of all before it."""
    texts = {}
    for (before, tokens), block in engine._scheduler._rows.prefixes._blocks.items():
        texts[block.number] = (before, tokens)

    def whole(number):
        before, tokens = texts[number]
        return (whole(before) if isinstance(before, int) else ()) + tokens

    return sorted(whole(number) for number in texts)


def parsed(lines):
    """Lines of server-sent events -> each one's id, None without, and its batch."""
    last = None
    for line in lines:
        if line.startswith("id: "):
            last = line[4:]
        elif line.startswith("data: "):
            yield last, json.loads(line[6:])
            last = None
