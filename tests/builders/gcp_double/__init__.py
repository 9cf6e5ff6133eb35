"""A test double of the Google Cloud provider: `pulumi-resource-gcp` as the engine sees it, and nothing behind it.

It refuses what the SDK's argument classes do not have, forces replacement where `infra.review.fields` says so, and
remembers what it made in a folder. When a one-node cluster of `tools.bed` is up for a region, a GKE cluster there
answers with it, and a pool of GPU machines appears as fake nodes. Nothing of it asks Google for anything.
"""
