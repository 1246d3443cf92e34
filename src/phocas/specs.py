"""Frozen dataclasses to and from text, ``phocas:b=6``.

Rules and attacks are frozen dataclasses that subclass :class:`Spec`. A :class:`Table` maps their
names to their classes, and parses their text. A user-defined class is written as
``package.module:Name:b=6``. :meth:`Table.parse` imports it; :meth:`Table.read` imports nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import numbers
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from phocas.deprecation import warn_renamed

SPELLINGS = {
    "f": ("b", "q"),
    "byzantine": ("q", "b"),
    "n_byzantine": ("q", "b"),
    "num_byzantine": ("q", "b"),
    "workers": ("num_workers",),
    "n_workers": ("num_workers",),
    "m": ("num_workers",),
    "n": ("num_workers",),
    "num_clients": ("clients", "num_workers"),
    "servers": ("num_servers",),
    "learning_rate": ("lr",),
    "batch": ("batch_size",),
    "aggregator": ("rule",),
    "aggregation": ("rule",),
    "random_state": ("seed",),
    "momentum": ("worker_momentum",),
}
"""For each name that other libraries use, our names in the order in which they are suggested."""

OnNonfinite = Literal["skip", "stop", "apply"]
"""The policy for an aggregate with NaN or inf: skip it, stop the run, or apply it."""


class Spec:
    """A frozen dataclass with a name, printed as ``name:field=value,...`` without its defaults."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    former_name: ClassVar[str] = ""
    """The name before version 0.3, which tables read with a warning."""
    former_fields: ClassVar[Mapping[str, str]] = {}
    """Parameters by the names that they had before version 0.3, which are read with a warning."""

    if not typing.TYPE_CHECKING:  # type checkers and editors read the fields

        def __new__(cls, *args: Any, **given: Any) -> Any:
            """Raise TypeError for an unknown parameter, and suggest the right one."""
            del args
            known = getattr(cls, "__dataclass_fields__", {})
            for name in given.keys() - known.keys() - cls.former_fields.keys():
                takes = inspect.signature(cls.__init__).parameters
                if name not in takes and not any(
                    each.kind == each.VAR_KEYWORD for each in takes.values()
                ):
                    owner = f"parameter of {cls.__name__}"
                    raise TypeError(unknown(owner, name, [*takes][1:], "parameters"))
            return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Set the default name of a class: ``module:Class``."""
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            return
        if "ClassVar" not in str(vars(cls).get("__annotations__", {}).get("name", "ClassVar")):
            # A field called "name" without a default must not get the inherited name.
            cls.name = dataclasses.field()
        else:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every Spec is a dataclass
            check, value = field.metadata.get("check"), getattr(self, field.name)
            if check is not None and (value is not None or field.default is not None):
                object.__setattr__(self, field.name, check(self.name, field.name, value))

    @classmethod
    def spelling(cls) -> str:
        """Return the registered name, or ``module:Class`` for user-defined classes."""
        return cls.name if cls in _LISTED else f"{cls.__module__}:{cls.__qualname__}"

    def __str__(self) -> str:
        given = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every Spec is a dataclass
            value = getattr(self, field.name)
            if field.init and value != field.default:
                given[field.name] = value
        return write_spec(self.spelling(), given)

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring, for tables and ``--help``."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    @classmethod
    def parameters(cls) -> str:
        """Describe the parameters: ``b``, or ``select=None``, separated by commas."""
        parts = []
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            required = field.default is dataclasses.MISSING
            parts.append(field.name if required else f"{field.name}={_write(field.default)}")
        return ", ".join(parts)


S = TypeVar("S", bound=Spec)
Check = Callable[[str, str, Any], Any]
"""A function of (owner, name, value) that returns the checked value, or raises an error."""


def checks(check: Check) -> dict[str, Check]:
    """Return the metadata of a field of a Spec whose values are checked on construction.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Noise(Spec):
    ...     name = "noise"
    ...     std: float = dataclasses.field(default=1.0, metadata=checks(positive))
    >>> Noise(std=0)
    Traceback (most recent call last):
        ...
    ValueError: noise needs a finite std > 0: got std=0.0
    """
    return {"check": check}


@dataclasses.dataclass(frozen=True)
class Foreign:
    """The text of a value that needs user-defined code, which ``load`` imports."""

    text: str
    parse: Callable[[str], Any] = dataclasses.field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def load(self) -> Any:
        """Import the code that the text names, and return the value."""
        return self.parse(self.text)


class Table(Mapping[str, type[S]], Generic[S]):
    """The classes of one kind by name; case, ``-`` and ``_`` in a name do not matter.

    Args:
        kind: the word for the classes in error messages, such as ``rule``.
        classes: the registered classes.
        base: the base class; with it ``package.module:Name`` may name a user-defined class, and
            this table parses fields that are annotated with the base.
        adapt: a function that returns a value for a plain function and the text of its arguments.
    """

    def __init__(
        self,
        kind: str,
        classes: Iterable[type[S]],
        base: type[S] | None = None,
        adapt: Callable[[Callable[..., Any], Mapping[str, str]], S] | None = None,
    ) -> None:
        self.kind = kind
        self.base = base
        self.adapt = adapt
        self._classes = {cls.name: cls for cls in classes}
        _LISTED.update(self._classes.values())
        self._keys = {
            _key(spelling): name
            for name, cls in self._classes.items()
            for spelling in (name, *cls.aliases)
        }
        self._former = {_key(cls.former_name): name for name, cls in self._classes.items()}
        self._former.pop("", None)
        if base is not None:
            _TABLES[base] = self

    def __getitem__(self, name: str) -> type[S]:
        key = _key(name)
        if key in self._former:
            warn_renamed(f"the {self.kind} {name!r}", repr(self._former[key]))
            return self._classes[self._former[key]]
        if key not in self._keys:
            raise KeyError(unknown(self.kind, name, self))
        return self._classes[self._keys[key]]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _key(name) in {**self._keys, **self._former}

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def parse(self, text: str) -> S:
        """Parse one value, for example ``phocas:b=6``; import user-defined code if named."""
        found = self.read(text)
        return self._load(found.text) if isinstance(found, Foreign) else found

    def read(self, text: str) -> S | Foreign:
        """Parse one value without imports; a user-defined value becomes a :class:`Foreign`."""
        name, _, rest = text.strip().partition(":")
        name = name.strip()
        place = self._place(text)
        if place is not None:
            split_arguments(place[1], place[0])
            return Foreign(text.strip(), self.parse)
        if name not in self:
            raise ValueError(unknown(self.kind, name, self))
        cls = self[name]
        values = read_arguments(cls, split_arguments(rest, cls.name))
        if any(isinstance(value, Foreign) for value in values.values()):
            return Foreign(text.strip(), self.parse)
        return cls(**values)

    def of(self, value: object, owner: str) -> S:
        """Return a value that may be given as text; error messages name the ``owner``."""
        if isinstance(value, str):
            return self.parse(value)
        base: type[Spec] = self.base or Spec
        if isinstance(value, base):
            return typing.cast("S", value)
        if self.adapt is not None and callable(value) and not isinstance(value, type):
            return self.adapt(value, {})
        raise TypeError(f"{owner} needs a {self.kind}, as a value or as text: got {value!r}")

    def find(self, text: str) -> Any:
        """Return the class, function or value that a text names; import user-defined code.

        Args:
            text: the name, with or without arguments.
        """
        place = self._place(text)
        if place is not None:
            return self._imported(place[0])
        name = text.strip().partition(":")[0].strip()
        if name not in self:
            raise ValueError(unknown(self.kind, name, self))
        return self[name]

    def _imported(self, where: str) -> Any:
        try:
            return imported(where)
        except ModuleNotFoundError as error:
            module = where.partition(":")[0]
            message = f"{unknown(self.kind, module, self)}; and there is no module {error.name!r}"
            raise ValueError(message) from None

    def _place(self, text: str) -> tuple[str, str] | None:
        """Split the text of a user-defined value into ``module:name`` and its arguments."""
        found = _FOREIGN.fullmatch(text.strip())
        if self.base is None or found is None or found["module"] in self:
            return None
        return f"{found['module']}:{found['name']}", found["rest"] or ""

    def _load(self, text: str) -> S:
        place = self._place(text)
        if place is None:  # only an argument is foreign
            name, _, rest = text.partition(":")
            cls = self[name.strip()]
            values = read_arguments(cls, split_arguments(rest, cls.name))
            return cls(**{key: loaded(value) for key, value in values.items()})
        where, rest = place
        found = self._imported(where)
        arguments = split_arguments(rest, where)
        assert self.base is not None
        if isinstance(found, type) and issubclass(found, self.base):
            if not dataclasses.is_dataclass(found):
                raise ValueError(f"{where} must be a frozen dataclass: put @dataclass(frozen=True)")
            return build(found, arguments)
        if isinstance(found, self.base) and not arguments:
            return found
        if self.adapt is not None and callable(found) and not isinstance(found, type):
            return self.adapt(found, arguments)
        function = " or a function" if self.adapt is not None else ""
        raise ValueError(
            f"{where} must be a subclass of {self.base.__name__}{function}: got {found!r}"
        )


_LISTED: set[type[Spec]] = set()
_TABLES: dict[type[Spec], Table[Any]] = {}
_FOREIGN = re.compile(
    r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)(:(?P<rest>.*))?", re.DOTALL
)
_PLACES = re.compile(r"(?<![\w.:])(?P<module>[A-Za-z_][\w.]*):[A-Za-z_][\w.]*\s*(?=$|[:|),/])")


def imported(place: str) -> Any:
    """Import and return ``package.module:name``; the working directory is searched too.

    Raises:
        ModuleNotFoundError: there is no such module.
        ValueError: the module cannot be imported, or has no such name.
    """
    module, _, name = place.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = [each for each in dir(found) if not each.startswith("_")]
            if module in ("__main__", "__mp_main__"):
                raise ValueError(
                    f"{place} is not defined in this process: other processes cannot import what a"
                    " notebook or a session defines; put it into a file, my_code.py, and write"
                    f" my_code:{name}"
                )
            raise ValueError(unknown(f"name in {module}", part, names, plural="names"))
        found = getattr(found, part)
    return found


def is_place(text: str) -> bool:
    """Return whether a text has the form ``package.module:name``; import nothing.

    >>> is_place("package.module:Net"), is_place("mlp:hidden=64"), is_place("mlp")
    (True, False, False)
    """
    found = _FOREIGN.fullmatch(text.strip())
    return found is not None and found["rest"] is None


def split_place(text: str) -> tuple[str, dict[str, str]] | None:
    """Split ``package.module:name:key=value`` into its place and its arguments; import nothing.

    >>> split_place("package.module:net:width=16"), split_place("mlp")
    (('package.module:net', {'width': '16'}), None)
    """
    found = _FOREIGN.fullmatch(text.strip())
    if found is None:
        return None
    place = f"{found['module']}:{found['name']}"
    return place, split_arguments(found["rest"] or "", place)


def named_modules(text: str) -> list[str]:
    """Return the modules that a text names; import nothing.

    >>> named_modules("nnm:b=1|mine.rules:Inner:b=2"), named_modules("monitor:rule=(krum:b=2)")
    (['mine.rules'], [])
    """
    return [found["module"] for found in _PLACES.finditer(text)]


def imported_callable(text: str) -> Callable[..., Any]:
    """Import and return the callable ``package.module:name``; raise a one-line error."""
    try:
        found = imported(text.strip())
    except ModuleNotFoundError as error:
        raise ValueError(f"{text}: there is no Python module {error.name!r}") from None
    if not callable(found):
        raise TypeError(f"{text} must be callable: got {type(found).__name__}")
    target: Callable[..., Any] = found
    return target


def loaded(value: Any) -> Any:
    """Return a value; load it if it is a :class:`Foreign`."""
    return value.load() if isinstance(value, Foreign) else value


def build(cls: type[S], arguments: Mapping[str, str], **given: Any) -> S:
    """Return a value of a class, from the text of some fields and the values of others."""
    values = read_arguments(cls, arguments, frozenset(given))
    return cls(**given, **{key: loaded(value) for key, value in values.items()})


@functools.lru_cache(maxsize=256)
def _hints(cls: type[Spec]) -> Mapping[str, Any]:
    """Return the types of a class's fields; to evaluate them takes most of the time of a read."""
    return typing.get_type_hints(cls)


