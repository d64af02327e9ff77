"""What the tests of every family ask of a checkpoint, written once: each check takes a folder, or the model loaded from
it, and an oracle, transformers' model of the same weights (`family_checkpoints.load_target`).

`family_suite` asks them of a family, whose own file says what its checkpoints are, and puts its head together of
transformers' modules (`family_definition`). Prompts are ids below 64, the vocabulary of the checkpoints that
`family_checkpoints` writes. Not a test itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator

import mtplab
from family_checkpoints import ready_for_mtp, write_fp8
from family_definition import Definition, HeadModule, oracle_hidden
from mtplab import generate, load_model, open_checkpoint, quantize_checkpoint, trace
from mtplab.checkpoint.audit.expected import expected_modules
from mtplab.checkpoint.config_json import text_config
from mtplab.checkpoint.names import normalised, of_other_senses
from mtplab.decode.runner import Run
from mtplab.decode.state import RunState
from mtplab.models import Model
from mtplab.models.cache import DeltaState, KVCache
from mtplab.models.passes import PassMaker
from mtplab.quant.policy import resolve_policy
from test_decode import caches_after, new_run
from test_memory import held_tensors
from test_models import run_passes
from tiny import stacked

TOLERANCE = 1e-4  # on logits of about ±20, float32
# weights in BF16, quantised at load with the published exclusions, without any, and with attention kept
WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"model_format": "fp8"},
    "all fp8": {"model_format": "fp8", "exclude": "none"},
    "attention kept": {"model_format": "fp8", "exclude": ["*attn*"]},
}
POLICIES = ("none", "int8", "fp8")
# each way to treat weights with an unquantised cache or a quantised one, every policy under BF16 and under FP8
TREATMENTS = (
    ("bf16", "none"), ("bf16", "int8"), ("bf16", "fp8"), ("fp8", "int8"), ("all fp8", "none"),
    ("attention kept", "fp8"),
)  # fmt: skip


def some_ids(count: int, seed: int = 3) -> list[int]:
    """Random ids that are no special token."""
    return torch.randint(2, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# ragged: one id, less than a chunk of the delta rule, more than one
PROMPTS = [some_ids(n, n) for n in (8, 1, 13, 70)]


# the target


def check_logits(model: Model, oracle: PreTrainedModel, exact: bool = True) -> None:
    """Hidden states and logits of a prompt read at once, token by token behind a cache, and in pieces."""
    ids = some_ids(90)
    hidden, logits = oracle_hidden(oracle, ids)
    for splits in ([90], [60] + [1] * 30, [64, 5, 1, 9, 11]):
        mine = run_passes(model, ids, splits, exact)
        assert (mine - hidden).abs().max() < TOLERANCE, splits
        with torch.inference_mode():
            assert (model.target.logits(mine) - logits).abs().max() < TOLERANCE, splits


def check_greedy(model: Model, oracle: PreTrainedModel, count: int = 24) -> None:
    """A ragged batch decodes, plainly and with drafts, to what transformers' cached decoding gives a prompt alone."""
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = oracle.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        expected.append(out[0, len(prompt) :].tolist())
    for depth in (0, 3) if model.draft is not None else (0,):
        assert generate(model, PROMPTS, depth=depth, max_new_tokens=count, ignore_eos=True).tokens == expected, depth


# the head


def check_head(model: Model, oracle: PreTrainedModel, modules: Sequence[HeadModule]) -> None:
    """The head's first step equals the module put together of transformers' layers, before its norm and after."""
    ids = some_ids(40, 5)
    hidden, _ = oracle_hidden(oracle, ids)
    n, module = len(ids) - 1, modules[0]
    with torch.no_grad():
        expected = module(oracle.get_input_embeddings()(torch.tensor(ids[1:])), hidden[:-1])
        expected_normed = module.norm(expected)
    passes = PassMaker(model.config, 256, model.dtype, model.device)
    with torch.inference_mode():
        run = passes.make(torch.arange(n)[None], n, True)
        embedded = run.gather(model.draft.embed(torch.tensor([ids[1:]]), run.positions))
        cache = model.draft_caches(1, 1, 256, resolve_policy("none"))[0]
        mine = model.draft(embedded, run.gather(hidden[None, :-1]), run, cache)
        normed = model.draft.normed(mine)[:n]
    assert (mine[:n] - expected).abs().max() < TOLERANCE
    assert (normed - expected_normed).abs().max() < TOLERANCE


