"""Reads a service's settings: flags win over the environment, that over the file, that over the defaults.

    [host]                       HICACHE_HOST__BYTES=4GiB                     --set host.bytes=4GiB
    bytes = "4GiB"

Each value keeps where it came from. An unknown key is an error that names the nearest known one, a bad value one that
says where it stands; nothing is ever ignored or guessed.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from hicache.config import Config, FileMode, Size
from hicache.errors import ConfigError
from hicache.sidecar.files import read_file
from hicache.storage.url import redacted

__all__ = ["DEFAULT", "PREFIX", "Setting", "Settings", "load_settings", "schema", "shown"]

PREFIX: Final = "HICACHE_"
"""Of environment variables; two underscores stand between a section and its key."""

DEFAULT: Final = "default"
"""Origin of what nobody has set."""

_CONFIG_VARIABLE: Final = PREFIX + "CONFIG"
_CLIENT_VARIABLES: Final = {PREFIX + "TOKEN"}
# Kubernetes puts such variables into every container of a namespace that has a service of the name hicache.
_LINKS: Final = re.compile(PREFIX + r"(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_\w+)?)")
_SECRET: Final = re.compile(r"password|secret|token|credential|passphrase", re.IGNORECASE)
_SECRET_PARAMETER: Final = re.compile(r"([?&][^=&]*(?:password|secret|token|credential)[^=&]*=)[^&]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as it is declared.

    Attributes:
        section, key: its two names.
        kind: type of its value.
        default: what it is if nobody sets it.
        text: what it is, in a line.
    """

    section: str
    key: str
    kind: Any
    default: Any
    text: str

    @property
    def name(self) -> str:
        """`section.key`."""
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"{PREFIX}{self.section}__{self.key}".upper()

    @property
    def is_table(self) -> bool:
        """Whether it is a table of entries, which may be set one by one."""
        return get_origin(_bare(self.kind)) is dict


