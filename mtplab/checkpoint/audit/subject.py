"""What the checks look at, gathered once: the checkpoint, its modules as planned, its head, its exclusion list."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mtplab.checkpoint.audit.heads import Head, find_head
from mtplab.checkpoint.bounded_regex import FIRST_SECONDS
from mtplab.checkpoint.config_json import text_config
from mtplab.checkpoint.exclusions import ListedModules
from mtplab.checkpoint.lenses import View, views_of
from mtplab.checkpoint.names import module_of
from mtplab.errors import CheckpointError

if TYPE_CHECKING:
    from mtplab.checkpoint.checkpoint import Checkpoint
    from mtplab.checkpoint.plan import ModulePlan, Plan

__all__ = ["Subject"]


class Subject:
    """One checkpoint under audit. Reads headers only.

    `as_on_disk`: False where entries of its list that cannot be run were left out, so that it can be audited.
    """

    def __init__(self, ckpt: Checkpoint, as_on_disk: bool = True) -> None:
        self.ckpt = ckpt
        self.as_on_disk = as_on_disk
        self.config = ckpt.config
        self.text = text_config(ckpt.config)
        self.quantization = ckpt.quantization

    @cached_property
    def plan(self) -> Plan:
        """Every module as stored, unusable ones too. Raises CheckpointError for a pattern that cannot be run."""
        return self.ckpt.look()

    @property
    def modules(self) -> tuple[ModulePlan, ...]:
        """The plan's modules."""
        return self.plan.modules

    @cached_property
    def views(self) -> list[View]:
        """The modules as the lenses take them, with scales that lie beside plain weights."""
        beside = [problem.tensor for problem in self.ckpt.problems if problem.kind == "junk-scale"]
        return views_of(self.modules, beside)

    @cached_property
    def linears(self) -> tuple[ModulePlan, ...]:
        """The modules that are matrix products, in use by a run."""
        return tuple(module for module in self.modules if module.kind == "linear" and module.part != "unused")

    @cached_property
    def head(self) -> Head | None:
        """The draft head, or None where there is none and none is promised."""
        return find_head(self.modules, self.config)

    @cached_property
    def content(self) -> dict[str, Any]:
        """The quantisation config as it stands, {} where there is none."""
        return self.ckpt.found.content if self.ckpt.found is not None else {}

    @cached_property
    def entry_of(self) -> dict[str, str]:
        """Module → the entry of the exclusion list that covers it, of those that one does."""
        found: dict[str, str] = {}
        for module in self.modules:
            try:
                entry = self.listed.entry_for(module.name)
            except CheckpointError:  # a pattern that cannot be run: the plan says so
                break
            if entry is not None:
                found[module.name] = entry
        return found

    @cached_property
    def listed(self) -> ListedModules:
        """The exclusion list, to be asked module by module; empty where nothing is quantised."""
        entries = self.quantization.exclusions if self.quantization is not None else ()
        to_end = self.quantization is None or self.quantization.exclusions_to_end
        return ListedModules(entries, self.quantization.where if self.quantization is not None else "", to_end)

    def bad_patterns(self) -> list[tuple[str, str]]:
        """(entry, what is wrong) for the entries of the exclusion list that cannot be run on these names."""
        names = {module_of(name) for name in self.ckpt.tensors}
        found = []
        begun = time.thread_time()
        if self.quantization is None:
            return found
        for entry in self.quantization.exclusions:
            if time.thread_time() - begun > FIRST_SECONDS:
                break  # a list so long is refused as a whole
            one = ListedModules([entry], self.quantization.where, self.quantization.exclusions_to_end)
            try:
                for name in names if one.has_patterns else ():
                    one.entry_for(name)
            except CheckpointError as error:
                found.append((entry, str(error)))
        return found

    @property
    def method(self) -> str:
        """quant_method as it stands, "" where nothing is quantised."""
        return str(self.content.get("quant_method", self.quantization.method if self.quantization is not None else ""))

    @property
    def listed_entries(self) -> tuple[str, ...] | None:
        """The exclusion list, or None where the format keeps none that could be changed."""
        if self.quantization is None or self.quantization.exclusions_key == "extra_config":
            return None
        return self.quantization.exclusions

    @property
    def list_key(self) -> str:
        """Where the exclusion list stands in the quantisation config."""
        return self.quantization.exclusions_key if self.quantization is not None else ""
