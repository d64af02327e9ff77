"""Models: layers, one small file per family, and the loader that turns checkpoint names into parameters."""

from mtplab.models.config import ModelConfig
from mtplab.models.model import Model, load_model

__all__ = ["Model", "ModelConfig", "load_model"]
