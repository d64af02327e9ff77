"""The repository's shape: rooms import one way, files stay small, notebooks are stripped, nothing is unsafe.

Reads source with `ast`, imports the package in child processes only, and knows nothing of what it computes.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
MAX_LINES = 450

# what each room may import from mtplab, besides itself; a new room is added here, on purpose
CHAIN = ("errors", "drawing", "config", "checkpoint", "quant", "engines", "models", "decode", "study", "report")
ROOMS: dict[str, set[str]] = {room: set(CHAIN[:place]) for place, room in enumerate(CHAIN)}
for _room in CHAIN[CHAIN.index("checkpoint") :]:
    ROOMS[_room].add("kernels")
ROOMS["kernels"] = set()
ROOMS["bench"] = ROOMS["report"] | {"kernels"}
# the runner behind HTTP: beside the study, which it knows nothing of
ROOMS["server"] = ROOMS["decode"] | {"decode"}
ROOMS["cli"] = set(CHAIN) | {"bench", "kernels", "server"}

# what the command line and a bare `import mtplab` must not wait for
HEAVY = ("torch", "triton", "transformers", "matplotlib", "IPython", "ipywidgets", "papermill")


# reading source


def tracked_files() -> list[Path]:
    """Every file of the repository that git tracks or would add."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [REPO / name for name in sorted(set(listing.split("\0"))) if name and (REPO / name).is_file()]


def python_files(*tops: str) -> list[Path]:
    return [
        path for path in tracked_files() if path.suffix == ".py" and path.relative_to(REPO).parts[0] in tops
    ]


