"""What every family is asked, as a class of tests that a family's own file derives from and fills in, and the fixtures
that those tests take.

    each, folder, pair = family_fixtures("glm4_moe", SHAPES)

    class TestGlm(RunsAsTransformers): ...

The checks themselves are `family_checks`, the checkpoints `family_checkpoints`; what is one family's alone stands in
its own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from family_checkpoints import FAMILIES, load_target, write_fp8
from family_checks import (
    PROMPTS,
    TREATMENTS,
    WEIGHTS,
    changed,
    check_audit,
    check_drafts,
    check_fp8,
    check_greedy,
    check_head,
    check_logits,
    check_lossless,
    check_memory,
    check_rollback,
    check_transformers_drafts,
    dequantised,
)
from family_definition import Definition, HeadModule, assembled, weights_of
from mtplab import CheckpointError, generate, load_model

__all__ = ["EVERY_STAGE", "HeadBehindTheTarget", "RunsAsTransformers", "family_fixtures"]

# (of the target, of the head): the hidden states that a head is given, those that engines give alike, and all
SAME_STAGE = (("post_norm", "post_norm"), ("pre_norm", "pre_norm"))
EVERY_STAGE = tuple((target, draft) for target in ("post_norm", "pre_norm") for draft in ("post_norm", "pre_norm"))


def family_fixtures(family: str, shapes: dict[str, dict[str, Any]]) -> tuple[Any, Any, Any]:
    """The fixtures `each`, `folder` and `pair` of a module, which is to give them these names."""
    write = FAMILIES[family]

    @pytest.fixture(scope="module", params=list(shapes))
    def each(request, tmp_path_factory):
        """(our model, transformers') of every shape."""
        folder = write(tmp_path_factory.mktemp(family), **shapes[request.param])
        return load_model(folder), load_target(folder)

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        """A checkpoint of the writer's own settings."""
        return write(tmp_path_factory.mktemp(family))

    @pytest.fixture(scope="module")
    def pair(folder):
        """(our model, transformers') of `folder`."""
        return load_model(folder), load_target(folder)

    return each, folder, pair


def over(names: str, attribute: str) -> Callable:
    """Parametrises a test by what the family's class holds under a name."""

    def mark(test: Callable) -> Callable:
        test.over = (names, attribute)
        return test

    return mark


class RunsAsTransformers:
    """A family's target and head, against transformers' modules, and what is said of its files."""

    family: ClassVar[str]  # in `FAMILIES`
    layout: ClassVar[str]  # what the audit calls the head
    # (key of the config's text part, a value that is refused, what is said of it)
    faults: ClassVar[Sequence[tuple[str, Any, str]]]
    # arguments of `heads_of` that make a head which is not the family's
    wrong: ClassVar[Sequence[dict[str, Any]]] = ()
    stages: ClassVar[Sequence[tuple[str, str]]] = SAME_STAGE
    depth: ClassVar[int] = 3
    treatments: ClassVar[Sequence[tuple[str, str]]] = TREATMENTS
    rollbacks: ClassVar[Sequence[str]] = ("none", "int4")

    def heads_of(self, oracle: PreTrainedModel, folder: Path, **wrong: Any) -> list[HeadModule]:
        """The head put together of transformers' modules, as vLLM runs it."""
        raise NotImplementedError("a family says how its head is put together")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if found := getattr(metafunc.function, "over", None):
            metafunc.parametrize(found[0], getattr(self, found[1]))

    @pytest.mark.parametrize("exact", [True, False])
    def test_target_equals_transformers(self, each, exact):
        check_logits(*each, exact)

    def test_ragged_batches_decode_as_transformers(self, each):
        check_greedy(*each)

    def test_head_equals_an_assembly_of_transformers_layers(self, each):
        model, oracle = each
        folder = model.checkpoint.path
        check_head(model, oracle, self.heads_of(oracle, folder))
        for wrong in self.wrong:
            other = self.heads_of(oracle, folder, **wrong)
            with pytest.raises(AssertionError):
                check_head(model, oracle, other)

    @over("target_hidden, draft_hidden", "stages")
    def test_drafts_are_those_of_the_definition(self, pair, folder, target_hidden, draft_hidden):
        model, oracle = pair
        definition = Definition(oracle, self.heads_of(oracle, folder), draft_hidden, target_hidden)
        check_drafts(model, definition, self.depth)

    @pytest.mark.slow
    @over("weights, policy", "treatments")
    def test_lossless_and_traced_exactly(self, folder, weights, policy):
        check_lossless(load_model(folder, **WEIGHTS[weights]), policy)

    @over("policy", "rollbacks")
    def test_rejected_drafts_leave_no_trace(self, pair, policy):
        check_rollback(pair[0], policy)

    def test_fp8_files_run(self, tmp_path):
        folder = write_fp8(self.family, tmp_path / "fp8")
        plain = dequantised(folder, tmp_path / "plain")
        check_fp8(folder, plain, load_target(plain))
        check_audit(folder, self.layout)
        check_memory(folder)

    def test_said_of_the_file(self, folder):
        check_audit(folder, self.layout)
        check_memory(folder)
        check_memory(folder, model_format="fp8", exclude="none")

    @over("key, value, said", "faults")
    def test_config_faults_are_named(self, folder, tmp_path, key, value, said):
        def change(tensors, config):
            config.get("text_config", config)[key] = value

        with pytest.raises(CheckpointError, match=said):
            load_model(changed(folder, tmp_path / "m", change))


class HeadBehindTheTarget(RunsAsTransformers):
    """A head as DeepSeek-V3's: layers behind the target's last one, with copies of its embedding and output matrix.
    transformers drafts with it too, and masks nothing; vLLM masks position 0."""

    norm: ClassVar[type[nn.Module]]  # transformers' classes
    layer: ClassVar[type[nn.Module]]
    prompt_seed: ClassVar[int]  # of a prompt whose drafts are right now and then
    wrong = ({"masked": False},)

    def heads_of(self, oracle: PreTrainedModel, folder: Path, masked: bool = True) -> list[HeadModule]:
        config, found = oracle.config, []
        count = json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"]
        for i in range(config.num_hidden_layers, config.num_hidden_layers + count):
            weights = weights_of(folder, f"model.layers.{i}.")
            for name in ("embed_tokens.weight", "shared_head.head.weight"):
                weights.pop(name)
            norms = [self.norm(config.hidden_size, config.rms_norm_eps) for _ in range(3)]
            names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            layer = self.layer(config, i)
            found.append(assembled(weights, names, norms, layer, oracle.model.rotary_emb, masked=masked))
        return found

    def test_drafts_are_transformers(self, each):
        check_transformers_drafts(*each, prompt_seed=self.prompt_seed)

    def test_copies_that_differ_are_the_heads_own(self, folder, tmp_path):
        names = [f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head")]

        def differ(tensors, config):
            for name in names:
                tensors[name] = -tensors[name]

        def lose(tensors, config):
            for name in names:
                tensors.pop(name)

        own, without = (load_model(changed(folder, tmp_path / change.__name__, change)) for change in (differ, lose))
        shared = load_model(folder)
        module, usual = (each.draft.modules[0] for each in (own, shared))
        assert torch.equal(module.embedding, -shared.target.embedding)
        assert torch.equal(module.head.weights()[0], -shared.target.head.weights()[0])
        assert usual.embedding is shared.target.embedding and usual.head is None
        settings = {"depth": 3, "max_new_tokens": 20}
        rounds = [generate(each, PROMPTS, **settings).rounds for each in (shared, without, own)]
        assert rounds[0] == rounds[1] != rounds[2]
