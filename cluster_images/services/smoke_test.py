"""The services image's own test: `python /opt/gkr/smoke/smoke_test.py [--fabric a3-mega|a3-ultra]`.

Runs as the image's user without a network, a GPU or a cluster; with --fabric in a GPU pod, to see that the node's
mounts meet the image.
"""

from __future__ import annotations

import argparse
import sys

import checks


def main() -> int:
    """Every check, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fabric", choices=("a3-mega", "a3-ultra"))
    options = parser.parse_args()
    listed = [
        ("user", checks.user),
        ("system", checks.system),
        ("secrets", checks.no_secret),
        ("code", checks.imports("spec", "storage", "services")),
        ("torch", checks.torch),
        ("encoder", encoder),
        ("prepare", prepare),
        ("ray", checks.ray),
    ]
    if options.fabric:
        listed.append(("fabric", checks.fabric(options.fabric)))
    return checks.run(listed)


def encoder() -> str:
    """Captions to embeddings with the weights that the image holds: like captions lie closer than unlike ones."""
    from services.sentences import SentenceEncoder, weights_folder

    model = SentenceEncoder(weights_folder(), device="cpu")
    one, two, other = model.embed(["a handwritten three", "the digit three", "a stormy sea at night"])
    near, far = float(one @ two), float(one @ other)
    if not (abs(float(one @ one) - 1) < 1e-4 and near > far + 0.1):
        raise RuntimeError(f"similarities {near:.3f} and {far:.3f}")
    return f"width {len(one)}, similarity {near:.2f} of like and {far:.2f} of unlike captions"


def prepare() -> str:
    """Data preparation writes a dataset."""
    checks.shell("python -m services.prepare --source sklearn-digits --manifest file:///tmp/digits/manifest.json")
    return "sklearn-digits"


if __name__ == "__main__":
    sys.exit(main())
