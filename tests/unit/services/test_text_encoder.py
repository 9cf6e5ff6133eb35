"""Text encoders of transformers, tiny and randomly initialised, saved to disk and read back the way real ones are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.encode import EncodeService
from services.service import Call, Reply, ServiceContext
from services.text_encoder import TOLERANCE, TextEncoder
from services.wire.messages import EncodeArgs, LatentsArgs
from spec.errors import ConfigError, RefusedError
from tests.builders.tiny_models import save_clip, save_t5

pytest.importorskip("transformers", reason="the extra `encoder` is not installed")

PROMPTS = ["seven", "a thin seven that leans to the right and nearly touches the edge", "bold zero", "seven " * 40]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {"t5": save_t5(base / "t5"), "clip": save_clip(base / "clip")}


def service(folder: Path, *, max_batch: int = 8) -> EncodeService:
    made = EncodeService(
        ServiceContext("encode", "encoder", cache_dir=folder, manifest="", max_batch=max_batch, model=str(folder))
    )
    made.warm_up()
    return made


def ask(made: EncodeService, captions: list[str]) -> Reply:
    (reply,) = made.compute("encode", [Call(EncodeArgs(captions=captions, tokens=True))])
    assert isinstance(reply, Reply), reply
    return reply


@pytest.mark.parametrize("family", ["t5", "clip"])
def test_report_18_a_prompt_encoded_alone_and_in_a_batch_is_the_same(folders: dict[str, Path], family: str) -> None:
    """https://github.com/lean-dojo/ReProver/issues/34 (also diffusers 12075): padding changed T5's embeddings.

    Alone, together, in another order, and cut into batches of three: equal within the published tolerance.
    """
    made, small = service(folders[family]), service(folders[family], max_batch=3)
    alone = [ask(made, [prompt]) for prompt in PROMPTS]
    together, backwards, cut = ask(made, PROMPTS), ask(made, PROMPTS[::-1]), ask(small, PROMPTS)
    for name in ("embeddings", "tokens"):
        expected = np.concatenate([one.tensors[name] for one in alone])
        assert expected.std() > 0.01
        limit = TOLERANCE * float(np.abs(expected).max())
        for other in (together.tensors[name], backwards.tensors[name][::-1], cut.tensors[name]):
            assert np.abs(other - expected).max() <= limit, name
    assert (together.tensors["mask"] == np.concatenate([one.tensors["mask"] for one in alone])).all()


@pytest.mark.parametrize("family", ["t5", "clip"])
def test_an_embedding_is_what_the_model_gives_for_the_text_without_padding(
    folders: dict[str, Path], family: str
) -> None:
    import torch
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    model = (T5EncoderModel if family == "t5" else CLIPTextModel).from_pretrained(folders[family]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    found = ask(service(folders[family]), PROMPTS[:3])
    for row, prompt in enumerate(PROMPTS[:3]):
        ids = tokenizer([prompt], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            states = model(input_ids=ids).last_hidden_state[0].numpy()
        length = len(states)
        assert found.tensors["mask"][row].tolist() == [1] * length + [0] * (found.tensors["mask"].shape[1] - length)
        np.testing.assert_allclose(found.tensors["tokens"][row, :length], states, rtol=1e-4, atol=1e-4)
        assert not found.tensors["tokens"][row, length:].any()
        pooled = states.mean(axis=0) if family == "t5" else states[-1]  # CLIP: the state of the text's end
        np.testing.assert_allclose(found.tensors["embeddings"][row], pooled, rtol=1e-4, atol=1e-4)


def test_a_text_beyond_the_limit_is_cut_and_tokens_come_only_if_asked_for(folders: dict[str, Path]) -> None:
    made = service(folders["clip"])
    first, second = ask(made, ["seven " * 40, "seven " * 80]).tensors["tokens"]
    np.testing.assert_allclose(first, second, atol=1e-5)
    plain, told = made.compute(
        "encode", [Call(EncodeArgs(captions=["a"])), Call(EncodeArgs(captions=["b"], tokens=True))]
    )
    assert isinstance(plain, Reply)
    assert isinstance(told, Reply)
    assert list(plain.tensors) == ["embeddings"]
    assert set(told.tensors) == {"embeddings", "tokens", "mask"}


def test_the_fingerprint_follows_weights_tokenizer_and_settings(folders: dict[str, Path], tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        return TextEncoder(folder, device="cpu").fingerprint

    own = fingerprint(folders["t5"])
    assert fingerprint(save_t5(tmp_path / "same")) == own
    assert fingerprint(save_t5(tmp_path / "other", seed=1)) != own
    changed = save_t5(tmp_path / "changed")
    settings = json.loads((changed / "tokenizer_config.json").read_text())
    (changed / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 12}))
    assert fingerprint(changed) != own
    assert ask(service(folders["t5"]), ["a"]).body.encoder == own


def test_weights_that_are_missing_are_refused_and_never_drawn_at_random(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = save_t5(tmp_path / "t5")
    weights = load_file(folder / "model.safetensors")
    gone = next(name for name in weights if name.startswith("encoder") and name.endswith("wo.weight"))
    kept = {name: values for name, values in weights.items() if name != gone}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="1 weights of the model are not in its folder") as refused:
        TextEncoder(folder, device="cpu")
    assert gone.split(".")[-2] in refused.value.message


def test_a_folder_that_is_no_model_is_refused_with_what_to_do(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json") as nothing:
        service(tmp_path)
    assert "gs://" in nothing.value.hint
    pickled = save_t5(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="they can run code"):
        service(pickled)
    bare = save_t5(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        service(bare)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((folders["t5"] / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="cannot be loaded"):
        service(tmp_path)


def test_a_text_encoder_refuses_images(folders: dict[str, Path]) -> None:
    with pytest.raises(RefusedError, match="holds a text encoder"):
        service(folders["t5"]).compute("latents", [Call(LatentsArgs(), {})])


def test_a_folder_in_a_bucket_is_copied_once_and_gives_the_same_fingerprint(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services import model_folder

    def no_path(_uri: str) -> None:
        """As for a store that is not this machine."""

    monkeypatch.setattr(model_folder, "file_path", no_path)
    uri = folders["t5"].as_uri()
    copied = model_folder.local_model(uri, cache_dir=tmp_path)
    assert copied != folders["t5"]
    assert model_folder.folder_digest(copied) == model_folder.folder_digest(folders["t5"])
    before = {path: path.stat().st_mtime_ns for path in copied.iterdir()}
    assert model_folder.local_model(uri, cache_dir=tmp_path) == copied
    assert {path: path.stat().st_mtime_ns for path in copied.iterdir()} == before
