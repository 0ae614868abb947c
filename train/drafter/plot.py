"""A picture of a training run."""

import json
from pathlib import Path
from typing import Any


def plot_training(file: Path, history: list[dict[str, Any]], step_tokens: int) -> None:
    """Top-1 accuracy of each level and the chain it promises over the tokens trained on -> a PNG. history: entries with
    step, top1 (by level) and chain. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    seen = [entry["step"] * step_tokens / 1e6 for entry in history]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    levels = len(history[0]["top1"])
    for level in range(levels):
        shade = plt.get_cmap("viridis")(0.85 * level / max(levels - 1, 1))
        left.plot(seen, [entry["top1"][level] for entry in history], color=shade, label=f"level {level + 1}")
    left.set(xlabel="million tokens", ylabel="top-1 accuracy, held out", ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    right.plot(seen, [entry["chain"] for entry in history], color="tab:blue")
    right.set(xlabel="million tokens", ylabel="tokens per step of a chain")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def write_history(file: Path, history: list[dict[str, Any]]) -> None:
    """One JSON line per evaluation."""
    file.write_text("".join(json.dumps(entry) + "\n" for entry in history))
