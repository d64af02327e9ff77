"""The families of models that mtplab runs, one file each: `registered` lists them, `family_of` finds a config's.

A family's file reads its config.json into a `ModelConfig` (`spec.py`) and says how its head is named; layers are those
of `build.py`. No file here imports torch.
"""

from mtplab.models.families.family import Family, family_of, registered

__all__ = ["Family", "family_of", "registered"]
