"""Evaluation of generated images against held-out real ones.

Label accuracy, Frechet distance, and distance to the training images.
"""

from services.evaluate.service import EvaluateService

__all__ = ["EvaluateService"]
