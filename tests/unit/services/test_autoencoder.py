"""An autoencoder of diffusers, where diffusers is installed; and one clear error where it is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.encode import EncodeService
from services.service import Call, Reply, ServiceContext
from services.wire.messages import EncodeArgs, LatentsArgs
from spec.errors import ConfigError, GkrError, RefusedError


def context(folder: Path) -> ServiceContext:
    return ServiceContext("encode", "latents", cache_dir=folder, manifest="", max_batch=8, model=str(folder))


def pictures(count: int, *, side: int = 16) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, side, 2 * side, 3), dtype=np.uint8)


def ask(service: EncodeService, images: NDArray[np.uint8] | None) -> Reply | GkrError:
    (answer,) = service.compute("latents", [Call(LatentsArgs(), {} if images is None else {"images": images})])
    return answer


def test_without_diffusers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)  # as where it is not installed
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="diffusers is not installed") as missing:
        EncodeService(context(tmp_path))
    assert "add diffusers" in missing.value.hint


def test_latents_are_the_scaled_mean_whatever_shares_the_call(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("diffusers", reason="no role installs diffusers")
    import torch

    from tests.builders.tiny_models import save_autoencoder

    service = EncodeService(context(save_autoencoder(tmp_path / "vae")))
    service.warm_up()
    images = pictures(5)
    whole = ask(service, images)
    assert isinstance(whole, Reply), whole
    latents = whole.tensors["latents"]
    assert latents.shape == (5, 4, 4, 8)
    alone = ask(service, images[3:4])
    assert isinstance(alone, Reply)
    assert (alone.tensors["latents"][0] == latents[3]).all()
    model = library.AutoencoderKL.from_pretrained(tmp_path / "vae").eval()
    with torch.inference_mode():
        mean = model.encode(torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1).latent_dist.mean
    np.testing.assert_allclose(latents, ((mean - 0.11) * 0.36).numpy(), rtol=1e-4, atol=1e-5)
    other = EncodeService(context(save_autoencoder(tmp_path / "other", seed=1)))
    answer = ask(other, images)
    assert isinstance(answer, Reply)
    assert answer.body.encoder != whole.body.encoder


def test_what_an_autoencoder_cannot_encode_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="no role installs diffusers")
    from tests.builders.tiny_models import save_autoencoder

    service = EncodeService(context(save_autoencoder(tmp_path / "vae")))
    for images, said in (
        (None, "carries none"),
        (pictures(1, side=15), r"uint8 \[1, 15, 30, 3\]"),
        (pictures(1)[..., :1], "3\\], the call"),
        (pictures(1)[:0], "carries uint8"),
    ):
        answer = ask(service, images)
        assert isinstance(answer, RefusedError)
        assert "multiples of 4" in answer.hint
        with pytest.raises(RefusedError, match=said):
            raise answer
    with pytest.raises(RefusedError, match="holds an autoencoder"):
        service.compute("encode", [Call(EncodeArgs(captions=["a"]))])
