"""Several prompts of unequal length in one call, with a draft and without: `python examples/batch.py`.

Every row accepts its own number of tokens in a round. A batch pays on a GPU; on a few CPU cores plain generate wins,
since there is no spare computation that a block could use.
"""

import time

from models import load, options_for

QUESTIONS = [
    "What is 7 times 8?",
    "A box holds 12 eggs. A farmer fills 10 boxes and has 5 eggs left over. How many eggs did the farmer collect?",
    "Tom has 3 boxes of pencils with 24 pencils in each box. How many pencils does he have?",
    "A train goes 60 miles an hour. How far does it go in 3 hours?",
]

options = options_for(__doc__, max_new_tokens=96).parse_args()
target, tokenizer, draft = load(options)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
batch = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
).to(target.device)

for assistant in (None, draft):  # the first call of a process is slow
    target.generate(**batch, assistant_model=assistant, do_sample=False, max_new_tokens=8)
for assistant in (None, draft):
    start = time.perf_counter()
    out = target.generate(
        **batch,
        assistant_model=assistant,
        do_sample=False,
        max_new_tokens=options.max_new_tokens,
        return_dict_in_generate=True,
    )
    seconds = time.perf_counter() - start
    answers = out.sequences[:, batch["input_ids"].shape[1] :]
    tokens = int((answers != tokenizer.pad_token_id).sum())
    print(f"{'plain' if assistant is None else 'dflash'}: {tokens} tokens, {tokens / seconds:.1f} tokens/s")

rounds = out.speculation.acceptance_lengths_by_sequence
for question, answer, lengths in zip(QUESTIONS, answers, rounds, strict=True):
    print(f"\n> {question}\n{tokenizer.decode(answer, skip_special_tokens=True)}")
    print(f"[{len(lengths)} rounds, tokens in each: {' '.join(map(str, lengths))}]")
