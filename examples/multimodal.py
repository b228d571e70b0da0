"""A question about an image, for a target that sees: SmolLM2 does not, so both models must be named.

    python examples/multimodal.py --target Qwen/Qwen3-VL-4B-Instruct --draft my-draft --image chart.png

The image's tokens are context for the draft like any others. It needs Pillow, and what the target's processor asks
for.
"""

import torch
from models import options_for
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor

parser = options_for(__doc__, max_new_tokens=128)
parser.add_argument("--image", metavar="PATH", required=True, help="file or URL")
parser.add_argument("--question", default="What is in this picture?")
options = parser.parse_args()
if options.target is None or options.draft is None:
    parser.error("name a target that takes images with --target, and its draft with --draft")

device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
processor = AutoProcessor.from_pretrained(options.target)
target = AutoModelForImageTextToText.from_pretrained(options.target, dtype="auto").to(device)
draft = AutoModel.from_pretrained(options.draft, dtype=target.dtype).to(device)

content = [{"type": "image", "url": options.image}, {"type": "text", "text": options.question}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
).to(device, target.dtype)
out = target.generate(
    **inputs, assistant_model=draft, max_new_tokens=options.max_new_tokens, return_dict_in_generate=True
)
length = inputs["input_ids"].shape[1]
print(processor.decode(out.sequences[0, length:], skip_special_tokens=True))
print(f"[{length} tokens of context, image included; {out.speculation.acceptance_length:.2f} tokens a round]")
