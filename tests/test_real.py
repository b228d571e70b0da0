"""The real SmolLM2-135M-Instruct and its draft: lossless, and a draft that works."""

import copy

import pytest
import torch
from oracle import count_forwards
from test_decoding import stateless_draft_logits

from transformers_dflash import DFlashCandidateGenerator

pytestmark = pytest.mark.real

QUESTIONS = [
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell in all?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "Write a Python function that reverses a string.",
]
WORTH_IT = [1.3, 1.3, 1.0]  # acceptance length at least: the draft has learnt maths questions, and nothing else


def inputs(tokenizer, question):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


@pytest.mark.parametrize(
    ("question", "at_least"), zip(QUESTIONS, WORTH_IT, strict=True), ids=["clips", "robe", "python"]
)
def test_float32_output_is_plain_output_in_fewer_forwards(smollm2, smollm2_draft, question, at_least):
    target, tokenizer = smollm2
    prompt = inputs(tokenizer, question)
    options = {"do_sample": False, "max_new_tokens": 64}
    answer = target.generate(**prompt, **options)
    with count_forwards(target) as forwards:
        out = target.generate(**prompt, **options, assistant_model=smollm2_draft, return_dict_in_generate=True)
    assert torch.equal(out.sequences, answer)
    assert len(forwards) == 1 + out.speculation.rounds
    assert out.speculation.acceptance_length > at_least


def test_draft_logits_equal_a_stateless_recompute(smollm2, smollm2_draft, monkeypatch):
    target, tokenizer = smollm2
    rounds = []
    original = DFlashCandidateGenerator._logits

    def draft_logits(self, hidden):
        rounds.append(original(self, hidden)[0])
        return rounds[-1][None]

    monkeypatch.setattr(DFlashCandidateGenerator, "_logits", draft_logits)
    prompt = inputs(tokenizer, QUESTIONS[0])
    out = target.generate(
        **prompt, do_sample=False, max_new_tokens=24, assistant_model=smollm2_draft, return_dict_in_generate=True
    )
    assert len(set(out.speculation.acceptance_lengths)) > 1  # partial acceptance
    length = prompt["input_ids"].shape[1] + 1
    with torch.no_grad():
        for logits, committed in zip(rounds, out.speculation.acceptance_lengths, strict=False):
            ids = out.sequences[:, :length]
            expected = stateless_draft_logits(target, smollm2_draft, ids, len(logits))
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
            length += committed


def test_bfloat16_output_is_plain_output_but_for_near_ties(smollm2, smollm2_draft):
    """Blocks are rounded otherwise than single rows: every token must be as good as the best one at its place."""
    target, tokenizer = smollm2
    target, draft = (copy.deepcopy(model).to(torch.bfloat16) for model in (target, smollm2_draft))
    prompt = inputs(tokenizer, QUESTIONS[0])
    start = prompt["input_ids"].shape[1]
    out = target.generate(**prompt, do_sample=False, max_new_tokens=64, assistant_model=draft)
    assert out.shape[1] == start + 64
    with torch.no_grad():
        logits = target(out[:, :-1]).logits[0, start - 1 :].float()  # (64, V)
    best, chosen = logits.max(-1).values, logits.gather(-1, out[0, start:, None])[:, 0]
    assert ((best - chosen) <= best.abs() * 2**-6).all()
