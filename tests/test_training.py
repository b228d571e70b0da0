"""What a draft is trained on and for: blocks, what their slots see, objectives, features, and the trainer."""

import argparse
import copy
import json

import pytest
import torch
from conftest import MASK, VOCAB, make_draft, make_target, prompt
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModel, EarlyStoppingCallback
from transformers.trainer_utils import HubStrategy

from transformers_dflash import cli
from transformers_dflash.target import Target, draft_logits
from transformers_dflash.training import (
    BlockDataset,
    DFlashTrainer,
    DFlashTrainingArguments,
    Document,
    FeatureStore,
    Objective,
    TargetFeatures,
    chat_ids,
    encode,
    read_rows,
)
from transformers_dflash.training.blocks import (
    ATTENTION,
    IGNORED,
    Blocks,
    block_labels,
    pad_anchors,
    possible_anchors,
    sample_anchors,
)
from transformers_dflash.training.command import unused_token, with_adapters
from transformers_dflash.training.objective import decay_weights, default_gamma, dpace_weights
from transformers_dflash.training.trainer import collate

DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}


def document(length: int, prompt_length: int, seed: int) -> Document:
    ids = prompt(length, seed)[0].tolist()
    return Document(ids, [place >= prompt_length for place in range(length)])


def answers(target, count: int, new_tokens: int = 24) -> list[Document]:
    """Documents whose responses are the target's own greedy ones."""
    documents = []
    for seed in range(count):
        ids = prompt(6, seed)
        whole = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)[
            0
        ].tolist()
        whole = whole[: whole.index(MASK)] if MASK in whole else whole
        documents.append(Document(whole, [place >= 6 for place in range(len(whole))]))
    return documents


def arguments(folder, **options) -> DFlashTrainingArguments:
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "eval_prompts": 2,
        "eval_new_tokens": 16,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    return DFlashTrainingArguments(**(defaults | options))


def hidden_of_blocks(draft, target, ids, anchors, **changes):
    """`(b, N, B, H)` by the path that training takes; `changes` replace inputs of the forward pass."""
    blocks = Blocks.at(anchors, ids, draft.config)
    features = TargetFeatures(target, draft.config.target_layer_ids)(ids).flatten(2)
    inputs = {
        "noise_embeds": target.get_input_embeddings()(blocks.ids),
        "context_hidden_states": features,
        "position_ids": blocks.position_ids,
        "attention_mask": blocks.layout,
        "num_blocks": anchors.shape[1],
    } | changes
    draft.set_attn_implementation(ATTENTION)
    return draft(**inputs).last_hidden_state.unflatten(1, (anchors.shape[1], -1))


