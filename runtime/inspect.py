"""Say what an engine is made of, for people."""

from .engine_file import Manifest, TensorSpec


def describe(manifest: Manifest) -> str:
    """A page about an engine: model, tree, limits, programs with their inputs and outputs, files, requirements."""
    spec, about = manifest.spec, manifest.about
    model, config = about["model"], spec.config
    caches = sum(_bytes(tensor) for tensor in spec.caches)
    lines = [
        f"model       {model['name']}: {model.get('model_type', '')}, {model['parameters'] / 1e6:.1f}M parameters, "
        + config["dtype"],
        f"drafter     {config['drafter']}: {config['nodes']} nodes, depth {config['depth']}, top-k {config['top_k']}",
        f"limits      {spec.max_batch} rows of {spec.max_seq_len} tokens, prompts in chunks of {spec.prefill_chunk}",
        f"runs on     {spec.device}; "
        + "; ".join(f"{key} {_short(value)}" for key, value in manifest.requires.items()),
        f"KV cache    {len(spec.caches) // 2} layers, {caches / 2**20:.0f} MiB at most",
        "built with  " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        f"built in    {about['build_s']} s",
        "files",
        *(
            f"  {name:<22}{entry['bytes'] / 2**20:10.1f} MiB  sha256 {entry['sha256'][:12]}"
            for name, entry in manifest.files.items()
        ),
        "state",
        *(f"  {tensor.name:<22}{tensor.dtype:<10}{list(tensor.shape)}" for tensor in spec.state),
        "programs",
        *(
            f"  {name:<10}{len(p.inputs)} inputs -> {', '.join(p.outputs)}"
            for name, p in (("prefill", spec.prefill), ("step", spec.step))
        ),
    ]
    return "\n".join(lines)


def _short(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _bytes(tensor: TensorSpec) -> int:
    size = 4 if tensor.dtype == "float32" else 2
    for length in tensor.shape:
        size *= length
    return size
