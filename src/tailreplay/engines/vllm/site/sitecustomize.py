"""On PYTHONPATH of vLLM's processes: Python runs it before anything else is imported."""

from tailreplay import torchvision_shim

torchvision_shim.install()
