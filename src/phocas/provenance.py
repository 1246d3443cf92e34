"""The code that a result depends on: digests of user-defined modules, and the results version."""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import inspect
import itertools
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phocas.specs import named_modules

RESULTS_VERSION = 2
"""The version of what runs compute; increase it in a release that changes a run's result.

It is part of a run's identity, and the package's version is not: results stay valid as long as this
number is unchanged.
"""

_NEVER = sys.stdlib_module_names | {"phocas", "torch", "numpy"}
_INSTALLED = {"site-packages", "dist-packages"}
_MAIN = ("__main__", "__mp_main__")  # the second is the name of the first in a spawned process
_DEPTH = 6  # depth up to which attributes of attributes are followed
_ITEMS = 64  # number of items of a container that are searched
_CONSTANTS = (int, float, complex, str, bytes, type(None), type(Ellipsis))
_LONGEST = 1024  # largest number of items of a container whose content is hashed
_CONTAINERS = (tuple, list, dict, set, frozenset)
_BOOKKEEPING = {
    "__abstractmethods__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__dict__",
    "__firstlineno__",
    "__module__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}


class _Source(NamedTuple):
    """The source of a module: its import spec, its digest, and the names that it imports."""

    spec: object
    digest: str
    imports: frozenset[str]


_sources: dict[str, _Source] = {}
"""The sources of modules, read once per import."""


def code_of(values: Sequence[object]) -> dict[str, str]:
    """Return digests of the user-defined code in some values, by the module that defines it.

    The digest of a module is that of its whole source. It is computed once per import, because an
    edit does not change the loaded code. Classes and functions of ``__main__``, and of modules
    without a file, have a digest each: of their bytecode and constants, and of the names they use
    from the same module. The modules that a covered module imports have digests too, and so on.
    Python, torch, numpy, phocas and installed packages are not covered, nor are imports by
    ``importlib``, imports of ``__main__``, and files that the code reads.

    Args:
        values: rules, models, functions, classes, and containers and objects that contain them. A
            text such as ``my_rules:Mine:b=2`` refers to its module, even an installed one.

    >>> code_of([print, "text", {"key": 1.5}])
    {}
    """
    found: dict[str, set[str]] = {}
    texts = [value for value in values if isinstance(value, str)]
    for name in [name for text in texts for name in named_modules(text)]:
        digest = None if _is_excluded(name) else _source_digest(name)
        if digest is not None:
            found[name] = {digest}
    for part in _definitions(values, _DEPTH, set()):
        home = part.__module__
        digest = _source_digest(home)
        if digest is None:
            home = f"{_MAIN[0] if home in _MAIN else home}:{part.__qualname__}"
            text = repr(_content(part, set())).replace(_MAIN[1], _MAIN[0])
            digest = _digest(text.encode())
        found.setdefault(home, set()).add(digest)
    for name, digest in _imported(found).items():
        found.setdefault(name, {digest})
    return {
        name: next(iter(some)) if len(some) == 1 else _digest("".join(sorted(some)).encode())
        for name, some in sorted(found.items())
    }


def describe_code(code: Mapping[str, str]) -> str:
    """Return digests shortened for comparison by eye.

    >>> describe_code({"my_rules": "3f2a91bc00112233"})
    'my_rules 3f2a91bc'
    """
    return ", ".join(f"{name} {digest[:8]}" for name, digest in code.items())


def defined_in(function: Any) -> str:
    """Return ``file:line`` of a function's definition, or its module if it has no file."""
    inner = inspect.unwrap(getattr(function, "func", function))
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is None:
        return str(getattr(inner, "__module__", "?"))
    return f"{code.co_filename}:{code.co_firstlineno}"


def raised_in(error: BaseException) -> str | None:
    """Return ``file:line`` of the user's code in which an error was raised; None if in ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).parent)
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    inside = False
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(ours):
            inside = True
        elif inside and (not file.startswith((*libraries, "<")) or file.startswith("<ipython")):
            place = f"{file}:{line}"
    return place


def describe_error(error: BaseException) -> str:
    """Return one line about an error, with the line of the user's code if it was raised there."""
    place = raised_in(error)
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return text if place is None else f"{place}: {text}"


def _is_excluded(module: str) -> bool:
    return module.partition(".")[0] in _NEVER


def _is_own(part: Any) -> bool:
    """Return whether a class or function is user-defined: neither of Python nor installed."""
    name = part.__module__
    if name is None or name in _MAIN or _is_excluded(name):
        return name is None or name in _MAIN
    return not _is_installed(name)


def _imported(names: Iterable[str]) -> dict[str, str]:
    """Return the digests of the user-defined modules that some modules import, also indirectly."""
    found: dict[str, str] = {}
    left = list(names)
    while left:
        source = _source(left.pop())
        for name in () if source is None else source.imports - found.keys():
            own = None if _is_excluded(name) or _is_installed(name) else _source(name)
            if own is not None:
                found[name] = own.digest
                left.append(name)
    return found


def _imports(source: bytes, package: str | None) -> frozenset[str]:
    """Return the names that may be modules in the import statements of a source.

    Packages that contain a module are imported with it.
    """
    found = {package or ""}
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # of a file that is not Python
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            home = importlib.util.resolve_name(name, package) if node.level else name
            found |= {home, *(f"{home}.{each.name}" for each in node.names)}
    join = "{}.{}".format
    return frozenset(part for each in found for part in itertools.accumulate(each.split("."), join))


def _is_installed(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return bool(_INSTALLED.intersection(Path(file).parts))


def _source_digest(name: str | None) -> str | None:
    """Return the digest of a module's file, or None if it has no file to hash."""
    source = _source(name)
    return None if source is None else source.digest


def _source(name: str | None) -> _Source | None:
    """Return what is known of a loaded module's file, or None if it has none."""
    module = sys.modules.get(name or "")
    if name is None or module is None or name in _MAIN:
        return None
    spec = getattr(module, "__spec__", None)
    known = _sources.get(name)
    if spec is not None and known is not None and known.spec is spec:
        return known
    try:
        content = Path(module.__file__ or "").read_bytes()
    except (AttributeError, OSError):
        return None
    _sources[name] = _Source(spec, _digest(content), _imports(content, module.__package__))
    return _sources[name]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _definitions(values: Iterable[object], depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield the user-defined classes and functions in values and in their contents."""
    for value in values:
        if isinstance(value, _CONSTANTS) or id(value) in seen or not depth:
            continue
        seen.add(id(value))
        inside: Iterable[object] = ()
        if isinstance(value, type):
            yield from filter(_is_own, value.__mro__)
        elif isinstance(value, types.FunctionType):
            if _is_own(value):
                yield value
            inside = _closure(value)
        elif isinstance(value, types.MethodType):
            inside = (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            inside = (value.func, value.args, value.keywords)
        elif isinstance(value, Mapping):
            inside = list(itertools.islice(value.values(), _ITEMS))
        elif isinstance(value, list | tuple | set | frozenset):
            inside = list(itertools.islice(value, _ITEMS))
        elif hasattr(type(value), "named_modules"):  # torch: thousands of attributes, few classes
            inside = {type(module) for module in value.modules()}  # type: ignore[attr-defined]
        elif not isinstance(value, types.ModuleType):
            inside = [type(value), *getattr(value, "__dict__", {}).values()]
        yield from _definitions(inside, depth - 1, seen)


def _closure(function: types.FunctionType) -> list[object]:
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != types.CellType()]


def _content(value: object, seen: set[int]) -> object:
    """Return what a definition computes as nested tuples of text, without lines and comments."""
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if isinstance(value, tuple | list):
        return tuple(_content(item, seen) for item in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(_content(item, seen)) for item in value))
    if isinstance(value, types.CodeType):
        return value.co_code.hex(), value.co_names, _content(value.co_consts, seen)
    if id(value) in seen:
        return "seen"
    seen.add(id(value))
    if isinstance(value, types.FunctionType) and _is_own(value):
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, _closure(value))
        return _content((*parts, _used_globals(value)), seen)
    if isinstance(value, type) and _is_own(value):
        kept = [(name, each) for name, each in vars(value).items() if name not in _BOOKKEEPING]
        return _content(sorted(kept, key=lambda pair: pair[0]), seen)
    if isinstance(value, Mapping):
        return _content(sorted(value.items(), key=lambda pair: repr(pair[0])), seen)
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        return _content(value.__func__, seen)
    if isinstance(value, property):
        return _content((value.fget, value.fset, value.fdel), seen)
    if isinstance(value, functools.partial):
        return _content((value.func, value.args, value.keywords), seen)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, _content(vars(value), seen)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _used_globals(function: types.FunctionType) -> list[object]:
    """Return the module-level objects that a function uses: constants, containers, definitions.

    An object of a class of the same module counts as its class, plus its values if it is a
    dataclass.
    """
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        loads = (step for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
        names |= {step.argval for step in loads}
    found: list[object] = []
    for each in (function.__globals__.get(name) for name in sorted(names)):
        if isinstance(each, types.FunctionType | type):
            found += [each] if each.__module__ == function.__module__ else []
        elif isinstance(each, _CONTAINERS):
            found += [each] if len(each) <= _LONGEST else []
        elif isinstance(each, _CONSTANTS):
            found.append(each)
        elif type(each).__module__ == function.__module__:
            found += [type(each), each]
    return found
