"""The network, its objective and its files.

Shared with the services that encode, sample and evaluate, so nothing here knows of ranks, meshes or runs: only `spec`
and torch.
"""
