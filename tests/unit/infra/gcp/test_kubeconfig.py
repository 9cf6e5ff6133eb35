"""How a cluster is reached: by permission through its DNS endpoint, or by the certificate that it hands out."""

from __future__ import annotations

import yaml

from infra.components.gcp.kubeconfig import Reach, kubeconfig


def test_through_the_dns_endpoint() -> None:
    reach = Reach(dns_endpoint="gke-0.us-east5.gke.goog", address="10.0.0.2", ca_certificate="Y2E=")
    found = yaml.safe_load(kubeconfig("us-east5", reach=reach))
    assert found["clusters"] == [{"name": "us-east5", "cluster": {"server": "https://gke-0.us-east5.gke.goog"}}]
    assert found["users"][0]["user"]["exec"]["command"] == "gke-gcloud-auth-plugin"
    assert found["current-context"] == found["contexts"][0]["name"] == "us-east5"


def test_by_certificate() -> None:
    reach = Reach(address="10.0.0.2:6443", ca_certificate="Y2E=", client_certificate="Yw==", client_key="aw==")
    found = yaml.safe_load(kubeconfig("bed-a", reach=reach))
    assert found["clusters"][0]["cluster"] == {
        "server": "https://10.0.0.2:6443", "certificate-authority-data": "Y2E=",
    }  # fmt: skip
    assert found["users"][0]["user"] == {"client-certificate-data": "Yw==", "client-key-data": "aw=="}
