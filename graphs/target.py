"""transformers' own modeling code as a traceable pass over the engine's cache: the target, and draft models alike."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import ATTENTION_NAME, Pass, register_attention
from .convolution import convolution_sizes
from .experts import EXPERTS_NAME, register_experts
from .hybrid_cache import HybridCache, take_state
from .kept import UnsupportedModel, kept_by, with_cache
from .llama4 import keep_to_first_chunk
from .rope import keep_short_frequencies
from .rwkv import shift_sizes


class CausalLM(nn.Module):
    """A causal LM that reads and writes the engine's KV tensors, those of its own layers, and leaves writes to states
    of rows to the pass."""

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int] = ()):
        """`feature_layers`: indices of the hidden states that are returned as features, see `Scorer.feature_layers`.
        Raises UnsupportedModel."""
        super().__init__()
        caches, self.states = kept_by(model)
        self.cached = sorted(caches)  # the layers with keys and values
        self.layers, self.depth = len(caches), int(model.config.get_text_config().num_hidden_layers)
        self.model = model.eval().requires_grad_(False)
        self.normed: Normed | None = None
        register_attention()
        register_experts()
        model.set_experts_implementation(EXPERTS_NAME)
        self.read_features(feature_layers)
        self.config = model.config.get_text_config()
        self.windows = convolution_sizes(model) + shift_sizes(model)
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        # Without attention there are no positions: RWKV's context_length is that of its training.
        most = getattr(self.config, "max_position_embeddings", None) if self.layers else None
        bounds = (most, keep_short_frequencies(model), keep_to_first_chunk(model))
        self.max_positions: int | None = min((bound for bound in bounds if bound is not None), default=None)

    def read_features(self, layers: Sequence[int]) -> None:
        """Return these hidden states as features from now on. Raises UnsupportedModel."""
        if not self.layers and any(layer <= self.depth for layer in layers):
            raise UnsupportedModel(  # the first is then that behind the first layer, not ahead of it
                f"model: transformers numbers the hidden states of {type(self.model).__name__}, which has no "
                "attention, otherwise than those of others; expected a drafter that reads the one behind the final "
                "norm alone"
            )
        try:
            if any(layer <= self.depth for layer in layers):
                check_hidden_states(self.model)
            if self.depth in layers:
                capture_last_layer(self.model)
            if self.depth + 1 in layers and self.normed is None:
                self.normed = capture_normed(self.model)
        finally:  # both run the model as transformers does
            self.model.set_attn_implementation(ATTENTION_NAME)
        self.feature_layers = tuple(layers)

    def forward(
        self,
        tokens: Tensor,
        where: Pass,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] int64, what is added to their embeddings [B, T, H], None for nothing -> logits [B, T, V] and
        features [B, T, features * hidden] (None without feature layers).

        The KV of the tokens is written in place at `where.slots`; `where.commit` writes to states of rows.
        """
        for size in self.windows:  # ahead of the layers, which are all alike then
            where.window(size)
        inner = any(layer <= self.depth for layer in self.feature_layers)
        try:
            out = self.model(**self._arguments(tokens, where, keys, values, added), output_hidden_states=inner)
        finally:
            take_state()  # of a layer that failed
        states = dict(enumerate(out.hidden_states)) if inner else {}
        if self.normed is not None:
            states[self.depth + 1] = self.normed.take()
        features = [states[layer] for layer in self.feature_layers]
        return out.logits, torch.cat(features, -1) if features else None

    def _arguments(
        self, tokens: Tensor, where: Pass, keys: Sequence[Tensor], values: Sequence[Tensor], added: Tensor | None
    ) -> dict[str, Any]:
        positions = where.positions
        if (
            self.max_positions is not None
        ):  # nodes past a row's limit are never accepted, but must not read past a table
            positions = positions.clamp(max=self.max_positions - 1)
        cache = HybridCache(keys, values, where, self.cached)
        given: dict[str, Any] = {"input_ids": tokens}
        if where.wanted is not None or added is not None:  # zeros must enter ahead of the first layer
            embedded = self.model.get_input_embeddings()(tokens)
            given = {"inputs_embeds": where.zeros_unless_wanted(embedded if added is None else embedded + added)}
        named = {"position_ids": positions, "attention_pass": where}
        return given | named | with_cache(self.model, cache)


def body(model: PreTrainedModel) -> Any:
    """A model without its head. Llama 4's text model has it by another name than its class says."""
    return model.model if model.base_model is model else model.base_model


def check_hidden_states(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a model whose layers hand on several hidden states of a token, as Gemma 3n's do."""
    if model.config._attn_implementation == ATTENTION_NAME:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        out = body(model)(input_ids=token, use_cache=False, output_hidden_states=True)
    if any(state.dim() != 3 for state in out.hidden_states):
        raise UnsupportedModel(
            f"model: the layers of {type(model).__name__} hand on several hidden states of a token; expected a drafter "
            "that reads the one behind the final norm alone"
        )


def capture_last_layer(model: PreTrainedModel) -> None:
    """Have transformers return the output of the last layer as the last hidden state, where it puts the normed one.
    Raises UnsupportedModel for a model in which that cannot be had."""
    model.config.get_text_config().tie_last_hidden_states = False
    if model.config._attn_implementation == ATTENTION_NAME:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        out = body(model)(input_ids=token, use_cache=False, output_hidden_states=True)
    if torch.equal(out.hidden_states[-1], out.last_hidden_state):
        raise UnsupportedModel(
            f"model: the output of {type(model).__name__}'s last layer cannot be captured ahead of its final norm; "
            "expected a drafter that reads other hidden states"
        )


class Normed:
    """Holds the hidden state behind a model's final norm after each of its passes, as a hook of its head. No list: the
    exporter would put another one in its place; no function: a copy of the model would share it."""

    state: Tensor | None = None

    def __call__(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.state = arguments[0]

    def __deepcopy__(self, copied: dict[int, object]) -> "Normed":
        """One that holds nothing yet: drafters that use the head leave a state that nobody takes."""
        fresh = copied[id(self)] = type(self)()
        return fresh

    def take(self) -> Tensor:
        """It, once."""
        state, self.state = self.state, None
        assert state is not None
        return state


def capture_normed(model: PreTrainedModel) -> Normed:
    """Have a model's head keep what it is given: transformers does not return it beside the logits. Raises
    UnsupportedModel for a model whose head gets anything else than the hidden state behind the final norm."""
    if model.config._attn_implementation == ATTENTION_NAME:
        model.set_attn_implementation("eager")
    normed = Normed()
    model.get_output_embeddings().register_forward_pre_hook(normed)
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=token, use_cache=False)
        expected = body(model)(input_ids=token, use_cache=False).last_hidden_state
    if normed.state is None or not torch.equal(normed.take(), expected):
        raise UnsupportedModel(
            f"model: the hidden state behind the final norm of {type(model).__name__} cannot be captured: its head "
            "gets another one; expected a drafter that reads other hidden states"
        )
    return normed
