"""Mixtures of experts: against transformers, bit by bit over batches, however files hold the experts."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from mtplab import CheckpointError, generate, load_model, open_checkpoint, trace
from mtplab.checkpoint.write import write_safetensors
from mtplab.decode.peek import next_logits
from mtplab.kernels import launch
from mtplab.kernels.gemm_grouped import route
from mtplab.models.mixture import Mixture
from mtplab.models.spec import MixtureSpec
from mtplab.quant.block import quantize_block
from mtplab.quant.experts import GroupedExperts, LoopedExperts, make_experts
from mtplab.quant.linear import LinearWeight
from test_models import run_passes
from tiny import DEFAULTS, MIXTURE, stacked, tiny_tensors, write_tiny

TOLERANCE = 1e-4
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A tiny checkpoint with its experts one by one, as FP8 releases have them."""
    return write_tiny(tmp_path_factory.mktemp("single") / "m", spread=4.0, **MIXTURE)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """The same weights stacked, as transformers writes them."""
    return write_tiny(tmp_path_factory.mktemp("stack") / "m", spread=4.0, stack=True, **MIXTURE)


@pytest.fixture(scope="module")
def oracle(stack):
    """transformers' model with every weight of the target, strictly."""
    ckpt = open_checkpoint(stack)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**ckpt.config)).float().eval()
    model.load_state_dict({name: ckpt.dequantize(name) for name in ckpt.tensors if not name.startswith("mtp.")})
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("splits", [[90], [60] + [1] * 30, [64, 5, 1, 9, 11]], ids=["prefill", "decode", "mixed"])
def test_target_equals_transformers(single, oracle, splits, exact):
    ids = torch.randint(0, 16, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        out = oracle.model(torch.tensor([ids])).last_hidden_state[0]
        logits = oracle.lm_head(out)
    model = load_model(single)
    mine = run_passes(model, ids, splits, exact)
    assert (mine - out).abs().max() < TOLERANCE
    with torch.inference_mode():
        assert (model.target.logits(mine) - logits).abs().max() < TOLERANCE


def test_ragged_batch_decodes_as_transformers(single, oracle):
    run = generate(load_model(single), PROMPTS, depth=3, max_new_tokens=24)
    for prompt, tokens in zip(PROMPTS, run.tokens, strict=True):
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert tokens == out[0, len(prompt) :].tolist()


def test_stacked_and_single_files_are_one_model(single, stack):
    one, other = load_model(single), load_model(stack)
    assert torch.equal(next_logits(one, PROMPTS[2]), next_logits(other, PROMPTS[2]))
    for settings in ({"exclude": None}, {"exclude": ["*.mlp.experts*"]}, {"exclude": "none"}):
        a, b = (load_model(path, model_format="fp8", **settings) for path in (single, stack))
        assert torch.equal(next_logits(a, PROMPTS[2]), next_logits(b, PROMPTS[2])), settings
    kept = load_model(stack, model_format="fp8", exclude=["*.mlp.experts*"])
    rounded = load_model(stack, model_format="fp8")
    assert not torch.equal(next_logits(kept, PROMPTS[2]), next_logits(rounded, PROMPTS[2]))


def test_one_expert_alone_can_be_kept_out(single):
    """Experts that are treated differently are not one rounding: their neighbours still are."""
    name = "model.layers.1.mlp.experts.3.down_proj"
    model = load_model(single, model_format="fp8", exclude=["*.mlp.gate", "lm_head", name])
    assert model.plan.by_name[name].weight == "bf16"
    assert model.plan.by_name[name.replace(".3.", ".4.")].weight == "fp8"
    varied = load_model(single, model_format="fp8").with_exclusions(["*.mlp.gate", "lm_head", name])
    assert torch.equal(next_logits(model, PROMPTS[2]), next_logits(varied, PROMPTS[2]))


def test_head_equals_an_assembly_of_transformers_layers(stack, oracle):
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

    ckpt, ids = open_checkpoint(stack), PROMPTS[2]
    config = oracle.config
    layer = theirs.Qwen3_5MoeDecoderLayer(config, config.layer_types.index("full_attention")).float().eval()
    at = "mtp.layers.0."
    layer.load_state_dict({n.removeprefix(at): ckpt.dequantize(n) for n in ckpt.tensors if n.startswith(at)})
    norm = {}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norm[name] = theirs.Qwen3_5MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        norm[name].load_state_dict({"weight": ckpt.dequantize(f"mtp.{name}.weight")})
    with torch.no_grad():
        hidden = oracle.model(torch.tensor([ids])).last_hidden_state
        embedded = oracle.model.embed_tokens(torch.tensor([ids[1:]]))
        both = torch.cat([norm["pre_fc_norm_embedding"](embedded), norm["pre_fc_norm_hidden"](hidden[:, :-1])], -1)
        x = F.linear(both, ckpt.dequantize("mtp.fc.weight"))
        places = torch.arange(len(ids) - 1)[None]
        rotary = oracle.model.rotary_emb(x, places)
        mask = torch.full((1, 1, len(ids) - 1, len(ids) - 1), -torch.inf).triu(1)
        out = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=places)
        expected = norm["norm"](out[0] if isinstance(out, tuple) else out)[0]
    mine = _head_hidden(load_model(stack), hidden[0], ids)
    assert (mine - expected).abs().max() < TOLERANCE