def module_name(path: Path) -> str:
    """The one name a file of the package is imported by."""
    parts = list(path.relative_to(REPO).with_suffix("").parts)
    if parts[0] == "kernels":
        parts.insert(0, "mtplab")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """`mtplab.quant.policy` -> `quant`; `mtplab.cli_sweep` -> `cli`; `mtplab` -> ``."""
    second = module.split(".")[1] if "." in module else ""
    return "cli" if second.startswith("cli_") else second


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(absolute name, line) of every import, wherever it stands: lazy and type-only ones count too."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, node.module] if node.module else base
            for alias in node.names:
                yield ".".join([*base, alias.name]), node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def wrong_way(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports that a module's room does not allow, as `line: reason`."""
    room = room_of(module)
    if room not in ROOMS:
        return [f"0: the room {room!r} is not in ROOMS; say there what it may import"]
    found = []
    for name, line in imported_modules(ast.parse(source), module, is_package):
        if name == "kernels" or name.startswith("kernels."):
            found.append(f"{line}: imports {name}; say mtplab.kernels, so that a file has one name only")
        if name.split(".")[0] != "mtplab" or name == "mtplab.__version__":
            continue
        other = room_of(name)
        if other not in ROOMS:
            found.append(f"{line}: imports {name} from the package's root; name the module that defines it")
        elif other != room and other not in ROOMS[room]:
            found.append(f"{line}: {room} imports {name}; it may import {sorted(ROOMS[room]) or 'nothing'}")
    return found


# one way


def test_imports_go_one_way():
    files = [path for path in python_files("mtplab", "kernels") if module_name(path) != "mtplab"]
    assert files
    found = [
        f"{path.relative_to(REPO)}:{problem}"
        for path in files
        for problem in wrong_way(path.read_text(), module_name(path), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mtplab.checkpoint.plan", "from mtplab.quant import quantize_block"),
        ("mtplab.checkpoint.plan", "def late():\n    from ..models import load_model"),
        ("mtplab.quant.policy", "import importlib\nimportlib.import_module('mtplab.study.sweep')"),
        ("mtplab.study.sweep", "from mtplab.bench import speed"),
        ("mtplab.models.qwen", "from mtplab import generate"),
        ("mtplab.quant.linear", "from kernels import fp8_gemm"),
        ("mtplab.kernels.fp8_gemm", "from mtplab.errors import MtplabError"),
        ("mtplab.surprise.thing", ""),
    ],
)
def test_the_check_sees_a_wrong_turn(module, source):
    assert len(wrong_way(source, module)) == 1


def test_the_check_lets_the_right_way_pass():
    assert (
        wrong_way("from . import formats\nfrom ..errors import CheckpointError", "mtplab.checkpoint.plan")
        == []
    )
    assert wrong_way("from mtplab.kernels import fp8_gemm", "mtplab.quant.linear") == []
    assert wrong_way("from .plan import Plan", "mtplab.checkpoint", is_package=True) == []
    assert wrong_way("import mtplab.bench.speed", "mtplab.cli_bench") == []


def test_kernels_that_triton_compiles_import_no_torch():
    """What compiles ahead of time does so in a process that has no torch."""
    light = ("targets", "variants", "sizes", "gemm_tiles", "aot")
    allowed = re.compile(rf"mtplab\.kernels\.(\w+_jit|{'|'.join(light)})(\.|$)")
    for path in python_files("kernels"):
        source = path.read_text()
        if path.name.endswith("_jit.py") or path.stem in light:
            names = {name for name, _ in imported_modules(ast.parse(source), "mtplab.kernels.x", False)}
            assert "torch" not in {name.split(".")[0] for name in names}, path.name
            ours = {name for name in names if name.startswith("mtplab")}
            assert all(map(allowed.match, ours)), path.name
        else:
            assert not re.search(r"^@triton\.jit\b", source, re.M), f"{path.name}: kernels live in *_jit.py files"


# lazy, and one name a file


def run_python(code: str, cwd: Path = REPO) -> str:
    """Standard output of a fresh interpreter that finds the checkout, whatever the folder."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    ["mtplab", "mtplab.errors", "mtplab.config", "mtplab.checkpoint", "mtplab.checkpoint.audit", "mtplab.cli"],
)
def test_import_is_light(module):
    loaded = run_python(f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])")
    assert loaded.split() == []


def test_opening_and_planning_need_no_torch(bundled_fp8):
    code = f"""
import sys, mtplab
checkpoint = mtplab.open_checkpoint({str(bundled_fp8)!r})
print(len(checkpoint.tensors), len(checkpoint.plan().modules), 'torch' in sys.modules)
"""
    tensors, modules, torch_loaded = run_python(code).split()
    assert int(tensors) > 0 and int(modules) > 0 and torch_loaded == "False"


# a fresh interpreter imports {names}, and then says which of its files have which names, and which files of {folders}
# would have been taken for a module that anything asked for, had it been started in that folder
EVERY_NAME = """
import collections, importlib, importlib.util, json, os, sys
from importlib.machinery import PathFinder

asked = set()

class Asked:
    def find_spec(name, path=None, target=None):
        asked.add(name.partition('.')[0])

sys.meta_path.insert(0, Asked)
for name in {names!r}:
    importlib.import_module(name)
seen = collections.defaultdict(list)
for name, module in list(sys.modules.items()):
    file = getattr(module, '__file__', None)
    if file and os.path.realpath(file).startswith({repo!r} + os.sep):
        seen[os.path.realpath(file)].append(name)
taken = {{}}
for folder in {folders!r}:
    specs = [PathFinder.find_spec(name, [folder]) for name in sorted(asked | {{'kernels'}})]
    taken[folder] = [spec.origin for spec in specs if spec and spec.origin]
print(json.dumps([seen, taken, sorted(asked)]))
"""


def names_of_files(names: list[str], folders: list[Path]) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """(the modules' names by file, files that a module would be taken from in these folders, every name asked for)."""
    told = EVERY_NAME.format(names=names, repo=str(REPO), folders=[str(folder) for folder in folders])
    seen, taken, asked = json.loads(run_python(told).splitlines()[-1])
    return (
        {file: found for file, found in seen.items() if "/.venv/" not in file},
        [file for folder in taken.values() for file in folder],
        asked,
    )


def test_every_file_has_one_module_name():
    """`kernels` beside `mtplab/kernels` gives no file two names, and hides no other package of that name, in whichever
    of these folders an interpreter is started: they differ in what it finds there first."""
    files = [path for path in python_files("mtplab", "kernels") if path.stem != "__main__"]
    names = sorted(module_name(path) for path in files)
    seen, taken, asked = names_of_files(names, [REPO, REPO / "notebooks", REPO / "kernels"])
    assert {name for found in seen.values() for name in found} >= set(names)
    assert {file: found for file, found in seen.items() if len(found) > 1} == {}
    assert taken == [str(REPO / "mtplab" / "__init__.py")] and {"torch", "mtplab"} <= set(asked)


def test_the_check_sees_a_name_that_is_hidden(tmp_path):
    (tmp_path / "numpy").mkdir()
    for name in ("numpy/__init__.py", "kernels.py", "not_there_at_all.py"):
        (tmp_path / name).touch()
    _, taken, _ = names_of_files(["mtplab.errors"], [tmp_path])
    assert taken == [str(tmp_path / "kernels.py")]
    _, taken, _ = names_of_files(["mtplab.errors", "numpy"], [tmp_path])
    assert taken == [str(tmp_path / "kernels.py"), str(tmp_path / "numpy" / "__init__.py")]


def test_kernels_is_reached_through_the_link():
    link = REPO / "mtplab" / "kernels"
    assert link.is_symlink() and link.resolve() == REPO / "kernels"
    assert not (REPO / "kernels" / "__init__.py").exists(), "it would hide other packages named kernels"


# files


def test_files_stay_small():
    long = {
        str(path.relative_to(REPO)): lines
        for path in tracked_files()
        if path.suffix in (".py", ".js", ".css") and (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines, split by job: {long}"


def test_modules_say_what_they_are():
    silent = [
        str(path.relative_to(REPO))
        for path in python_files("mtplab", "kernels")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def unsafe_uses(source: str, own_state: bool = False) -> list[str]:
    """Ways to run code that came with data: unpicklers, eval and exec, and code from a checkpoint.

    `own_state`: a training recipe may read back the state it wrote itself, with torch's restricted unpickler.
    """
    found = []
    tree = ast.parse(source)
    for name, line in imported_modules(tree, "x", False):
        if name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"):
            found.append(f"{line}: {name}")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "torch.load" and own_state and "weights_only=True" in map(ast.unparse, node.keywords):
            continue
        if called in ("eval", "exec", "compile", "builtins.eval", "builtins.exec", "torch.load"):
            found.append(f"{node.lineno}: {called}(")
        for keyword in node.keywords:
            if keyword.arg in ("trust_remote_code", "allow_pickle") and ast.unparse(keyword.value) != "False":
                found.append(f"{node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}")
    return found


def test_nothing_unpickles_or_evaluates():
    found = [
        f"{path.relative_to(REPO)}:{use}"
        for path in python_files("mtplab", "kernels", "data")
        for use in unsafe_uses(path.read_text(), own_state=path.is_relative_to(REPO / "data" / "recipe"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load(f, weights_only=True)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_check_sees_unsafe_calls(source):
    assert len(unsafe_uses(source)) == 1
    assert len(unsafe_uses("torch.load(f)", own_state=True)) == 1
    assert unsafe_uses("model.eval(); safetensors.torch.load_file(f); re.compile('a')") == []


def test_no_path_of_one_machine():
    homes = "|".join(("home", "root", "work", "Users", "farm", "mnt"))
    pattern = re.compile(rf"(?<![\w.$}})/])/(?:{homes})/[\w.]")
    data = {".safetensors", ".json", ".jsonl", ".png", ".npz"}
    found = [
        f"{path.relative_to(REPO)}:{number}: {line.strip()[:80]}"
        for path in tracked_files()
        if path.suffix not in data
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


# notebooks and prompts


def notebooks() -> list[Path]:
    return sorted(REPO.glob("notebooks/**/*.ipynb"))


def test_notebooks_are_committed_stripped():
    assert notebooks()
    for path in notebooks():
        book = json.loads(path.read_text())
        assert book["metadata"]["kernelspec"]["name"] == "python3", path.name
        assert not {"papermill", "widgets"} & set(book["metadata"]), path.name
        for cell in book["cells"]:
            assert "papermill" not in cell["metadata"], path.name
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [] and cell["execution_count"] is None, path.name


def test_notebooks_have_one_parameters_cell():
    for path in notebooks():
        cells = json.loads(path.read_text())["cells"]
        tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
        assert len(tagged) == 1 and tagged[0]["cell_type"] == "code", path.name


def uses_output_context(source: str) -> bool:
    """`with Output():` hangs headless kernels now and then, and `interact` is built on it."""
    with_output = r"\bwith\b[^\n:]*\bOutput\s*\("
    built_on_it = r"\b(?:interact|interactive|interactive_output)\s*\("
    return bool(re.search(f"{with_output}|{built_on_it}", source))


def test_nothing_draws_through_output_contexts():
    sources = {path: path.read_text() for path in python_files("mtplab")}
    for path in notebooks():
        cells = json.loads(path.read_text())["cells"]
        sources[path] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert [path.name for path, source in sources.items() if uses_output_context(source)] == []
    assert uses_output_context("with widgets.Output() as out:") and uses_output_context("interact(f, k=3)")


def test_prompt_files_hold_prompts():
    files = sorted(REPO.glob("data/prompts/*.jsonl"))
    assert len(files) >= 2, "one file per domain: those the model was trained near, and one it was not"
    seen: set[str] = set()
    for path in files:
        prompts = [json.loads(line) for line in path.read_text().splitlines()]
        assert prompts, path.name
        for prompt in prompts:
            assert set(prompt) >= {"id", "domain", "text"}, (path.name, prompt)
            assert prompt["text"].strip() and prompt["id"] not in seen, (path.name, prompt["id"])
            seen.add(prompt["id"])
        assert len({prompt["domain"] for prompt in prompts}) == 1, f"{path.name}: one domain a file"
