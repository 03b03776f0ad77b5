"""Backends by URL scheme: found, missing, broken, made for another version, twice."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.errors import BackendUnavailableError, ConfigError
from hicache.storage.base import StorageBackend
from hicache.storage.memory import MemoryBackend
from hicache.storage.registry import check_backend, configured, installed_schemes, load_backend, open_storage
from hicache.storage.wrappers import GuardedBackend, MeteredBackend

Install = Callable[..., None]

COMPLETE = """
    from hicache.storage.memory import MemoryBackend
    class Acme(MemoryBackend):
        pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with one storage plug-in on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(scheme: str, source: str, *, distribution: str = "acme-store", attribute: str = "Acme") -> None:
        module = f"{distribution.replace('-', '_')}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{distribution.replace('-', '_')}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[hicache.storage_backends]\n{scheme} = {module}:{attribute}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return make


def test_a_plug_in_is_found_loaded_and_opened(install: Install) -> None:
    install("acme", COMPLETE)
    assert "acme" in installed_schemes()
    backend = open_storage("acme://?capacity=1MiB")
    assert isinstance(backend, MeteredBackend)
    assert isinstance(backend.inner, GuardedBackend)
    assert type(backend.inner.inner).__name__ == "Acme"
    assert backend.statistics().capacity == 2**20
    backend.close()


def test_an_unknown_scheme_says_what_is_installed() -> None:
    with pytest.raises(BackendUnavailableError, match=r"served by no installed package.*file, memory"):
        open_storage("s4://bucket")


def test_a_scheme_whose_client_is_missing_says_what_would_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("redis", "hicache_redis")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(BackendUnavailableError, match=r"does not load.*pip install 'hicache\[redis\]'"):
        open_storage("redis://localhost")


@pytest.mark.case("PLUG-3")
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise RuntimeError('boom')", "does not load.*RuntimeError: boom"),
        ("import a_module_that_is_not_here", "does not load.*ModuleNotFoundError"),
        ("class Other: pass", "does not load.*AttributeError"),
        ("Acme = 5", "not a subclass"),
        ("class Acme: pass", "not a subclass"),
        (
            """
            from hicache.storage.base import StorageBackend
            class Acme(StorageBackend):
                def put(self, objects): return []
                def get_into(self, keys, buffers): return []
            """,
            "lacks clear, close, contains, delete, generation, statistics, touch.*upgrade",
        ),
        (
            """
            from hicache.storage.memory import MemoryBackend
            class Acme(MemoryBackend):
                def contains(self, keys): return []
            """,
            "other arguments.*contains",
        ),
        (
            """
            from hicache.storage.memory import MemoryBackend
            class Acme(MemoryBackend):
                def put(self, objects, must): return []
            """,
            "other arguments.*put",
        ),
    ],
)
def test_what_does_not_keep_the_contract_is_refused_when_it_is_loaded(install: Install, source: str, text: str) -> None:
    install("acme", source)
    with pytest.raises(BackendUnavailableError, match=text) as caught:
        open_storage("acme://")
    assert "acme-store" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.case("PLUG-3")
def test_a_contract_that_grew_names_the_methods_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBackend, "__abstractmethods__", frozenset({"batch_exists", "warm_up"}))
    with pytest.raises(BackendUnavailableError, match="lacks batch_exists, warm_up"):
        check_backend(MemoryBackend, "a backend")


def test_a_failed_import_is_the_cause(install: Install) -> None:
    install("acme", "raise RuntimeError('boom')")
    with pytest.raises(BackendUnavailableError) as caught:
        load_backend("acme")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_two_packages_for_one_scheme_are_an_error(install: Install) -> None:
    install("acme", COMPLETE)
    install("acme", COMPLETE, distribution="other-store")
    with pytest.raises(BackendUnavailableError, match=r"acme-store.*and other-store.*uninstall all but one"):
        open_storage("acme://")


def test_a_backend_without_urls_says_so(install: Install) -> None:
    install("acme", "from hicache.storage.wrappers import GuardedBackend\nclass Acme(GuardedBackend): pass")
    with pytest.raises(ConfigError, match="cannot be opened by a URL"):
        open_storage("acme://")


def test_storage_is_a_url_or_an_object() -> None:
    opened = configured("memory://")
    inner = MemoryBackend()
    given = configured(inner)
    assert isinstance(opened, StorageBackend)
    assert isinstance(given, MeteredBackend)
    assert isinstance(given.inner, GuardedBackend)
    assert configured(given) is given
    with pytest.raises(ConfigError, match="not int"):
        configured(5)  # type: ignore[arg-type]
