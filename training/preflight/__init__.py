"""Preflight: look for what would break an expensive job, before it starts.

Collector -> pure evaluator -> `spec.events.Check` with PASS, WARN, FAIL or UNKNOWN, the value, the threshold, what
was seen and what mends it. Importing this package does not import torch; only the child process of the two steps does
(`training.preflight.two_steps`).
"""

from training.preflight.request import PreflightRequest
from training.preflight.runner import check_node, refusal, run_host_checks

__all__ = ["PreflightRequest", "check_node", "refusal", "run_host_checks"]
