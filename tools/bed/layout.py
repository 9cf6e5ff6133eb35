"""Names, addresses and paths of a bed; pure. Everything that two modules must agree on is derived here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from spec.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
PAUSE_IMAGE = "localhost/gkr/pause:1"
"""What containerd starts for every pod; built and imported with the other system images."""
MOST_REGIONS = 2


@dataclass(frozen=True)
class Wanted:
    """What a person asked `up` for."""

    fake: dict[str, int] = field(default_factory=dict[str, int])
    """Catalogue machine -> fake nodes of it."""
    gpus: int = 0
    """GPUs that the real node pretends to have."""
    regions: int = 1
    for_stacks: bool = False
    """What a platform stack installs is left to it: operators, queues, namespaces, GPU nodes, facts."""


@dataclass(frozen=True)
class Bed:
    """One region's cluster."""

    index: int
    """Of the machine: names of devices and addresses derive from it."""
    folder: Path
    """All its state; see the properties."""

    @property
    def name(self) -> str:
        """Also the name of the context in its kubeconfig."""
        return f"bed-{self.index}" if self.index else "bed"

    @property
    def region(self) -> str:
        """Stands for Google Cloud's region."""
        return f"bed-{'abcdefgh'[self.index]}"

    @property
    def node(self) -> str:
        """The one real node."""
        return f"bed-{self.index}"

    @property
    def netns(self) -> str:
        """Network namespace, as `ip netns` names it."""
        return f"gkr-bed-{self.index}"

    @property
    def host_device(self) -> str:
        """The host's end of the veth pair."""
        return f"gkrbed{self.index}"

    @property
    def host_address(self) -> str:
        """The host's end; refuses connections from inside."""
        return f"10.201.{self.index}.1"

    @property
    def address(self) -> str:
        """The node: the host reaches the API server and host ports here, and so do pods."""
        return f"10.201.{self.index}.2"

    @property
    def link_address(self) -> str:
        """Its end of the link to the other region."""
        return f"10.202.{self.index // 2}.{self.index % 2 + 1}"

    @property
    def pod_gateway(self) -> str:
        """The bridge."""
        return f"172.30.{self.index}.1"

    @property
    def pod_range(self) -> str:
        """Of real pods."""
        return f"172.30.{self.index}.0/24"

    @property
    def service_range(self) -> str:
        """Cluster IPs."""
        return f"10.{96 + self.index}.0.0/16"

    @property
    def api_service(self) -> str:
        """Cluster IP of the API server."""
        return f"10.{96 + self.index}.0.1"

    @property
    def dns_service(self) -> str:
        """Cluster IP of CoreDNS."""
        return f"10.{96 + self.index}.0.10"

    @property
    def fake_range(self) -> str:
        """Addresses that KWOK hands to fake pods; unreachable on purpose."""
        return f"10.{210 + self.index}.0.0/16"

    @property
    def server(self) -> str:
        """The API server's URL from the host and from inside."""
        return f"https://{self.address}:6443"

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator."""
        return self.folder / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Keys, certificates, and the components' kubeconfigs."""
        return self.folder / "pki"

    @property
    def settings(self) -> Path:
        """Configuration files of components."""
        return self.folder / "settings"

    @property
    def images(self) -> Path:
        """containerd's own folder: the only large thing that `down` keeps."""
        return self.folder / "containerd"

    @property
    def data(self) -> Path:
        """What `down` empties: etcd, kubelet, pod addresses."""
        return self.folder / "data"

    @property
    def bucket(self) -> Path:
        """Objects of the bucket; emptied with the rest of `data`."""
        return self.data / "bucket"

    @property
    def containerd_socket(self) -> Path:
        """Inside the bed's mount namespace, where /run is its own: short whatever the state folder is called."""
        return Path("/run/containerd/containerd.sock")

    def log(self, component: str) -> Path:
        """What a component printed since it was last started."""
        return self.folder / "logs" / f"{component}.log"

    @property
    def pod_logs(self) -> Path:
        """Where kubelet keeps what containers printed."""
        return self.folder / "logs" / "pods"


def state_root() -> Path:
    """GKR_BED, else a folder in the user's state folder."""
    own = os.environ.get("GKR_BED")
    if own:
        return Path(own).absolute()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gkr" / "bed"


def first_index() -> int:
    """GKR_BED_FIRST, so that beds of two state folders can be up at once; even, since two regions share a link."""
    text = os.environ.get("GKR_BED_FIRST") or "0"
    if text not in {"0", "2", "4", "6"}:
        raise ConfigError(f'"{text}" is not the index of a first region', where="GKR_BED_FIRST", hint="0, 2, 4 or 6")
    return int(text)


def bed(region: int, *, root: Path | None = None) -> Bed:
    """The bed of a region, counted from 0."""
    index = first_index() + region
    return Bed(index=index, folder=(root or state_root()) / str(index))


def beds(count: int, *, root: Path | None = None) -> list[Bed]:
    """The first `count` beds."""
    return [bed(region, root=root) for region in range(count)]
