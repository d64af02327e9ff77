"""The recipe of the bundled model: its network is Qwen3.5, its head trains under the mask that decoding has."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mtplab import open_checkpoint
from oracle import oracle, oracle_hidden

REPO = Path(__file__).resolve().parent.parent
BUNDLED = REPO / "data" / "tiny-qwen3_5"


@pytest.fixture(scope="module", autouse=True)
def recipe_on_path():
    """The recipe's modules import each other by bare name, as scripts do."""
    names = ("corpus", "tokenizer", "gdn", "network", "optim", "train", "unloop", "to_gguf")
    sys.path[:0] = [str(REPO / "data" / "recipe"), str(REPO / "data" / "recipe" / "peers")]
    yield
    del sys.path[:2]
    for name in names:
        sys.modules.pop(name, None)


def bundled_network():
    import network

    checkpoint = open_checkpoint(BUNDLED)
    net = network.Network(network.read_config())
    state = {n.replace("model.language_model.", "model."): checkpoint.dequantize(n) for n in checkpoint.tensors}
    net.load_state_dict(state, strict=True)
    return net


def random_ids(b: int, t: int) -> torch.Tensor:
    return torch.randint(1, 2048, (b, t), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_network_is_transformers_qwen35():
    net, ids = bundled_network(), random_ids(1, 150)
    hidden, logits = oracle_hidden(oracle(BUNDLED), ids[0].tolist())
    ours = net.model(ids)[0]
    torch.testing.assert_close(ours, hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(net.logits(ours), logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_parameters_are_the_tensors_on_disk():
    import network

    names = {n.replace("model.language_model.", "model.") for n in open_checkpoint(BUNDLED).tensors}
    assert set(network.Network(network.read_config()).state_dict()) == names


@pytest.mark.parametrize("t", [1, 31, 32, 97])
def test_chunked_rule_equals_the_recurrence(t):
    from gdn import gated_delta_rule, unit

    g = torch.Generator().manual_seed(t)
    q, k = (torch.randn(2, t, 2, 8, generator=g, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, t, 4, 6, generator=g, dtype=torch.float64)
    decay = -torch.rand(2, t, 4, generator=g, dtype=torch.float64) * 3
    beta = torch.rand(2, t, 4, generator=g, dtype=torch.float64)
    got = gated_delta_rule(q, k, v, decay, beta)
    qn, kn = unit(q) * 8**-0.5, unit(k)
    for b in range(2):
        for h in range(4):
            state = torch.zeros(8, 6, dtype=torch.float64)
            for i in range(t):
                key = kn[b, i, h // 2]
                state = state * decay[b, i, h].exp()
                state = state + torch.outer(key, (v[b, i, h] - key @ state) * beta[b, i, h])
                torch.testing.assert_close(got[b, i, h], qn[b, i, h // 2] @ state, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_head_sees_what_decoding_sees():
    """Step j at slot t, all slots at once, equals a chain decoded alone from the window cut at that slot."""
    net, ids = bundled_network(), random_ids(1, 44)
    hidden, embedded = net.model(ids[:, :40]), net.model.embed_tokens(ids)
    steps = net.mtp(hidden, embedded, 3)
    for slot in (0, 7, 25):
        alone = net.mtp(hidden[:, : slot + 1], embedded[:, : slot + 4], 3)
        for whole, cut in zip(steps, alone, strict=True):
            torch.testing.assert_close(whole[:, slot], cut[:, slot], atol=2e-5, rtol=1e-4)


def test_bf16_gemms_round_but_do_not_stray():
    import network

    x, w = torch.randn(5, 64), torch.randn(48, 64, requires_grad=True)
    y = network._Matmul16.apply(x, w)
    exact = x @ w.t()
    assert not torch.equal(y, exact)
    assert (y - exact).norm() < 0.02 * exact.norm()
    y.sum().backward()
    assert (w.grad - x.sum(0)).norm() < 0.02 * x.sum(0).norm() * 48**0.5


def test_muon_update_is_nearly_orthogonal():
    from optim import orthogonalise

    for shape in ((64, 96), (96, 64)):
        s = torch.linalg.svdvals(orthogonalise(torch.randn(*shape)))
        assert s.min() > 0.6 and s.max() < 1.3


def test_windows_cover_an_epoch_and_resume():
    from train import WINDOW, Windows

    source = Windows(np.arange(WINDOW * 9, dtype=np.uint16), WINDOW + 4, seed=1)
    count = len(source.starts)
    first = [source.next() for _ in range(count + 3)]
    assert len({int(w[0]) for w in first[:count]}) == count
    again = Windows(source.tokens, WINDOW + 4, seed=1)
    again.at(1, 0)
    np.testing.assert_array_equal(again.next(), first[count])
    place = (source.epoch, source.index)
    following = source.next()
    again.at(*place)
    np.testing.assert_array_equal(again.next(), following)


def test_soft_cross_entropy_matches_autograd():
    from train import SoftCrossEntropy

    logits = torch.randn(6, 11, requires_grad=True)
    p = torch.randn(6, 11).softmax(-1)
    SoftCrossEntropy.apply(logits, p).mul(2).backward()
    ours, logits.grad = logits.grad, None
    (F.cross_entropy(logits, p) * 2).backward()
    torch.testing.assert_close(ours, logits.grad)


@pytest.mark.parametrize("phase", ["trunk", "head"])
def test_a_few_steps_lower_the_loss(phase):
    import network
    from optim import make_optimizers, set_rate
    from train import DEPTH, RATES, WINDOW, losses

    torch.manual_seed(0)
    net = network.Network(network.read_config())
    if phase == "head":
        net.model.requires_grad_(False)
    frozen = net.model.layers[0].mlp.up_proj.weight.clone()
    ids = random_ids(1, 8).repeat(1, 40)[:, : WINDOW + 1 + DEPTH]  # a pattern that can be learnt at once
    optimizers = make_optimizers({n: p for n, p in net.named_parameters() if p.requires_grad}, *RATES[phase])
    set_rate(optimizers, 0.5)
    values = []
    for _ in range(4):
        total, _ = losses(net, ids, phase, progress=0.5)
        for optimizer in optimizers:
            optimizer.zero_grad()
        total.backward()
        for optimizer in optimizers:
            optimizer.step()
        values.append(total.item())
    assert values[-1] < values[0] - 0.01
    assert torch.equal(frozen, net.model.layers[0].mlp.up_proj.weight) == (phase == "head")


def test_repeats_are_tokens_that_complete_a_4_gram_again():
    from unloop import repeated

    assert repeated([1, 2, 3, 4, 9, 1, 2, 3, 4, 5], start=5) == [False, False, False, True, False]
    assert repeated([7] * 6, start=0) == [False, False, False, False, True, True]


def test_unlikelihood_lowers_marked_tokens_only():
    from unloop import unlikelihood

    net, texts = bundled_network(), random_ids(2, 60)
    marks = torch.zeros(2, 60, dtype=torch.bool)
    assert unlikelihood(net, texts, marks) == 0
    marks[0, 20:30] = True

    def probability() -> torch.Tensor:
        return net.logits(net.model(texts[:, :-1])).softmax(-1).gather(-1, texts[:, 1:, None])[0, 19:29].sum()

    before = probability()
    unlikelihood(net, texts, marks).backward()
    with torch.no_grad():
        for p in net.model.parameters():
            p -= 0.05 * p.grad / (p.grad.norm() + 1e-12)
    assert probability() < before


def test_continuations_are_greedy_and_marked():
    from unloop import NEW_TOKENS, PROMPT_TOKENS, continuations, repeated

    net, prompts = bundled_network(), random_ids(2, PROMPT_TOKENS).tolist()
    texts, marks = continuations(net, prompts)
    assert texts.shape == marks.shape == (2, PROMPT_TOKENS + NEW_TOKENS)
    assert texts[:, :PROMPT_TOKENS].tolist() == prompts and not marks[:, :PROMPT_TOKENS].any()
    assert marks[1, PROMPT_TOKENS:].tolist() == repeated(texts[1].tolist(), PROMPT_TOKENS)
    with torch.no_grad():
        likeliest = net.logits(net.model(texts))[:, PROMPT_TOKENS - 1 : -1].argmax(-1)
    assert (likeliest == texts[:, PROMPT_TOKENS:]).float().mean() > 0.98  # the rest: near ties


def test_rate_warms_up_and_ends_at_zero():
    from train import rate

    assert rate("trunk", 0.1, 0) < rate("trunk", 0.1, 5) < rate("trunk", 0.1, 100) == 1
    assert rate("trunk", 0.7, 900) == pytest.approx(0.5)
    assert rate("head", 1.01, 900) == 0


def test_tokenizer_is_byte_level_and_ends_with_eos():
    from corpus import Document
    from tokenizer import EOS, encode, train_tokenizer

    tok = train_tokenizer(["the cat and the hat\n" * 50])
    assert tok.token_to_id(EOS) == 0
    odd = "naïve\t☃\n\n  x = 1"
    assert tok.decode(tok.encode(odd).ids) == odd
    arrays = encode(tok, [Document("docs", "a", "the hat", False), Document("docs", "b", "cat", True)])
    assert arrays["train_docs"][-1] == 0 and arrays["held_docs"][-1] == 0 and not len(arrays["train_python"])


def test_held_out_split_is_a_rule(monkeypatch, tmp_path):
    import corpus

    pairs = [(f"s{i}", "t" * 300) for i in range(50)]
    monkeypatch.setattr(corpus, "fetch", lambda folder: folder)
    for name in ("scripture", "documentation"):
        monkeypatch.setattr(corpus, name, lambda root: iter(pairs))
    monkeypatch.setattr(corpus, "standard_library", lambda: iter(pairs))
    held = [d.source for d in corpus.documents(tmp_path) if d.held_out and d.corpus == "docs"]
    assert held == ["s8", "s32"]


def test_gguf_names_and_value_head_order():
    from to_gguf import read, rename, tile

    np.testing.assert_array_equal(tile(np.arange(8), 0, 2, 2), [0, 1, 4, 5, 2, 3, 6, 7])
    config = open_checkpoint(BUNDLED).config
    tensors = read(BUNDLED / "model.safetensors")
    made = dict(rename(name, x, config) for name, x in tensors.items())
    assert len(made) == len(tensors)
    fc = open_checkpoint(BUNDLED).dequantize("mtp.fc.weight").numpy()
    np.testing.assert_array_equal(made["blk.4.nextn.eh_proj.weight"], fc)
    norm = next(x for n, x in tensors.items() if n.endswith("layers.0.input_layernorm.weight"))
    np.testing.assert_array_equal(made["blk.0.attn_norm.weight"], norm + 1)
    out = next(x for n, x in tensors.items() if n.endswith("layers.0.linear_attn.out_proj.weight"))
    np.testing.assert_array_equal(made["blk.0.ssm_out.weight"][:, 64:128], out[:, 128:192])


def test_a_step_down_is_clipped_and_scaled():
    """On loss = 3x + 4y the gradient is (3, 4): norm 5, clipped to (0.6, 0.8); SGD then moves by rate times that."""
    from optim import descend

    params = [torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(()))]
    frozen = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    sgd = torch.optim.SGD(params, lr=9.0)
    for group in sgd.param_groups:
        group["base"] = 0.5
    for times in (1, 2):
        norm = descend([sgd], [*params, frozen], 3 * params[0] + 4 * params[1], 0.2)
        assert norm == pytest.approx(5.0)
        assert [p.item() for p in params] == pytest.approx([-0.06 * times, -0.08 * times], rel=1e-4)
    assert frozen.item() == 1.0
