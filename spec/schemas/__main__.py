"""`python -m spec.schemas [--check]`."""

from __future__ import annotations

import sys

from spec.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from spec.schemas import stale, write


def main(arguments: list[str]) -> int:
    """Writes the schemas, or with --check only says which are not current."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python -m spec.schemas [--check]\n")
        return EXIT_USAGE
    if not arguments:
        for name in write():
            sys.stdout.write(f"wrote spec/schemas/{name}\n")
        return EXIT_OK
    old = stale()
    for name in old:
        sys.stderr.write(f"spec/schemas/{name} is not current; run: python -m spec.schemas\n")
    return EXIT_FAILED if old else EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
