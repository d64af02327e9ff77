"""A sweep on servers gives the rows that the same sweep gives here; what goes wrong with one is one point's failure.

`fake_engine` counts as vLLM does and drafts as `study_fakes`' runner does, and `mtplab serve` is the runner itself.
"""

import concurrent.futures
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import mtplab
import study_fakes as fakes
from fake_engine import FakeEngine, rounds_of
from mtplab.engines import Attach, Launch, Limits
from mtplab.errors import ConfigError, MtplabError
from mtplab.report.row_facts import row_facts
from mtplab.study import engine_commands, read_rows
from mtplab.study.planned import plan_sweep
from mtplab.study.store import PointStore

PROMPTS = [[1, 2, 3], [4, 5], [6]]
TOKENS = 20
QUICK = Limits(request=5.0, point=30.0, attempts=2)
MODEL = Path(__file__).resolve().parent.parent / "data" / "tiny-qwen3_5"


def own(seed: str) -> Launch:
    """`mtplab serve`, told from others' by a seed that greedy decoding does not look at."""
    command = (sys.executable, "-m", "mtplab.cli", "serve")
    return Launch(engine="mtplab", command=command, arguments=("--seed", seed), limits=QUICK)



@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    found = fakes.make_checkpoint(tmp_path / "fake")
    monkeypatch.setattr("mtplab.checkpoint.open_checkpoint", lambda path: found)
    return found


def swept(checkpoint, folder, *engines, **settings):
    engine = Attach(addresses=tuple(each.url for each in engines), limits=settings.pop("limits", QUICK))
    arguments = {"depths": [0, 3], "max_new_tokens": TOKENS} | settings
    return mtplab.sweep(checkpoint, PROMPTS, engine=engine, results=folder, **arguments)


def test_rows_of_attached_servers(checkpoint, tmp_path):
    with FakeEngine(0) as plain, FakeEngine(3, own=True) as drafting:
        told = []
        found = swept(checkpoint, tmp_path / "r", plain, drafting, temperature=[0, 0.5], on_progress=told.append)
    rounds = rounds_of(TOKENS, 3)
    assert [(row.temperature, row.depth) for row in found] == [(0, 0), (0, 3), (0.5, 0), (0.5, 3)]
    assert (found.computed, found.reused, found.failed, found.notes) == (4, 0, [], [])
    assert (told[-1].done, told[-1].total) == (4, 4)
    zero, deep = found.rows[:2]
    assert (deep.engine, deep.method, deep.error) == ("vllm", "run", None)
    assert (deep.tokens, deep.rounds) == (3 * (TOKENS - 1), 3 * len(rounds))
    assert deep.acceptance_length == pytest.approx(deep.tokens / deep.rounds)
    assert len(deep.per_position) == len(deep.conditional) == 3
    assert deep.conditional[1] == pytest.approx(deep.per_position[1] / deep.per_position[0])
    assert (zero.rounds, zero.acceptance_length, zero.per_position) == (zero.tokens, 1.0, [])
    # what it does not export is missing, and where it is does not get out
    assert (deep.target_weight_bytes, deep.kv_bytes_per_token, deep.kl) == (None, None, None)
    written = (tmp_path / "r" / "rows.jsonl").read_text()
    assert drafting.url not in written and str(tmp_path) not in written
    assert deep.provenance["engine"]["version"] == "0.32.0"
    assert next(iter(deep.by_domain.values())).prompt_rounds == [len(rounds)] * 3
    assert "engine vllm" in found.to_table().splitlines()[0]


def test_what_is_on_disk_is_not_asked_again_and_a_failure_is(checkpoint, tmp_path):
    with FakeEngine(3, fault=lambda engine, number, handler: handler.send(500, "no") or True) as engine:
        bad = swept(checkpoint, tmp_path, engine, depths=[3])
        assert "status 500" in bad.failed[0].error
        engine.fault = None
        assert swept(checkpoint, tmp_path, engine, depths=[3]).computed == 1
        asked = engine.begun
        again = swept(checkpoint, tmp_path, engine, depths=[3])
        assert (again.reused, again.computed, engine.begun) == (1, 0, asked)
    embedded = mtplab.sweep(
        checkpoint, PROMPTS, depths=[3], max_new_tokens=TOKENS, results=tmp_path, load_model=fakes.load_model,
        generate=fakes.generate,
    )  # fmt: skip
    assert embedded.computed == 1  # another point
    assert {row.engine for row in read_rows(tmp_path)} == {None, "vllm"}


