"""The comparison with llama.cpp and vLLM: what their records mean, what our model makes of their texts, and processes.

The engines are not run: `tests/peers/*.json` are results that their workers wrote (`note` says by what).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mtplab import generate, load_model, trace
from mtplab.bench.__main__ import main
from mtplab.bench.peers import command, environments, launch
from mtplab.bench.peers.compare import BF16_TIE_STEPS, SLOT, bf16_step, compare, is_tie
from mtplab.bench.peers.environments import PEERS
from mtplab.bench.peers.forced import force
from mtplab.bench.peers.rounds import (
    Counts,
    Difference,
    counts_of,
    differences,
    emitted_of_chunks,
    emitted_of_steps,
    walk,
)
from mtplab.bench.peers.table import Race, counts_table, differences_table, races_table
from mtplab.decode.peek import next_logits
from mtplab.errors import ConfigError, MtplabError

RECORDED = Path(__file__).parent / "peers"
REPO = Path(__file__).resolve().parent.parent


def recorded(name: str) -> dict:
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(bundled):
    return load_model(bundled)


@pytest.fixture(scope="module")
def in_bf16(bundled):
    return load_model(bundled, dtype="bfloat16")


# rounds


def test_vllm_counts_before_the_cut():
    """Ten tokens, the first of no round: 4 + 3 + 2, the last round having accepted three drafts of which two fitted."""
    assert emitted_of_steps([3, 2, 3], 10) == [4, 3, 2]
    assert emitted_of_steps([3, 2, 1], 10) == [4, 3, 2]
    with pytest.raises(MtplabError, match="3 rounds emitted 8 tokens, of 9"):
        emitted_of_steps([3, 2, 0], 10)
    with pytest.raises(MtplabError):
        emitted_of_steps([3, 2, 3, 0], 10)


def test_llamacpps_stream_is_cut_where_its_clock_moves():
    # token, milliseconds, drafted, accepted; the last round has one token left and drafts nothing
    first = [[1, 0.0, 0, 0], [2, 1.5, 3, 2], [3, 1.5, 3, 2], [4, 1.5, 3, 2]]
    chunks = [*first, [5, 2.5, 6, 2], [6, 3.0, 6, 2], [6, 3.0, 6, 2]]
    assert emitted_of_chunks(chunks, 3, 6) == [3, 1, 1]
    with pytest.raises(MtplabError, match="3 rounds emitted 5 tokens, of 7"):
        emitted_of_chunks(chunks, 3, 8)
    with pytest.raises(MtplabError, match="holds 6 drafts"):
        emitted_of_chunks([chunks[0], chunks[4]], 3, 5)


def test_counts_leave_a_rounds_last_token_to_the_bonus():
    assert counts_of([4, 3, 1, 2], 3) == Counts(4, 6, (3, 2, 1))
    assert counts_of([4], 3) + counts_of([1], 3) == Counts(2, 3, (1, 1, 1))


def test_a_walk_over_hits_is_the_runners(model):
    """Independent of traces: rounds as `generate` recorded them."""
    ids = [model.encode("def main(argv):\n    import os"), model.encode("And it came to pass")]
    settings = {"max_new_tokens": 30, "ignore_eos": True, "exact": True}
    made = trace(model, ids, 3, **settings)
    hits = np.split(np.asarray(made.hits), 2)
    for depth in (1, 3):
        run = generate(model, ids, depth=depth, **settings)
        for p in range(2):
            assert walk(hits[p], depth) == [x.emitted for x in run.rounds if x.prompt == p]


def test_a_difference_names_the_draft():
    hits = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    assert walk(hits, 3) == [3, 3] and differences(0, [3, 3], hits, 3) == []
    # theirs stopped a draft early, and each later round is asked where it began
    assert differences(7, [2, 2, 2], hits, 3) == [Difference(7, 0, 2, True)]
    assert differences(7, [4, 2], hits, 3) == [Difference(7, 0, 3, False)]
    assert differences(7, [2, 4], hits, 3) == [Difference(7, 0, 2, True), Difference(7, 2, 2, False)]


# what our model makes of a text


def test_our_own_text_leads_everywhere(model):
    ids = [model.encode("import os"), model.encode("In the beginning")]
    made = trace(model, ids, 3, max_new_tokens=20, ignore_eos=True, exact=True)
    found = force(model, ids, made.outputs, 3)
    assert (found.target.lead >= 0).all() and (found.target.lead > 0).mean() > 0.9
    np.testing.assert_array_equal(found.hits.reshape(-1, 3), np.asarray(made.hits))
    seen = ~np.isnan(found.draft.lead)
    assert seen[..., 0].all() and np.isnan(found.draft.lead[..., 1]).any()
    np.testing.assert_array_equal(found.draft.lead[seen] > 0, found.hits[seen])


def test_a_token_that_is_not_ours_lies_behind(model):
    ids = model.encode("import os")
    text = trace(model, [ids], 1, max_new_tokens=12, ignore_eos=True, exact=True).outputs[0]
    other = [*text[:4], (text[4] + 1) % 2048, *text[5:]]
    found = force(model, [ids], [other], 1)
    logits = next_logits(model, ids + text[:4])
    assert found.rivals[0, 4] == text[4] == int(logits.argmax())
    assert found.target.lead[0, 4] == pytest.approx(float(logits[other[4]] - logits.max()), abs=1e-4)
    assert found.target.size[0, 4] == pytest.approx(float(max(logits.max(), abs(logits[other[4]]))), abs=1e-4)
    assert (found.target.lead[0, :4] > 0).all()


def test_a_step_of_bf16_is_torchs():
    for size in (0.3, 1.0, 7.99, 8.0, 12.6, 31.0):
        here = torch.tensor(size, dtype=torch.bfloat16)
        assert bf16_step(float(here)) == float(here.nextafter(torch.tensor(torch.inf, dtype=torch.bfloat16)) - here)
    assert is_tie(-0.12, 12.6, None) and not is_tie(-0.13, 12.6, None) and BF16_TIE_STEPS == 2
    assert is_tie(5e-4, 12.6, 1e-3) and not is_tie(0.12, 12.6, 1e-3)


def test_near_ties_are_as_wide_as_an_engines_leads_lie_from_ours(model, in_bf16):
    ids = [model.encode("import os")]
    made = trace(model, ids, 1, max_new_tokens=8, ignore_eos=True, exact=True)
    leads = force(model, ids, made.outputs, 1).target.lead
    leads[0, 5] += 0.004
    found = compare(model, in_bf16, ids, made, {0: (made.outputs, [])}, True, False, leads.tolist())
    assert found.tie == pytest.approx(0.004, abs=1e-5) and found.unexplained == 0 and not found.behind
    assert "margins up to 0.004\n" in differences_table("x", found, model.decode)
    assert compare(model, in_bf16, ids, made, {0: (made.outputs, [])}, True, False).tie == 1e-3


# recorded results


def against(model, in_bf16, name: str, carries: bool, texts=None):
    kept = recorded(name)
    job, outputs = kept["job"], kept["result"]["outputs"]
    depth, tokens = job["depth"], job["tokens"]
    made = trace(model, job["prompts"], depth, max_new_tokens=tokens, ignore_eos=True, exact=True)
    if "chunks" in outputs[0]:
        emitted = [emitted_of_chunks(x["chunks"], depth, tokens) for x in outputs]
    else:
        emitted = [emitted_of_steps(x["accepted"], tokens) for x in outputs]
    texts = texts or [x["ids"] for x in outputs]
    found = {depth: (texts, emitted)}
    return compare(model, in_bf16, job["prompts"], made, found, "chunks" in outputs[0], carries)


def test_llamacpp_carries_a_slot_from_request_to_request(model, in_bf16):
    """With the slot its rounds are ours to the last one; without it they are not, and no tie excuses that."""
    found = against(model, in_bf16, "llamacpp", carries=True)
    assert found.unexplained == 0 and found.drafts and {x.why for x in found.drafts} == {SLOT}
    assert found.depths[0].equal_texts == 2 and not found.partings
    assert found.depths[0].differing_prompts == (1,), "the first request finds a slot of zeros"
    assert against(model, in_bf16, "llamacpp", carries=False).unexplained == len(found.drafts)
    text = differences_table("llama.cpp", found, model.decode)
    assert SLOT in text and "differences unexplained: 0" in text


def test_vllm_parts_at_near_ties_only(model, in_bf16):
    found = against(model, in_bf16, "vllm", carries=False)
    assert found.unexplained == 0 and found.partings and found.drafts
    assert all(abs(x.lead) <= BF16_TIE_STEPS * x.step for x in found.drafts + found.partings)
    assert all(x.rival != x.token and x.depths == (3,) for x in found.partings)
    table = counts_table("vLLM", found, {3: "as told"}, 2)
    assert "mtplab on vLLM's texts" in table and "reported: as told" in table
    assert f"prompt {found.partings[0].prompt:2}, token" in differences_table("vLLM", found, model.decode)


def test_a_token_from_nowhere_is_not_excused(model, in_bf16):
    texts = [list(x["ids"]) for x in recorded("vllm")["result"]["outputs"]]
    texts[0][3] = (texts[0][3] + 1) % 2048
    found = against(model, in_bf16, "vllm", carries=False, texts=texts)
    assert found.unexplained > 0 and not found.partings[0].tie and found.partings[0].at == 3
    assert "unexplained" in differences_table("vLLM", found, model.decode)


# processes


def run(code: str, folder: Path, job: dict | None = None, seconds: float = 30) -> dict:
    return launch.run_job([sys.executable, "-c", code], job or {}, folder, "x", seconds, {})


def test_a_job_gives_its_result_and_the_time_it_took(tmp_path):
    code = "import json, sys; n = json.load(sys.stdin)['n']; json.dump({'n': n + 1}, open(sys.argv[1], 'w'))"
    found = run(code, tmp_path, {"n": 41})
    assert found["n"] == 42 and 0 < found["cpu"] <= found["wall"] * 1.1 < 33 and not list(tmp_path.glob("*.tmp"))
    with pytest.raises(MtplabError, match=r"x: ended with 3; .*which ends with: why"):
        run("print('why'); raise SystemExit(3)", tmp_path)


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({pid!r}, "w").write(str(child.pid))
time.sleep(60)
"""


