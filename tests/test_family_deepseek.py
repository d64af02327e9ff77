"""DeepSeek-V3: latent attention, experts in groups and the head, against transformers; a cache of one row."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from family_checkpoints import load_target, ready_for_mtp, write_deepseek_v3, write_fp8
from mtplab import CheckpointError, generate, load_model, open_checkpoint, trace
from mtplab.decode.peek import next_logits
from mtplab.kernels.fp8_reference import round_activation
from mtplab.models.fields import Fields
from mtplab.models.passes import PassMaker
from mtplab.models.rotary import frequencies
from mtplab.models.spec import MixtureSpec, Rotary
from mtplab.quant.policy import resolve_policy
from test_head_per_depth import drafted
from test_mixture import _mixture
from test_models import run_passes
from tests.checkpoint_builders import CHECKPOINTS

TOLERANCE = 1e-4
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]
IDS = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(3)).tolist()
# yarn and a query rank; neither; the halves of a head paired; all layers experts; a head of two layers
SHAPES = {
    "published": {},
    "plain": {"q_lora_rank": None, "rope_scaling": None},
    "halves": {"rope_interleave": False},
    "experts": {"first_k_dense_replace": 0, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "two": {"heads": 2},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder of one of SHAPES, written once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = write_deepseek_v3(tmp_path_factory.mktemp(name), **SHAPES[name])
        return made[name]

    return get


@pytest.fixture(scope="module")
def model(written):
    return load_model(written("published"))


@pytest.fixture(scope="module")
def oracle(written):
    return load_target(written("published"))


@pytest.mark.parametrize("name", SHAPES)
def test_target_equals_transformers(written, name):
    """In one prefill, decoded token by token, and in passes of many; with exact arithmetic and without."""
    mine, reference = load_model(written(name)), load_target(written(name))
    with torch.no_grad():
        out = reference.model(torch.tensor([IDS])).last_hidden_state[0]
        logits = reference.lm_head(out)
    for splits in ([90], [60] + [1] * 30, [64, 5, 1, 9, 11]):
        for exact in (True, False):
            hidden = run_passes(mine, IDS, splits, exact)
            assert (hidden - out).abs().max() < TOLERANCE, (splits, exact)
            with torch.inference_mode():
                assert (mine.target.logits(hidden) - logits).abs().max() < TOLERANCE, (splits, exact)


def test_ragged_batch_decodes_as_transformers(model, oracle):
    run = generate(model, PROMPTS, depth=3, max_new_tokens=24)
    for prompt, tokens in zip(PROMPTS, run.tokens, strict=True):
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert tokens == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rope", [
    {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.8, "beta_fast": 16},
    {"factor": 8, "original_max_position_embeddings": 32, "truncate": False, "attention_factor": 1.3},
    {"original_max_position_embeddings": 1024, "mscale": 1.0},
])  # fmt: skip
def test_yarn_is_transformers(rope):
    given = {"type": "yarn", "factor": None} | rope
    config = DeepseekV3Config(rope_scaling=dict(given), rope_theta=10000.0, max_position_embeddings=8192)
    embedding = theirs.DeepseekV3RotaryEmbedding(config)
    fields = Fields({"rope_scaling": given, "rope_theta": 10000.0, "max_position_embeddings": 8192})
    yarn = fields.yarn(fields.rope()[2])
    assert yarn.attention == pytest.approx(embedding.attention_scaling, rel=1e-12)
    torch.testing.assert_close(
        frequencies(Rotary(64, 10000.0, yarn)), embedding.inv_freq, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (6, 1)])
@pytest.mark.parametrize("normalised", [True, False])
def test_routing_is_transformers(groups, normalised):
    """Which experts, and with what weights; of scores that are equal too, and that are zero."""
    count, top_k, hidden = 12, 2, 16
    g = torch.Generator().manual_seed(groups[0])
    config = DeepseekV3Config(
        n_routed_experts=count, num_experts_per_tok=top_k, hidden_size=hidden, n_group=groups[0], topk_group=groups[1],
        norm_topk_prob=normalised, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = theirs.DeepseekV3TopkRouter(config)
    router.weight.data = torch.randn(count, hidden, generator=g)
    router.weight.data[3] = router.weight.data[2]
    router.weight.data[7:9] = router.weight.data[5]
    router.e_score_correction_bias.copy_(torch.randn(count, generator=g).mul(0.3))
    router.e_score_correction_bias[2:9] = 0.25
    router.weight.data[:, 0] = 1.0
    x = torch.randn(64, hidden, generator=g)
    x[:4, 0] = -1000.0
    block, _ = _mixture(experts=count, top_k=top_k, hidden=hidden, inner=8)
    block.spec = MixtureSpec(count, top_k, 8, 8, "sigmoid", normalised, 2.5, *groups)
    block.bias = router.e_score_correction_bias
    with torch.no_grad():
        logits, weights, chosen = router(x)
        mine, places = block._chosen(logits)
    theirs_by_expert, mine_by_expert = (
        torch.full((64, count), -1.0).scatter(1, at, w) for at, w in ((chosen, weights), (places, mine))
    )
    torch.testing.assert_close(mine_by_expert, theirs_by_expert, rtol=1e-6, atol=0)
    assert (weights[:4] == 0).all() and (weights[4:] > 0).all()
    ties = (logits.sigmoid() + block.bias).sort(-1).values.diff(dim=-1) == 0
    assert ties.any(-1).all()


@pytest.mark.parametrize("count", [9, 12, 16])
def test_sigmoids_of_a_row_do_not_depend_on_the_rows_beside_it(count):
    block, hidden = _mixture(experts=count, top_k=3, hidden=72, inner=20)
    block.spec = MixtureSpec(count, 3, 20, 20, "sigmoid", factor=2.5)
    block.shared_gate, block.bias = None, torch.linspace(-0.5, 0.5, count)
    x = torch.randn(136, hidden, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = block(torch.zeros_like(x), x, 136)
        for rows in [*range(1, 20), 56, 64, 65, 127, 130]:
            part = x[: -(-rows // 8) * 8]
            assert torch.equal(block(torch.zeros_like(part), part, rows)[:rows], whole[:rows]), rows


def head_by_transformers(folder, oracle, ids):
    """What the head gives after its norm [t − 1, h] and its logits, by transformers' own layers."""
    ckpt, config, n = open_checkpoint(folder), oracle.config, oracle.config.num_hidden_layers
    at = f"model.layers.{n}."
    config = type(config).from_dict(config.to_dict() | {"first_k_dense_replace": 0})
    config._attn_implementation = "eager"
    layer = theirs.DeepseekV3DecoderLayer(config, n).float().eval()
    own = {name.removeprefix(at): ckpt.dequantize(name) for name in ckpt.tensors if name.startswith(at)}
    parts = {"enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head"}
    state = {name: value for name, value in own.items() if name.removesuffix(".weight") not in parts}
    experts = config.n_routed_experts

    def stacked(*names):
        return torch.stack(
            [torch.cat([state.pop(f"mlp.experts.{e}.{name}.weight") for name in names]) for e in range(experts)]
        )

    state["mlp.experts.gate_up_proj"] = stacked("gate_proj", "up_proj")
    state["mlp.experts.down_proj"] = stacked("down_proj")
    layer.load_state_dict(state)

    def norm(name, x):
        module = theirs.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        module.load_state_dict({"weight": own[f"{name}.weight"]})
        return module(x)

    with torch.no_grad():
        hidden = oracle.model(torch.tensor([ids])).last_hidden_state
        embedded = F.embedding(torch.tensor([ids[1:]]), own["embed_tokens.weight"])
        both = torch.cat([norm("enorm", embedded), norm("hnorm", hidden[:, :-1])], -1)
        x = F.linear(both, own["eh_proj.weight"])
        places = torch.arange(len(ids) - 1)[None]
        mask = torch.full((1, 1, len(ids) - 1, len(ids) - 1), -torch.inf).triu(1)
        out = layer(x, position_embeddings=oracle.model.rotary_emb(x, places), attention_mask=mask)
        normed = norm("shared_head.norm", out[0] if isinstance(out, tuple) else out)[0]
        return hidden, normed, F.linear(normed, own["shared_head.head.weight"])


