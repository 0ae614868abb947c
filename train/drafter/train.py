"""`specstep train-drafter`: a drafter for a target, from text that the target wrote."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compile.drafters.ngram_file import tokenizer_hash
from ...compile.source import Source, load_source
from ...errors import InputError
from ...progress import OnProgress, silent
from ..data.hidden_states import fast_bfloat16, feature_layers, quick_dtype
from ..data.reader import MANIFEST, Data
from .batches import Batches, TokensOnly
from .checkpoint import Checkpoint
from .initialize import draft_vocabulary, fit_scale, mask_token
from .kind import Wanted
from .kinds import KINDS
from .optimizer import Optimizer
from .options import TrainOptions
from .plot import plot_training, write_history
from .unroll import unroll

REPORT_EVERY = 20.0  # seconds
LEVEL_WEIGHT = 0.8  # of a level's loss, relative to the level before
FIT_BATCHES = 64  # for the linear start


def train_drafter(
    model: str, data: Sequence[str], output: str | Path, *, progress: OnProgress = silent, **given: Any
) -> Path:
    """Train a drafter and write it -> its folder, for `build --drafter FOLDER`. A run that was interrupted goes on from
    its last checkpoint. given: fields of `TrainOptions`. Raises InputError and BuildError."""
    options, output = TrainOptions(**given), Path(output)
    try:  # hours before it is needed
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output: expected a folder that can be written, got {output}: {error.strerror}") from None
    torch.manual_seed(options.seed)
    progress(f"loading {model}")
    target = load_source(model, options.dtype or quick_dtype(options.device), options.device)
    check_logits(target)
    sources = [open_data(file, target) for file in data]
    training = Training(target, sources, options)
    progress(
        f"{training.tokens:,} tokens in {training.sequences:,} sequences, {len(training.held)} batches held out; "
        f"draft vocabulary of {len(training.vocabulary):,}: {training.coverage:.1%} of what the target wrote"
    )
    run = dataclasses.asdict(options) | {
        "model": Path(model).name,
        "tokens": training.tokens,
        "feature_layers": list(training.feature_layers),
    }
    checkpoint = Checkpoint(output, run)
    training.run(checkpoint, progress)
    training.kind.save(output, training.drafter, target)
    try:
        write_history(output / "history.jsonl", training.history)
        plot_training(output / "history.png", training.history, options.batch * options.width)
    except ImportError:
        progress("no picture of the training: that needs `pip install specstep[plot]`")
    except OSError as error:
        progress(f"no history of the training: {error}")
    checkpoint.remove()
    progress(f"drafter written to {output}")
    return output


def check_logits(target: Source) -> None:
    """Refuse a target whose logits are more than its output rows times its last hidden state, as a drafter's are.
    Raises InputError."""
    tokens = torch.arange(8, device=target.model.device)[None]
    with torch.no_grad():
        logits = target.model(tokens, use_cache=False).logits.float()
        last = target.model.base_model(tokens, use_cache=False)[0]
        plain = torch.nn.functional.linear(last, target.model.get_output_embeddings().weight).float()
    if not torch.allclose(logits, plain, atol=0.05 * float(logits.std()) + 1e-6):
        raise InputError(
            f"model: {target.name}: expected logits straight from its output layer, got scaled, capped or biased ones"
        )


def open_data(file: str, target: Source) -> Data | TokensOnly:
    """A data directory or a JSON-lines file, checked against the target. Raises InputError."""
    if not (Path(file) / MANIFEST).is_file():
        return TokensOnly(file, target)
    data = Data(file)
    text = target.model.config.get_text_config()
    vocabulary = target.model.get_output_embeddings().weight.shape[0]
    tokenizer = tokenizer_hash(target.tokenizer) if target.tokenizer else None
    data.manifest.check_same(file, vocabulary, tokenizer, text.hidden_size)
    return data


def layers_of(
    sources: Sequence[Data | TokensOnly], target: Source, wanted: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Whose inputs are the features: what is wanted or the data kept, else the usual three. Raises InputError where
    sources differ."""
    kept = {s.manifest.hidden_layers for s in sources if isinstance(s, Data) and s.manifest.hidden_size is not None}
    found = kept | ({wanted} if wanted else set())
    if len(found) > 1:
        raise InputError(f"data: expected hidden states of the same layers in all of it, got {sorted(found)}")
    return found.pop() if found else feature_layers(target.model.config.get_text_config().num_hidden_layers)


