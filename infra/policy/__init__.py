"""What no stack of ours may declare, as pure functions over resources.

The same functions run over what the mocks recorded (unit tests, no engine) and over every preview (`infra.review`).
They see a resource as the engine does: type token, name and inputs in the wire's spelling. They read nothing from the
cloud, change nothing and never print a value that could be a secret. What a stack's own file must satisfy is checked
earlier, by `spec.stack`; these rules look at the result, whoever wrote it.
"""

from infra.policy.resource import Finding, Resource, Settings
from infra.policy.rules import RULES, check

__all__ = ["RULES", "Finding", "Resource", "Settings", "check"]