def unmasked(model):
    """As transformers runs the head: with the embedding at position 0."""
    return dataclasses.replace(model, draft=dataclasses.replace(model.draft, first_masked=False))


def head_outputs(model, hidden, ids):
    n = len(ids) - 1
    passes = PassMaker(model.config, 256, model.dtype, model.device)
    with torch.inference_mode():
        run = passes.make(torch.arange(n)[None], n, True)
        embedded = run.gather(model.draft.embed(torch.tensor([ids[1:]]), run.positions))
        (cache,) = model.draft_caches(1, 1, 256, resolve_policy("none"))
        out = model.draft(embedded, run.gather(hidden[:, :-1]), run, cache)[: run.rows]
        normed = model.draft.normed(out)
        return normed, model.draft.logits(normed)


def test_head_equals_an_assembly_of_transformers_layers(written, model, oracle):
    ids = IDS[:30]
    hidden, normed, logits = head_by_transformers(written("published"), oracle, ids)
    mine = head_outputs(unmasked(model), hidden, ids)
    assert (mine[0] - normed).abs().max() < TOLERANCE
    assert (mine[1] - logits).abs().max() < TOLERANCE
    # zeros in place of the first slot's embedding, as vLLM has them, are felt behind it too
    masked, _ = head_outputs(model, hidden, ids)
    assert (masked - normed).abs().amax(-1).min() > 1e-3


