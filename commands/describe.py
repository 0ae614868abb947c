"""Say what an engine is made of, for people."""

import re
from typing import Any

from ..runtime.engine_file import EngineSpec, Manifest

# A layer's state and its windows, which may be several: what else a name has is whose layer it is, and its number.
STATE_OF_LAYER = re.compile(r"(?:recurrent|window)\.(\d+)(?:\.\d+)?$")


def describe(manifest: Manifest) -> str:
    """A page about an engine: model, tree, limits, programs with their inputs and outputs, files, requirements."""
    spec, about = manifest.spec, manifest.about
    model, config = about["model"], spec.config
    copies = 2 if "plans" in about and not config["plugins"] else 1  # a step without plugins writes its caches anew
    caches = copies * spec.ranks * sum(tensor.nbytes for tensor in spec.caches)
    lines = [
        f"model       {model['name']}: {model.get('model_type', '')}, {model['parameters'] / 1e6:.1f}M parameters, "
        + config["dtype"],
        *([f"adapter     {model['adapter']}"] if "adapter" in model else []),
        f"drafter     {config['drafter']}",
        *_tools(about["tools"]),
        *(f"vocabulary  {said}" for said in about.get("vocabularies", [])),
        *_tree(about["tree"]),
        *_stages(about["stages"]),
        *_operators(about.get("operators", {})),
        *_drafts(about.get("drafts_may_change_text")),
        *_forced(config.get("forced_acceptance")),
        *_parts(config.get("sum_parts", 1), config.get("draft_ranks", 1)),
        *_ranks(spec, config.get("draft_ranks", 1)),
        f"limits      {spec.max_batch} rows of {spec.max_seq_len} tokens, prompts in chunks of {spec.prefill_chunk}",
        f"runs on     {'cuda' if 'plans' in about else spec.device}; "
        + "; ".join(f"{key} {_short(value)}" for key, value in manifest.requires.items()),
        *_caches(spec, caches),
        *_states(spec),
        *_memory(about.get("weights", {}), manifest, caches),
        *_widened(about.get("widened", {})),
        "built with  " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        f"built in    {about['build_s']} s{_stage_times(about.get('stage_s', {}))}",
        *_files(manifest),
        *_programs(spec),
        *_models(about),
        *_plans(about),
    ]
    return "\n".join(lines)


def _files(manifest: Manifest) -> list[str]:
    """Each file with its size and sum."""
    width = max(22, *map(len, manifest.files))
    return [
        "files",
        *(
            f"  {name:<{width}}{entry['bytes'] / 2**20:10.1f} MiB  sha256 {entry['sha256'][:12]}"
            for name, entry in manifest.files.items()
        ),
    ]


def _programs(spec: EngineSpec) -> list[str]:
    """The tensors of a row's state, and what the programs take and give."""
    return [
        "state",
        *(f"  {tensor.name:<22}{tensor.dtype:<10}{list(tensor.shape)}" for tensor in (*spec.state, *spec.shared)),
        "programs",
        *(
            f"  {name:<10}{len(p.inputs)} inputs -> {', '.join(p.outputs)}"
            for name, p in (("prefill", spec.prefill), ("step", spec.step))
        ),
    ]


def _tools(tools: dict[str, Any] | None) -> list[str]:
    """How the model is told of tools, and writes calls."""
    if tools is None:
        return []
    form = tools["name"] or f"a form that is not known, {tools['written']!r}: --tool-format names one"
    shown = "in its chat template" if tools["lists"] else "in the system message"
    return [f"tools       listed {shown}, calls as {form}"]


def _parts(parts: int, of_draft: int) -> list[str]:
    drafter = ", those of the draft model, too" if of_draft > 1 else ""
    return [f"parts       rowwise layers are sums of {parts}{drafter}"] if parts > 1 else []


def _ranks(spec: EngineSpec, of_draft: int) -> list[str]:
    each = "GPUs" if spec.device == "cuda" else "processes"
    drafter = "the model; the drafter is in each" if of_draft == 1 else "the model and the draft model"
    return [f"ranks       {spec.ranks} {each} share {drafter}"] if spec.ranks > 1 else []


def _stage_times(seconds: dict[str, float]) -> str:
    return "".join(f", {name} {spent:.1f}" for name, spent in seconds.items())


def _tree(tree: dict[str, Any]) -> list[str]:
    """The tree in a line; a static one also with its paths."""
    lines = [f"tree        {tree['kind']}: {tree['nodes']} nodes, depth {tree['depth']}, top-k {tree['top_k']}"]
    if tree["paths"]:
        lines += [
            "            root",
            *(f"            {'    ' * len(path)}{path[-1]}" for path in sorted(tree["paths"])),
        ]
    return lines


