"""Safe YAML for experiment files: YAML 1.2 numbers, unique keys, bounded size after alias expansion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ludus.errors import ConfigError

MAX_NODES = 50_000
"""Maximum number of values of a document after alias expansion; limits YAML bombs."""

_MAX_DEPTH = 60
_MERGE = "tag:yaml.org,2002:merge"
_STR, _INT, _FLOAT, _BOOL = (f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool"))


class _Loader(yaml.SafeLoader):
    """Safe loader with the numbers of YAML 1.2: 3e-4 is a number; 12:30, 010 and 2024-01-31 are strings."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _INT, re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*)?\.[0-9_]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*\.(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _integer(loader: _Loader, node: Any) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 0) if re.match(r"0[xob]", text) else int(text)


_Loader.add_constructor(_INT, _integer)


def read_text(path: Path, max_bytes: int, hint: str = "") -> str:
    """Read a small UTF-8 text file. Raises ConfigError with `hint`."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8.", hint) from error
    if len(data) > max_bytes:
        raise ConfigError(f"{path} is larger than {max_bytes} bytes.", hint)
    return text


def parse_yaml(text: str, source: str) -> Any:
    """Parse the single document in `text`, with aliases expanded. Raises ConfigError that names `source`."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, {}, ())
            return _copy_unshared(loader.construct_document(node))
        finally:
            loader.dispose()
    except ConfigError as error:
        raise ConfigError(f"{source}, {error.message}", error.hint) from error
    except RecursionError as error:
        raise ConfigError(f"{source} is not valid YAML: it is nested too deeply.") from error
    except yaml.YAMLError as error:
        hint = "Indent with spaces, not tabs." if "\\t" in str(error) else ""
        raise ConfigError(f"{source} is not valid YAML: {error}", hint) from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML raises these for !!int of words, !!bool maybe, !!timestamp soon and numbers of 5000 digits.
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Return path of each key → its line number, from 1. The text must be valid for `parse_yaml`."""
    loader = _Loader(text)
    try:
        out: dict[tuple[str, ...], int] = {}
        _add_lines(loader.get_single_node(), (), out)
        return out
    finally:
        loader.dispose()


def _add_lines(node: Any, path: tuple[str, ...], out: dict[tuple[str, ...], int]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    merged: list[Any] = []
    for key, value in node.value:
        if key.tag == _MERGE:
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        else:
            out.setdefault((*path, str(key.value)), key.start_mark.line + 1)
            _add_lines(value, (*path, str(key.value)), out)
    for each in merged:  # own keys take precedence over merged ones
        _add_lines(each, path, out)


def _check(node: Any, sizes: dict[int, int], above: tuple[int, ...]) -> int:
    """Return the number of values of a node after alias expansion. Raises ConfigError for invalid or ambiguous nodes."""
    if id(node) in above:
        raise _at(node, "an alias refers to a section that contains it")
    if len(above) > _MAX_DEPTH:
        raise _at(node, f"sections are nested more than {_MAX_DEPTH} deep")
    if id(node) in sizes:
        return sizes[id(node)]
    below, size = (*above, id(node)), 1
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = _key(key)
            if name in seen:
                raise _at(key, f"the key {name!r} occurs twice", "Keep one.")
            seen.add(name)
            size += 1 + _check(value, sizes, below)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_check(one, sizes, below) for one in node.value)
    if size > MAX_NODES:
        raise _at(node, f"with its aliases expanded this has more than {MAX_NODES:,} values", "Use fewer aliases.")
    sizes[id(node)] = size
    return size


def _key(node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _at(node, "a key is a string, not a list or a section")
    if node.tag in (_STR, _MERGE):
        return str(node.value)
    if node.tag == _BOOL and node.value.lower() not in ("true", "false"):  # on, off, yes, no: strings, as in YAML 1.2
        node.tag = _STR
        return str(node.value)
    if node.tag == _BOOL:
        raise _at(node, f"the key {node.value} reads as true or false in YAML", f'Write it as "{node.value}".')
    raise _at(node, f"the key {node.value or 'null'} is not a string")


def _at(node: Any, message: str, hint: str = "") -> ConfigError:
    return ConfigError(f"line {node.start_mark.line + 1}: {message}.", hint)


def _copy_unshared(value: Any) -> Any:
    """Return a copy in which no object is shared, so that experiments can be changed independently."""
    if isinstance(value, dict):
        return {key: _copy_unshared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy_unshared(inner) for inner in value]
    if not (value is None or isinstance(value, (str, bool, int, float))):
        raise ConfigError(f"a value has an unsupported type: {type(value).__name__}.", "Write it in quotes.")
    return value


def dump_yaml(data: Any) -> str:
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True)


class Dumper(yaml.SafeDumper):
    """Writes YAML that `_Loader` reads back unchanged; never uses aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_float(dumper: yaml.SafeDumper, value: float) -> Any:
    text = repr(value)
    if value != value or value in (float("inf"), float("-inf")):
        text = ".nan" if value != value else ".inf" if value > 0 else "-.inf"
    elif "e" in text and "." not in text:
        text = text.replace("e", ".0e", 1)  # YAML 1.1 parsers read 1e-05 as a string
    return dumper.represent_scalar(_FLOAT, text)


def _represent_str(dumper: yaml.SafeDumper, value: str) -> Any:
    odd = any(sign in value for sign in "\x85\u2028\u2029\ufeff")  # line breaks that only double quotes preserve
    return dumper.represent_scalar(_STR, value, style='"' if odd else None)


Dumper.add_representer(float, _represent_float)
Dumper.add_representer(str, _represent_str)
Dumper.yaml_implicit_resolvers = {  # quote strings that our loader or a YAML 1.1 parser would read as another type
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {**yaml.SafeDumper.yaml_implicit_resolvers, **_Loader.yaml_implicit_resolvers}
}