def drafted(model: Model, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], list[tuple]]:
    """(outputs, and of every round: prompt, tokens there, drafts)."""
    seen, draft = [], Run._draft

    def spy(run: Run):
        drafts, probs = draft(run)
        seen.extend(zip(run.live, run.lengths.tolist(), drafts.tolist(), strict=True))
        return drafts, probs

    with mock.patch.object(Run, "_draft", spy):
        out = generate(model, prompts, **settings)
    return out.tokens, seen


def check_drafts(model: Model, definition: Definition, depth: int = 3, count: int = 14) -> None:
    """Every draft of every round of a ragged batch is the definition's likeliest, whatever was rejected before it."""
    target, draft = definition.stages
    settings = {"depth": depth, "max_new_tokens": count, "target_hidden": target, "draft_hidden": draft}
    outputs, rounds = drafted(model, PROMPTS, ignore_eos=True, **settings)
    kept = set()
    for prompt, length, drafts in rounds:
        text = PROMPTS[prompt] + outputs[prompt]
        kept.add(next((i for i, draft in enumerate(drafts) if draft not in text[length + i : length + i + 1]), depth))
        for draft, logits in zip(drafts, definition.drafts(text[:length], depth), strict=True):
            assert logits.max() - logits[draft] < 1e-3, (prompt, length, drafts)
    assert len(kept) > 1 and min(kept) == 0, "rounds that keep different numbers of drafts are the point"


def check_head_setting(
    model: Model, prompts: list[list[int]] = PROMPTS[:2], depth: int = 2, count: int = 8, first: int = 0, **change: Any
) -> None:
    """With a setting of the head changed the text stays, and what is drafted from step `first` on is another."""
    bare = dataclasses.replace(model, draft=dataclasses.replace(model.draft, **change))
    one, other = (trace(each, prompts, depth, max_new_tokens=count) for each in (model, bare))
    assert one.outputs == other.outputs and np.nanmax(abs(one.top[:, first:] - other.top[:, first:])) > 1e-3


