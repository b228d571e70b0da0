"""Replace a draft's candidates by tokens that are known to be right or wrong, while the draft itself still runs."""

from contextlib import contextmanager
from math import ceil

import torch

from transformers_dflash import DFlashCandidateGenerator


class Rounds(list):
    """Of which there must be some where each is looked at."""

    def __iter__(self):
        assert len(self) > 0, "the draft was never asked: what is tested of every round was tested of none"
        return super().__iter__()


@contextmanager
def oracle(answer: torch.LongTensor, num_right: int | list[int], vocab_size: int):
    """Inside: every block starts with `num_right` tokens of `answer (b, n)` and goes on with wrong ones.

    With a list, sequence i of a batch uses entry i; sequences are told apart by what is committed of them.

    Yields a list that collects, per round, the ids before it, the draft's own logits `(k, V)` and, of a batch, those
    of all rows with their ids.
    """
    drafted = Rounds()
    original_choice = DFlashCandidateGenerator.draft_rows
    original_logits = DFlashCandidateGenerator._logits
    counts = [num_right] * len(answer) if isinstance(num_right, int) else num_right

    def draft_logits(self, hidden):
        logits = original_logits(self, hidden)
        drafted[-1]["logits"], drafted[-1]["all_logits"] = logits[0], logits
        return logits

    def draft_rows(self, rows, max_candidates=None):
        drafted.append({"input_ids": rows[0], "rows": rows, "context_before": len(self.cache)})
        candidates, _ = original_choice(self, rows, max_candidates)
        k = candidates.shape[1]
        if k == 0:
            drafted.pop()
            return candidates, None
        drafted[-1]["context"] = len(self.cache)
        for row, ids in enumerate(rows):
            length = ids.shape[1]
            which = next(i for i, whole in enumerate(answer) if whole[:length].tolist() == ids[0].tolist())
            right = answer[which, length : length + k].clone()
            right[counts[which] :] = (right[counts[which] :] + 1) % vocab_size
            candidates[row, : len(right)] = right
        return candidates, None

    DFlashCandidateGenerator.draft_rows, DFlashCandidateGenerator._logits = draft_rows, draft_logits
    try:
        yield drafted
    finally:
        DFlashCandidateGenerator.draft_rows = original_choice
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
