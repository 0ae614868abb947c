"""What corrects the logits of a block drafter by the token ahead: a drafter that says all depths in one pass knows no
path, a path's last token is the next best thing.

Source: DSpark (arXiv 2607.05147): a table of bigrams of low rank, W2 W1[token], as it is or weighed by the slot.
Letters: B batch, F frontier nodes, H hidden size, R rank, V tokens of the drafter.
"""

import torch
from torch import Tensor, nn

from .frontier import embeddable


class Markov(nn.Module):
    """Adds the bigram's logits."""

    memory = 0  # numbers that a path carries from token to token

    def __init__(self, tokens: int, draft_tokens: int, rank: int, hidden_size: int):
        """tokens: those of the target, of which one is ahead; draft_tokens: those of the drafter, which follow."""
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, draft_tokens, bias=False)

    def forward(self, tokens: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, F], the hidden state [B, 1, H] of the slot that says what follows them, their parents' memory [B,
        F, memory] -> what is added to the slot's logits [B, F, V], and their own memory."""
        ahead = self.markov_w1(embeddable(tokens, self.markov_w1.num_embeddings))
        weighed, memory = self.weigh(ahead, hidden.expand(-1, tokens.shape[1], -1), memory)
        return self.markov_w2(weighed), memory

    def weigh(self, ahead: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """ahead [B, F, R], hidden [B, F, H], memory -> what goes into W2 [B, F, R], memory."""
        return ahead, memory


class GatedMarkov(Markov):
    """A gate of the slot and the token on each of the bigram's numbers."""

    def __init__(self, tokens: int, draft_tokens: int, rank: int, hidden_size: int):
        super().__init__(tokens, draft_tokens, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def weigh(self, ahead: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, ahead], -1))) * ahead, memory


class RecurrentMarkov(Markov):
    """A recurrent state over the path's tokens and their slots."""

    def __init__(self, tokens: int, draft_tokens: int, rank: int, hidden_size: int):
        super().__init__(tokens, draft_tokens, rank, hidden_size)
        self.memory = rank
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def weigh(self, ahead: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        gate, new, out = self.joint_proj(torch.cat([memory, ahead, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * memory + (1.0 - gate) * torch.tanh(new)


MARKOVS = {"vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov}  # as configs call them
