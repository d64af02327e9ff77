"""Each engine's server asked from end to end, by a server of a few lines that speaks and counts as that engine does."""

import json
import threading
from functools import reduce
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import add

import pytest

import mtplab
from mtplab.config import SamplingConfig
from mtplab.engines.attach import attach
from mtplab.engines.measured import Counts
from mtplab.engines.registry import ENGINES
from mtplab.engines.settings import Attach, Limits
from tests.engine_texts import SERVED, exposed, generated, recorded

DEPTH = 3
TRT = 'trtllm_model_config_info{a="b"} 1\ntrtllm_speculative_config_info{spec_num_tokens="3"} 1\n'


class Dialect(ThreadingHTTPServer):
    """Serves as `engine`."""

    daemon_threads = True

    def __init__(self, engine: str, depth: int = DEPTH):
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine, self.depth, self.more = engine, depth, ""
        self.lock, self.drafts, self.plain, self.tokens = threading.Lock(), [], 0, 0
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *problem):
        self.shutdown()
        super().__exit__(*problem)

    def get(self, path: str):
        """What lies there; None where nothing."""
        if path == ENGINES[self.engine].metrics_path:
            with self.lock:
                text = exposed(self.engine, self.depth, self.tokens, self.drafts)
            if self.engine in ("llamacpp", "lmdeploy") and not self.drafts:  # which have no positions before
                text = "\n".join(line for line in text.splitlines() if "per_pos" not in line) + "\n"
            idle = "llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"
            return text + {"tensorrt_llm": TRT, "llamacpp": idle}.get(self.engine, "") + self.more
        found = {"/v1/models": {"object": "list", "data": [{"id": "m"}]}}
        if self.engine == "sglang":
            found["/server_info"] = recorded("sglang")["server_info"] | {"kv_cache_dtype": "auto"}
        return found.get(path)

    def post(self, asked: dict) -> dict:
        """An answer in the engine's form, and its counts kept."""
        prompt, n = asked.get("prompt") or asked["input_ids"], asked.get("max_tokens") or asked["n_predict"]
        drafts, plain = generated(self.engine, self.depth, n, [prompt[0] % 4, prompt[1] % 4, 1])
        with self.lock:
            self.drafts, self.plain, self.tokens = self.drafts + drafts, self.plain + plain, self.tokens + n
        accepted, drafted = sum(a for _, a in drafts), sum(d for d, _ in drafts)
        histogram = [sum(a == j for _, a in drafts) for j in range(self.depth + 1)]
        ids, usage = list(range(n)), {"prompt_tokens": len(prompt), "completion_tokens": n}
        if self.engine == "lmdeploy":
            return {"text": "", "output_ids": ids, "meta_info": usage | {"finish_reason": {"type": "length"}}}
        if self.engine == "llamacpp":
            said = {"draft_n": drafted, "draft_n_accepted": accepted}
            body = {"content": "", "tokens": ids, "tokens_predicted": n, "tokens_evaluated": len(prompt)}
            return body | {"stop_type": "limit", "timings": said}
        choice, body = {"text": "", "token_ids": ids}, {"usage": usage}
        if self.engine == "vllm":
            steps = {"per_step_accepted": [a for _, a in drafts], "per_step_drafted": [d for d, _ in drafts]}
            body["metrics"] = {"speculative_decoding": steps}
        elif self.engine == "sglang":
            spec = {"spec_verify_ct": len(drafts), "spec_num_correct_drafts": accepted}
            spec |= {"spec_num_proposed_drafts": drafted, "spec_correct_drafts_histogram": histogram}
            body["sglext"] = {"spec_tokens_details": spec}
        else:
            spec = {"num_spec_steps": len(drafts), "total_accepted_draft_tokens": accepted}
            choice["speculative_decoding"] = spec | {"total_draft_tokens": drafted, "acceptance_histogram": histogram}
        return body | {"choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._give(self.server.get(self.path))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._give(self.server.post(asked) if self.path == ENGINES[self.server.engine].completions_path else None)

    def _give(self, found):
        body = (found if isinstance(found, str) else json.dumps(found)).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


def test_what_a_server_holds_is_not_what_has_no_name_there():
    with Dialect("tensorrt_llm") as server:
        server.more = 'trtllm_kv_cache_config_info{cache_dtype="nvfp4"} 1\n'
        (found,) = attach(Attach(addresses=(f"http://127.0.0.1:{server.server_address[1]}",)))
    assert found.known.quant_policy == "nvfp4" and found.contradiction("nvfp4", "none") is None
    for policy in ("int8", "none", "fp8_e4m3"):
        assert "its cache is nvfp4" in found.contradiction(policy, "none")


PROMPTS = [[p, p + 2, 5] for p in range(1, 7)]


def measured(server: Dialect, concurrency: int):
    address = f"http://127.0.0.1:{server.server_address[1]}"
    (found,) = attach(Attach(addresses=(address,), limits=Limits(concurrency=concurrency, attempts=2)))
    assert (found.engine, found.model) == (server.engine, "m")
    assert found.depth == (None if server.engine in ("llamacpp", "lmdeploy") else DEPTH)
    sampling = SamplingConfig(max_new_tokens=20, ignore_eos=True)
    return found.open(None).measure(PROMPTS, ["a", "b"] * 3, DEPTH, sampling, threading.Event(), None)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("engine", SERVED)
def test_every_engine_gives_tokens_over_steps(engine, concurrency):
    with Dialect(engine) as server:
        found = measured(server, concurrency)
    counts = reduce(add, (share.counts for share in found.shares))
    drafts = server.drafts
    assert (counts.tokens, counts.rounds) == (6 * 19, len(drafts) + server.plain)
    assert counts.drafted == sum(d for d, _ in drafts) and found.remarks == ()
    before_the_cut = tuple(sum(a > j for _, a in drafts) for j in range(DEPTH))
    if engine == "vllm":  # its answers are by step
        assert counts.accepted + counts.rounds == counts.tokens
        assert all(0 <= a - b <= 6 for a, b in zip(before_the_cut, counts.per_position, strict=True))
    else:
        assert (counts.accepted, counts.per_position) == (sum(before_the_cut), before_the_cut)
    by_themselves = engine in ("vllm", "sglang", "tensorrt_llm") or concurrency == 1
    assert len(found.shares) == (6 if by_themselves else 2)
    assert found.outputs == (tuple(range(20)),) * 6


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("engine", ["llamacpp", "lmdeploy", "sglang"])
def test_a_server_that_drafts_less_than_it_is_told_to_is_no_row_of_zeros(engine, concurrency, bundled, tmp_path):
    with Dialect(engine, depth=2) as server:
        if engine == "sglang":  # one that does not say
            said = server.get
            server.get = lambda path: None if path == "/server_info" else said(path)
        address = f"http://127.0.0.1:{server.server_address[1]}"
        settings = Attach(addresses=(address,), limits=Limits(concurrency=concurrency, attempts=1))
        asked = {"depths": [DEPTH], "max_new_tokens": 20, "ignore_eos": True, "results": tmp_path}
        (row,) = mtplab.sweep(bundled, PROMPTS, engine=settings, **asked).rows
    assert (row.depth, row.per_position, row.rounds) == (DEPTH, [], None)
    said = (
        "drafts 2 tokens a round; it was to draft 3" if engine == "llamacpp" else "drafts less a round than it was to"
    )
    assert said in row.error


@pytest.mark.parametrize("engine", SERVED)
def test_a_row_says_what_a_server_was_taken_at_its_word_for(engine, bundled, tmp_path):
    with Dialect(engine) as server:
        settings = Attach(addresses=(f"http://127.0.0.1:{server.server_address[1]}",))
        asked = {"depths": [DEPTH], "max_new_tokens": 20, "ignore_eos": True, "results": tmp_path}
        (row,) = mtplab.sweep(bundled, PROMPTS, engine=settings, **asked).rows
    silent = engine in ("llamacpp", "lmdeploy")
    assert ("how deep it drafts" in row.remark and f": depth {DEPTH}, quant_policy none" in row.remark) == silent
    assert "how its cache is stored" in row.remark and "quant_policy none" in row.remark
    own = engine in ("vllm", "llamacpp")  # which can store the draft's otherwise, and do not say so
    assert ("how its draft's cache is stored" in row.remark and "draft_quant_policy none" in row.remark) == own
    assert row.provenance["engine"]["title"] == ENGINES[engine].title


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_short_texts_of_a_server_that_shortens_drafts_are_counted(tokens, bundled, tmp_path):
    with Dialect("llamacpp") as server:
        settings = Attach(addresses=(f"http://127.0.0.1:{server.server_address[1]}",))
        asked = {"depths": [DEPTH], "max_new_tokens": tokens, "ignore_eos": True, "results": tmp_path}
        (row,) = mtplab.sweep(bundled, PROMPTS, engine=settings, **asked).rows
    assert row.error is None and row.tokens == len(PROMPTS) * (tokens - 1) and row.rounds > 0


def test_rounds_that_went_uncounted_are_said_and_nothing_is_made_of_the_rest():
    with Dialect("lmdeploy") as server:
        truly = server.post

        def forgets(asked):
            answer = truly(asked)
            with server.lock:
                del server.drafts[-4:]
            return answer

        server.post = forgets
        found = measured(server, 4)
    counts = reduce(add, (share.counts for share in found.shares))
    assert counts == Counts(6 * 19, None, None, None, None)
    assert any("did not count all rounds" in remark for remark in found.remarks)