def _head_hidden(model, hidden, ids):
    from mtplab.models.passes import PassMaker
    from mtplab.quant.policy import resolve_policy

    n = len(ids) - 1
    passes = PassMaker(model.config, 256, model.dtype, model.device)
    with torch.inference_mode():
        run = passes.make(torch.arange(n)[None], n, True)
        embedded = run.gather(F.embedding(torch.tensor([ids[1:]]), model.target.embedding))
        (cache,) = model.draft_caches(1, 1, 256, resolve_policy("none"))
        out = model.draft(embedded, run.gather(hidden[None, :-1]), run, cache)[: run.rows]
        return model.draft.normed(out)


@pytest.mark.parametrize("policy", ["none", "int8", "fp8"])
@pytest.mark.parametrize("settings", [{}, {"model_format": "fp8"}, {"model_format": "fp8", "exclude": "none"}])
def test_lossless_and_traced_exactly(single, settings, policy):
    model = load_model(single, quant_policy=policy, **settings)
    plain = generate(model, PROMPTS, depth=0, max_new_tokens=20).tokens
    found = trace(model, PROMPTS, max_depth=5, max_new_tokens=20).acceptance()
    for depth in (1, 2, 5):
        run = generate(model, PROMPTS, depth=depth, max_new_tokens=20)
        assert run.tokens == plain
        assert found.stats(depth) == run.stats
    alone = [generate(model, [prompt], depth=5, max_new_tokens=20).tokens[0] for prompt in PROMPTS]
    assert alone == plain