def check_transformers_drafts(model: Model, oracle: PreTrainedModel, count: int = 60, prompt_seed: int = 1) -> None:
    """transformers' `generate(use_mtp=True)` and a run of as many drafts a round, with its conventions (nothing masked
    at position 0, hidden states after the norms, the target's output matrix): the same text, rounds and drafts."""
    oracle = ready_for_mtp(oracle)
    prompt = some_ids(9, prompt_seed)
    theirs, candidates = [], MTPCandidateGenerator.get_candidates

    def spy(self, input_ids, *args, **kwargs):
        found = candidates(self, input_ids, *args, **kwargs)
        length = input_ids.shape[1]
        if found[0].shape[1] > length:
            theirs.append((length, found[0][0, length:].tolist()))
        return found

    with mock.patch.object(MTPCandidateGenerator, "get_candidates", spy):
        out = oracle.generate(
            torch.tensor([prompt]), use_mtp=True, max_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    modules = [dataclasses.replace(each, head=None) for each in model.draft.modules]
    head = dataclasses.replace(model.draft, modules=modules, first_masked=False)
    plain = dataclasses.replace(model, draft=head)
    depth = model.config.mtp_layers
    stages = {"target_hidden": "post_norm", "draft_hidden": "post_norm"}
    (tokens,), rounds = drafted(plain, [prompt], depth=depth, max_new_tokens=count, ignore_eos=True, **stages)
    assert tokens == out[0, len(prompt) :].tolist()
    mine = [(length, drafts) for _, length, drafts in rounds]
    # at the end transformers drafts no more than may still be emitted
    assert len(mine) > 15 and mine[:-depth] == theirs[: len(mine) - depth]
    assert len(mine) < 0.9 * count, "drafts that are never right show little"


# runs


def check_lossless(model: Model, policy: str, depths: Sequence[int] = (1, 2, 3, 4), count: int = 10) -> None:
    """Text at every depth is plain decoding's, alone as in a batch, and a trace's counts are the runner's."""
    settings = {"max_new_tokens": count, "quant_policy": policy, "ignore_eos": True}
    plain = generate(model, PROMPTS, depth=0, **settings).tokens
    found = trace(model, PROMPTS, max(depths), **settings)
    assert found.outputs == plain
    for depth in depths:
        run = generate(model, PROMPTS, depth=depth, **settings)
        assert run.tokens == plain, depth
        assert run.per_prompt == found.acceptance().per_prompt(depth), depth
    alone = generate(model, PROMPTS, depth=max(depths), max_batch=1, **settings)
    assert alone.tokens == plain and alone.per_prompt == run.per_prompt


def check_rollback(model: Model, policy: str) -> None:
    """After rounds with rejections the target's caches are those of a run that saw the accepted tokens alone, and the
    head's those of one that drafts less far."""
    prompts = [some_ids(9, 11), some_ids(30, 12)]
    with torch.inference_mode():
        runs = []
        for depth in (4, 2):
            run = new_run(model, prompts, depth, policy, n=150)
            run.prefill()
            while run.lengths[0] < 60:
                run.round()
            runs.append(run)
        plain = new_run(model, prompts[:1], 0, policy, n=150)
        plain.prefill()
        while plain.lengths[0] < runs[0].lengths[0]:
            plain.round()
    accepted = {record.accepted for record in runs[0].records if record.prompt == 0}
    assert len(accepted) > 1 and min(accepted) == 0, "rounds that keep different numbers of drafts are the point"
    assert plain.tokens[0] == runs[0].tokens[0]
    for layer, (mine, replayed) in enumerate(zip(caches_after(runs[0]), caches_after(plain), strict=True)):
        for a, b in zip(mine, replayed, strict=True):
            assert torch.equal(a, b), f"layer {layer}"
    last = [next(record.emitted for record in reversed(run.records) if record.prompt == 0) for run in runs]
    for step in range(model.config.draft_caches(2)):
        known = min(int(run.lengths[0]) - 1 - emitted for run, emitted in zip(runs, last, strict=True)) - step - 1
        assert known > 40
        one, other = (run.state.draft[step].parts[0].held for run in runs)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a[:, 0, :, :known].view(torch.uint8), b[:, 0, :, :known].view(torch.uint8)), step


# FP8 files


def dequantised(folder: Path, out: Path, block: int = 128) -> Path:
    """A block-FP8 checkpoint's values in float32, by a formula of its own, without its quantisation config."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    values = {}
    for name, value in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            whole = scale.repeat_interleave(block, -2).repeat_interleave(block, -1)
            value = value.float() * whole[..., : value.shape[-2], : value.shape[-1]]
        if not name.endswith("_scale_inv"):
            values[name] = value.contiguous()
    out.mkdir(parents=True)
    config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config))
    save_file(values, out / "model.safetensors", {"format": "pt"})
    return out


def check_fp8(folder: Path, plain: Path, oracle: PreTrainedModel) -> None:
    """A block-FP8 checkpoint, its dequantised values in `plain` and transformers' model of those: without rounding of
    activations target and head are the same; with it the text differs and drafting stays lossless."""
    model, values = load_model(folder, activation_rounding=False), load_model(plain)
    check_logits(model, oracle)
    ids = [PROMPTS[0], PROMPTS[2]]
    settings = {"max_depth": 3, "max_new_tokens": 10, "ignore_eos": True}
    one, other = trace(model, ids, **settings), trace(values, ids, **settings)
    assert one.outputs == other.outputs and (one.hits == other.hits).all()
    for mine, theirs in ((one.top, other.top), (one.log_p, other.log_p)):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE)
    rounded = load_model(folder)
    for part in ("target", "draft"):
        fp8 = [m for m in rounded.plan.modules if m.part == part and m.weight == "fp8"]
        assert fp8 and all(m.activation == "fp8" for m in fp8), part
    again = trace(rounded, ids, **settings)
    assert np.nanmax(abs(again.top - one.top)) > 1e-3
    check_lossless(rounded, "none", (1, 3), 10)


def quantised_here(family: str, at: Path, depth: int) -> tuple[Model, Model]:
    """A family's checkpoint quantised into `at`/out runs as the same one quantised at load: (the one, the other)."""
    write_fp8(family, at / "f")
    source = at / "f" / "bf16"
    quantize_checkpoint(source, at / "out", format="fp8-block")
    written, loaded = load_model(at / "out"), load_model(source, model_format="fp8")
    runs = [generate(each, PROMPTS, depth=depth, max_new_tokens=12) for each in (written, loaded)]
    assert runs[0].tokens == runs[1].tokens and runs[0].rounds == runs[1].rounds
    return written, loaded