def test_a_head_of_its_own_embedding_and_vocabulary_is_used(written, oracle, tmp_path):
    tensors = load_file(written("published") / "model.safetensors")
    g = torch.Generator().manual_seed(9)
    for name in ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"):
        tensors[name] = (tensors[name].float() + 0.1 * torch.randn(tensors[name].shape, generator=g)).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((written("published") / "config.json").read_text())
    own = load_model(tmp_path)
    hidden, normed, logits = head_by_transformers(tmp_path, oracle, IDS[:20])
    mine = head_outputs(unmasked(own), hidden, IDS[:20])
    assert (mine[0] - normed).abs().max() < TOLERANCE and (mine[1] - logits).abs().max() < TOLERANCE
    shared = load_model(written("published"))
    assert shared.draft.modules[0].embedding is shared.target.embedding and shared.draft.modules[0].head is None


@pytest.mark.parametrize("name", ["published", "plain"])
def test_tokens_and_drafts_are_those_of_transformers_own_mtp(written, name, monkeypatch):
    theirs_seen, candidates = [], MTPCandidateGenerator.get_candidates

    def spy(self, input_ids, *args, **kwargs):
        found = candidates(self, input_ids, *args, **kwargs)
        if found[0].shape[1] > input_ids.shape[1]:
            theirs_seen.append((input_ids.shape[1], found[0][0, input_ids.shape[1] :].tolist()))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", spy)
    reference, prompt = ready_for_mtp(load_target(written(name))), PROMPTS[0]
    out = reference.generate(
        torch.tensor([prompt]), use_mtp=True, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    mine = unmasked(load_model(written(name)))
    tokens, rounds = drafted(mine, [prompt], monkeypatch, depth=1, max_new_tokens=60, ignore_eos=True)
    assert tokens[0] == out[0, len(prompt) :].tolist()
    drafts = {length: draft for _, length, draft in rounds}
    both = [(drafts[length], draft) for length, draft in theirs_seen if length in drafts]
    assert len(both) > 25 and all(a == b for a, b in both)
    assert sum(int(out[0, length]) == draft[0] for length, draft in theirs_seen[:-1]) > 5


# caches, rounds and traces


@pytest.fixture(scope="module", params=[
    {}, {"model_format": "fp8"}, {"model_format": "fp8", "exclude": ["*.self_attn.*"]},
    {"model_format": "fp8", "exclude": "none", "draft_exclude": "published"},
], ids=str)  # fmt: skip
def variant(request, written):
    """The model with other modules in FP8."""
    return load_model(written("published"), **request.param)


@pytest.mark.parametrize("policy", ["none", "int8", "fp8", "int4@1"])
def test_lossless_and_traced_exactly(variant, policy):
    model = variant
    draft = policy.partition("@")[0]
    chosen = {"quant_policy": policy, "draft_quant_policy": draft, "max_new_tokens": 12}
    plain = generate(model, PROMPTS, depth=0, **chosen).tokens
    found = trace(model, PROMPTS, max_depth=4, **chosen).acceptance()
    for depth in (1, 2, 3, 4):
        run = generate(model, PROMPTS, depth=depth, **chosen)
        assert run.tokens == plain and found.stats(depth) == run.stats, depth
    assert generate(model, PROMPTS[1:2], depth=4, **chosen).tokens == plain[1:2]


def test_a_head_of_two_layers_is_traced_exactly(written):
    model = load_model(written("two"))
    plain = generate(model, PROMPTS, depth=0, max_new_tokens=20).tokens
    found = trace(model, PROMPTS, max_depth=3, max_new_tokens=20)
    for depth in (1, 2, 3):
        run = generate(model, PROMPTS, depth=depth, max_new_tokens=20)
        assert run.tokens == plain and run.per_prompt == found.acceptance().per_prompt(depth)


def test_a_given_output_is_read_to_the_bits_of_decoding_it(model):
    """Passes of 64 tokens and of one: what the head is given of them is the same."""
    plain = generate(model, PROMPTS, depth=0, max_new_tokens=40, ignore_eos=True).tokens
    settings = {"max_depth": 3, "max_new_tokens": 40, "ignore_eos": True, "quant_policy": "int8"}
    outputs = trace(model, PROMPTS, **settings).outputs
    given, own = trace(model, PROMPTS, output=outputs, **settings), trace(model, PROMPTS, **settings)
    assert (given.hits == own.hits).all() and given.top.tobytes() == own.top.tobytes()
    assert len(plain[0]) == 40


# files in FP8


def test_fp8_files_are_their_values(tmp_path):
    folder = write_fp8("deepseek_v3", tmp_path / "fp8")
    ckpt = open_checkpoint(folder)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(
        {n: ckpt.dequantize(n).contiguous() for n in ckpt.tensors if not n.endswith("_scale_inv")},
        plain / "model.safetensors",
    )
    config = {key: value for key, value in ckpt.config.items() if key != "quantization_config"}
    (plain / "config.json").write_text(json.dumps(config))
    mine, same = load_model(folder, activation_rounding=False), load_model(plain)
    assert torch.equal(next_logits(mine, IDS), next_logits(same, IDS))
    with torch.no_grad():
        logits = load_target(plain)(torch.tensor([IDS])).logits[0, -1]
    assert (next_logits(mine, IDS) - logits).abs().max() < TOLERANCE
    runs = [generate(each, PROMPTS, depth=2, max_new_tokens=10) for each in (mine, same)]
    assert runs[0].tokens == runs[1].tokens and runs[0].rounds == runs[1].rounds
    rounded = load_model(folder)
    assert (next_logits(rounded, IDS) - logits).abs().max() > 1e-3
    assert rounded.plan.by_name["model.layers.0.self_attn.kv_b_proj"].weight == "fp8"
    assert rounded.plan.by_name["model.layers.1.mlp.gate"].weight == "bf16"


def test_inputs_are_rounded_but_of_kv_b_proj(tmp_path):
    """transformers' model of the file's values, whose linear layers round their inputs where FP8 is. A value between
    two codes may fall to either side, so most are compared, not all."""
    folder = write_fp8("deepseek_v3", tmp_path, first_k_dense_replace=1, num_hidden_layers=1, heads=0)
    ckpt, reference = open_checkpoint(folder), load_target(tmp_path / "bf16")
    state = {name: ckpt.dequantize(name) for name in reference.state_dict()}
    reference.load_state_dict(state)
    model = load_model(folder)
    fp8 = [m.name for m in model.plan.modules if m.activation == "fp8"]
    assert len(fp8) == 8 and "model.layers.0.self_attn.kv_b_proj" in fp8

    mine = run_passes(model, IDS, [90], True)

    @torch.no_grad()
    def difference():
        return (mine - reference.model(torch.tensor([IDS])).last_hidden_state[0]).abs()

    def rounded(module, args):
        return (round_activation(args[0]),)

    plain = difference()
    for name in fp8:
        if "kv_b_proj" not in name:
            reference.get_submodule(name).register_forward_pre_hook(rounded)
    found = difference()
    reference.get_submodule("model.layers.0.self_attn.kv_b_proj").register_forward_pre_hook(rounded)
    every = difference()
    assert 20 * found.median() < min(plain.median(), every.median())


@pytest.mark.parametrize("name", ["ds-v3-ragged-mtp", "ds-ue8m0-e8m0dtype"])
def test_files_in_the_releases_layout_run(name):
    model = load_model(CHECKPOINTS / name / "ckpt")
    assert model.config.family == "DeepSeek-V3, R1, V3.1"
    plain = generate(model, PROMPTS, depth=0, max_new_tokens=10).tokens
    if name == "ds-v3-ragged-mtp":
        assert generate(model, PROMPTS, depth=2, max_new_tokens=10).tokens == plain
    else:
        assert model.draft is None
    other = load_model(CHECKPOINTS / name / "ckpt", exclude=["*.self_attn.*"])
    varied = model.with_exclusions(["*.self_attn.*"])
    assert torch.equal(next_logits(other, IDS), next_logits(varied, IDS))
    assert not torch.equal(next_logits(other, IDS), next_logits(model, IDS))


def test_other_exclusions_make_latent_attention_again(model):
    fp8 = model.with_exclusions("published", model_format="fp8")
    mine, its = (each.target.layers[0].mixer for each in (fp8, model))
    assert mine.kv_b is not its.kv_b and mine.kv_norm is its.kv_norm
    ckpt_value = model.checkpoint.dequantize("model.layers.0.self_attn.kv_b_proj.weight")
    assert torch.equal(its.kv_b.weights()[0], ckpt_value)
    assert 0 < (mine.kv_b.weights()[0] - ckpt_value).abs().max() < 0.05
    back = fp8.with_exclusions(["*.kv_b_proj", "*.mlp.*", "lm_head"])
    direct = load_model(model.checkpoint.path, model_format="fp8", exclude=["*.kv_b_proj", "*.mlp.*", "lm_head"])
    assert torch.equal(next_logits(back, IDS), next_logits(direct, IDS))
    assert torch.equal(back.target.layers[0].mixer.kv_b.weights()[0], ckpt_value)


# before anything is loaded


@pytest.mark.parametrize("fp8", [False, True])
def test_audit_names_the_family_and_finds_what_is_lost(tmp_path, fp8):
    folder = write_fp8("deepseek_v3", tmp_path / "x") if fp8 else write_deepseek_v3(tmp_path / "x")
    audit = open_checkpoint(folder).audit()
    assert not audit.at_least("warning")
    assert audit.head.complete and audit.head.family.startswith("DeepSeek-V3")
    tensors = load_file(folder / "model.safetensors")
    lost = (
        "model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts.5.down_proj", "model.layers.2.self_attn.kv_b_proj",
        "model.layers.2.mlp.shared_experts.gate_proj", "model.layers.3.shared_head.norm",
    )  # fmt: skip
    for name in lost:
        tensors.pop(f"{name}.weight")
        tensors.pop(f"{name}.weight_scale_inv", None)
    save_file(tensors, folder / "model.safetensors")
    findings = open_checkpoint(folder, lenient=True).audit().findings
    assert set(lost) <= {name for finding in findings if finding.severity == "error" for name in finding.tensors}


@pytest.mark.parametrize(("change", "said"), [
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method is 'greedy'; expected 'noaux_tc'"),
    ({"attention_bias": True}, "attention_bias is true; expected false"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2; expected 4"),
    ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15; expected an even number"),
    ({"n_group": 3}, "n_group is 3; expected"),
    ({"topk_group": 5}, "topk_group is 5; expected at most n_group, 4"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; expected at most 4"),
    ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'; expected 'default' or 'yarn'"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is missing"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 64}}, "factor is 'x'"),
    ({"rope_theta": 0.5}, "rope_theta is 0.5; expected more than 1 with yarn"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1; expected a whole number"),
])  # fmt: skip
def test_configs_that_ask_for_something_else_are_refused(written, tmp_path, change, said):
    config = json.loads((written("published") / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((written("published") / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=said.replace("(", r"\(")):
        load_model(tmp_path)
