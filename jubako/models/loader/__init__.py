"""How do a checkpoint's tensors become torch tensors with Hugging Face's names?"""

from jubako.models.loader.weights import load_weights

__all__ = ["load_weights"]
