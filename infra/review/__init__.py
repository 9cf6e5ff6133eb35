"""What a change would do to a stack, in one Markdown comment and one exit code.

The input is the engine's own preview; nothing here asks the cloud or the engine. What could be lost comes first:
replacements and deletions of what is protected, carries GPUs or holds data, with the field that forces them. A change
that loses something passes only with the label that says a person has looked. Secrets are never printed: the engine
masks what it knows as secret, and this package masks what looks like one.
"""

from infra.review.preview import Preview, read_preview
from infra.review.report import Review, review

__all__ = ["Preview", "Review", "read_preview", "review"]