SHAPES = {
    "fused": {},
    "layer-aligned": {"context_injection": "layer_aligned"},
    "normed taps": {"tap_norm": True},
    "causal in the block": {"causal_layer_types": ["sliding_attention"]},
    "narrow window": {"sliding_window": 4},
    "dflash 2": DFLASH2,
    "from the anchor": {"sample_from_anchor": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_training_computes_for_each_block_what_decoding_computes(target, shape):
    draft = make_draft(target, **SHAPES[shape])
    if shape == "dflash 2":
        for layer in draft.layers:
            layer.attention_conv.kernel_projection.weight.normal_(std=0.3)
            layer.mlp_conv.base_kernel.normal_()
    ids = torch.cat([prompt(40, 1), prompt(40, 2)])
    anchors = torch.tensor([[5, 9, 10, 23, 36, 38], [1, 2, 17, 20, 30, 39]])
    trained = hidden_of_blocks(draft, target, ids, anchors)
    draft.set_attn_implementation("eager")
    features = TargetFeatures(target, draft.config.target_layer_ids)(ids).flatten(2)
    for row in range(2):
        for block, anchor in enumerate(anchors[row].tolist()):
            slots = torch.full((1, draft.config.block_size), MASK)
            slots[0, 0] = ids[row, anchor]
            decoded = draft(target.get_input_embeddings()(slots), features[row : row + 1, :anchor]).last_hidden_state
            torch.testing.assert_close(trained[row, block], decoded[0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_block_sees_nothing_from_its_anchor_on_and_no_other_block(target, draft):
    ids, anchors = prompt(40, 1), torch.tensor([[8, 20, 30]])
    before = hidden_of_blocks(draft, target, ids, anchors)
    features = TargetFeatures(target, draft.config.target_layer_ids)(ids).flatten(2)
    features[:, 20:] += 1.0  # the anchor's own features and all later ones
    after = hidden_of_blocks(draft, target, ids, anchors, context_hidden_states=features)
    torch.testing.assert_close(after[:, :2], before[:, :2], atol=0, rtol=0)
    assert (after[:, 2] - before[:, 2]).abs().max() > 1e-3

    embeds = target.get_input_embeddings()(Blocks.at(anchors, ids, draft.config).ids)
    embeds[:, : draft.config.block_size] += 1.0  # the first block
    after = hidden_of_blocks(draft, target, ids, anchors, noise_embeds=embeds)
    torch.testing.assert_close(after[:, 1:], before[:, 1:], atol=0, rtol=0)
    assert (after[:, 0] - before[:, 0]).abs().max() > 1e-3


def test_labels_are_the_tokens_after_the_anchor_up_to_the_end_of_its_response():
    ids = torch.arange(100, 112)
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    assert possible_anchors(mask).tolist() == [2, 3, 4, 8, 9, 10]
    labels = block_labels(ids, mask, torch.tensor([2, 4, 9]), 5)
    assert labels.tolist() == [
        [103, 104, 105, IGNORED, IGNORED],
        [105, IGNORED, IGNORED, IGNORED, IGNORED],
        [110, 111, IGNORED, IGNORED, IGNORED],
    ]


def test_anchors_change_with_epoch_and_document_and_with_nothing_else():
    documents = [document(60, 5, 0), document(60, 5, 1)]

    def anchors(epoch, index, seed=0):
        dataset = BlockDataset(documents, 8, 5, seed)
        dataset.start_epoch(epoch)
        return dataset[index]["anchors"].tolist()

    assert anchors(0, 0) == anchors(0, 0)
    assert len({tuple(anchors(*place)) for place in [(0, 0), (1, 0), (0, 1), (1, 1)]}) == 4
    assert anchors(0, 0) != anchors(0, 0, seed=1)
    assert anchors(0, 0) == sorted(set(anchors(0, 0)))
    assert len(anchors(0, 0)) == 8
    everything = sample_anchors(torch.ones(9, dtype=torch.bool), 512, torch.Generator())
    assert everything.tolist() == list(range(8))


def test_decay_weights_are_those_of_the_paper():
    weights = decay_weights(4, 2.0, torch.device("cpu"))
    torch.testing.assert_close(weights[1:] / weights[:-1], torch.full((3,), torch.e**-0.5))
    assert weights.sum() == pytest.approx(1)
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]


def test_dpace_weights_are_suffix_sums_of_smoothed_prefix_products():
    confidence = torch.tensor([[0.5, 0.25, 0.8]])
    smooth = [0.75, 0.625, 0.9]
    products = [smooth[0], smooth[0] * smooth[1], smooth[0] * smooth[1] * smooth[2]]
    expected = [sum(products), sum(products[1:]), products[2]]
    everything = torch.ones(1, 3, dtype=torch.bool)
    torch.testing.assert_close(dpace_weights(confidence, everything, 0.5), torch.tensor([expected]))
    two = torch.tensor([[True, True, False]])
    expected = [sum(products[:2]), products[1], 0.0]
    torch.testing.assert_close(dpace_weights(confidence, two, 0.5), torch.tensor([expected]))


def slow_loss(kind, draft, target, hidden, labels, teacher):
    """Row by row and place by place."""
    total = 0.0
    weights = decay_weights(labels.shape[1], 4.0, labels.device)
    for row in range(len(labels)):
        logits = draft_logits(draft, target, hidden[row][None])[0]
        log_q = logits.log_softmax(-1)
        chances = [log_q[j, label].exp().item() for j, label in enumerate(labels[row].tolist()) if label != IGNORED]
        for place, label in enumerate(labels[row].tolist()):
            if label == IGNORED:
                continue
            weight = weights[place]
            loss = -log_q[place, label]
            if kind == "kl":
                p = target.head(teacher[row, place]).softmax(-1)
                loss = (p * (p.log() - log_q[place])).sum()
            if kind == "dpace":
                smooth = [0.5 * chance + 0.5 for chance in chances]
                products = torch.tensor(smooth).cumprod(0)
                weight = products[place:].sum()
            total = total + weight * loss
    return total


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("kind", ["ce", "kl", "dpace"])
def test_losses_and_gradients_equal_the_slow_ones_in_chunks_of_any_size(target, draft, kind, chunk):
    torch.manual_seed(0)
    hidden = torch.randn(5, 5, 32, requires_grad=True)
    teacher = torch.randn(5, 5, 32)
    labels = torch.randint(0, VOCAB, (5, 5))
    labels[1, 3:] = IGNORED
    labels[4, 1:] = IGNORED
    view = Target(target)
    expected = slow_loss(kind, draft, view, hidden, labels, teacher)
    (wanted,) = torch.autograd.grad(expected, hidden)
    objective = Objective(kind, 4.0, chunk=chunk)
    total, counts, right = objective(draft, view, hidden, labels, labels, teacher)
    (gradient,) = torch.autograd.grad(total * 1.0, hidden)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-4)
    assert counts.tolist() == [5, 4, 4, 3, 3]
    choices = draft_logits(draft, view, hidden).argmax(-1)
    assert right.tolist() == [int((choices[:, j] == labels[:, j]).sum()) for j in range(5)]


def test_a_reduced_vocabulary_learns_what_it_can_choose(target):
    draft = make_draft(target, draft_vocab_size=20)
    draft.d2t.copy_(torch.arange(20) % 2)  # ids 0, 2, 2, 4, ... : odd ids cannot be chosen
    hidden = torch.randn(2, 5, 32, requires_grad=True)
    labels = torch.tensor([[2, 4, 3, 6, 8], [5, 7, 9, 11, 13]])
    total, *_ = Objective("ce", 4.0)(draft, Target(target), hidden, labels, labels, None)
    total.backward()
    assert total.isfinite()
    assert draft.lm_head.weight.grad.abs().sum() > 0
    assert (hidden.grad[0].abs().sum(-1) > 0).tolist() == [True, True, False, True, True]
    assert hidden.grad[1].abs().sum() == 0


def test_an_embedding_of_its_own_is_trained(target, tmp_path):
    draft = make_draft(target, own_embedding=True)
    before, theirs = draft.embed_tokens.weight.detach().clone(), target.get_input_embeddings().weight.clone()
    documents = [document(30, 4, n) for n in range(4)]
    DFlashTrainer(draft, target, arguments(tmp_path, max_steps=2, learning_rate=1e-2), documents).train()
    changed = (draft.embed_tokens.weight != before).any(1)
    assert changed[MASK]
    assert changed.sum() > 4  # anchors
    assert torch.equal(target.get_input_embeddings().weight, theirs)


def test_a_reduced_vocabulary_learns_the_targets_law_of_what_it_can_choose(target):
    draft = make_draft(target, draft_vocab_size=16)
    draft.d2t.copy_(torch.arange(16))  # the even ids
    hidden, teacher = torch.randn(3, 5, 32, requires_grad=True), torch.randn(3, 5, 32)
    labels = torch.randint(0, VOCAB, (3, 5))
    total, *_ = Objective("kl", 4.0)(draft, Target(target), hidden, labels, labels, teacher)
    p = Target(target).head(teacher)[..., ::2].softmax(-1)
    slow = (p * (p.log() - draft.lm_head(hidden).log_softmax(-1))).sum(-1)  # (3, 5)
    expected = (slow * decay_weights(5, 4.0, hidden.device)).sum()
    torch.testing.assert_close(total, expected)
    ours = torch.autograd.grad(total, [hidden, draft.lm_head.weight])
    for one, other in zip(ours, torch.autograd.grad(expected, [hidden, draft.lm_head.weight]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_the_selector_learns_from_the_token_before(target):
    draft = make_draft(target, **DFLASH2)
    hidden = torch.randn(3, 5, 32)
    labels = torch.randint(0, VOCAB, (3, 5))
    Objective("ce", 4.0)(draft, Target(target), hidden, labels, labels.roll(1, 1), None)[0].backward()
    selector = draft.candidate_selector
    assert selector.hidden_projection.weight.grad.abs().sum() > 0
    touched = selector.predecessor_codebook.grad.abs().sum(-1).nonzero()[:, 0].tolist()
    assert set(touched) <= set(labels.flatten().tolist())
    assert touched


def test_stored_features_are_those_of_the_line(target, tmp_path):
    documents = [document(20 + n, 5, n) for n in range(70)]  # more than a shard
    store = FeatureStore.build(tmp_path, documents, target, [1, 3, -1])
    features = TargetFeatures(target, [3, -1])
    for number in (0, 63, 64, 69):
        online = features(torch.tensor(documents[number].ids)[None])[0]
        torch.testing.assert_close(store.select(store[number], [3, -1]), online, atol=0, rtol=0)
    states = {}
    hook = target.model.norm.register_forward_hook(
        lambda _m, inputs, output: states.update(last=inputs[0], normed=output)
    )
    target(torch.tensor(documents[0].ids)[None])
    hook.remove()
    torch.testing.assert_close(store[0][:, 1], states["last"][0], atol=1e-5, rtol=1e-5)  # tap 3: before the norm
    torch.testing.assert_close(store[0][:, 2], states["normed"][0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"holds the taps \[1, 3, -1\], not \[2\]"):
        store.select(store[0], [2])


def test_features_go_on_where_a_build_was_cut(target, tmp_path, monkeypatch):
    documents = [document(20, 5, n) for n in range(130)]
    seen = []
    original = TargetFeatures.__call__

    def breaks_off(self, ids, *rest):
        if len(seen) == 70:
            raise KeyboardInterrupt
        seen.append(ids)
        return original(self, ids, *rest)

    monkeypatch.setattr(TargetFeatures, "__call__", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        FeatureStore.build(tmp_path, documents, target, [1])
    with pytest.raises(ValueError, match="holds no index.json"):
        FeatureStore(tmp_path)
    monkeypatch.setattr(TargetFeatures, "__call__", lambda self, ids, *rest: seen.append(ids) or original(self, ids))
    store = FeatureStore.build(tmp_path, documents, target, [1])
    assert len(seen) == 70 + 130 - 64  # the first shard was not made again
    assert len(store) == 130
    with pytest.raises(ValueError, match="features of other documents, another target or other taps"):
        FeatureStore.build(tmp_path, documents[1:], target, [1])


def test_a_full_disk_is_told_before_anything_is_written(target, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match="GiB free: use another disk"):
        FeatureStore.build(tmp_path / "store", [document(20, 5, 0)], target, [1, 3])
    assert list((tmp_path / "store").iterdir()) == []


def test_training_makes_a_draft_that_accepts_more_and_loads(target, tmp_path):
    documents = answers(target, 12)
    draft = make_draft(target, initializer_range=0.1)
    trainer = DFlashTrainer(
        draft,
        target,
        arguments(tmp_path, max_steps=150, learning_rate=3e-3, logging_steps=50),
        documents,
        documents[:4],
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 3
    assert all(entry["places_per_second"] > 0 and 0 <= entry["accuracy_1"] <= 1 for entry in logged)
    assert after["eval_loss"] < 0.7 * before["eval_loss"]
    assert after["eval_accuracy_1"] > before["eval_accuracy_1"] + 0.3
    assert after["eval_acceptance_length"] > before["eval_acceptance_length"] + 0.5
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModel.from_pretrained(tmp_path / "saved")
    for name, weight in draft.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, atol=0, rtol=0)
    ids = prompt(6, 0)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16}
    assert target.generate(ids, assistant_model=loaded, **options).tolist() == target.generate(ids, **options).tolist()


def trained_weights(target, folder, documents, **options):
    draft = make_draft(target)
    features = options.pop("features", None)
    trainer = DFlashTrainer(draft, target, arguments(folder, **options), documents, train_features=features)
    trainer.train()
    return draft.state_dict(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("loss_type", ["kl", "dpace"])
def test_accumulated_steps_equal_large_ones_whatever_the_documents_lengths(target, tmp_path, loss_type):
    documents = [document(length, 4, length) for length in (9, 30, 14, 50, 11, 23, 40, 7)]
    # Without Adam, which makes whole steps of gradients that are nothing but rounding.
    options = {"max_steps": 2, "loss_type": loss_type, "anchors_per_document": 6, "optim": "sgd", "learning_rate": 0.1}
    large, large_losses = trained_weights(target, tmp_path, documents, per_device_train_batch_size=4, **options)
    small, small_losses = trained_weights(
        target, tmp_path, documents, per_device_train_batch_size=1, gradient_accumulation_steps=4, **options
    )
    assert small_losses == pytest.approx(large_losses, rel=1e-4)
    before = make_draft(target).state_dict()
    assert max(float((large[name] - before[name]).abs().max()) for name in large) > 1e-2
    for name in large:
        torch.testing.assert_close(small[name], large[name], atol=1e-5, rtol=1e-4)


def test_training_from_stored_features_equals_training_with_the_target_in_the_loop(target, tmp_path):
    documents = [document(30, 4, n) for n in range(6)]
    store = FeatureStore.build(tmp_path / "features", documents, target, [0, 1, 3, -1])
    options = {"max_steps": 3, "loss_type": "kl"}
    online, online_losses = trained_weights(target, tmp_path, documents, **options)
    stored, stored_losses = trained_weights(target, tmp_path, documents, features=store, **options)
    assert stored_losses == pytest.approx(online_losses, rel=1e-5)
    for name in online:
        torch.testing.assert_close(stored[name], online[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("steps", [3, 6], ids=["amid the first epoch", "amid the second"])
def test_a_resumed_run_goes_on_as_the_unbroken_one(target, tmp_path, steps):
    documents = [document(30, 4, n) for n in range(10)]
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "anchors_per_document": 5}
    draft = make_draft(target)
    whole = DFlashTrainer(draft, target, arguments(tmp_path / "run", **options), documents)
    whole.train()
    again = make_draft(target)
    resumed = DFlashTrainer(again, target, arguments(tmp_path / "run", **options), documents)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{steps}"))
    for name, weight in draft.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, atol=0, rtol=0)


def test_every_epoch_draws_anchors_whoever_loads_the_data(target, draft, tmp_path, monkeypatch):
    """Data loaders that processes share hand no epoch on to the data set."""
    monkeypatch.setattr("accelerate.data_loader.DataLoaderShard.set_epoch", lambda self, _epoch: None)
    documents = [document(30, 4, n) for n in range(4)]
    trainer = DFlashTrainer(draft, target, arguments(tmp_path, num_train_epochs=3), documents)
    epochs, original = [], BlockDataset.__getitem__

    def noted(self, index):
        epochs.append(self.epoch)
        return original(self, index)

    monkeypatch.setattr(BlockDataset, "__getitem__", noted)
    trainer.train()
    assert epochs == [0] * 4 + [1] * 4 + [2] * 4


def test_of_several_gpus_one_is_used_where_no_launcher_started_the_processes(target, draft, tmp_path):
    options = arguments(tmp_path, max_steps=1)
    assert options.n_gpu == 0
    options._n_gpu = 2  # as two GPUs set it
    trainer = DFlashTrainer(draft, target, options, [document(30, 4, 0)])
    assert trainer.args.n_gpu == 1
    trainer.train()


def test_the_card_tells_of_the_weights_that_are_kept(target, draft, tmp_path):
    documents = [document(30, 4, n) for n in range(6)]
    options = {"num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "acceptance_length"}
    trainer = DFlashTrainer(draft, target, arguments(tmp_path, **options), documents[:4], documents[4:])
    lengths = iter([1.5, 2.5, 1.25])
    trainer.acceptance_length = lambda _documents: next(lengths)
    trainer.train()
    trainer.record()
    table = draft.config.model_card["training"]
    assert [table[name] for name in ("epochs", "steps")] == [2.0, 4]
    assert table["acceptance_length_on_held_out_prompts"] == 2.5


def test_only_the_draft_is_published_while_it_is_trained(target, draft, tmp_path, monkeypatch):
    trainer = DFlashTrainer(draft, target, arguments(tmp_path), [document(30, 4, 0)])
    said = []
    monkeypatch.setattr(trainer, "push_to_hub", said.append)
    trainer._push_from_checkpoint(str(tmp_path))
    assert said == ["Training in progress, step 0"]
    trainer.args.hub_strategy = HubStrategy.END
    trainer._push_from_checkpoint(str(tmp_path))
    assert len(said) == 1


def test_a_target_that_is_spread_over_devices_stays_where_it_is(targets, tmp_path, monkeypatch):
    target = copy.deepcopy(targets["llama"])
    target.hf_device_map = {"model": 0, "lm_head": 1}
    monkeypatch.setattr(target, "to", lambda *_: pytest.fail("it was moved"))
    DFlashTrainer(make_draft(target), target, arguments(tmp_path), [document(30, 4, 0)])


def test_a_step_without_finite_gradients_is_left_out(target, tmp_path, monkeypatch):
    documents = [document(30, 4, n) for n in range(4)]
    draft = make_draft(target)
    weights = {name: weight.clone() for name, weight in draft.state_dict().items()}
    trainer = DFlashTrainer(draft, target, arguments(tmp_path, max_steps=3), documents)

    def broken(*_args):
        return draft.norm.weight.sum() * float("nan"), torch.ones(5), torch.ones(5)

    monkeypatch.setattr(Objective, "__call__", broken)
    trainer.train()
    for name, weight in weights.items():
        torch.testing.assert_close(draft.state_dict()[name], weight, atol=0, rtol=0)
    endless = DFlashTrainer(draft, target, arguments(tmp_path, max_steps=30), documents)
    with pytest.raises(FloatingPointError, match="10 steps in a row"):
        endless.train()


def test_rows_become_documents(smollm2_tokenizer, tmp_path):
    tokenizer = smollm2_tokenizer
    chat = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four."},
    ]
    made = encode({"messages": chat}, tokenizer)
    responses = [token for token, wanted in zip(made.ids, made.response_mask, strict=True) if wanted]
    assert tokenizer.decode(responses) == "Two.<|im_end|>Four.<|im_end|>"  # the target writes no "\n" behind
    made = encode({"messages": chat, "learn": "last"}, tokenizer)  # as a server's answers are
    responses = [token for token, wanted in zip(made.ids, made.response_mask, strict=True) if wanted]
    assert tokenizer.decode(responses) == "Four.<|im_end|>"
    made = encode({"prompt": "One?", "response": "Two."}, tokenizer)
    assert tokenizer.decode(made.ids).endswith("<|im_start|>assistant\nTwo.")
    assert tokenizer.decode(made.ids[: made.response_mask.index(True)]).endswith("<|im_start|>assistant\n")
    made = encode({"prompt": [5, 6], "response": [7]}, None)
    assert (made.ids, made.response_mask) == ([5, 6, 7], [False, False, True])

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [5], "response": [7]}) + "\n\n" + "{broken\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3 is no JSON"):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [5], "response": []}, "a `response` that is not empty"),
        ({"text": "a"}, r"it has \['text'\]"),
        ({"messages": [{"role": "user", "content": "a"}]}, "without an assistant turn"),
        ({"messages": "a"}, "no list of objects with a `role`: a"),
        ({"messages": [{"content": "a"}]}, "no list of objects with a `role`"),
        ({"prompt": None, "response": "a"}, "`prompt` of a row is neither text nor a list of token ids: None"),
        ({"prompt": "a", "response": 5}, "`response` of a row is neither"),
        ({"prompt": [5], "response": [5, -1]}, "`response` of a row is neither"),
    ],
)
def test_rows_that_teach_nothing_are_refused(smollm2_tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        encode(row, smollm2_tokenizer)


def test_a_mask_token_is_found_where_the_tokenizer_has_no_padding(target, smollm2_tokenizer, monkeypatch):
    """As with Llama 3, whose embedding has no spare row either."""
    monkeypatch.setattr(target.get_input_embeddings(), "num_embeddings", len(smollm2_tokenizer))
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.pad_token = None
    assert unused_token(target, tokenizer, []) == unused_token(target, smollm2_tokenizer, [])


def test_a_chat_that_the_template_refuses_is_named(smollm2_tokenizer, monkeypatch):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    monkeypatch.setattr(smollm2_tokenizer, "chat_template", template)
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match=r"refuses a chat with the roles system, user \(no system role\)"):
        chat_ids(chat, smollm2_tokenizer)
    asked = argparse.Namespace(target="x", system="a", no_chat_template=False)
    with pytest.raises(cli.BadInput, match=r"target x refuses the prompt \(no system role\): leave out --system"):
        cli.tokenize(smollm2_tokenizer, "b", asked)


