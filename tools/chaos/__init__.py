"""Fault campaigns: `make chaos`."""