def read_arguments(
    cls: type[Spec], arguments: Mapping[str, str], given: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Read the text of a class's arguments; raise for unknown and missing ones."""
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {
        field.name: field
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in given
    }
    values = {}
    for given_key, text in arguments.items():
        key = cls.former_fields.get(given_key, given_key)
        if key != given_key:
            warn_renamed(f"{cls.spelling()}:{given_key}=", f"{key}=")
        if key not in fields:
            raise ValueError(
                unknown(f"parameter of {cls.spelling()}", key, fields, plural="parameters")
            )
        if key in values:
            raise ValueError(f"{cls.spelling()}: {key} is given twice")
        try:
            values[key] = _read(text, hints[key])
        except ValueError as error:
            raise ValueError(f"{cls.spelling()}: {key} must be {error}, got {text!r}") from None
    for field in fields.values():
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ValueError(
                f"{cls.spelling()} needs {field.name}: write {cls.spelling()}:{field.name}=..."
                f" (parameters: {cls.parameters()})"
            )
    return values


def keywords_of(function: Callable[..., Any], skip: int = 1) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function that may be given by name, after the first ``skip``.

    >>> def centre(rows, b, *, share=0.5): ...
    >>> list(keywords_of(centre))
    ['b', 'share']
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except ValueError:  # a function of compiled code that does not tell
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: each for each in parameters if each.kind in named}


