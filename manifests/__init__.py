"""Plan or stack configuration -> Kubernetes objects as plain dicts. Pure: no file, no clock, no network."""