def test_what_a_measurement_must_say_of_itself_is_in_its_row(checkpoint, tmp_path):
    """Fresh and read back, by whichever name the point is asked for, and where people look."""

    def stranger(engine, number, handler):
        engine.count(7, 30)
        return False

    limits = QUICK.model_copy(update={"attempts": 1})
    told = []
    with FakeEngine(3, fault=stranger) as engine:
        for _ in range(2):
            found = swept(checkpoint, tmp_path, engine, depths=[3], limits=limits, on_row=told.append)
            (row,) = found.rows
            assert "other traffic on the server" in row.caveat and "other traffic" not in row.remark
            assert "other traffic on the server" in found.to_table() and "depth 3: other traffic" in found._repr_html_()
            assert "other traffic on the server" in row_facts(found.rows)["To be known"]
    assert [row.caveat for row in told] == [row.caveat] * 2 and found.reused == 1


def points(checkpoint, folder, *launches):
    """The point of each launch, planned and not started."""
    found = []
    for launch in launches:
        asked = {"model_or_path": checkpoint, "prompts": PROMPTS, "depths": [3], "engine": launch, "results": folder}
        bound = inspect.signature(mtplab.sweep).bind(**asked)
        bound.apply_defaults()
        (unit,) = plan_sweep(SimpleNamespace(**bound.arguments), starts=False).units
        found.append(unit.config)
    return found


def test_what_gives_other_numbers_is_another_point_and_what_does_not_is_none(checkpoint, tmp_path):
    for name, content in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        (tmp_path / f"{name}.gguf").write_bytes(content)
    cpp = [Launch(engine="llamacpp", served=str(tmp_path / f"{name}.gguf")) for name in "abc"]
    vllm = [
        Launch(engine="vllm"),
        Launch(engine="vllm", command=("/somewhere/vllm", "serve")),
        Launch(engine="vllm", command=("vllm", "serve", "--dtype", "float32")),
        Launch(engine="vllm", arguments=("--chat-template", "/srv/one/a.jinja")),
        Launch(engine="vllm", arguments=("--chat-template", "/srv/two/a.jinja")),
        Launch(engine="vllm", tp=2),
        Launch(engine="vllm", limits=Limits(concurrency=1)),
    ]
    a, b, c = (each.hash() for each in points(checkpoint, tmp_path / "r", *cpp))
    assert a == c != b  # by what is in the file
    found = points(checkpoint, tmp_path / "r", *vllm)
    hashes = [each.hash() for each in found]
    assert hashes[0] == hashes[1] and len(set(hashes)) == len(hashes) - 1
    assert "/srv" not in json.dumps([each.settings() for each in found])


def test_rows_of_another_version_of_the_engine_are_not_taken_for_this_ones(checkpoint, tmp_path, monkeypatch):
    with FakeEngine(3) as engine:
        assert swept(checkpoint, tmp_path, engine, depths=[3]).computed == 1
        assert swept(checkpoint, tmp_path, engine, depths=[3]).reused == 1
        monkeypatch.setattr("fake_engine.VERSION", "0.33.0")
        again = swept(checkpoint, tmp_path, engine, depths=[3])
    assert again.computed == 1 and again.rows[0].provenance["engine"]["version"] == "0.33.0"