def _models(about: dict[str, Any]) -> list[str]:
    """ONNX models: opset and every tensor."""
    lines = []
    for name, model in about.get("models", {}).items():
        lines.append(f"model {name}.onnx, opset {model['opset']}")
        lines += [f"  {tensor:<22}{kind['dtype']:<10}{kind['shape']}" for tensor, kind in model["tensors"].items()]
    return lines


def _plans(about: dict[str, Any]) -> list[str]:
    """TensorRT plans: what they are built for, layers and plugins, the shapes they are tuned for, every tensor."""
    lines = []
    for name, plan in about.get("plans", {}).items():
        plugins = ", ".join(f"{count} {plugin}" for plugin, count in plan["plugins"].items()) or "no plugins"
        lines += [
            f"plan {name} for compute capability {', '.join(about['compute_capability'])}: {plan['layers']} layers, "
            f"{plugins}",
            *(
                f"  profile {least} to {most} {dimension}, best at {best}"
                for profile in plan["profiles"]
                for dimension, (least, best, most) in profile.items()
            ),
            *(f"  {tensor:<22}{kind['dtype']:<10}{kind['shape']}" for tensor, kind in plan["tensors"].items()),
        ]
    return lines


def _stages(stages: dict[str, dict[str, int]]) -> list[str]:
    total = {kind: sum(stage[kind] for stage in stages.values()) or 1 for kind in ("nodes", "parameters")}
    shares = (
        f"{name} {stage['nodes'] / total['nodes']:.0%} of nodes and "
        f"{stage['parameters'] / total['parameters']:.0%} of parameters"
        for name, stage in stages.items()
    )
    return ["step        " + "; ".join(shares)]


def _operators(counts: dict[str, int]) -> list[str]:
    """Operators of ours in a step, and those of PyTorch that no rewrite matched."""
    if not counts:
        return []
    own, others = list[str](), list[str]()
    for name, count in counts.items():
        library, _, operator = name.rpartition("::")
        (own if library == "specstep" else others).append(f"{operator} {count}")
    left = ", ".join(others) or "no product, reduction or function"
    return [f"kernels     {', '.join(own) or 'none of ours'}", f"PyTorch's   {left}"]


def _drafts(reasons: list[str] | None) -> list[str]:
    """Whether drafts may change a text, and why; engines of earlier versions do not say."""
    if reasons is None:
        return []
    return [f"drafts      may change the text: {'; '.join(reasons)}" if reasons else "drafts      change no text"]


def _caches(spec: EngineSpec, size: float) -> list[str]:
    """Keys and values, which not every model has. size: bytes."""
    if not spec.caches:
        return []
    return [f"KV cache    {len(spec.caches) // 2} layers, {size / 2**20:.0f} MiB at most, {spec.caches[0].dtype}"]


def _states(spec: EngineSpec) -> list[str]:
    """What recurrent layers keep, whatever a row's length."""
    kept = [tensor for tensor in spec.state if tensor.name in spec.recurrent]
    if not kept:
        return []
    layers = len({STATE_OF_LAYER.sub(r"\1", tensor.name) for tensor in kept})
    size = sum(tensor.nbytes for tensor in kept)
    return [f"states      {layers} recurrent layers, {size / 2**20:.1f} MiB for {spec.max_batch} rows of any length"]


def _memory(kinds: dict[str, int], manifest: Manifest, caches: float) -> list[str]:
    """What the weights are, and what an engine takes once it is loaded."""
    files = [manifest.files[name] for name in manifest.spec.weights_files if name in manifest.files]
    if not files or not kinds:
        return []
    whole = sum(file["bytes"] for file in files)
    said = [f"{count / 2**20:.1f} MiB {kind}" for kind, count in kinds.items()]
    said += [f"{(whole - sum(kinds.values())) / 2**20:.1f} MiB that is not packed"]
    return [
        f"weights     {', '.join(said)}",
        f"memory      {(whole + caches) / 2**20:.0f} MiB of weights and caches, beside PyTorch's own",
    ]


def _widened(tensors: dict[str, list[str]]) -> list[str]:
    """What the model's file has in fewer bits than the engine."""
    return [f"widened     from {kind}: {', '.join(names)}" for kind, names in tensors.items()]


def _forced(count: int | None) -> list[str]:
    said = f"FORCED      accepts {count} drafts per step whatever the target says: to measure"
    return [] if count is None else [said]


def _short(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
