"""What manifest.json may say: its fields and how they relate, checked before anything is allocated or run.

A program is native code that trusts its tensors: it would write past one whose shape is too small.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..controls import ALL_TOKENS, BANNED_WORDS, BIASES, STOP_IDS, WORD_TOKENS, Sampling, most_catch_up
from ..report import FREE
from .json_checks import equal_to, refusal
from .manifest_fields import MANIFEST_FIELDS, TENSORRT

WEIGHTS = "weights.safetensors"
NEXT = "next."  # in a program that writes nothing in place, `next.X` is the output that input X becomes
GIVEN = ("tokens", "count", "nodes", "catch_up")  # inputs that are no tensors of the session
Data = dict[str, Any]


def check_manifest(data: Any) -> None:
    """Raises ValueError for what no build of this format writes: the field, what was expected, what was found."""
    MANIFEST_FIELDS("manifest", data)
    spec = data["spec"]
    _check_numbers(spec, data["about"]["tree"])
    _check_tensors(spec)
    _check_ranks(spec["config"], data["files"])
    if spec["config"]["backend"].startswith("tensorrt"):
        TENSORRT("manifest", {**spec["config"], **data["about"]})
    for name in ("prefill", "step", "plain"):
        if spec[name] is not None:
            _check_program(name, spec, data["files"])
    returned = [spec["prefill"]["outputs"][1:], spec["step"]["outputs"][5:]]
    if spec["config"]["backend"] == "inductor":
        equal_to(returned[0])("step.outputs after tree_parents", returned[1])


def weights_files(ranks: int) -> list[str]:
    """The file of each rank's weights."""
    return [WEIGHTS] if ranks == 1 else [f"weights.rank{rank}.safetensors" for rank in range(ranks)]