def test_a_job_that_takes_too_long_leaves_nothing_behind(tmp_path):
    with pytest.raises(MtplabError, match="took more than 3 s"):
        run(PARENT.format(pid=str(tmp_path / "pid")), tmp_path, seconds=3)
    assert ends(tmp_path / "pid")


def test_nor_does_a_bench_that_is_told_to_end(tmp_path):
    pid = tmp_path / "pid"
    code = f"""
import sys
from pathlib import Path
from mtplab.bench.peers.launch import run_job
run_job([sys.executable, "-c", {PARENT.format(pid=str(pid))!r}], {{}}, Path({str(tmp_path)!r}), "x", 60, {{}})
"""
    bench = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(REPO)})
    try:
        for _ in range(600):
            if pid.is_file() and pid.read_text():
                break
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(30) == 128 + signal.SIGTERM
    finally:
        bench.kill()
    assert ends(pid)


def ends(file: Path) -> bool:
    """Whether the process whose id is in a file is gone within five seconds."""
    pid = int(file.read_text())
    for _ in range(100):
        if not _runs(pid):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie that nobody has waited for."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.is_file() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_result_answers_its_own_job_only(tmp_path):
    keeper = launch.Keeper(tmp_path)
    assert keeper.recall("a", {"depth": 1}) is None
    keeper.keep("a", {"depth": 1}, {"n": 1})
    assert keeper.recall("a", {"depth": 1}) == {"n": 1} and keeper.recall("a", {"depth": 2}) is None
    fresh = launch.Keeper(tmp_path, fresh=True)
    assert fresh.recall("a", {"depth": 1}) is None
    fresh.keep("a", {"depth": 1}, {"n": 2})
    assert fresh.recall("a", {"depth": 1}) == {"n": 2}
    (tmp_path / "a.json").write_text("{")
    assert launch.Keeper(tmp_path).recall("a", {"depth": 1}) is None


