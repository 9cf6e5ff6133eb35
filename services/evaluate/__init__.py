"""Evaluation of generated images against held-out real ones: label accuracy, Frechet distance, distance to the training images."""

from services.evaluate.service import EvaluateService

__all__ = ["EvaluateService"]
