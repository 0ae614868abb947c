"""What the calls of a step are parts of: a stage, an operator, and a place in the model.

Calls are told apart by their order, which the compiled graph fixes, and by the addresses of the weights that they are
given.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...kernels.recording import RecordedCall

PROFILED_STAGES = ("verify", "accept", "commit", "draft", "runtime")  # in the order of a step
COMPILED, HOST = "compiled code", "host"  # in place of an operator's name
# They do not say how much of their inputs they read.
READ_IN_PART = {"packed_embedding", "packed_expert_linear", "expert_linear_native", "ngram"}


@dataclass(frozen=True)
class Part:
    """What a step does in one kind of place: an operator over the same weight of every layer, or the compiled code that
    leads there."""

    stage: str  # of PROFILED_STAGES
    op: str  # an operator, or COMPILED or HOST
    place: str  # its weight without layer numbers, as mlp.gate_proj; for compiled code what follows it
    calls: int  # in one step
    seconds: float  # of all of them, in one step
    read: int | None  # bytes of weights and caches, in one step; None: not known


def step_parts(calls: Sequence[RecordedCall], times: Sequence[float], names: Mapping[int, str]) -> list[Part]:
    """What a step does, by kind of place, what takes longest first.

    times: seconds of what leads to each call and of the call, in turn; then of the program's rest, and of the host.
    names: of the weights, by address.
    """
    found: dict[tuple[str, str, str], list[tuple[float, int | None]]] = defaultdict(list)
    last = "verify"
    for index, (call, stage) in enumerate(zip(calls, _stages(calls), strict=True)):
        place = _place(call, names)
        between = "commit" if stage == "draft" != last else stage
        found[between, COMPILED, f"before {call.name} {place}".rstrip()].append((times[2 * index], None))
        found[stage, call.name, place].append((times[2 * index + 1], _read(call, names)))
        last = stage
    found["draft" if last == "draft" else "commit", COMPILED, "at the end"].append((times[-2], None))
    found["runtime", HOST, "inputs, state and report"].append((times[-1], None))
    parts = [_part(key, done) for key, done in found.items()]
    return sorted(parts, key=lambda part: -part.seconds)


def weight_bytes(calls: Sequence[RecordedCall], names: Mapping[int, str]) -> int:
    """Bytes of the weights that linear layers read whole, each once."""
    linear = [call for call in calls if "linear" in call.name and call.name not in READ_IN_PART]
    return sum(size for _, size in {given for call in linear for given in call.inputs if given[0] in names})


def _part(key: tuple[str, str, str], done: Sequence[tuple[float, int | None]]) -> Part:
    seconds, read = sum(each for each, _ in done), [each for _, each in done if each is not None]
    return Part(*key, len(done), seconds, sum(read) if read else None)


def _stages(calls: Sequence[RecordedCall]) -> Iterator[str]:
    """The stage of each call. The target's choice ends the verification. The first log-probabilities behind it are the
    report's: acceptance, wherever the compiler put them. The rest drafts."""
    names = [call.name for call in calls]
    choice = names.index("choose") if "choose" in names else len(names)
    report = next((index for index, name in enumerate(names) if index > choice and name == "top_log_probs"), None)
    for index in range(len(names)):
        yield "verify" if index <= choice else "accept" if index == report else "draft"


def _place(call: RecordedCall, names: Mapping[int, str]) -> str:
    """The weight of a linear layer or an embedding, without the numbers of layers: `mlp.gate_proj`."""
    if "linear" not in call.name and "embedding" not in call.name:
        return ""
    _, name = max(((size, names[data]) for data, size in call.inputs if data in names), default=(0, ""))
    parts = re.sub(r"\.weight[^.]*$|_packed_*$", "", name).split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers and parts[numbers[-1] + 1 :] else parts[-2:])


def _read(call: RecordedCall, names: Mapping[int, str]) -> int | None:
    """Bytes of weights and caches that a call reads, None where that is not known."""
    if call.read is not None or call.name in READ_IN_PART:
        return call.read
    sizes = [size for data, size in call.inputs if data in names]
    return sum(sizes) if sizes else None