def test_a_server_that_accepts_nothing_is_a_finding(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("fake_engine.rounds_of", lambda tokens, depth: [0] * (tokens - 1))
    with FakeEngine(2) as engine:
        found = swept(checkpoint, tmp_path, engine, depths=[2])
    (row,), (note,) = found.rows, found.notes
    assert (row.acceptance_length, row.per_position, row.error) == (1.0, [0.0, 0.0], None)
    assert "vllm · as stored · none · temperature 0 · depth 2: the first draft was accepted in 0.0 % of 57" in note


def test_one_server_that_dies_is_one_depths_failure(checkpoint, tmp_path):
    def dies(engine, number, handler):
        threading.Thread(target=engine.close).start()
        handler.close_connection = True
        return True

    with FakeEngine(1) as good:
        dying = FakeEngine(3, fault=dies)
        found = swept(checkpoint, tmp_path, dying, good, depths=[1, 3])
    assert [row.error is None for row in found] == [True, False]
    assert "cannot be reached" in found.failed[0].error or "broke off" in found.failed[0].error
    assert dying.url not in (tmp_path / "rows.jsonl").read_text()


def test_depths_that_no_server_has_are_left_out_and_said(checkpoint, tmp_path):
    with FakeEngine(2) as engine:
        found = swept(checkpoint, tmp_path, engine, depths=range(4))
        assert [row.depth for row in found] == [2]
        assert found.notes == ["no server drafts 0, 1, 3 tokens a round: left out"]
        with pytest.raises(ConfigError, match="the servers draft 2 tokens a round; depths 5"):
            swept(checkpoint, tmp_path, engine, depths=[5])
        with FakeEngine(2) as other, pytest.raises(ConfigError, match="both draft 2 tokens a round"):
            swept(checkpoint, tmp_path, engine, other)
        with pytest.raises(ConfigError, match="its cache is none"):
            swept(checkpoint, tmp_path, engine, depths=[2], quant_policy=["int8"])
    assert not (tmp_path / ".locks").exists() or read_rows(tmp_path)


def test_what_a_server_has_is_swept_with_no_files_of_it(tmp_path):
    with FakeEngine(3) as engine:
        settings = Attach(addresses=(engine.url,), limits=QUICK)
        found = mtplab.sweep(None, ["ab", "c"], depths=[3], max_new_tokens=TOKENS, engine=settings, results=tmp_path)
        (row,) = found.rows
        assert (row.checkpoint, row.exclude_label, row.n_prompts, row.error) == ("fake", "as served", 2, None)
        with pytest.raises(ConfigError, match="there is no checkpoint"):
            mtplab.sweep(None, ["ab"], exclude=["none"], engine=settings, results=tmp_path)


OURS_ALONE = {
    "method": "trace",
    "quality": True,
    "calibration": ["x"],
    "draft_sampling": "sampled",
    "target_hidden": "pre_norm",
    "load_model": fakes.load_model,
    "generate": fakes.generate,
    "device": "cuda",
    "dtype": "bfloat16",
    "activation_rounding": False,
    "exact": False,
}


@pytest.mark.parametrize("name", OURS_ALONE)
def test_what_only_our_runner_does_is_refused_by_name(checkpoint, tmp_path, name):
    with pytest.raises(ConfigError, match=f"^{name} is .* an engine is given"):
        mtplab.sweep(checkpoint, PROMPTS, engine="vllm", results=tmp_path, **{name: OURS_ALONE[name]})


@pytest.mark.parametrize(
    ("engine", "settings", "said"),
    [
        ("vllm", {"quant_policy": ["turboquant"]}, "engine vllm.*quant_policy turboquant"),
        (Launch(engine="vllm", tp=2, ep=3), {}, "engine vllm.*ep 3"),
        (Launch(engine="mtplab", tp=2), {}, "engine mtplab.*tp 2"),
        (Launch(engine="vllm", command=("vllm", "serve", "--quantization", "fp8")), {}, "command holds --quantization"),
        (Launch(engine="vllm", command=("/no/such/vllm", "serve")), {}, "/no/such/vllm is not on this machine's path"),
        ("nobody", {}, "engine is 'nobody'"),
        (3, {}, "engine is 3"),
        ([], {}, "addresses"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_anything_starts(checkpoint, tmp_path, engine, settings, said):
    with pytest.raises(ConfigError, match=said):
        mtplab.sweep(checkpoint, PROMPTS, engine=engine, results=tmp_path / "r", **settings)
    assert not (tmp_path / "r").exists()


def test_commands_are_printed_and_nothing_is_started(tmp_path, monkeypatch, capsys):
    from mtplab.cli import main

    for name in ("Popen", "run"):
        monkeypatch.setattr(subprocess, name, None)
    words = ["sweep", str(MODEL), "--depths", "0,3", "--limit", "1", "--results", str(tmp_path / "r")]
    words += ["--temperature", "0,1", "--exclude", "published", "--parallel", "tp=2", "--engine", "vllm"]
    words += ["--print-commands"]
    words += ["--engine-command", f"{sys.executable} serve"]  # which is there, and is not asked for its version
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    written, about, plain, _, deep, then = lines  # both temperatures share a server
    assert [line.split()[1] for line in (written, plain, deep)] == ["quantize", "serve", "serve"]
    assert about == "# depth 0 · published · KV cache unquantised" and "--engine http://HOST:PORT" in then
    # wherever the line is run
    assert written.split()[3] == plain.split()[2] and Path(written.split()[3]).is_absolute()
    assert "mtp.fc" in written and '"num_speculative_tokens": 3' in deep and "--tensor-parallel-size 2" in plain
    # servers that others can ask, side by side
    assert "--host 0.0.0.0 --port 8000" in plain and "--host 0.0.0.0 --port 8001" in deep
    assert not (tmp_path / "r").exists()
    with pytest.raises(ConfigError, match="nothing to start"):
        engine_commands(MODEL, engine="http://127.0.0.1:1")


def test_options_that_do_not_go_together_are_refused(capsys):
    from mtplab.cli import main

    for words, said in (
        (["--parallel", "tp=2"], "give --engine too"),
        (["--engine", "vllm", "--served-model", "x"], "a server that runs already"),
        (["--engine", "http://a", "--start-timeout", "3"], "runs already"),
        (["--engine", "vllm", "--engine", "sglang"], "expected one engine"),
        (["--engine", "vllm", "--parallel", "tp=x"], "degrees such as"),
        (["--engine", "vllm", "--engine-args", "'"], "quote as in a shell"),
        (["--engine", "localhost:8000"], "a server's address (http://host:port), or one of"),
        (["--engine", "vllm", "--api-key-env", "NO_SUCH_KEY"], "no such variable"),
    ):
        assert main(["sweep", str(MODEL), *words]) == 2
        assert said in capsys.readouterr().err


def test_settings_that_are_wrong_are_named_in_python_too():
    for make, said in (
        (lambda: Launch(engine="vllm", tpp=3), "tpp is 3: extra inputs are not permitted"),
        (lambda: Launch(engine="vllm", arguments="--max-num-seqs 64"), "arguments is '--max-num-seqs 64'"),
        (lambda: Attach(addresses=("localhost:8000",)), "an address such as http"),
        (lambda: Limits(concurrency=0), "concurrency is 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            make()


def test_what_an_engine_will_misread_is_said_before_it_is_started(tmp_path, capsys):
    """SGLang builds mtp.fc plain, whatever its list says: the codes of one in FP8 are taken for weights."""
    from mtplab.cli import main

    words = ["sweep", str(MODEL), "--depths", "1", "--limit", "1", "--results", str(tmp_path / "r"), "--print-commands"]
    assert main([*words, "--engine", "sglang", "--exclude", "none"]) == 0
    assert "SGLang builds 'mtp.fc' unquantised, which the file holds in FP8" in capsys.readouterr().err
    assert main([*words, "--engine", "sglang", "--exclude", "published"]) == 0
    assert capsys.readouterr().err == ""


def test_what_cannot_be_asked_of_a_server_is_said_to_be_as_told(checkpoint, tmp_path):
    with FakeEngine(3) as engine:
        (row,) = swept(checkpoint, tmp_path, engine, depths=[3]).rows
    assert "that vLLM's 'fake' has these weights and exclusions is as told" in row.remark


# servers that are started


def same(row):
    """What of a row must not depend on who ran it, at temperature 0."""
    names = ("depth", "tokens", "rounds", "drafted", "accepted", "acceptance_length", "per_position", "output_hash")
    return {name: getattr(row, name) for name in names} | {
        domain: (found.prompt_rounds, found.prompt_accepted) for domain, found in row.by_domain.items()
    }


@pytest.mark.slow
def test_two_dask_workers_sweep_on_two_servers_as_we_do_here(tmp_path):
    """One of them has weights that were written for it: the checkpoint's, quantised with these exclusions."""
    distributed = pytest.importorskip("distributed")
    study = {"depths": [2], "limit": 1, "max_new_tokens": 16, "exclude": [None, ["mtp.*"]]}
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor(pure=False) as executor,
    ):
        there = mtplab.sweep(MODEL, results=tmp_path / "r", engine=own("111"), executor=executor, **study)
    here = mtplab.sweep(MODEL, results=tmp_path / "r", quality=False, **study)
    assert there.failed == [] and there.computed == here.computed == 2
    assert [same(row) for row in there] == [same(row) for row in here]
    assert there.rows[0].tokens > there.rows[0].rounds
    assert [row.provenance["engine"]["version"] for row in there] == [mtplab.__version__] * 2
    assert len(list((tmp_path / "r" / "checkpoints").glob("*/model.safetensors"))) == 1
    assert left_of("111") == []


def left_of(seed: str) -> list[int]:
    """Servers that were started with this seed and are still there."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            words = (each / "cmdline").read_bytes().split(b"\0") if each.name.isdigit() else []
        except OSError:
            continue
        if b"serve" in words and seed.encode() in words:
            found.append(int(each.name))
    return found


KILLED = """
import sys, mtplab
from test_engine_sweep import own
long = dict(limit=1, max_new_tokens=4000, ignore_eos=True)
mtplab.sweep(sys.argv[1], depths=[2], engine=own("222"), results=sys.argv[2], **long)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_sweep_that_is_killed(tmp_path):
    paths = os.pathsep.join([str(MODEL.parents[1]), str(Path(__file__).parent)])
    command = [sys.executable, "-c", KILLED, str(MODEL), str(tmp_path / "r")]
    sweep = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    deadline = time.monotonic() + 90
    try:
        while not left_of("222") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left_of("222")
        time.sleep(1)
    finally:
        sweep.kill()
        sweep.wait()
    while left_of("222") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_of("222") == []


def test_a_cancel_stops_at_once_and_what_was_done_stays(checkpoint, tmp_path):
    cancel = threading.Event()
    with FakeEngine(1) as engine, FakeEngine(3) as slow:
        slow.delay, stopped = 5.0, []

        def soon(row):
            stopped.append(time.monotonic() + 0.3)
            threading.Timer(0.3, cancel.set).start()  # in the middle of the next depth's first request

        found = swept(checkpoint, tmp_path, engine, slow, depths=[1, 3], cancel=cancel, on_row=soon)
        assert time.monotonic() - stopped[0] < 3
        assert slow.begun
    assert found.cancelled and [row.depth for row in found] == [1] and found.failed == []


def test_a_pool_of_threads_sweeps_on_servers_at_once(checkpoint, tmp_path):
    with FakeEngine(1) as one, FakeEngine(3) as other, concurrent.futures.ThreadPoolExecutor(2) as executor:
        one.delay = other.delay = 0.3
        found = swept(checkpoint, tmp_path, one, other, depths=[1, 3], executor=executor)
    assert [row.depth for row in found] == [1, 3] and found.failed == []
    points = {row.point for row in found}
    assert len(points) == 1  # one file, which both wrote into
    assert sorted(PointStore(tmp_path).rows(points.pop())) == [1, 3]


def test_a_row_of_an_engine_reads_back_as_it_was(checkpoint, tmp_path):
    with FakeEngine(3) as engine:
        (row,) = swept(checkpoint, tmp_path, engine, depths=[3]).rows
    assert mtplab.study.ResultRow.from_json(row.to_json()) == row
    bare = {**json.loads(row.to_json()), "rounds": None, "accepted": None, "acceptance_length": None}
    bare |= {"per_position": [None] * 3, "by_domain": {}}
    assert mtplab.study.ResultRow.from_json(json.dumps(bare)).rounds is None
    with pytest.raises(MtplabError):
        mtplab.study.ResultRow.from_json(json.dumps({**bare, "engine": None}))


def test_the_log_of_an_engine_that_fell_is_kept_and_its_row_names_it(checkpoint, tmp_path):
    says = "print('root cause: no such thing'); [print('later', n) for n in range(50)]; raise SystemExit(3)"
    broken = Launch(engine="vllm", command=(sys.executable, "-c", says), limits=QUICK)
    (row,) = mtplab.sweep(checkpoint, PROMPTS, depths=[1], engine=broken, results=tmp_path / "r").rows
    assert "ended with exit code 3" in row.error and str(tmp_path) not in row.error
    (log,) = (tmp_path / "r" / "logs").iterdir()
    assert f"logs/{log.name}" in row.error and "root cause: no such thing" in log.read_text()
