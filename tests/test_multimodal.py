"""Targets that see images: the prompt's images count as context, positions are those of tokens, output stays plain."""

import pytest
import torch
import transformers
from conftest import CACHE, COMMON, VOCAB, WINDOW, make_draft
from oracle import count_forwards, expected_forwards, oracle
from test_decoding import stateless_draft_logits
from transformers import DynamicCache

from transformers_dflash import DFlashDraftConfig

NEW_TOKENS = 24
IMAGE, VIDEO, START, END, MASK_ID = 30, 29, 28, 27, 31
SPECIAL = [IMAGE, VIDEO, START, END]
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
QWEN_VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
QWEN_VISION |= {"initializer_range": 0.2, "out_hidden_size": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 8,
    "initializer_range": 0.2,
}
GEMMA3 = {
    **COMMON,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 5.0,  # which only the class without images applies
}


def qwen(name, text, vision, ids=QWEN_IDS):
    return f"{name}ForConditionalGeneration", {"text_config": {**COMMON, **text}, "vision_config": vision, **ids}


def llava(name, text, **fields):
    fields = {"image_token_index": IMAGE, "image_token_id": IMAGE, "tie_word_embeddings": False} | fields
    return f"{name}ForConditionalGeneration", {"text_config": text, **fields}


QWEN3_VISION = {**QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
QWEN35_VISION = {**QWEN_VISION, "num_position_embeddings": 16}
CLIP = {**TOWER, "model_type": "clip_vision_model"}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model"}
WINDOWED = {**COMMON, "model_type": "mistral", "sliding_window": WINDOW}
MODELS = {
    "qwen2_5_vl": qwen(
        "Qwen2_5_VL", {"rope_parameters": MROPE}, {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": qwen("Qwen3VL", {"rope_parameters": MROPE}, QWEN3_VISION),
    "qwen3_vl_moe": qwen("Qwen3VLMoe", {"rope_parameters": MROPE, **EXPERTS}, QWEN3_VISION),
    "qwen3_5": qwen("Qwen3_5", DELTA, QWEN35_VISION),
    "qwen3_5_moe": qwen("Qwen3_5Moe", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}, QWEN35_VISION),
    "gemma3": llava("Gemma3", GEMMA3, vision_config=SIGLIP, mm_tokens_per_image=4, tie_word_embeddings=True),
    "llava": llava("Llava", {**COMMON, "model_type": "llama"}, vision_config=CLIP, vision_feature_layer=-1),
    "llava_windowed": llava("Llava", WINDOWED, vision_config=CLIP, vision_feature_layer=-1),
    "cohere_text": llava(  # its text config has a factor that the class around it leaves out
        "Llava", {**COMMON, "model_type": "cohere", "logit_scale": 0.25}, vision_config=CLIP, vision_feature_layer=-1
    ),
    "internvl": llava(
        "InternVL",
        {**COMMON, "model_type": "qwen3"},
        vision_config={**TOWER, "patch_size": [2, 2], "image_size": [8, 8]},
        image_seq_length=4,
    ),
    "mistral3": llava(
        "Mistral3",
        {**COMMON, "model_type": "mistral"},
        vision_config={**TOWER, "model_type": "pixtral", "head_dim": 8},
        vision_feature_layer=-1,
        spatial_merge_size=1,
    ),
    "idefics3": llava("Idefics3", {**COMMON, "model_type": "llama"}, vision_config=TOWER, scale_factor=1),
    "aya_vision": llava("AyaVision", {**GEMMA3, "model_type": "cohere2"}, vision_config=SIGLIP, downsample_factor=1),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {
            "text_config": {**COMMON, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "image_size": 16},
            "image_start_token_id": START,
            "image_end_token_id": END,
            **QWEN_IDS,
        },
    ),
    "muse_glimmer": (
        "MuseGlimmerForConditionalGeneration",
        {
            "text_config": {**COMMON, "sliding_window": WINDOW},
            "vision_config": {**TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
            "out_hidden_size": 64,
            "projector_hidden_size": 32,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {**GEMMA3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
            | {"num_kv_shared_layers": 0, "global_head_dim": 8},
            "vision_config": {**TOWER, "pooling_kernel_size": 2, "position_embedding_size": 16}
            | {"head_dim": 8, "num_key_value_heads": 2},
            "boi_token_id": START,
            "eoi_token_id": END,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": 26,
        },
    ),
    "paligemma": llava("PaliGemma", {**COMMON, "model_type": "gemma"}, vision_config=SIGLIP, projection_dim=32),
}


@pytest.fixture(scope="module")
def made() -> dict:
    return {}


def target_of(made, name):
    class_name, fields = MODELS[name]
    if name not in made:
        model_class = getattr(transformers, class_name)
        torch.manual_seed(0)
        config = model_class.config_class(**fields)
        for part in (config, config.get_text_config(decoder=True)):
            part._attn_implementation = "eager"
        made[name] = model_class(config).eval()
        for parameter_name, parameter in made[name].named_parameters():
            if "mm_input_projection" in parameter_name:  # zero in a new model: images would not matter
                torch.nn.init.normal_(parameter, std=0.2)
    return made[name]


def draft_of(target):
    shape = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    return make_draft(target, **shape)


def image_inputs(name, num_images=1, seed=0) -> dict:
    """A prompt with images of four tokens each, as the family's processor would lay it out."""
    generator = torch.Generator().manual_seed(seed)

    def text(length):
        return torch.randint(2, END, (length,), generator=generator).tolist()

    ids = text(4)
    for _ in range(num_images):
        ids += [START] + [IMAGE] * 4 + [END] + text(3)
    ids = torch.tensor([ids])
    types = (ids == IMAGE).long()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name.startswith(("qwen", "glm4v", "muse")):
        inputs["pixel_values"] = torch.randn(16 * num_images, 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * num_images)
        return inputs | ({} if name == "muse_glimmer" else {"mm_token_type_ids": types})
    if name == "gemma4":
        places = [[x, y] for y in range(4) for x in range(4)]
        inputs["pixel_values"] = torch.randn(num_images, 16, 3 * 4 * 4, generator=generator)
        inputs["image_position_ids"] = torch.tensor([places] * num_images)
        return inputs | {"mm_token_type_ids": types}
    inputs["pixel_values"] = torch.randn(num_images, 3, 8, 8, generator=generator)
    if name == "idefics3":
        inputs["pixel_values"] = inputs["pixel_values"][None]
    if name == "mistral3":
        inputs["image_sizes"] = torch.tensor([[8, 8]] * num_images)
    if name == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs | ({"token_type_ids": types} if name == "gemma3" else {})


def greedy(target, inputs, draft=None, **options):
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0} | options
    return target.generate(**inputs, assistant_model=draft, suppress_tokens=SPECIAL, **options)


def whole_inputs(target, inputs, length) -> dict:
    """What a forward over all `length` tokens is given beside their ids: the prompt's images, every token's type."""
    grown = {key: value for key, value in inputs.items() if key.startswith(("pixel", "image"))}
    for key in ("token_type_ids", "mm_token_type_ids"):
        if key in inputs:
            more = length - inputs[key].shape[1]
            answer = int(target.config.model_type == "paligemma")  # there 0 is the prompt, which sees all of itself
            grown[key] = torch.cat([inputs[key], inputs[key].new_full((1, more), answer)], dim=1)
    return grown


@pytest.mark.parametrize("num_right", [0, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_oracle_candidates_give_plain_output(made, name, num_right):
    target, inputs = target_of(made, name), image_inputs(name)
    answer = greedy(target, inputs)
    with oracle(torch.cat([answer, answer], dim=1), num_right, VOCAB), count_forwards(target) as calls:
        assert torch.equal(greedy(target, inputs, draft_of(target)), answer)
    if not name.startswith("qwen3_5"):  # recurrent layers replay what was accepted
        assert len(calls) == expected_forwards(NEW_TOKENS, num_right)


@pytest.mark.parametrize("num_images", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_draft_logits_of_every_round_equal_a_stateless_recompute(made, name, num_images):
    target, inputs = target_of(made, name), image_inputs(name, num_images)
    if not num_images:
        inputs = {key: value for key, value in inputs.items() if not key.startswith(("pixel", "image"))}
    draft, answer = draft_of(target), greedy(target, inputs)
    with torch.no_grad(), oracle(torch.cat([answer, answer], dim=1), 2, VOCAB) as rounds:
        assert torch.equal(greedy(target, inputs, draft), answer)
        for each in rounds:
            ids = each["input_ids"]
            more = whole_inputs(target, inputs, ids.shape[1])
            expected = stateless_draft_logits(target, draft, ids, len(each["logits"]), **more)
            torch.testing.assert_close(each["logits"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_image_matters(made, name):
    """Else the tests above would not see it lost."""
    target = target_of(made, name)
    inputs = image_inputs(name)
    other = inputs | {"pixel_values": -inputs["pixel_values"]}
    with torch.no_grad():
        assert not torch.allclose(target(**inputs).logits[:, -1], target(**other).logits[:, -1], atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_second_turn_on_a_passed_on_cache(made, name):
    target, inputs = target_of(made, name), image_inputs(name)
    draft, outputs = draft_of(target), []
    first = greedy(target, inputs)
    for assistant in (None, draft):
        cache = DynamicCache(config=target.config.get_text_config(decoder=True))
        ids = greedy(target, inputs, assistant, **{CACHE: cache})
        assert torch.equal(ids, first)
        ids = torch.cat([ids, torch.tensor([[5, 6, 7]])], dim=1)
        more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        outputs.append(greedy(target, more, assistant, **{CACHE: cache}))
    assert torch.equal(*outputs)


def test_token_types_of_a_block_are_those_of_single_steps():
    """Every new token has the type of the prompt's last one, though a block is longer than that part of the prompt."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128}
    config = transformers.GPT2Config(**sizes, initializer_range=0.2, bos_token_id=1, eos_token_id=None)
    target = transformers.GPT2LMHeadModel(config).eval()
    draft = make_draft(target, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    ids = torch.randint(2, END, (1, 9))
    inputs = {"input_ids": ids, "token_type_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]])}
    answer = greedy(target, inputs)
    for num_right in (0, 2, 5):
        with oracle(torch.cat([answer, answer], dim=1), num_right, VOCAB), count_forwards(target) as calls:
            assert torch.equal(greedy(target, inputs, draft), answer)
        assert len(calls) == expected_forwards(NEW_TOKENS, num_right)


def test_special_tokens_of_a_draft_where_the_text_config_has_none():
    config = transformers.Qwen3VLConfig(bos_token_id=3, eos_token_id=4)
    made = DFlashDraftConfig.from_target(config, MASK_ID)
    assert (made.bos_token_id, made.eos_token_id) == (3, 4)
    assert made.hidden_size == config.text_config.hidden_size


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "paligemma"])
def test_a_batch_of_images_gives_what_plain_generate_gives(made, name):
    target = target_of(made, name)
    first, second = image_inputs(name, 1, seed=0), image_inputs(name, 1, seed=1)
    inputs = {key: torch.cat([first[key], second[key]]) for key in first}
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    drafted = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=draft_of(target))
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("name", ["qwen3_5"])
def test_a_batch_for_a_recurrent_target_is_refused(made, name):
    target = target_of(made, name)
    inputs = {key: torch.cat([value, value]) for key, value in image_inputs(name, 1).items()}
    with pytest.raises(ValueError, match="LinearAttentionLayer; with a DFlash draft it serves one sequence at a time"):
        target.generate(**inputs, do_sample=False, max_new_tokens=4, assistant_model=draft_of(target))