# the command


def test_peers_that_are_not_installed_are_named_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(environments.FOLDER, raising=False)
    assert main(["peers", "--environments", str(tmp_path), "--work", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "llama.cpp is not installed" in out and "vLLM is not installed" in out and "make peers" in out
    monkeypatch.setenv(environments.FOLDER, str(tmp_path / "elsewhere"))
    assert environments.environments_folder(None, tmp_path) == tmp_path / "elsewhere"


def test_an_environment_is_there_once_its_packages_are(tmp_path):
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert environments.python_of(PEERS["vllm"], tmp_path) is None, "an installation that was interrupted"
    (tmp_path / "vllm" / ".installed").write_text("\n".join(PEERS["vllm"].requirements))
    assert environments.python_of(PEERS["vllm"], tmp_path) == python


def test_the_page_names_the_versions_that_are_installed(repo):
    page = (repo / "docs" / "peers.md").read_text(encoding="utf-8")
    for peer in PEERS.values():
        assert peer.title in page and peer.requirements[0].replace("==", " ") in page


def test_depths_are_asked_for_in_words():
    assert command.depths_of("0-8") == list(range(9)) and command.depths_of("3,0-1") == [0, 1, 3]
    for wrong in ("9", "", "x", "3-1"):
        with pytest.raises(ValueError):
            command.depths_of(wrong)
    with pytest.raises(SystemExit):
        main(["peers", "--tokens", "1"])


def test_prompts_whose_text_ends_are_left_out(model, bundled):
    texts = command.all_prompts(bundled.parent / "prompts")[:8]
    found = command.endless(model, texts, 3, 60)
    everything = [model.encode(text) for text in texts]
    whole = [len(x) for x in generate(model, everything, depth=0, max_new_tokens=60, exact=True).tokens]
    assert min(whole) < 60, "one of these ends"
    assert found == [ids for ids, n in zip(everything, whole, strict=True) if n == 60][:3]
    with pytest.raises(ConfigError, match="9 prompts were asked for"):
        command.endless(model, texts, 9, 60)


def test_a_race_is_judged_over_all_depths_only():
    race = Race("x", {0: 3.0, 1: 5.0}, 0.4, "work", 20.0, True)
    assert race.ratio == pytest.approx(20) and race.verdict == "goal 20×: met"
    assert Race("x", {0: 3.0}, 0.4, "work", 20.0, True).verdict == "goal 20×: not met"
    part = Race("x", {0: 3.0}, 0.1, "work", 20.0, False)
    assert part.verdict == "depths 0 alone"
    assert "20.0×  goal 20×: met (work)" in races_table([race, part])