def test_a_row_does_not_depend_on_the_rows_beside_it():
    """Every count of rows from 1 to 130, at an odd width, gives the bits that a row has alone."""
    block, hidden = _mixture(experts=16, top_k=4, hidden=72, inner=20)
    x = torch.randn(136, hidden, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = block(torch.zeros_like(x), x, 136)
        for rows in [*range(1, 20), 64, 65, 127, 130]:
            part = x[: -(-rows // 8) * 8]
            assert torch.equal(block(torch.zeros_like(part), part, rows)[:rows], whole[:rows]), rows


def _mixture(experts, top_k, hidden, inner, seed=0):
    from mtplab.models.layers import MLP
    from mtplab.quant.linear import PackedLinear

    g, cpu = torch.Generator().manual_seed(seed), torch.device("cpu")

    def weight(*shape, name="w"):
        return LinearWeight(name, (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).bfloat16().float(), False)

    def linear(*members):
        return PackedLinear(list(members), torch.float32, cpu)

    each = [(weight(inner, hidden), weight(inner, hidden), weight(hidden, inner)) for _ in range(experts)]
    shared = MLP(linear(weight(inner, hidden), weight(inner, hidden)), linear(weight(hidden, inner)))
    made = make_experts(each, torch.float32, cpu)
    router, gate = linear(weight(experts, hidden)), linear(weight(1, hidden))
    spec = MixtureSpec(experts, top_k, inner, inner, shared_gated=True)
    return Mixture(spec, router, made, shared, gate, None), hidden


def test_grouped_experts_beat_the_naive_loop():
    """Batch 32, 64 experts, 8 a token: one product an expert and part, which take most of the time, and far less of it
    than the loop over each token's experts.

    How much less hangs on how the machine's library takes to small products: 6.1 times on an AMD EPYC and 4.0 on an
    Intel Xeon (LOG.md).
    """
    block, hidden = _mixture(experts=64, top_k=8, hidden=256, inner=128)
    x = torch.randn(32, hidden, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        chosen = block.router(x)[0].softmax(-1).topk(8, -1)
        share = chosen.values / chosen.values.sum(-1, keepdim=True)
        weights = [[w for part in (up, down) for w in part.weights()] for up, down in
                   zip(block.experts._up, block.experts._down, strict=True)]  # fmt: skip

        def naive():
            out = torch.zeros_like(x)
            for token in range(len(x)):
                for expert in range(64):  # as a loop over all experts for every token does
                    for slot in (chosen.indices[token] == expert).nonzero()[:, 0].tolist():
                        gate, up, down = weights[expert]
                        mixed = F.silu(F.linear(x[token], gate)) * F.linear(x[token], up)
                        out[token] += share[token, slot] * F.linear(mixed, down)
            return out

        def grouped():
            out = torch.zeros_like(x)
            block._add_experts(out, x, share, chosen.indices)
            return out

        assert (naive() - grouped()).abs().max() < 1e-5
        sizes = [int((chosen.indices == expert).sum()) for expert in range(64)]
        parts = [(up, down, x.new_ones(n, hidden), x.new_ones(n, 128)) for up, down, n in
                 zip(block.experts._up, block.experts._down, sizes, strict=True) if n]  # fmt: skip

        def bare():
            for up, down, wide, narrow in parts:
                up.joined(wide)
                down.joined(narrow)

        times = {each: [] for each in (naive, grouped, bare)}
        for each in [naive, grouped, bare] * 7:
            began = time.process_time()  # of all threads; what others do on the machine is not in it
            each()
            times[each].append(time.process_time() - began)
    loop, ours, products = (statistics.median(found) for found in times.values())
    assert loop / ours >= 3, times
    assert ours <= 1.5 * products, times


def test_stacked_fp8_files_load(single, tmp_path):
    """FP8 stacks with a scale a block, beside which single experts hold the same codes."""
    config = DEFAULTS | MIXTURE | {"moe_intermediate_size": 128, "hidden_size": 128}
    plain = stacked(tiny_tensors(config))
    out, one = {}, {}
    for name, value in plain.items():
        if ".experts." not in name:
            out[name] = one[name] = value
            continue
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        both = [[quantize_block(rows.float()) for rows in expert.chunk(len(parts))] for expert in value]
        out[name] = torch.stack([torch.cat([q.data.view(torch.uint8) for q in row]) for row in both])
        out[name] = out[name].view(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = torch.stack([torch.cat([q.scale for q in row]) for row in both])
        for e, row in enumerate(both):
            for part, q in zip(parts, row, strict=True):
                at = f"{name.rpartition('.')[0]}.{e}.{part}.weight"
                one[at], one[f"{at}_scale_inv"] = q.data, q.scale
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    models = []
    for folder, tensors in (("stack", out), ("one", one)):
        path = write_tiny(tmp_path / folder, **(config | {"quantization_config": quantized}))
        write_safetensors(path / "model.safetensors", tensors)
        models.append(load_model(path))
    assert models[0].plan.by_name["model.layers.0.mlp.experts.gate_up_proj"].activation == "fp8"
    assert torch.equal(next_logits(models[0], PROMPTS[0]), next_logits(models[1], PROMPTS[0]))


@pytest.mark.parametrize("change", [{"num_experts_per_tok": 9}, {"num_experts": 0}, {"moe_intermediate_size": None}])
def test_sizes_that_are_none_are_refused(tmp_path, change):
    path = write_tiny(tmp_path / "m", **(MIXTURE | {"num_experts": 8}))
    text = (path / "config.json").read_text()
    import json

    (path / "config.json").write_text(json.dumps(json.loads(text) | change))
    with pytest.raises(CheckpointError, match=next(iter(change))):
        load_model(path)


def test_grouped_kernels_give_what_the_loop_gives(monkeypatch):
    """FP8 experts through the grouped kernels (in Triton's interpreter) and one by one."""
    g, cpu = torch.Generator().manual_seed(5), torch.device("cpu")

    def weight(n, k):
        return LinearWeight("e", quantize_block(torch.randn(n, k, generator=g) * k**-0.5), True)

    each = [(weight(128, 160), weight(128, 160), weight(160, 128)) for _ in range(4)]
    x = torch.randn(6, 160, generator=g)
    routing = route(torch.tensor([[0, 3], [3, 1], [0, 1], [1, 3], [3, 0], [0, 3]]), 4)
    loop = make_experts(each, torch.float32, cpu)
    assert isinstance(loop, LoopedExperts)
    assert GroupedExperts.takes(each)
    monkeypatch.setenv(launch.VARIABLE, "triton")
    grouped = make_experts(each, torch.float32, cpu)
    assert isinstance(grouped, GroupedExperts)
    difference = grouped(x, routing) - loop(x, routing)
    assert difference.abs().max() < 2e-3 * loop(x, routing).abs().max()
