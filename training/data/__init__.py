"""Samples for the trainer: their order, their preparation in worker processes, their delivery to a rank."""