def test_a_tokenizer_without_chat_template_is_named(smollm2_tokenizer):
    template, smollm2_tokenizer.chat_template = smollm2_tokenizer.chat_template, None
    try:
        with pytest.raises(ValueError, match="has no chat template"):
            encode({"prompt": "One?", "response": "Two."}, smollm2_tokenizer)
    finally:
        smollm2_tokenizer.chat_template = template


def test_documents_that_cannot_be_trained_on_are_refused(target, draft, tmp_path):
    with pytest.raises(ValueError, match="document 1 has no response of two tokens"):
        DFlashTrainer(draft, target, arguments(tmp_path), [document(20, 4, 0), document(5, 4, 0)])
    holds_mask = Document([3, 4, MASK, 5, 6], [False, False, True, True, True])
    with pytest.raises(ValueError, match=f"document 0 holds the draft's mask_token_id {MASK}"):
        DFlashTrainer(draft, target, arguments(tmp_path), [holds_mask])
    foreign = Document([3, 4, 5000, 5, 6], [False, False, True, True, True])
    with pytest.raises(ValueError, match="document 0 holds token 5000, and the target's embedding has"):
        DFlashTrainer(draft, target, arguments(tmp_path), [foreign])
    with pytest.raises(ValueError, match="there is no document"):
        DFlashTrainer(draft, target, arguments(tmp_path), [])
    other = make_target("qwen3")
    with pytest.raises(ValueError, match="loss_type is one of ce, kl, dpace"):
        arguments(tmp_path, loss_type="mse")
    with pytest.raises(ValueError, match="keeps the anchors of the first epoch"):
        arguments(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    shallow = make_draft(other, target_layer_ids=[1, 9], num_target_layers=None)
    with pytest.raises(ValueError, match="taps layer 9"):
        DFlashTrainer(shallow, target, arguments(tmp_path), [document(20, 4, 0)])


def test_batches_are_padded_on_the_right():
    short = {"input_ids": torch.tensor([1, 2, 3]), "anchors": torch.tensor([1]), "labels": torch.tensor([[3]])}
    long = {
        "input_ids": torch.tensor([1, 2, 3, 4]),
        "anchors": torch.tensor([1, 2]),
        "labels": torch.tensor([[3], [4]]),
    }
    batch = collate([short, long])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["anchors"].tolist() == pad_anchors([short["anchors"], long["anchors"]]).tolist() == [[1, -1], [1, 2]]
    assert batch["labels"].tolist() == [[[3], [IGNORED]], [[3], [4]]]


def test_adapters_are_trained_saved_loaded_and_decode(target, tmp_path):
    documents = answers(target, 6)
    draft = make_draft(target, tap_norm=True)
    draft.save_pretrained(tmp_path / "base")
    adapted = with_adapters(draft, 4)
    before = {name: weight.clone() for name, weight in adapted.named_parameters()}
    DFlashTrainer(
        adapted,
        target,
        arguments(tmp_path, max_steps=20, learning_rate=1e-2, logging_steps=20),
        documents,
        documents[:2],
    ).train()
    moved = {name for name, weight in adapted.named_parameters() if not torch.equal(weight, before[name])}
    assert all(("lora_" in name) or ("modules_to_save" in name) for name in moved)
    assert any("lora_A" in name for name in moved)
    assert all(any(f"{part}.modules_to_save" in name for name in moved) for part in ("fc", "tap_norm"))

    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    ids = prompt(6, 0)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    options["return_dict_in_generate"] = True
    plain = target.generate(ids, **options)
    outputs = [target.generate(ids, assistant_model=one, **options) for one in (adapted.eval(), loaded)]
    merged = loaded.merge_and_unload()
    outputs.append(target.generate(ids, assistant_model=merged, **options))
    for output in outputs:
        assert output.sequences.tolist() == plain.sequences.tolist()
        assert output.speculation.acceptance_lengths == outputs[0].speculation.acceptance_lengths
    untrained = target.generate(ids, assistant_model=AutoModel.from_pretrained(tmp_path / "base"), **options)
    assert outputs[0].speculation.acceptance_length > untrained.speculation.acceptance_length


def test_features_of_other_documents_or_another_target_are_refused(target, draft, tmp_path):
    documents = [document(20, 5, n) for n in range(3)]
    store = FeatureStore.build(tmp_path / "features", documents, target, [1, 3])
    tuned = make_target("llama")
    tuned.model.layers[1].mlp.down_proj.weight.data += 0.01  # as merged adapters do, under the same name
    for others, model in ((documents[::-1], target), (documents, make_target("llama", seed=7)), (documents, tuned)):
        with pytest.raises(ValueError, match="features of other documents, of another order or of another"):
            DFlashTrainer(draft, model, arguments(tmp_path), others, train_features=store)


def test_adapters_of_a_dflash_2_draft_train_its_small_parts_whole(target, tmp_path):
    draft = make_draft(target, **DFLASH2)
    adapted = with_adapters(draft, 2)
    before = {name: weight.clone() for name, weight in adapted.named_parameters()}
    documents = answers(target, 4)
    DFlashTrainer(adapted, target, arguments(tmp_path, max_steps=3, learning_rate=1e-2), documents).train()
    moved = {name for name, weight in adapted.named_parameters() if not torch.equal(weight, before[name])}
    for part in ("attention_conv", "mlp_conv", "candidate_selector"):
        assert any(f"{part}.modules_to_save" in name for name in moved), part
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    ids = prompt(6, 0)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    drafted = target.generate(ids, assistant_model=adapted.eval(), **options)
    assert drafted.tolist() == target.generate(ids, **options).tolist()


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_the_loss_of_an_evaluation_is_the_mean_over_blocks_however_they_are_batched(target, tmp_path, batch_size):
    documents = [document(length, 3, length) for length in (8, 60, 20)]
    options = {"per_device_eval_batch_size": batch_size, "eval_prompts": 0, "max_steps": 1}
    trainer = DFlashTrainer(make_draft(target), target, arguments(tmp_path, **options), documents, documents)
    got = trainer.evaluate()["eval_loss"]
    losses = []
    for one in documents:
        alone = DFlashTrainer(make_draft(target), target, arguments(tmp_path, eval_prompts=0), [one], [one])
        losses.append((alone.evaluate()["eval_loss"], len(alone.eval_dataset[0]["anchors"])))
    total, blocks = sum(loss * count for loss, count in losses), sum(count for _, count in losses)
    assert len({count for _, count in losses}) == 3
    assert got == pytest.approx(total / blocks, rel=0.02)  # alone, a document has other anchors


def test_answers_without_a_prompt_do_not_stop_an_evaluation(target, draft, tmp_path):
    documents = [document(20, 0, 0), document(20, 5, 1)]
    trainer = DFlashTrainer(draft, target, arguments(tmp_path, max_steps=1), documents, documents)
    assert trainer.evaluate()["eval_acceptance_length"] >= 1


def test_prompts_are_answered_together_and_as_if_alone(target, draft, tmp_path, monkeypatch):
    documents = [document(12 + 3 * n, 4 + 2 * n, n) for n in range(5)]
    sizes, generate = [], target.generate
    monkeypatch.setattr(target, "generate", lambda ids, **options: sizes.append(len(ids)) or generate(ids, **options))

    def length(rows):
        options = {"per_device_eval_batch_size": rows, "eval_new_tokens": 20}
        return DFlashTrainer(draft, target, arguments(tmp_path, **options)).acceptance_length(documents)

    draft.generation_config.num_assistant_tokens = 2
    assert length(1) == length(2) > 1
    assert sizes == [1] * 5 + [2, 2, 1]
    monkeypatch.setattr("transformers_dflash.training.trainer.takes_ragged_rows", lambda _cache: False)
    length(2)
    assert sizes[8:] == [1] * 5


def test_early_stopping_sees_the_acceptance_length(target, draft, tmp_path):
    documents = answers(target, 4)
    options = {"learning_rate": 0.0, "num_train_epochs": 6, "eval_strategy": "epoch", "save_strategy": "epoch"}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "acceptance_length"}
    options |= {"greater_is_better": True}
    trainer = DFlashTrainer(
        draft, target, arguments(tmp_path, **options), documents, documents, callbacks=[EarlyStoppingCallback(1)]
    )
    trainer.train()
    assert trainer.state.epoch == 2  # nothing gets better
    assert trainer.state.best_metric >= 1


def test_rows_come_from_a_parquet_file_as_from_lines(tmp_path):
    rows = [{"prompt": "What is 7 times 8?", "response": "56"}, {"prompt": "And 8 times 8?", "response": "64"}]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tmp_path / "rows.parquet"
    Dataset.from_list(rows).to_parquet(table)
    assert list(read_rows(table)) == list(read_rows(lines)) == rows
