"""A one-node Kubernetes on this machine, in namespaces of its own without a way out: `python -m tools.bed up`.

Promises: real components (API server, kubelet, containerd, KubeRay, Kueue), nothing of it reaches another machine, and
`down` leaves no process, mount, namespace or network device behind, however `up` ended. Not a cluster to rely on:
`down` forgets every object, and only images and certificates survive it.
"""
