"""A chat that streams: `python examples/quickstart.py`. An empty line ends it."""

from contextlib import suppress

from models import load, options_for
from transformers import TextStreamer

options = options_for(__doc__, max_new_tokens=256).parse_args()
target, tokenizer, draft = load(options)

streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
chat = []
with suppress(EOFError, KeyboardInterrupt):
    while question := input("> ").strip():
        chat.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = target.generate(
            **inputs.to(target.device),
            assistant_model=draft,
            max_new_tokens=options.max_new_tokens,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        answer = output.sequences[0, inputs["input_ids"].shape[1] :]
        chat.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        print(f"[{len(answer)} tokens, {output.speculation.acceptance_length:.2f} a round]")
