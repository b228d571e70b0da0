"""A draft for a fine-tuned target, adapted from the draft of the base model: `python examples/fine_tuned_target.py`.

Fine-tuning changes what a target says, and its old draft guesses worse. Adapters of a few megabytes, trained on the
fine-tuned target's own answers, bring it back. Without --target, SmolLM2 is fine-tuned first: a few steps teach it to
answer sums in one form. The numbers are small, so that it takes minutes on two CPU cores.

    python examples/fine_tuned_target.py --target my-fine-tuned-model --draft drafts-of-its-base-model

It needs the extra train: pip install -e '.[demo,train]'
"""

import torch
from models import load, options_for
from peft import LoraConfig, get_peft_model

from transformers_dflash.training import DFlashTrainer, DFlashTrainingArguments, encode

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SUMS = [(a, b) for a in range(2, 9) for b in range(11, 15)]

parser = options_for(__doc__, max_new_tokens=48)
parser.add_argument("--steps", type=int, default=40, metavar="N", help="of training, default 40")
parser.add_argument("--teach", type=int, metavar="N", help="fine-tune the target first, by so many steps")
parser.add_argument("--output", default="adapted-draft", metavar="DIR")
options = parser.parse_args()
target, tokenizer, draft = load(options, torch.float32)


def chat(a: int, b: int, *answer: dict) -> list[dict]:
    return [{"role": "user", "content": f"What is {a} plus {b}?"}, *answer]


def teach(target, steps: int):
    """Fine-tune the target a little, on answers in one form."""
    adapted = get_peft_model(target, LoraConfig(r=8, lora_alpha=16, target_modules=PROJECTIONS))
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=2e-3)
    for step in range(steps):
        a, b = SUMS[5 * step % len(SUMS)]
        answer = {"role": "assistant", "content": f"The sum of {a} and {b} is {a + b}. Take {a}, then count {b} more."}
        ids = tokenizer.apply_chat_template(chat(a, b, answer), return_tensors="pt", return_dict=True)["input_ids"]
        ids = ids.to(target.device)
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.merge_and_unload()


if steps := (16 if options.target is None else 0) if options.teach is None else options.teach:
    target = teach(target, steps)

# The draft learns from what the fine-tuned target says, and from nothing else.
documents = []
for a, b in SUMS[:: max(1, len(SUMS) // options.steps)]:
    prompt = tokenizer.apply_chat_template(chat(a, b), add_generation_prompt=True)["input_ids"]
    ids = torch.tensor([prompt], device=target.device)
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        do_sample=False,
        max_new_tokens=options.max_new_tokens,
    )
    document = encode({"prompt": prompt, "response": out[0, len(prompt) :].tolist()}, tokenizer)
    if draft.config.mask_token_id not in document.ids:  # to the draft it means "not yet known"
        documents.append(document)

adapters = get_peft_model(draft, LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS))
adapters.print_trainable_parameters()
arguments = DFlashTrainingArguments(
    output_dir=options.output,
    max_steps=options.steps,
    learning_rate=1e-3,
    per_device_train_batch_size=2,
    anchors_per_document=32,
    eval_prompts=4,
    eval_new_tokens=options.max_new_tokens,
    save_strategy="no",
    report_to=[],
)
trainer = DFlashTrainer(adapters, target, arguments, documents[:-4] or documents, documents[-4:])
before = trainer.evaluate()["eval_acceptance_length"]
trainer.train()
after = trainer.evaluate()["eval_acceptance_length"]
print(f"acceptance length on held-out sums: {before:.2f} before, {after:.2f} after")

trainer.record()  # for the card: how it was trained
# Merged, it is a draft like any other; adapters.save_pretrained would keep the small files instead.
adapters.merge_and_unload().save_pretrained(options.output)
print(f"the adapted draft is in {options.output}")
