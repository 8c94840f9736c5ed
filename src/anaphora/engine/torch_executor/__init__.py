"""The executor on PyTorch: every decoder-only architecture that `transformers` knows, over our pages."""

from anaphora.engine.torch_executor.executor import TorchExecutor

__all__ = ["TorchExecutor"]