def describe_keywords(keywords: Mapping[str, inspect.Parameter]) -> str:
    """Describe the keywords of a function as :meth:`Spec.parameters` does."""
    return ", ".join(
        name if each.default is each.empty else f"{name}={_write(each.default)}"
        for name, each in keywords.items()
    )


def check_keywords(
    function: Callable[..., Any],
    given: Iterable[str],
    offered: Collection[str] = (),
    skip: int = 1,
) -> None:
    """Raise ValueError unless a function can be called with the given keywords.

    Args:
        function: the user's function.
        given: the names that the user gives.
        offered: names that the caller passes if the function has them.
        skip: the number of first parameters that the caller passes in any case.
    """
    known = keywords_of(function, skip)
    known = {name: each for name, each in known.items() if name not in offered}
    owner, names = place_of(function), set(given)
    for name in sorted(names - known.keys()):
        raise ValueError(unknown(f"parameter of {owner}", name, known, plural="parameters"))
    for name, each in known.items():
        if each.default is each.empty and name not in names:
            shown = describe_keywords(known)
            raise ValueError(
                f"{owner} needs {name}: write {owner}:{name}=... (parameters: {shown})"
            )


def read_keywords(function: Callable[..., Any], arguments: Mapping[str, str]) -> dict[str, Any]:
    """Read the text of a function's keywords by its annotations, or by the form of the text.

    >>> def centre(rows, b: int, share=0.5): ...
    >>> read_keywords(centre, {"b": "2", "share": "1", "other": "mean"})
    {'b': 2, 'share': 1, 'other': 'mean'}
    """
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # annotations that cannot be evaluated are ignored
        hints = {}
    values = {}
    for key, text in arguments.items():
        try:
            values[key] = loaded(_read(text, hints[key])) if key in hints else _guess(text)
        except ValueError as error:
            raise ValueError(f"{place_of(function)}: {key} must be {error}, got {text!r}") from None
    return values


