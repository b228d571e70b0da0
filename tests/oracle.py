"""Replace a draft's candidates by tokens that are known to be right or wrong, while the draft itself still runs."""

from contextlib import contextmanager
from math import ceil

import torch

from transformers_dflash import DFlashCandidateGenerator


@contextmanager
def oracle(answer: torch.LongTensor, num_right: int, vocab_size: int):
    """Inside: every block starts with `num_right` tokens of `answer (1, n)` and goes on with wrong ones.

    Yields a list that collects, per round, the ids before it and the draft's own logits `(k, V)`.
    """
    drafted = []
    original_choice = DFlashCandidateGenerator.get_candidates
    original_logits = DFlashCandidateGenerator._logits

    def draft_logits(self, hidden):
        logits = original_logits(self, hidden)
        drafted[-1]["logits"] = logits[0]
        return logits

    def get_candidates(self, input_ids, **kwargs):
        drafted.append({"input_ids": input_ids, "context_before": len(self.cache)})
        ids, _ = original_choice(self, input_ids, **kwargs)
        length = input_ids.shape[1]
        k = ids.shape[1] - length
        if k == 0:
            drafted.pop()
            return ids, None
        drafted[-1]["context"] = len(self.cache)
        candidates = answer[:, length : length + k].clone()
        candidates[:, num_right:] = (candidates[:, num_right:] + 1) % vocab_size
        return torch.cat([input_ids, candidates], dim=1), None

    DFlashCandidateGenerator.get_candidates, DFlashCandidateGenerator._logits = get_candidates, draft_logits
    try:
        yield drafted
    finally:
        DFlashCandidateGenerator.get_candidates = original_choice
        DFlashCandidateGenerator._logits = original_logits


@contextmanager
def count_forwards(model):
    """Inside: a list grows by one at every forward of the model."""
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        hook.remove()


def expected_forwards(num_new_tokens: int, num_right: int) -> int:
    """Target forwards that an oracle of `num_right` right candidates a round needs: the prefill gives one token."""
    return 1 + ceil((num_new_tokens - 1) / (num_right + 1))
