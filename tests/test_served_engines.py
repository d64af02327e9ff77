"""What real vLLM and llama.cpp servers answered to a sweep, given to the sweep again: the rows are those that came of
the engines then, and each difference from our own rounds has its reason.

`tests/peers/served_*.json` are recorded by `python -m mtplab.bench engines --record` (`note` and docs/engines.md say
how). The engines themselves are run by the last test, where they are installed.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest

from mtplab import load_model, sweep, trace
from mtplab.bench.__main__ import main
from mtplab.bench.engines.command import launch_of, recorded_row
from mtplab.bench.engines.heard import Ear, Heard
from mtplab.bench.engines.judged import judge
from mtplab.bench.engines.likely import emitted_of_counts
from mtplab.bench.peers import environments
from mtplab.bench.peers.environments import PEERS
from mtplab.bench.peers.rounds import walk
from mtplab.engines import Attach, Launch, Limits
from mtplab.engines.client import Exchange
from mtplab.engines.engine import Wanted
from mtplab.engines.registry import engine_of
from mtplab.errors import MtplabError
from mtplab.study.row import ResultRow
from replay_engine import ReplayEngine

RECORDED = Path(__file__).parent / "peers"
ENGINES = ("vllm", "llamacpp")


@pytest.fixture(scope="module")
def model(bundled):
    return load_model(bundled)


@pytest.fixture(scope="module")
def in_bf16(bundled):
    return load_model(bundled, dtype="bfloat16")


def recorded(name: str) -> dict:
    return json.loads((RECORDED / f"served_{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def replays(bundled, tmp_path_factory):
    """Rows by engine."""
    return {name: replayed(bundled, tmp_path_factory.mktemp(name), name, recorded(name)) for name in ENGINES}


def replayed(bundled, folder: Path, name: str, kept: dict) -> list[ResultRow]:
    """The sweep's rows from servers that answer as the engine did."""
    limits, rows = Limits(concurrency=1 if name == "llamacpp" else 8, attempts=1), []
    for heard in map(Heard.from_json, kept["depths"]):
        with ReplayEngine(heard, engine_of(name).metrics_path) as server:
            result = sweep(
                bundled,
                kept["prompts"],
                [heard.depth],
                max_new_tokens=kept["tokens"],
                ignore_eos=True,
                engine=Attach(addresses=(server.url,), limits=limits),
                results=folder / str(heard.depth),
            )
        assert not server.wrong and server.answered == len(kept["prompts"])
        rows += result.rows
    return rows


def judged(model, in_bf16, name: str, kept: dict, rows: list[ResultRow]):
    heard = [Heard.from_json(each) for each in kept["depths"]]
    deepest = max(each.depth for each in heard)
    ours = trace(model, kept["prompts"], deepest, max_new_tokens=kept["tokens"], ignore_eos=True, exact=True)
    engine, float32 = engine_of(name), name == "llamacpp"
    return judge(engine, heard, rows, model, in_bf16, kept["prompts"], ours, float32, kept["leads"])


@pytest.mark.parametrize("name", ENGINES)
def test_a_recorded_engine_gives_its_rows_again(replays, name):
    kept = recorded(name)
    rows = replays[name]
    assert [recorded_row(row) for row in rows] == kept["rows"]
    assert [row.depth for row in rows] == [0, 1, 2, 3, 4] and all(row.engine == name for row in rows)
    assert all(row.rounds < row.tokens and None not in row.per_position for row in rows[1:])


@pytest.mark.parametrize("name", ENGINES)
def test_every_difference_has_its_reason(replays, model, in_bf16, name):
    kept = recorded(name)
    rows = replays[name]
    found = judged(model, in_bf16, name, kept, rows)
    assert not found.faults and found.unexplained == 0
    for depth, row in zip(found.compared.depths, rows[1:], strict=True):
        assert depth.theirs.rounds == row.rounds and depth.theirs.accepted == row.accepted
        assert depth.theirs.accepted > 0.5 * depth.theirs.rounds
    if name == "llamacpp":
        assert found.compared.tie < 0.01
        assert all(depth.equal_texts == len(kept["prompts"]) for depth in found.compared.depths)
    else:
        assert found.compared.behind or found.compared.drafts, "BF16 parts somewhere"


@pytest.mark.parametrize("name", ENGINES)
def test_a_wrong_token_and_a_wrong_count_are_seen(replays, model, in_bf16, name):
    kept = recorded(name)
    rows = replays[name]
    spoilt = copy.deepcopy(kept)
    for each in spoilt["depths"][1:]:
        answer = each["completions"][0][1]
        ids = answer["tokens"] if name == "llamacpp" else answer["choices"][0]["token_ids"]
        ids[7] = (ids[7] + 1) % 2048
    found = judged(model, in_bf16, name, spoilt, rows)
    assert any("texts, row and answers" in fault for fault in found.faults)
    assert any(not token.tie and token.at == 7 for token in found.compared.behind)
    if kept["leads"] is not None:
        spoilt["leads"][0][3] += 0.5
        found = judged(model, in_bf16, name, spoilt, rows)
        assert "its margins lie up to 0.5" in found.faults[0], "else anything would be a near-tie"
    # one draft less accepted than its server counted
    row = rows[3]
    other = row.model_copy(update={"accepted": row.accepted - 1})
    found = judged(model, in_bf16, name, kept, [*rows[:3], other, *rows[4:]])
    assert [fault.partition(":")[0] for fault in found.faults] == ["depth 3"]