# what is said of a file


def check_audit(folder: Path, layout: str) -> None:
    """The audit, values too, finds nothing wrong and the head whole, of this layout; and it knows the shape of every
    matrix and norm that the file holds, but those that the head may share with the target."""
    ckpt = open_checkpoint(folder)
    found = ckpt.audit(deep=True)
    # which the heads written here are
    said = [each for each in found.at_least("warning") if each.kind != "random-head"]
    assert [f"{each.kind}: {each.message}" for each in said] == []
    assert found.head is not None and found.head.complete and layout in found.head.family, found.head
    asked = expected_modules(text_config(ckpt.config), found.head.layers)
    held = {module.name: normalised(module.name) for module in found.modules}
    read = {held[name.removesuffix(".weight")] for name in ckpt.tensors if name.endswith(".weight")}
    read -= {name for name in read if of_other_senses(name)}
    ends = ("lm_head", ".embed_tokens", "shared_head.head", "shared_head.output")
    shared = {name for name in read if name.endswith(ends)}
    # a stack in place of single experts is the reader's to know
    stacks = {name.rpartition(".")[0] for name in held.values() if name.endswith(".experts.gate_up_proj")}
    single = {name for name in asked if any(name.startswith(f"{stack}.") for stack in stacks)}
    assert read - shared == asked.keys() - single - {"model.embed_tokens"}


def check_memory(folder: Path, **settings: Any) -> None:
    """Bytes said before loading are those held, of weights and of caches."""
    model = load_model(folder, dtype="bfloat16", **settings)
    said = mtplab.memory(folder, dtype="bfloat16", batch=3, context=40, depth=2, **settings)
    assert said.caches is not None and said.fits is not None
    # not said: norms of q and k for every head
    normed = any(getattr(layer.mixer, "norms", False) for layer in model.config.layers)
    assert said.weights.nbytes == pytest.approx(held_tensors(model), rel=0.015 if normed else 5e-3)
    for policy in ("none", "int8"):
        model = load_model(folder, quant_policy=policy, **settings)
        caches = mtplab.memory(folder, quant_policy=policy, batch=3, context=40, depth=2, **settings).caches
        state = RunState(model, 3, 40, model.policy("target"), model.policy("draft"), 2)
        held = [cache for cache in (*state.target, *state.draft) if isinstance(cache, KVCache)]
        deltas = [cache for cache in state.target if isinstance(cache, DeltaState)]
        assert caches.token == sum(cache.bytes_per_slot for cache in held)
        assert 3 * caches.state == sum(x.nbytes for d in deltas for x in (d.conv, d.recurrent, d.step_buffer(3)))
        assert caches.deployed_token == model.kv_bytes_per_token() + model.kv_bytes_per_token(part="draft")


def changed(folder: Path, out: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint whose tensors and config a function has changed in place."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, out / "model.safetensors")
    return out


def stack_experts(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """For `changed`: experts as transformers holds them in memory, and writes them where its renaming is off."""
    made = stacked(tensors)
    tensors.clear()
    tensors.update(made)
