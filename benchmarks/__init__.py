"""Measured claims: one file per claim, compared in one run with what it beats."""