def test_metrics_that_no_rounds_can_give_are_a_fault(replays, model, in_bf16):
    kept = recorded("llamacpp")
    rows = replays["llamacpp"]
    name = 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="%d"} '
    for n, text in kept["depths"][2]["looks"].items():
        if int(n):
            lines = text.splitlines()
            for j, more in ((0, 1), (1, -1)):
                at = next(i for i, line in enumerate(lines) if line.startswith(name % j))
                lines[at] = f"{name % j}{int(float(lines[at].rsplit(' ', 1)[1])) + more}"
            kept["depths"][2]["looks"][n] = "\n".join(lines) + "\n"
    found = judged(model, in_bf16, "llamacpp", kept, rows)
    assert any("no way through its text" in fault for fault in found.faults)


def test_rounds_are_found_from_counts_by_position():
    rng = np.random.default_rng(5)
    hits = np.cumprod(rng.random((40, 3)) < 0.7, 1).astype(bool)
    nowhere = np.zeros_like(hits)
    ours = walk(hits, 3)
    counts = [sum(each > j for each in ours) for j in (1, 2, 3)]
    assert emitted_of_counts(hits, nowhere, counts) == ours
    assert emitted_of_counts(hits, nowhere, [counts[0] - 1, *counts[1:]]) is None
    # a draft that could go either way, and did: no other way has the counts of that
    ties = nowhere.copy()
    for slot in (at for at in np.cumsum([0, *ours[:-1]]).tolist() if hits[at, 0]):
        other = hits.copy()
        other[slot] = False
        theirs = walk(other, 3)
        theirs_counts = [sum(each > j for each in theirs) for j in (1, 2, 3)]
        if theirs_counts != counts:
            break
    ties[slot, 0] = True
    assert emitted_of_counts(hits, ties, theirs_counts) == theirs != ours
    assert emitted_of_counts(hits, nowhere, theirs_counts) is None
    assert emitted_of_counts(hits, ties, counts) == ours


def test_what_was_asked_twice_or_not_at_all_is_no_record():
    engine = engine_of("vllm")
    ear = Ear(engine, [0])
    answer = {"choices": [{"text": "x", "token_ids": [1]}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    ear(Exchange("http://x", engine.completions_path, {"prompt": [5]}, 200, json.dumps(answer)))
    ear(Exchange("http://x", engine.completions_path, {"prompt": [6]}, 503, "later"))
    assert ear.heard[0].answers(engine, [[5]])[0].ids == (1,)
    with pytest.raises(MtplabError, match="1 completions of 1 prompts were heard; expected one of each of 2"):
        ear.heard[0].answers(engine, [[5], [6]])


def test_engines_that_are_not_installed_are_named_and_left_out(tmp_path, capsys):
    assert main(["engines", "--environments", str(tmp_path), "--work", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "llama.cpp is not installed" in out and "vLLM is not installed" in out and "make engines" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_real_engine(repo, tmp_path, name, capsys):
    """Started, swept at two depths and held against ours; `make engines` does it at five."""
    folder = environments.environments_folder(None, repo)
    if environments.python_of(PEERS[name], folder) is None:
        pytest.skip(f"{PEERS[name].title} is not installed in {folder / name}: make engines")
    given = ["engines", "--engine", name, "--depths", "0,3", "--prompts", "4", "--tokens", "40"]
    assert main([*given, "--work", str(tmp_path), "--peers", str(tmp_path / "peers")]) == 0
    assert "failed or unexplained: 0" in capsys.readouterr().out


def test_vllm_is_started_by_its_module_too():
    """`vllm serve` takes the model by place, the module behind it by an option."""
    wanted = Wanted("/m", None, 2, "none", "none", 100)
    for command, first in (
        (None, ["/m"]),
        (("/there/vllm", "serve"), ["/m"]),
        (("python", "-m", "vllm.entrypoints.openai.api_server"), ["--model", "/m"]),
    ):
        words = engine_of("vllm").arguments(wanted, Launch(engine="vllm", command=command), "name", 1)
        assert words[: words.index("--served-model-name")] == first


def test_an_engine_is_started_with_one_thread_and_its_own_environment(bundled, tmp_path):
    settings = launch_of("vllm", Path("/there/bin/python"), bundled.parent, tmp_path)
    assert settings.command[0] == "/there/bin/python" and Path(settings.command[1]).is_file()
    assert "bfloat16" in settings.arguments and os.path.basename(settings.command[1]) == "serve_vllm.py"
