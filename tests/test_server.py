"""`mtplab.server`: answers are `generate`'s token for token, counters its counts, all else is refused by name."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from mtplab import __version__
from mtplab.decode import generate
from mtplab.errors import ConfigError
from mtplab.models import load_model
from mtplab.server import serve, service
from tests.server_client import GREEDY, LONG, PROMPTS, Answer, ask, metrics, raw, same, until


@pytest.fixture(scope="module")
def model(bundled):
    return load_model(bundled)


@pytest.fixture(scope="module")
def server(model):
    with serve(model, depth=3, seed=5) as running:
        yield running


@pytest.mark.parametrize("depth", [0, 3])
def test_answers_and_counters_are_those_of_generate(model, depth):
    ids = [model.encode(text) for text in PROMPTS]
    forms = [(PROMPTS[0], ids[:1]), (PROMPTS, ids), (ids[1], ids[1:]), (ids, ids)]
    asked = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3, "return_token_ids": True}
    given = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3}
    total, read, written = None, 0, 0
    with serve(model, depth=depth) as server:
        before = metrics(server)
        for prompt, same_ids in forms:
            for extra, options in ((asked, given), ({**GREEDY, "max_tokens": 9}, {"max_new_tokens": 9})):
                expected = generate(model, same_ids, depth=depth, **options)
                answer = ask(server, "/v1/completions", {"prompt": prompt, **extra})
                same(answer, expected, depth)
                lengths = sum(map(len, same_ids)), sum(map(len, expected.tokens))
                usage = {"prompt_tokens": lengths[0], "completion_tokens": lengths[1], "total_tokens": sum(lengths)}
                assert answer.json["usage"] == usage
                assert (answer.json["object"], answer.json["model"]) == ("text_completion", "tiny-qwen3_5")
                total = expected.stats if total is None else total + expected.stats
                read, written = read + lengths[0], written + lengths[1]
        after = metrics(server)
    speculation = {name: value for name, value in after.items() if "spec_decode" in name}
    prefix = "mtplab:spec_decode_num_"
    assert speculation == ({} if not depth else {
        prefix + "drafts_total": total.rounds,
        prefix + "draft_tokens_total": total.drafted,
        prefix + "accepted_tokens_total": total.accepted,
        **{f"{prefix}accepted_tokens_per_pos_total[{j}]": n for j, n in enumerate(total.accepted_per_position)},
    })  # fmt: skip
    assert after["mtplab:prompt_tokens_total"] == read and after["mtplab:generation_tokens_total"] == written
    assert after["mtplab:request_success_total"] == 2 * sum(len(same_ids) for _, same_ids in forms)
    assert after["mtplab:num_requests_running"] == after["mtplab:num_requests_waiting"] == 0
    assert not any(value for name, value in before.items() if name.startswith("mtplab:"))
    assert before["process_start_time_seconds"] == after["process_start_time_seconds"] <= time.time()


def test_defaults_are_openais_and_the_seed_the_servers(model, server):
    answer = ask(server, "/v1/completions", {"prompt": PROMPTS[0], "model": "tiny-qwen3_5", "stop": None, "n": 1})
    expected = generate(model, PROMPTS[0], depth=3, temperature=1.0, seed=5, max_new_tokens=16)
    (choice,) = answer.json["choices"]
    assert choice["text"] == expected.texts[0] and "token_ids" not in choice
    assert (choice["finish_reason"], answer.json["usage"]["completion_tokens"]) == ("length", 16)
    neutral = {"stream": False, "presence_penalty": 0.0, "repetition_penalty": 1, "top_k": -1, "user": "x", "seed": 5}
    assert ask(server, "/v1/completions", {"prompt": PROMPTS[0], **neutral}).json["choices"] == [choice]


def test_the_end_of_a_sequence_is_told(model):
    tokens = generate(model, PROMPTS[0], depth=3, max_new_tokens=16).tokens[0]
    ending = replace(model, config=replace(model.config, eos_token_ids=(tokens[6],)))
    first = tokens.index(tokens[6]) + 1
    with serve(ending, depth=3) as server:
        body = {"prompt": PROMPTS[0], **GREEDY}
        (stopped,) = ask(server, "/v1/completions", body).json["choices"]
        (through,) = ask(server, "/v1/completions", {**body, "ignore_eos": True}).json["choices"]
    assert (stopped["finish_reason"], stopped["token_ids"]) == ("stop", tokens[:first])
    assert (through["finish_reason"], through["token_ids"]) == ("length", tokens)


def test_cache_policies_are_the_servers(model):
    policies = {"quant_policy": "fp8:calibrated", "draft_quant_policy": "int4", "calibration": ["The sea was calm."]}
    expected = generate(model, PROMPTS, depth=2, max_new_tokens=12, **policies)
    with serve(model, depth=2, name="a study", **policies) as server:
        same(ask(server, "/v1/completions", {"prompt": PROMPTS, "max_tokens": 12, **GREEDY}), expected, 2)
        info = ask(server, "/server_info").json
        assert ask(server, "/v1/completions", {"prompt": "x", "model": "a study", "max_tokens": 1}).status == 200
    assert (info["model"], info["depth"], info["exact"]) == ("a study", 2, True)
    assert (info["quant_policy"], info["draft_quant_policy"]) == ("fp8_e4m3:calibrated", "int4")


def test_what_a_server_says_of_itself(bundled, model, server):
    assert ask(server, "/version").json == {"version": __version__}
    assert ask(server, "/health?again=1").status == 200
    (served,) = ask(server, "/v1/models").json["data"]
    assert (served["id"], served["object"]) == ("tiny-qwen3_5", "model")
    assert served["max_model_len"] == model.config.max_position
    info = ask(server, "/server_info").json
    assert (info["exclude"], info["model_format"]) == ("as stored", None)
    assert (info["dtype"], info["device"]) == ("float32", "cpu")
    quantised = load_model(bundled, model_format="fp8", exclude=["*.o_proj", "mtp.*"], draft_exclude="none")
    with serve(quantised, depth=0) as other:
        info = ask(other, "/server_info").json
    assert (info["exclude"], info["draft_exclude"], info["model_format"]) == ("*.o_proj, mtp.*", "none", "fp8")
    assert (info["depth"], info["draft_quant_policy"]) == (0, None)


def test_tokenize(model, server):
    found = ask(server, "/tokenize", {"prompt": PROMPTS[0]}).json
    assert (found["tokens"], found["count"]) == (model.encode(PROMPTS[0]), len(model.encode(PROMPTS[0])))
    with_special = ask(server, "/tokenize", {"prompt": PROMPTS[0], "add_special_tokens": True}).json
    assert with_special["tokens"] == model.tokenizer.encode(PROMPTS[0], add_special_tokens=True).ids
    ask(server, "/tokenize", {"prompt": ["x"]}).refused(400, "prompt is ['x']")
    ask(server, "/tokenize", {"prompt": "x", "messages": []}).refused(400, "'messages' is not understood")
    ask(server, "/tokenize", {"prompt": "x", "model": "y"}).refused(404, "model is 'y'")


def test_requests_at_once_are_each_right_and_add_up(model, server):
    texts = ["The sea", "In the beginning", "import os", "A king"]
    expected = [
        [generate(model, [text], depth=3, temperature=0.9, seed=seed, max_new_tokens=12) for text in texts]
        for seed in range(3)
    ]
    before = metrics(server)

    def client(text: str) -> list[Answer]:
        body = {"prompt": text, "temperature": 0.9, "max_tokens": 12, "return_token_ids": True}
        return [ask(server, "/v1/completions", {**body, "seed": seed}) for seed in range(3)]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(client, texts))
    for column, per_seed in enumerate(answers):
        for seed, answer in enumerate(per_seed):
            same(answer, expected[seed][column], 3)
    after = metrics(server)
    runs = [run for row in expected for run in row]
    for name, count in {
        "mtplab:request_success_total": len(runs),
        "mtplab:generation_tokens_total": sum(len(run.tokens[0]) for run in runs),
        "mtplab:spec_decode_num_drafts_total": sum(run.stats.rounds for run in runs),
        "mtplab:spec_decode_num_accepted_tokens_total": sum(run.stats.accepted for run in runs),
        "mtplab:spec_decode_num_accepted_tokens_per_pos_total[2]": sum(
            run.stats.accepted_per_position[2] for run in runs
        ),
    }.items():
        assert after[name] - before[name] == count, name


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "prompt is {}: field required"),
        ({"prompt": ""}, 400, "prompt 0 is empty"),
        ({"prompt": []}, 400, "prompt is []"),
        ({"prompt": [[1], []]}, 400, "prompt 1 is empty"),
        ({"prompt": {"text": "x"}}, 400, "prompt is {'text': 'x'}"),
        ({"prompt": 5}, 400, "prompt is 5"),
        ({"prompt": [1, "x"]}, 400, "prompt 0 is 1"),
        ({"prompt": [1, 99999]}, 400, "token id 99999; expected 0 to"),
        ({"prompt": [[1], [-1]]}, 400, "prompt 1 has token id -1"),
        ({"prompt": [True]}, 400, "prompt 0 is True"),
        ({"prompt": [[1.0]]}, 400, "prompt 0 is [1.0]"),
        ({"prompt": ["x"] * 257}, 400, "257 prompts; expected at most 256"),
        ({"prompt": "\ud800"}, 400, "half a surrogate pair"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"prompt": "x", "max_tokens": "9"}, 400, "max_tokens is '9'"),
        ({"prompt": "x", "max_tokens": True}, 400, "max_tokens is True"),
        ({"prompt": "x", "max_tokens": 10**6}, 400, "max_position_embeddings of 4096; shorten it or lower max_tokens"),
        ({"prompt": [1] * 4096}, 400, "prompt 0 has 4096 tokens"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature is -1"),
        ({"prompt": "x", "temperature": float("nan")}, 400, "temperature is nan"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p is 0"),
        ({"prompt": "x", "top_k": -2}, 400, "top_k is -2"),
        ({"prompt": "x", "seed": -1}, 400, "seed is -1"),
        ({"prompt": "x", "ignore_eos": 1}, 400, "ignore_eos is 1"),
        ({"prompt": "x", "stream": True}, 400, "stream is True; this study server takes only absent or False"),
        ({"prompt": "x", "n": 2}, 400, "n is 2; this study server takes only absent or 1"),
        ({"prompt": "x", "n": True}, 400, "n is True"),
        ({"prompt": "x", "stop": ["\x1b[2J"]}, 400, r"stop is ['\x1b[2J']"),
        ({"prompt": "x", "logprobs": 1}, 400, "logprobs is 1"),
        ({"prompt": "x", "guided_json\x1b": {}}, 400, r"'guided_json\x1b' is not understood here; expected prompt,"),
        ({"prompt": "x", "model": "gpt\x1b]0;"}, 404, r"model is 'gpt\x1b]0;'; this server has 'tiny-qwen3_5'"),
        ({"prompt": "x", "model": 1}, 400, "model is 1"),
        (b"", 400, "no body"),
        (b"{", 400, "expected JSON"),
        (b"[1]", 400, "expected a JSON object, found list"),
        (b"\xff", 400, "expected UTF-8"),
        (b'{"prompt": "x", "prompt": "y"}', 400, "occurs twice"),
        (b"[" * 200_000, 400, "nested too deep"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", 400, "expected JSON"),
        (b" " * (9 << 20), 413, "9437184 bytes; expected at most 8388608"),
    ],
    ids=lambda value: None if isinstance(value, int | str) else repr(value)[:30],
)
def test_what_a_completion_refuses(server, body, status, says):
    ask(server, "/v1/completions", body).refused(status, says)


def test_paths_methods_and_lengths(server):
    ask(server, "/v1/chat/completions", {"messages": []}).refused(404, "'/v1/chat/completions'")
    ask(server, "/%1b[2J").refused(404, "expected /v1/completions")
    for path, body, allowed in (("/v1/completions", None, "POST"), ("/health", {}, "GET"), ("/metrics", {}, "GET")):
        answer = ask(server, path, body)
        answer.refused(405, f"is asked with {allowed}")
        assert answer.headers["Allow"] == allowed
    ask(server, "/health", method="BREW").refused(405, "BREW")
    assert ask(server, "/health", method="HEAD").status == 405
    ask(server, "/tokenize", b"", **{"Content-Length": "1e3"}).refused(400, "Content-Length is '1e3'")
    ask(server, "/tokenize", b"", **{"Transfer-Encoding": "chunked"}).refused(411, "Content-Length")


def test_one_connection_carries_many_requests_and_no_http_is_refused(server):
    get = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
    found = raw(server, get % b"/version" + get % b"/nothing" + get % b"/health")
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"404", b"200"]
    assert b'"error"' in raw(server, b"\x1b[2J nonsense\r\n\r\n") and b"\x1b" not in raw(server, b"\x1b[2J a b\r\n\r\n")
    # a body that never comes whole
    assert raw(server, b"POST /tokenize HTTP/1.1\r\nContent-Length: 99\r\n\r\n{") == b""


def test_the_key_is_asked_of_whoever_wants_more_than_to_look(model):
    with serve(model, depth=1, api_key="s3cret") as server:
        for path, body in (("/v1/models", None), ("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"},
                            {"Authorization": "s3cret"}, {"Authorization": "Bearer \xe9"}):  # fmt: skip
                answer = ask(server, path, body, **headers)
                answer.refused(401, "Authorization: Bearer")
                assert answer.headers["WWW-Authenticate"] == "Bearer" and b"s3cret" not in answer.raw
            assert ask(server, path, body, Authorization="Bearer s3cret").status == 200
        for path in ("/health", "/version", "/server_info", "/metrics"):
            assert ask(server, path).status == 200


def test_a_run_that_fails_is_told_in_one_line_and_the_next_is_right(model, monkeypatch):
    def failing(*arguments, **options):
        raise RuntimeError(f"out of\nmemory \x1b[31m in /tmp/build/alloc.cpp of {model.checkpoint.path}")

    with serve(model, depth=3) as server:
        with monkeypatch.context() as patch:
            patch.setattr(service, "generate", failing)
            answer = ask(server, "/v1/completions", {"prompt": "x"})
        said = r"RuntimeError: out of memory \x1b[31m in …/alloc.cpp of tiny-qwen3_5"
        answer.refused(500, said)
        found = metrics(server)
        assert found["mtplab:request_success_total"] == found["mtplab:num_requests_running"] == 0
        expected = generate(model, PROMPTS, depth=3, max_new_tokens=5)
        same(ask(server, "/v1/completions", {"prompt": PROMPTS, "max_tokens": 5, **GREEDY}), expected, 3)


def test_without_a_tokenizer_ids_are_answered_and_no_path_is_told(model):
    with serve(replace(model, tokenizer=None), depth=1) as server:
        ask(server, "/v1/completions", {"prompt": "x"}).refused(400, "tiny-qwen3_5: no tokenizer.json")
        ask(server, "/tokenize", {"prompt": "x"}).refused(400, "no tokenizer.json")
        (choice,) = ask(server, "/v1/completions", {"prompt": [5, 6], **GREEDY}).json["choices"]
    assert choice["text"] == "" and choice["token_ids"] == generate(model, [[5, 6]], 1, max_new_tokens=16).tokens[0]


def test_clients_that_leave_cost_nothing_more(model):
    """One that is answered and one that waits: both leave, neither is counted, and who comes after is answered."""
    with serve(model, depth=1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        clients = [http.client.HTTPConnection(host, int(port)) for _ in range(2)]
        gauges = ("mtplab:num_requests_running", "mtplab:num_requests_waiting")
        for client, wanted in zip(clients, ((2, 0), (2, 2)), strict=True):
            client.request("POST", "/v1/completions", json.dumps(LONG))
            until(lambda wanted=wanted: tuple(map(metrics(server).get, gauges)) == wanted)
        for client in reversed(clients):
            client.close()
        expected = generate(model, PROMPTS[0], depth=1, max_new_tokens=5)
        same(ask(server, "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 5, **GREEDY}), expected, 1)
        until(lambda: metrics(server)["mtplab:num_requests_waiting"] == 0)
        found = metrics(server)
    assert (found["mtplab:request_success_total"], found["mtplab:generation_tokens_total"]) == (1, 5)
    assert found["mtplab:num_requests_running"] == 0


def test_leaving_the_block_ends_what_runs_and_frees_the_port(model):
    threads = threading.active_count()
    with ThreadPoolExecutor(2) as pool:
        with serve(model, depth=1) as server:
            pending = [pool.submit(ask, server, "/v1/completions", LONG) for _ in range(2)]
            until(lambda: metrics(server)["mtplab:num_requests_waiting"] == 2)
            idle = socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=5)
        for each in pending:
            each.result(timeout=10).refused(503, "the server is stopping")
        with closing(idle):
            assert idle.recv(1) == b""
    until(lambda: threading.active_count() == threads)
    with pytest.raises(ConnectionRefusedError):
        ask(server, "/health")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"depth": 17}, "depth is 17"),
        ({"quant_policy": "int3"}, "int3"),
        ({"quant_policy": "fp8:calibrated"}, "is calibrated on texts"),
        ({"seed": -1}, "seed is -1"),
        ({"name": " "}, "name is ' '"),
        ({"port": 65536}, "port is 65536"),
        ({"host": ""}, "host is ''"),
        ({"host": "192.0.2.1"}, "port 0 of 192.0.2.1 cannot be listened on"),
    ],
)
def test_a_server_that_cannot_run_is_refused_before_it_listens(model, options, says):
    with pytest.raises(ConfigError, match=re.escape(says)), serve(model, **options):
        pass
