"""What a region's cluster holds before any experiment does.

Each module has pure functions that make Kubernetes objects as plain dicts, and one component that declares them. The
dicts are what the API server sees, byte for byte, so they are tested against the schemas of the pinned versions; the
typed classes of the SDK would test only their own spelling, and know no custom resource.
"""