def place_of(function: Any) -> str:
    """Return ``module:name`` of a function, a class or a callable object."""
    inner = getattr(function, "func", function)  # functools.partial
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}:{named.__qualname__}"


def unknown(kind: str, got: str, known: Iterable[str], plural: str | None = None) -> str:
    """Return the error text for an unknown name: the nearest match and all known names."""
    names = list(known)
    keys = {_key(name): name for name in names}
    usual = [_key(name) for name in SPELLINGS.get(got, ()) if name in names]
    usual += [key for key in keys if sorted(key) == sorted(_key(got))]  # transposed letters
    close = usual[:1] or difflib.get_close_matches(_key(got), keys, n=1, cutoff=0.5)
    hint = f"; did you mean {keys[close[0]]!r}?" if close else ";"
    listing = ", ".join(names) if names else "none"
    plural = plural or (f"{kind[:-1]}ies" if kind.endswith("cy") else f"{kind}s")
    return f"unknown {kind} {got!r}{hint} {plural}: {listing}"


def check_on_nonfinite(value: str) -> None:
    """Raise ValueError unless a value is a policy for aggregates with NaN or inf."""
    if value not in typing.get_args(OnNonfinite):
        raise ValueError(unknown("on_nonfinite", value, typing.get_args(OnNonfinite), "policies"))


