"""Runs on Kubernetes clusters: the second implementation of `gkr.backend`, beside `gkr.local`.

Everything here is imported only by commands that were asked about a cluster. Nothing of it decides what a run is: plans
come from `spec`, objects from `manifests`.
"""
