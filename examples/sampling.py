"""Sampling, and the ways in which a draft can guess at it: `python examples/sampling.py`.

All of them keep the target's law of answers; they differ in how much of a block is accepted.
"""

import torch
from models import load, options_for

WAYS = {
    "drawn from the draft's law": {},
    "drawn at a temperature of 0.3": {"temperature": 0.3},
    "the likeliest tokens": {"do_sample": False},
    "a tree of 12 tokens": {"tree_budget": 12},
}

parser = options_for(__doc__, max_new_tokens=96)
parser.add_argument("--temperature", type=float, default=0.7)
parser.add_argument("--top-p", type=float, default=0.95)
options = parser.parse_args()
target, tokenizer, draft = load(options)
question = "Tom has 3 boxes of pencils with 24 pencils in each box. How many pencils does he have?"
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(target.device)

for way, changes in WAYS.items():
    for name in ("temperature", "do_sample", "tree_budget"):
        setattr(draft.generation_config, name, changes.get(name))
    torch.manual_seed(0)
    out = target.generate(
        **inputs,
        assistant_model=draft,
        do_sample=True,
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        return_dict_in_generate=True,
    )
    speculation = out.speculation
    answer = tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"guesses: {way}\n{answer}")
    print(f"[{speculation.acceptance_length:.2f} tokens a round, {speculation.rounds} rounds]\n")