def count(owner: str, parameter: str, value: object, minimum: int = 0) -> int:
    """Return a count as ``int``; raise for fractions, bools and values below the minimum."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{owner} needs an integer {parameter} (a count, not a fraction): got {value!r}"
        )
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{owner} needs {parameter} >= {minimum}: got {parameter}={number}")
    return number


def positive(owner: str, parameter: str, value: object) -> float:
    """Return a positive finite number as ``float``; raise for other values."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner} needs a number {parameter}: got {value!r}")
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{owner} needs a finite {parameter} > 0: got {parameter}={number}")
    return number


def number(owner: str, parameter: str, value: object) -> float:
    """Return any number as ``float``, NaN and inf too; raise for other types."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner} needs a number {parameter}: got {value!r}")
    return float(value)


def probability(owner: str, parameter: str, value: object) -> float:
    """Return a probability as ``float``; raise for values outside [0, 1]."""
    share = number(owner, parameter, value)
    if not 0 <= share <= 1:
        raise ValueError(f"{owner} needs 0 <= {parameter} <= 1: got {parameter}={share}")
    return share


def one_of(owner: str, parameter: str, value: str, options: Iterable[str]) -> str:
    """Return one of the listed words; raise for all others."""
    words = list(options)
    if value not in words:
        raise ValueError(unknown(f"{parameter} of {owner}", value, words, plural="it may be"))
    return value


def normalise(value: Spec, /, **fields: object) -> None:
    """Store checked fields in a frozen dataclass, from its ``__post_init__``."""
    for name, content in fields.items():
        object.__setattr__(value, name, content)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def write_spec(name: str, given: Mapping[str, object]) -> str:
    """Return the text of a value: ``name:field=value,...``."""
    parts = [f"{key}={_write(value)}" for key, value in given.items()]
    return name + (":" + ",".join(parts) if parts else "")


def _write(value: object) -> str:
    if isinstance(value, Spec):
        return f"({value})"
    if isinstance(value, tuple):
        return "/".join(_write(item) for item in value)
    return str(value)


def split(text: str, separator: str) -> list[str]:
    """Split text at the separators outside parentheses.

    >>> split("nnm:b=6|monitor:rule=(nnm:b=6|phocas:b=6)", "|")
    ['nnm:b=6', 'monitor:rule=(nnm:b=6|phocas:b=6)']
    """
    depth = 0
    parts = [""]
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def split_arguments(text: str, owner: str) -> dict[str, str]:
    """Split ``a=1,b=(c:d=2,e=3)`` at the commas outside parentheses."""
    arguments: dict[str, str] = {}
    for part in split(text, ","):
        if not part.strip():
            continue
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(
                f"{owner} takes {owner}:name=value,...: got {part.strip()!r} without '='"
            )
        if key in arguments:
            raise ValueError(f"{owner}: {key} is given twice")
        arguments[key] = value.strip()
    return arguments


def _guess(text: str) -> Any:
    """Read text as an integer, a number, true, false or none; else return the text."""
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _read(text: str, hint: Any) -> Any:
    """Read text as the annotated type, or raise ValueError with the type in words."""
    origin = typing.get_origin(hint)
    options = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in options and text.lower() == "none":
            return None
        errors = []
        for option in options:
            if option is type(None):
                continue
            try:
                return _read(text, option)
            except ValueError as error:
                errors.append(str(error))
        raise ValueError(" or ".join(errors))
    if origin is typing.Literal:
        if text in options:
            return text
        raise ValueError("one of " + ", ".join(map(repr, options)))
    if origin is tuple:
        return tuple(_read(item, options[0]) for item in text.strip("()").split("/") if item)
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError("true or false")
    if hint is int or hint is float:
        try:
            return hint(text)
        except ValueError:
            raise ValueError("an integer" if hint is int else "a number") from None
    if hint in _TABLES:
        inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
        return _TABLES[hint].read(inner)
    return text
