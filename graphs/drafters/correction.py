"""What corrects the logits of a block drafter by the tokens ahead: a drafter that says all depths in one pass knows no
path, and each node of a tree has one.

Sources: DSpark (arXiv 2607.05147), a table of bigrams of low rank, W2 W1[token], as it is or weighed by the slot;
Domino, a recurrent network over the path; DFlash2 (z-lab/dflash), which chooses among a slot's likeliest tokens by such
a table whose numbers the slot weighs.
Letters: B batch, F frontier nodes, H hidden size, R rank, G hidden size of the network, V tokens of the drafter.
"""

import torch
from torch import Tensor, nn

from .frontier import embeddable


class Correction(nn.Module):
    """What is trained. memory: numbers that a path carries from token to token; skipped: the first depths that are not
    corrected; among: how many of a slot's likeliest tokens may come, 0 for all."""

    memory = 0
    skipped = 0
    among = 0

    def forward(self, tokens: Tensor, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, F], their embeddings [B, F, H], the hidden state [B, F, H] of the slot that says what follows
        them, their parents' memory [B, F, memory] -> what is added to the slot's logits [B, F, V], and their own
        memory."""
        raise NotImplementedError


class Markov(Correction):
    """Adds the bigram's logits."""

    def __init__(self, tokens: int, draft_tokens: int, rank: int, hidden_size: int):
        """tokens: those of the target, of which one is ahead; draft_tokens: those of the drafter, which follow."""
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, draft_tokens, bias=False)

    def forward(self, tokens: Tensor, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        ahead = self.markov_w1(embeddable(tokens, self.markov_w1.num_embeddings))
        weighed, memory = self.weigh(ahead, hidden, memory)
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


class Domino(Correction):
    """A gated recurrent unit over the embeddings of the path, and two layers over its state and the slot."""

    def __init__(self, draft_tokens: int, inner: int, memory: int, hidden_size: int, skipped: int):
        """inner: the width between the two layers."""
        super().__init__()
        self.memory, self.skipped = memory, skipped
        self.token = nn.Linear(hidden_size, 3 * memory, bias=False)
        self.state = nn.Linear(memory, 3 * memory, bias=False)
        self.down = nn.Linear(hidden_size + memory, inner, bias=False)
        self.up = nn.Linear(inner, draft_tokens, bias=False)

    def forward(self, tokens: Tensor, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        reset, keep, new = self.token(embedded).chunk(3, -1)
        old_reset, old_keep, old = self.state(memory).chunk(3, -1)
        keep = torch.sigmoid(keep + old_keep)
        new = torch.tanh(new + torch.sigmoid(reset + old_reset) * old)
        memory = (1.0 - keep) * new + keep * memory
        both = torch.cat([hidden, memory], -1)
        return self.up(nn.functional.silu(self.down(both))), memory


class Selector(Correction):
    """Chooses among a slot's likeliest tokens: adds W2 (W1[token] * W h) to their logits."""

    def __init__(self, tokens: int, draft_tokens: int, rank: int, hidden_size: int, among: int):
        """tokens, draft_tokens: as for `Markov`."""
        super().__init__()
        self.among = among
        self.predecessor_codebook = nn.Embedding(tokens, rank)
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.successor_codebook = nn.Linear(rank, draft_tokens, bias=False)

    def forward(self, tokens: Tensor, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        ahead = self.predecessor_codebook(embeddable(tokens, self.predecessor_codebook.num_embeddings))
        return self.successor_codebook(ahead * self.hidden_projection(hidden)), memory
