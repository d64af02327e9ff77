"""Exact arithmetic: a row is bit-equal whatever the number of rows, sequences or keys beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mtplab import load_model
from mtplab.kernels.fp8_reference import round_activation
from mtplab.models.attend import KEY_BLOCK, attend, attention_bias
from mtplab.models.delta_rule import CHUNK, delta_rule_chunked, delta_rule_step
from mtplab.models.norm import RMSNorm
from mtplab.models.passes import PassMaker
from mtplab.models.rows import by_element, pad_rows
from mtplab.quant.kv_codec import CODECS
from mtplab.quant.linear import LinearWeight, PackedLinear
from mtplab.quant.policy import resolve_policy
from tiny import write_shallow

ROWS = range(1, 129)
SOME_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 127, 128)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rows_agree(operator, x: torch.Tensor) -> None:
    """operator(x[:m]) equals the first m rows of operator(x), for every m."""
    whole = operator(x)
    # two threads on a shared machine spend their time waiting for each other
    for m in ROWS if torch.get_num_threads() == 1 else SOME_ROWS:
        assert torch.equal(operator(x[:m]), whole[:m]), f"{m} rows"


def padded(operator):
    """The operator on rows padded to a multiple of 8, as exact passes run it."""
    return lambda x: operator(pad_rows(x, -(-len(x) // 8) * 8))[: len(x)]


@pytest.mark.parametrize("k, n", [(256, 772), (512, 256), (256, 2048), (96, 40), (1000, 130)])
@pytest.mark.parametrize("rounded", [True, False], ids=["w8a8", "float"])
def test_linear_rows(k, n, rounded):
    linear = PackedLinear(
        [LinearWeight("w", torch.randn(n, k) / 16, rounded)], torch.float32, torch.device("cpu")
    )
    rows_agree(padded(lambda x: linear(x)[0]), torch.randn(2048, k))
    residual = torch.randn(2048, n)
    rows_agree(padded(lambda x: linear.add_to(residual[: len(x)], x)), torch.randn(2048, k))


@pytest.mark.parametrize("k", [256, 64, 100])
def test_elementwise_and_norm_rows(k):
    x = torch.randn(2048, k) * 4
    weight = torch.randn(k)
    rows_agree(RMSNorm(weight, 1e-6), x)
    rows_agree(padded(lambda x: F.silu(x)), x)
    rows_agree(lambda x: round_activation(x).abs(), x)  # the sign of a zero may differ


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 48])
def test_gate_rows(heads):
    """Functions whose vectorised and scalar forms differ, of as few numbers a row as there are heads, or of one."""
    x = torch.randn(2048, heads)
    rows_agree(padded(lambda x: by_element(torch.exp, by_element(F.softplus, x) * -0.5)), x)
    rows_agree(padded(lambda x: by_element(torch.sigmoid, x)), x)


@pytest.mark.parametrize("h, h_kv, d", [(4, 1, 64), (8, 2, 64), (6, 6, 32), (16, 2, 128)])
def test_attention_queries_batches_and_keys(h, h_kv, d):
    b, t, length = 5, 130, 2 * KEY_BLOCK
    q, k, v = torch.randn(b, h, t, d) / d**0.5, torch.randn(b, h_kv, length, d), torch.randn(b, h_kv, length, d)
    position = torch.arange(200, 200 + t).expand(b, -1)

    def run(n: int, queries: slice, keys: int) -> torch.Tensor:
        bias = attention_bias(position[:n, queries], torch.arange(keys), h // h_kv, torch.float32)
        return attend(q[:n, :, queries], k[:n, :, :keys], v[:n, :, :keys], bias, exact=True)

    whole = run(b, slice(None), length)
    for n in (1, 2, 3, 5, 8, 17, 64, 129):
        assert torch.equal(run(b, slice(0, n), length), whole[:, :n]), f"{n} queries"
    for n in (1, 2, 4):
        assert torch.equal(run(n, slice(None), length), whole[:n]), f"batch {n}"
    short = slice(0, KEY_BLOCK - 200)  # queries that see no key of the second block
    assert torch.equal(run(b, short, KEY_BLOCK), whole[:, short]), "one key block less"


def test_attention_equals_torch():
    q, k, v = torch.randn(2, 4, 9, 64) / 8, torch.randn(2, 2, KEY_BLOCK, 64), torch.randn(2, 2, KEY_BLOCK, 64)
    position = torch.randint(0, KEY_BLOCK, (2, 9))
    bias = attention_bias(position, torch.arange(KEY_BLOCK), 1, torch.float32)
    expected = F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), bias[:, None], scale=1.0
    )
    expected = expected.transpose(1, 2).flatten(2)
    for exact in (True, False):
        grouped = attention_bias(position, torch.arange(KEY_BLOCK), 2, torch.float32)
        torch.testing.assert_close(attend(q, k, v, grouped, exact), expected, rtol=1e-5, atol=1e-6)


def delta_inputs(n: int, t: int, d: int = 64):
    q, k = (F.normalize(torch.randn(n, t, d), dim=-1) for _ in range(2))
    return q / d**0.5, k, torch.randn(n, t, d), -torch.rand(n, t) * 0.3, torch.rand(n, t)


def steps(q, k, v, g, beta, state):
    """The recurrent form over t tokens, and the state after each."""
    outs, states = [], []
    for i in range(q.shape[1]):
        new = torch.empty_like(state)
        one = slice(i, i + 1)
        outs.append(
            delta_rule_step(
                q[:, one], k[:, one], v[:, one], g[:, i].exp().view(-1, 1, 1), beta[:, i].view(-1, 1, 1), state, new
            )
        )
        state = new
        states.append(new)
    return torch.cat(outs, 1), states


@pytest.mark.parametrize("d", [64, 32, 128])
def test_delta_rule_sequences_apart(d):
    inputs, state = delta_inputs(40, 3, d), torch.randn(40, d, d)
    whole, states = steps(*inputs, state)
    for n in (1, 2, 4, 7, 12, 33):
        part, part_states = steps(*(x[:n] for x in inputs), state[:n])
        assert torch.equal(part, whole[:n]) and torch.equal(part_states[-1], states[-1][:n]), n


def test_delta_rule_chunked_equals_recurrent():
    inputs, state = delta_inputs(6, 3 * CHUNK), torch.randn(6, 64, 64) * 0.1
    expected, states = steps(*inputs, state)
    out, after = delta_rule_chunked(*inputs, state)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, states[-1], rtol=1e-4, atol=1e-5)


def test_delta_rule_chunked_padding_and_batch_change_nothing():
    q, k, v, g, beta = delta_inputs(6, 3 * CHUNK)
    state = torch.randn(6, 64, 64)
    true = torch.arange(3 * CHUNK) < 2 * CHUNK
    out, after = delta_rule_chunked(q, k, v, g * true, beta * true, state)
    head = slice(0, 2 * CHUNK)
    short, short_after = delta_rule_chunked(*(x[:, head] for x in (q, k, v, g, beta)), state)
    assert torch.equal(short_after, after) and torch.equal(short, out[:, head])
    one, one_after = delta_rule_chunked(q[:1], k[:1], v[:1], (g * true)[:1], (beta * true)[:1], state[:1])
    assert torch.equal(one, out[:1]) and torch.equal(one_after, after[:1])


@pytest.mark.parametrize("policy", list(CODECS))
def test_cache_codec_rows(policy):
    codec = CODECS[policy]

    def through(x):
        codes, meta = codec.encode(x, torch.bfloat16)
        return codec.decode(codes, meta, torch.float32)

    rows_agree(through, torch.randn(2048, 64) * 3)


@pytest.mark.parametrize("model_format", [None, "fp8"])
def test_a_token_of_the_whole_target(bundled, tmp_path, model_format):
    """One token's hidden state is the same at m = 1 … 128 tokens of the pass, through a layer of each kind."""
    model = load_model(write_shallow(tmp_path, bundled, (0, 3)), model_format=model_format)
    ids = torch.randint(1, 2048, (1, 128), generator=torch.Generator().manual_seed(3))
    passes = PassMaker(model.config, KEY_BLOCK, model.dtype, model.device)
    policy = resolve_policy("int8")

    def hidden(t: int) -> torch.Tensor:
        caches = model.target_caches(1, KEY_BLOCK, policy)
        run = passes.make(torch.arange(t)[None], t, True)
        return model.target.logits(model.target.normed(model.target(ids[:, :t], run, caches)))[:t]

    with torch.inference_mode():
        whole = hidden(128)
        for t in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 100, 127):
            assert torch.equal(hidden(t), whole[:t]), f"{t} tokens"