@dataclass(frozen=True, slots=True)
class Settings:
    """What was read.

    Attributes:
        config: all values.
        origins: where those come from that are not defaults, by name.
    """

    config: Config
    origins: Mapping[str, str]

    def origin(self, name: str) -> str:
        """Where a value comes from: "default", a file, a variable or a flag; of a table, of all its entries."""
        found = [origin for key, origin in self.origins.items() if key == name or key.startswith(name + ".")]
        return ", ".join(dict.fromkeys(found)) or DEFAULT

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Name, value and origin of every setting, fit to be shown: without secrets."""
        for setting in schema():
            value = getattr(getattr(self.config, setting.section), setting.key)
            yield setting.name, shown(setting.name, value), self.origin(setting.name)


@cache
def schema() -> tuple[Setting, ...]:
    """All settings, in the order of their declaration."""
    return tuple(
        Setting(section, info.name, kind, info.default if info.default is not msgspec.NODEFAULT else {}, _text(kind))
        for section, kind_of_section in get_type_hints(Config).items()
        for info, kind in zip(
            msgspec.structs.fields(kind_of_section),
            get_type_hints(kind_of_section, include_extras=True).values(),
            strict=True,
        )
    )


def load_settings(
    file: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Settings:
    """Read all sources.

    Args:
        file: path of a TOML file; None: the one that HICACHE_CONFIG names, or none.
        environment: variables; those that do not begin with HICACHE_ are of others.
        flags: name of a setting (or of a table's entry) -> (the flag as it is shown, its value).

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a value that its setting does not take.
    """
    environment = environment or {}
    merged = _Merged({setting.name: setting for setting in schema()})
    file = file if file is not None else environment.get(_CONFIG_VARIABLE) or None
    if file is not None:
        merged.add_file(file, _read(file))
    for variable, value in sorted(environment.items()):
        if variable.startswith(PREFIX):
            merged.add_variable(variable, value)
    for name, (flag, value) in (flags or {}).items():
        merged.add(name, value, flag)
    return merged.settings()


def shown(name: str, value: Any) -> Any:
    """A value without secrets, made of what JSON has; sizes and modes are texts."""
    if isinstance(value, Size | FileMode):
        return str(value)
    if isinstance(value, Mapping):
        return {key: "***" if _SECRET.search(key) else shown(name, entry) for key, entry in value.items()}
    if isinstance(value, msgspec.Struct):
        return {key: shown(name, getattr(value, key)) for key in value.__struct_fields__}
    if isinstance(value, tuple):
        return [shown(name, entry) for entry in value]
    if name == "storage.url" and isinstance(value, str):
        return redacted(_SECRET_PARAMETER.sub(r"\1***", value))
    return value


class _Merged:
    """Raw values by name, later ones in the place of earlier ones."""

    def __init__(self, known: Mapping[str, Setting]) -> None:
        self._known = known
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def add_file(self, path: str, document: Mapping[str, Any]) -> None:
        sections = {setting.section for setting in self._known.values()}
        for section, table in document.items():
            if section not in sections or not isinstance(table, dict):
                raise self._unknown(section, f"file {path}", sections)
            for key, value in table.items():
                self.add(f"{section}.{key}", value, f"file {path}", exact=True)

    def add_variable(self, variable: str, value: str) -> None:
        if variable == _CONFIG_VARIABLE or variable in _CLIENT_VARIABLES or _LINKS.fullmatch(variable):
            return
        name = variable.removeprefix(PREFIX).lower().replace("__", ".")
        if not self._is_known(name):
            variables = {setting.variable for setting in self._known.values()}
            raise self._unknown(variable, "environment", variables)
        self.add(name, value, f"environment {variable}")

    def add(self, name: str, value: Any, origin: str, *, exact: bool = False) -> None:
        """Set a value, a whole table or one entry of a table. A text stands for any kind, unless it is `exact`."""
        setting, entry = self._find(name, origin)
        if isinstance(value, str) and not exact:
            value = _from_text(setting, value, name=name, origin=origin, entry=bool(entry))
        converted = _converted(setting, value, name=name, origin=origin, entry=bool(entry), exact=exact)
        if entry:
            self._values[setting.name] = {**self._values.get(setting.name, {}), entry: converted}
        else:
            self._values[setting.name] = converted
            for key in [key for key in self._origins if key.startswith(setting.name + ".")]:
                del self._origins[key]
        self._origins[name] = origin

    def settings(self) -> Settings:
        given: dict[str, dict[str, Any]] = {}
        for name, value in self._values.items():
            section, key = name.split(".", 1)
            given.setdefault(section, {})[key] = value
        kinds = get_type_hints(Config)
        return Settings(
            Config(**{section: kinds[section](**values) for section, values in given.items()}), self._origins
        )

    def _is_known(self, name: str) -> bool:
        return name in self._known or bool(self._table_of(name))

    def _table_of(self, name: str) -> str:
        section, _, rest = name.partition(".")
        key, dot, entry = rest.partition(".")
        table = f"{section}.{key}"
        return table if dot and entry and table in self._known and self._known[table].is_table else ""

    def _find(self, name: str, origin: str) -> tuple[Setting, str]:
        if name in self._known:
            return self._known[name], ""
        if table := self._table_of(name):
            return self._known[table], name.removeprefix(table + ".")
        raise self._unknown(name, origin, set(self._known))

    def _unknown(self, name: str, origin: str, known: set[str]) -> ConfigError:
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        key = name.rpartition(".")[2]
        near = near or [other for other in sorted(self._known) if other.rpartition(".")[2] == key]
        hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(sorted(known)):.600}"
        return ConfigError(f"unknown setting {_name(name)} ({_name(origin)}): {hint}")


def _read(path: str) -> dict[str, Any]:
    data = read_file(f"configuration file {path!r:.200}", path)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path!r:.200} is no TOML: {error}") from None


def _from_text(setting: Setting, text: str, *, name: str, origin: str, entry: bool) -> Any:
    bare = _bare(setting.kind)
    if setting.is_table and not entry:
        try:
            return json.loads(text)
        except ValueError:
            raise ConfigError(
                f"{name} ({_name(origin)}): give a JSON object, or set entries one by one as {name}.NAME=VALUE"
            ) from None
    if get_origin(bare) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text.strip().lower() if bare is bool else text


def _converted(setting: Setting, value: Any, *, name: str, origin: str, entry: bool, exact: bool) -> Any:
    kind = get_args(_bare(setting.kind))[1] if entry else setting.kind
    bare = _bare(kind)
    if setting.is_table:
        value = _spelled_out(bare if entry else get_args(bare)[1], value, entry=entry)
    try:
        return msgspec.convert(value, kind, strict=exact or not isinstance(value, str), dec_hook=_parse)
    except (msgspec.ValidationError, ConfigError) as error:
        reason = _reason(error, bare)
    raise ConfigError(f"{_name(name)}={_briefly(name, value)} ({_name(origin)}): {reason}")


def _spelled_out(kind: Any, value: Any, *, entry: bool) -> Any:
    """A record with one field that must be given may be given as that field: `1000 = "acme"`."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return value
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]

    def spell(given: Any) -> Any:
        return {required[0]: given} if len(required) == 1 and isinstance(given, str) else given

    return spell(value) if entry or not isinstance(value, dict) else {key: spell(given) for key, given in value.items()}


def _name(text: str) -> str:
    """A name of somebody's choice, on one line."""
    return (text if text.isprintable() else repr(text))[:200]


def _briefly(name: str, value: Any) -> str:
    """A value for a message: short, without secrets."""
    return "***" if _SECRET.search(name) else repr(shown(name, value))[:80]


def _parse(kind: Any, given: Any) -> Any:
    if kind in (Size, FileMode):
        return kind.parse(given)
    raise NotImplementedError(kind)


def _reason(error: Exception, kind: Any) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    text = str(error).replace("`", "").replace(" - at $", " at ")
    text = text.removeprefix("Object ")
    if "unknown field" in text:
        return f"{text}; {_fields(kind)}"
    if "Invalid enum value" in text:
        return f"{text.replace('Invalid enum value', 'there is no')}; use one of {_choices(kind)}"
    return text[:1].lower() + text[1:]


def _fields(kind: Any) -> str:
    names = [name for struct in _structs(kind) for name in struct.__struct_fields__]
    return f"known are: {', '.join(names)}"


def _choices(kind: Any) -> str:
    """All that is named literally somewhere in a kind."""
    if get_origin(kind) is Literal:
        return ", ".join(str(choice) for choice in get_args(kind))
    inner = [*get_args(kind)]
    for struct in _structs(kind) if not inner else ():
        inner.extend(get_type_hints(struct).values())
    return ", ".join(filter(None, (_choices(_bare(part)) for part in inner)))


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    parts = [kind, *(_bare(part) for part in get_args(kind))]
    return [part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)]


def _bare(kind: Any) -> Any:
    return _bare(get_args(kind)[0]) if get_origin(kind) is Annotated else kind


def _text(kind: Any) -> str:
    metas = [meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    return next((meta.description for meta in metas if meta.description), "")
