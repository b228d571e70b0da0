"""The hooks: what they leave alone, that they can be undone, what they refuse, and Transformers' own path."""

import copy

import pytest
import torch
from conftest import CACHE, COMMON, MASK, VOCAB, make_draft, make_target, prompt
from transformers import (
    AutoConfig,
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.generation import GenerationMixin

import transformers_dflash
from transformers_dflash import DFlashDraftConfig, DFlashDraftModel


def greedy(target, ids, draft=None, **options):
    return target.generate(ids, **({"do_sample": False, "max_new_tokens": 24, "assistant_model": draft} | options))


def hooked():
    return (
        GenerationMixin.__dict__["_validate_generation_mode"],
        GenerationMixin.__dict__["_assisted_decoding"],
        AutoConfig.__dict__["from_pretrained"],
    )


def test_install_is_idempotent_and_can_be_undone(target, draft):
    installed = hooked()
    transformers_dflash.install()
    assert hooked() == installed
    transformers_dflash.uninstall()
    try:
        assert not set(hooked()) & set(installed)
        assert all(part.__qualname__.startswith("GenerationMixin.") for part in hooked()[:2])
        with pytest.raises(Exception, match=r".+"):
            greedy(target, prompt(7), draft)
        originals = hooked()
        transformers_dflash.uninstall()
        assert hooked() == originals
    finally:
        transformers_dflash.install()
    assert torch.equal(greedy(target, prompt(7), draft), greedy(target, prompt(7)))


def test_other_assistants_go_the_way_they_went(target):
    assistant = make_target("llama", seed=7)
    assistant.generation_config.num_assistant_tokens = 3
    assert torch.equal(greedy(target, prompt(7), assistant), greedy(target, prompt(7)))
    assert torch.equal(greedy(target, prompt(7), prompt_lookup_num_tokens=2), greedy(target, prompt(7)))


def test_other_decoding_modes_go_the_way_they_went(target):
    beams = greedy(target, prompt(7), num_beams=3, num_return_sequences=2)
    assert beams.shape == (2, 31)
    transformers_dflash.uninstall()
    try:
        assert torch.equal(greedy(target, prompt(7), num_beams=3, num_return_sequences=2), beams)
    finally:
        transformers_dflash.install()


@pytest.mark.parametrize("injection", ["fused", "layer_aligned"])
def test_transformers_own_dflash_path_drives_our_draft(targets, family, injection):
    target = targets[family]
    draft = make_draft(target, context_injection=injection, layer_types=["full_attention"] * 2)
    out = greedy(target, prompt(7), draft, speculation_type="dflash", return_dict_in_generate=True)
    assert not hasattr(out, "speculation")  # which our loop adds
    assert torch.equal(out.sequences, greedy(target, prompt(7)))


def test_transformers_own_path_drafts_what_ours_drafts(target):
    """The same hidden states through both loops. (Of a tapped last layer Transformers takes the normed state.)"""
    draft = make_draft(target, layer_types=["full_attention"] * 2, target_layer_ids=[0, 2])
    own, ours = [], []
    for calls, options in ((own, {"speculation_type": "dflash"}), (ours, {})):
        hook = draft.register_forward_hook(
            lambda _m, _a, out, calls=calls: calls.append(out.last_hidden_state.clone())
        )
        greedy(target, prompt(7), draft, **options)
        hook.remove()
    full_blocks = [states for states in ours if states.shape[1] == draft.config.block_size]
    assert len(full_blocks) > 5
    for one, other in zip(own, full_blocks, strict=False):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


REFUSALS = {
    "beam search": ({"num_beams": 3}, r"greedy search and sampling.*num_beams=3"),
    "no cache": ({"use_cache": False}, r"needs the target's cache"),
    "synced gpus": ({"synced_gpus": True}, r"synced_gpus=True"),
    "ensemble weight": ({"assistant_ensemble_weight": 0.5, "do_sample": True}, r"assistant_ensemble_weight"),
}


@pytest.mark.parametrize("request_", REFUSALS)
def test_what_cannot_be_served_is_refused_before_any_work(target, draft, request_):
    options, message = REFUSALS[request_]
    calls = []
    hook = target.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=message):
        greedy(target, prompt(7), draft, **options)
    hook.remove()
    assert not calls