def capacity_for(max_seq_len: int, scratch: int, slot_step: int) -> int:
    """Slots of caches for rows of so many tokens, see `EngineSpec`."""
    capacity = -(-(max_seq_len + scratch) // slot_step) * slot_step + slot_step
    return max(capacity, 3 * slot_step)  # a number of slots that can only be one is no dynamic dimension


def scratch_for(nodes: int, depth: int, frontiers: Sequence[int], catch_up: int) -> int:
    """Slots past a row's length that a step writes. frontiers: nodes that each level expands; catch_up: positions that
    a drafter processes ahead of that, and of the depths behind them where it drafts all in one pass."""
    drafted = max(depth + 2, 1 + sum(frontiers))  # slots past the length after a step, at most D + 1 more
    return max(nodes + 1, depth + 1 + drafted, catch_up + max(depth, 1))


def rows_of_state(capacity: int, nodes: int, vocab_size: int) -> dict[str, tuple[list[int], str, int]]:
    """Shape of a row, dtype and first value of the state that every engine has, as `graphs/state.py` declares it."""
    numbers = (
        "lengths", "limits", "finish", "prediction_lengths", "prompt_lengths", "min_lengths", "seeds", "logprobs",
        "masked", "learning",
    )  # fmt: skip
    shapes = {
        **dict.fromkeys(("history", "prediction"), ([capacity], "int64")),
        **dict.fromkeys(("tree_tokens", "tree_parents"), ([nodes + 1], "int64")),
        **dict.fromkeys(numbers, ([], "int64")),
        "stop_ids": ([STOP_IDS], "int64"),
        "sampling": ([len(Sampling._fields)], "float32"),
        "bias_ids": ([BIASES], "int64"),
        "bias": ([BIASES], "float32"),
        "banned_words": ([BANNED_WORDS, WORD_TOKENS], "int64"),
        "allowed": ([nodes + 1, -(-vocab_size // 32)], "int32"),
    }
    nothing = ("tree_parents", "stop_ids", "prediction", "bias_ids", "banned_words", "logprobs")
    first = {**dict.fromkeys(nothing, -1), "finish": FREE, "learning": 1, "allowed": ALL_TOKENS}
    return {name: (*shape, first.get(name, 0)) for name, shape in shapes.items()}


def _check_numbers(spec: Data, tree: Data) -> None:
    """The relations of sizes."""
    config = spec["config"]
    for name in ("max_batch", "max_seq_len", "device"):
        equal_to(config[name])(name, spec[name])
    for name in ("nodes", "depth", "top_k"):
        equal_to(config[name])(f"about.tree.{name}", tree[name])
    equal_to(min(config["prefill_chunk"], spec["max_seq_len"]))("prefill_chunk", spec["prefill_chunk"])
    if spec["catch_up"]:
        equal_to(most_catch_up(config["depth"]))("catch_up", spec["catch_up"])
    equal_to(scratch_for(config["nodes"], config["depth"], tree["frontiers"], spec["catch_up"]))(
        "scratch", spec["scratch"]
    )
    equal_to(capacity_for(spec["max_seq_len"], spec["scratch"], spec["slot_step"]))("capacity", spec["capacity"])


def _check_ranks(config: Data, files: Data) -> None:
    """There are weights of each rank, and of no other."""
    expected = weights_files(config.get("ranks", 1))
    got = sorted(name for name in files if name.startswith("weights."))
    if config["backend"] == "inductor" and got != sorted(expected):
        raise refusal("files", " ".join(expected), " ".join(got) or "none")


def _check_tensors(spec: Data) -> None:
    """Names once, rows and slots as the sizes say, and shapes that are known."""
    batch, capacity = spec["max_batch"], spec["capacity"]
    every = [tensor["name"] for kind in ("state", "shared", "caches") for tensor in spec[kind]]
    twice = sorted({name for name, count in Counter(every).items() if count > 1} | ({*every} & {*GIVEN}))
    if twice:
        raise refusal("tensors", "each name once", twice[0])
    rows, found = rows_of_state(capacity, spec["config"]["nodes"], spec["vocab_size"]), {}
    for tensor in spec["state"]:
        found[tensor["name"]] = tensor
        equal_to([batch])(f"{tensor['name']}.shape", tensor["shape"][:1])
    for name, (shape, dtype, fill) in rows.items():
        if name not in found:
            raise refusal("state", name, sorted(found))
        equal_to([batch, *shape])(f"{name}.shape", found[name]["shape"])
        equal_to(dtype)(f"{name}.dtype", found[name]["dtype"])
        equal_to(fill)(f"{name}.fill", found[name]["fill"])
    learned_rows = spec["config"]["learned_rows"]
    for tensor in spec["shared"]:
        if tensor["name"].rpartition(".")[2] == "learned":
            equal_to([learned_rows + 1, 16])(f"{tensor['name']}.shape", tensor["shape"])
            equal_to("int64")(f"{tensor['name']}.dtype", tensor["dtype"])
    layers = len(spec["caches"]) // 2
    names = [f"{kind}.{index}" for kind in ("keys", "values") for index in range(layers)]
    equal_to(names)("caches", [tensor["name"] for tensor in spec["caches"]])
    kept = "int8" if spec["config"].get("kv_cache") == "int8" else spec["config"]["dtype"]
    for tensor in spec["caches"]:
        shape = tensor["shape"]
        if len(shape) != 4 or [shape[0], shape[2]] != [batch, capacity]:
            raise refusal(f"{tensor['name']}.shape", [batch, "H", capacity, "D"], shape)
        equal_to(kept)(f"{tensor['name']}.dtype", tensor["dtype"])
        equal_to(0)(f"{tensor['name']}.fill", tensor["fill"])
    for name, known in (("drafter_tensors", {*every}), ("recurrent", {*found} - {*rows})):
        if odd := sorted({*spec[name]} - known):
            raise refusal(name, "names of tensors", odd[0])


def _check_program(name: str, spec: Data, files: Data) -> None:
    """Its file is one that is checked, and its inputs and outputs are tensors of the session."""
    program = spec[name]
    if program["file"] not in files:
        raise refusal(f"{name}.file", f"one of {', '.join(sorted(files))}", program["file"])
    tensors = {tensor["name"] for kind in ("state", "shared", "caches") for tensor in spec[kind]}
    for side, known in (("inputs", {*GIVEN, *tensors}), ("outputs", {"report", *tensors})):
        names = [each.removeprefix(NEXT) for each in program[side]]
        odd = [each for each, count in Counter(names).items() if each not in known or count > 1]
        if odd:
            raise refusal(f"{name}.{side}", "names of tensors, each once", odd[0])
    if name != "prefill":
        equal_to(["report"])(f"{name}.outputs", program["outputs"][:1])
    # Models of other backends name what they take, and are compared with it.
    if spec["config"]["backend"] == "inductor":
        _check_order(name, spec)


def _check_order(name: str, spec: Data) -> None:
    """Inputs and outputs of a program that knows them by their place alone, as `compile/assemble.py` orders them."""
    names = [tensor["name"] for kind in ("state", "shared", "caches") for tensor in spec[kind]]
    own, moved = spec["drafter_tensors"], ["report", "lengths", "finish"]
    catch_up = ["catch_up"] if spec["catch_up"] else []
    inputs, outputs = {
        "prefill": (["tokens", "count", *names], ["lengths"]),
        "step": (["nodes", *catch_up, *names], [*moved, "tree_tokens", "tree_parents"]),
        "plain": ([each for each in names if each not in own], moved),
    }[name]
    equal_to(inputs)(f"{name}.inputs", spec[name]["inputs"])
    got = spec[name]["outputs"]
    equal_to(outputs)(f"{name}.outputs", got[: len(outputs)])
    returned = got[len(outputs) :]
    if name == "plain" or returned != [each for each in own if each in returned]:
        equal_to([])(f"{name}.outputs after {outputs[-1]}", returned)