def count_written(sources: Sequence[Data | TokensOnly], vocabulary: int) -> Tensor:
    """How often the target wrote each token [V_target] int64. Reads tokens only, no hidden states."""
    counts, one = torch.zeros(vocabulary, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for source in sources:
        for tokens, prompt in source.texts():
            counts.index_add_(0, tokens[prompt:], one.expand(len(tokens) - prompt))
    return counts


class Training:
    """One run: the data split, the drafter, and how far it is."""

    def __init__(self, target: Source, sources: Sequence[Data | TokensOnly], options: TrainOptions):
        """Raises InputError and BuildError."""
        self.target, self.sources, self.options, self.kind = target, sources, options, KINDS[options.kind]
        rows = target.model.get_output_embeddings().weight.detach()
        counts, embeddings = count_written(sources, len(rows)), target.model.get_input_embeddings().weight
        mask = mask_token(counts[: len(embeddings)], embeddings[: len(counts)])
        start = self.kind.going_on(options.start, target, mask, options) if options.start else None
        self.feature_layers = layers_of(sources, target, start.config.feature_layers if start else None)
        self.vocabulary = start.target_ids().cpu() if start else draft_vocabulary(counts, options.draft_vocab_size)
        self.coverage = float(counts[self.vocabulary].sum() / counts.sum().clamp(min=1))
        self._drafted = torch.zeros(len(counts), dtype=torch.bool).index_fill(0, self.vocabulary, True)
        order = torch.randperm(sum(len(source) for source in sources), generator=self._generator(0))
        held = max(1, round(len(order) * options.held_out))
        self._learned, kept = order[held:], order[:held]
        self.held = self._batches(kept)
        if not len(self.held) or not len(self._batches(self._learned)):
            raise InputError(
                f"data: expected over {options.batch * options.width} tokens to learn from and as many held out, got "
                f"{self.tokens} in all; collect more, or lower --batch and --width"
            )
        self._fresh = start is None
        self.drafter = start or self.kind.new(Wanted(target, self.feature_layers, self.vocabulary, mask, options))
        self._target_rows = rows[self.vocabulary.to(rows.device)]
        self.steps = options.epochs * len(self._batches(self._learned))
        self.history: list[dict[str, Any]] = []
        self._unroll = torch.compile(unroll, dynamic=False)

    @property
    def sequences(self) -> int:
        return sum(len(source) for source in self.sources)

    @property
    def tokens(self) -> int:
        return int(sum(source.lengths.sum() for source in self.sources))

    def run(self, checkpoint: Checkpoint, progress: OnProgress) -> None:
        """Train to the end, from the checkpoint if there is one. Raises InputError for a loss that is no number."""
        optimizer = Optimizer(self.drafter, self.options.learning_rate, self.steps)
        step = checkpoint.restore(self.drafter, optimizer, self.history)
        if step:
            progress(f"going on after {step} of {self.steps} steps")
        else:
            self._start(progress)
        every, started, spoken, first = max(1, self.steps // self.options.evaluations), time.monotonic(), 0.0, step
        while step < self.steps:
            epoch, index = divmod(step, self.steps // self.options.epochs)
            if epoch * (self.steps // self.options.epochs) == step or step == first:
                batches = self._batches(
                    self._learned[torch.randperm(len(self._learned), generator=self._generator(1 + epoch))]
                )
            loss = self._update(batches, index, optimizer, step)
            step += 1
            if time.monotonic() - spoken > REPORT_EVERY:
                spoken = time.monotonic()
                speed = (step - first) / (spoken - started)
                tokens = speed * self.options.batch * self.options.width
                progress(
                    f"step {step} of {self.steps}, loss {loss:.3f}, {tokens:,.0f} tokens/s, "
                    f"{(self.steps - step) / speed / 60:.0f} minutes to go"
                )
            if step % every == 0 or step == self.steps:
                self._evaluate(step, progress)
                checkpoint.save(self.drafter, optimizer, self.history, step)

    def _start(self, progress: OnProgress) -> None:
        batches = self._batches(self._learned)
        progress("fitting the start")
        some = (batches[index] for index in range(min(FIT_BATCHES, len(batches))))
        self.kind.begin(self.drafter, some, self._fresh)
        if self._fresh:
            fit_scale(self.drafter.norm, lambda: float(self._sums(batches, 0)[0, 0]))
        self._evaluate(0, progress)

    def _update(self, batches: Batches, index: int, optimizer: Optimizer, step: int) -> float:
        sums = self._sums(batches, index)
        weights = LEVEL_WEIGHT ** torch.arange(len(sums), device=sums.device)
        loss = (sums[:, 0] / sums[:, 3].clamp(min=1) * weights).sum() / weights.sum()
        value = loss.item()
        if not math.isfinite(value):
            raise InputError(
                f"loss: expected a number, got {value} at step {step}; the last checkpoint is kept: run "
                "again with a lower --learning-rate and another output"
            )
        loss.backward()
        optimizer.step(step)
        return value

    @torch.no_grad()
    def _evaluate(self, step: int, progress: OnProgress) -> None:
        """Measure on what was held out, and say it: top-1 accuracy a per level promises 1 + a0 + a0*a1 + ... tokens of
        a chain."""
        sums = torch.stack([self._sums(self.held, index) for index in range(len(self.held))]).sum(0)
        loss, top1, top4 = (sums[:, :3] / sums[:, 3:].clamp(min=1)).T.tolist()
        chain = 1 + float(torch.tensor(top1).cumprod(0).sum())
        self.history.append({"step": step, "loss": loss, "top1": top1, "top4": top4, "chain": chain})
        shown = "; ".join(
            f"{name} {' '.join(f'{x:.3f}' for x in xs)}" for name, xs in (("top 1", top1), ("top 4", top4))
        )
        progress(f"held out after {step} steps, by level: {shown}; a chain would yield {chain:.2f} tokens per step")

    def _sums(self, batches: Batches, index: int) -> Tensor:
        device, batch, target_rows = self.target.model.device.type, batches[index], self._target_rows
        embed, fast = self.target.model.get_input_embeddings(), fast_bfloat16(device)
        if not fast:  # the drafter's own type: hidden states are kept in bfloat16
            batch = batch._replace(features=batch.features.float(), last=batch.last.float())
            target_rows = target_rows.float()
        with torch.autocast(device, torch.bfloat16, enabled=fast):
            return self._unroll(self.kind.levels, self.drafter, embed, batch, target_rows, self.options.levels)

    def _batches(self, chosen: Tensor) -> Batches:
        sizes = (self.options.batch, self.options.width)
        return Batches(self.sources, chosen, self.target, self.feature_layers, self._drafted, *sizes)

    def _generator(self, use: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.options.seed * 1_000_003 + use)