def test_encoder_decoder_targets_are_refused(draft):
    target = BartForConditionalGeneration(
        BartConfig(vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                   decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    )  # fmt: skip
    with pytest.raises(ValueError, match="encoder-decoder"):
        greedy(target, prompt(7), draft)


def test_caches_that_cannot_roll_back_are_refused_by_name(target, draft):
    class Unknown(DynamicCache):
        is_croppable = False

    with pytest.raises(ValueError, match="Unknown says that it cannot be cropped"):
        greedy(target, prompt(7), draft, **{CACHE: Unknown(config=target.config)})


def test_a_target_whose_cache_is_no_transformers_cache_is_refused(target, draft):
    class Foreign:
        def get_seq_length(self):
            return 0

    with pytest.raises(ValueError, match="Foreign"):
        greedy(target, prompt(7), draft, **{CACHE: Foreign()})


def llama(**overrides):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**COMMON | overrides)).eval()


def test_drafts_of_another_target_are_refused(target):
    ids = prompt(7)
    with pytest.raises(ValueError, match=r"taps layer 5.*has 4 decoder layers"):
        greedy(target, ids, make_draft(llama(num_hidden_layers=6), target_layer_ids=[1, 5]))
    with pytest.raises(ValueError, match=r"hidden_size is 64.*hidden_size is 32"):
        greedy(target, ids, make_draft(llama(hidden_size=64, head_dim=16)))
    with pytest.raises(ValueError, match=r"mask_token_id 31.*20 rows"):
        greedy(llama(vocab_size=20), ids.clamp(max=19), make_draft(target))
    with pytest.raises(ValueError, match=r"made for org/other"):
        greedy(target, ids, make_draft(llama(hidden_size=64, head_dim=16), target_name_or_path="org/other"))


def test_a_mask_token_outside_the_target_is_no_silent_index_error(target):
    draft = make_draft(target, vocab_size=64)
    draft.config.mask_token_id = 40
    with pytest.raises(ValueError, match=r"mask_token_id 40 .* 32 rows"):
        greedy(target, prompt(7), draft)


def test_an_empty_prompt_is_as_plain_generate_has_it(target, draft):
    empty = torch.zeros(1, 0, dtype=torch.long)
    outcomes = []
    for assistant in (None, draft):
        try:
            outcomes.append(greedy(target, empty, assistant).tolist())
        except (ValueError, IndexError, RuntimeError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


def test_no_budget_is_refused_as_plain_generate_does(target, draft):
    for assistant in (None, draft):
        with pytest.raises(ValueError, match="max_new_tokens"):
            greedy(target, prompt(7), assistant, max_new_tokens=0)


def tokenizer(words) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    vocab = {word: n for n, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=words[0])))


def test_tokenizers_that_differ_are_refused_and_equal_ones_pass(target, draft):
    mine, same, other = tokenizer(["a", "b"]), tokenizer(["a", "b"]), tokenizer(["a", "c"])
    answer = greedy(target, prompt(7))
    drafted = greedy(target, prompt(7), draft, tokenizer=mine, assistant_tokenizer=same)
    assert torch.equal(drafted, answer)
    with pytest.raises(ValueError, match="another vocabulary"):
        greedy(target, prompt(7), draft, tokenizer=mine, assistant_tokenizer=other)


def test_prompt_tuned_targets_are_refused_and_lora_targets_work(draft):
    peft = pytest.importorskip("peft")
    lora = peft.get_peft_model(
        make_target("llama"),
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False),
    )
    ids = prompt(7)
    answer = lora.generate(input_ids=ids, do_sample=False, max_new_tokens=24)
    drafted = lora.generate(input_ids=ids, do_sample=False, max_new_tokens=24, assistant_model=draft)
    assert torch.equal(drafted, answer)
    prompted = peft.get_peft_model(
        make_target("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match="virtual tokens"):
        prompted.generate(input_ids=ids, do_sample=False, max_new_tokens=24, assistant_model=draft)


def test_auto_classes_know_the_draft(target, tmp_path):
    make_draft(target).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DFlashDraftConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is DFlashDraftModel


def test_the_draft_is_no_generating_model(draft):
    assert not draft.can_generate()
    assert not isinstance(draft, GenerationMixin)


def test_a_target_that_was_copied_generates_too(target, draft):
    assert torch.equal(greedy(copy.deepcopy(target), prompt(7), draft), greedy(target, prompt(7)))


def test_ids_of_the_mask_may_stand_in_the_prompt(target, draft):
    ids = torch.tensor([[3, MASK, 4, MASK]])
    assert torch.equal(greedy(target, ids, draft), greedy(target, ids))
